"""The language engine's step loop: admit, schedule, constrain, run, update, outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.core.cost import Cost
from tokenmill.core.kv_events import Dump, EventPublisher
from tokenmill.core.requests import End, Generate, Request, RequestOutput
from tokenmill.core.specs.vision import VisionSpec, image_problem
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    OutOfMemory,
    RanksLostError,
    StepResult,
)
from tokenmill.engine.drafts.drafting import Drafting
from tokenmill.engine.rerun import run_in_parts
from tokenmill.engine.sampling.grammar_pool import GrammarPool
from tokenmill.engine.sampling.structured import StructuredRequests
from tokenmill.kv.transfer import KVTransfer
from tokenmill.routing.attention_dp import Outlook, RankLoad
from tokenmill.routing.step_rates import StepSums
from tokenmill.sched.scheduler import Batch, Scheduler

if TYPE_CHECKING:
    from tokenmill.kv.tiers.offloading import KVTiers

_BLOCKED_WAIT_S = 0.001  # how long a step without a batch waits for blocks that others free

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a batch; engine/runner.py does it with a model."""

    def run(self, batch: Batch) -> StepResult: ...


class PendingStep(Protocol):
    """A batch under way."""

    def runs(self) -> bool: ...
    def wait(self) -> StepResult: ...


class Launcher(Runner, Protocol):
    """A runner that can start a batch and be asked for its result later.

    Where masks follow, sample_late() samples the constrained items once they are set.
    """

    def launch(self, batch: Batch) -> PendingStep: ...
    def sample_late(self, launched: Any) -> None: ...


class LanguageEngine:
    """An Engine over a scheduler and a runner; one thread calls it.

    With a `launcher`, steps overlap: the next batch is chosen and launched before the tokens of the
    last one are known. Requests that follow a grammar are sampled when these are: their masks come
    while the device computes. While a request wants log-probabilities of its prompt, or steps
    draft, all run in the plain loop; where drafts are looked up, only if something was found.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        grammar: GrammarPool | None = None,
        vocab_size: int | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        launcher: Launcher | None = None,
        kv: KVTransfer | None = None,
        tiers: KVTiers | None = None,
        drafting: Drafting | None = None,
        vision: VisionSpec | None = None,
        may_rerun: bool = True,
    ) -> None:
        """`may_rerun`: a step that fails may run again, in parts; no other rank counts steps."""
        self._scheduler = scheduler
        self._may_rerun = may_rerun
        self.drafting = drafting  # may be exchanged between two steps
        self._runner = runner
        self._launcher = launcher
        self.kv = kv
        self.tiers = tiers
        # Launched at a time, its tokens not known yet.
        self._in_flight: tuple[Batch, PendingStep, int] | None = None
        self._host_bound: set[str] = set()  # live requests that need the plain loop
        self._structured = StructuredRequests(grammar)
        self._vocab_size, self._vision = vocab_size, vision
        self._clock = clock
        self._finished: list[RequestOutput] = []  # ended outside the scheduler
        self._num_finished: dict[str, int] = {}
        self._draining = False
        self._publisher: EventPublisher | None = None
        self._steps = StepSums()
        self._step_end_ns = 0  # of the last one
        self._meter = scheduler.meter
        self._meter.start(clock())
        self._computing = False  # a batch has run or runs, and there is more to do

    def warm_up(self) -> None:
        """Start to load what the first structured request would wait for, in the background."""
        self._structured.warm_up()

    def submit(self, request: Request) -> None:
        """Queue a request. Never raises for a bad one: the next step() yields its REJECT."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._tell(request.request_id, End(FinishReason.REJECT, *refusal))
            return
        if self.kv is not None and request.task.kv_from is not None:
            self.kv.expect(request, self._clock())
            # Whoever computes the prompt has told its log-probabilities.
            sampling = replace(request.task.sampling, prompt_logprobs=None)
            request = request.with_task(sampling=sampling)
        if request.task.sampling.structured is None:
            self._add(request)
        else:
            self._structured.compile(request, self._clock())

    def step(self, hold_context: bool = False) -> list[RequestOutput]:
        """Run one batch and return what it produced; [] when there is nothing to do.

        Where context is held, no prompt is computed in it: see routing/attention_dp.py.
        """
        now_ns = self._clock()
        if not self._computing:
            self._meter.idle(now_ns)
        if self.kv is not None:
            self.kv.poll(now_ns, self._abort_receive)
        if self.tiers is not None:
            self.tiers.poll()
        self._admit(now_ns)
        to_draft = 0 if self.drafting is None else self.drafting.choose()
        overlap = self._may_overlap(to_draft)
        is_first = overlap and self._in_flight is None  # its time shows in the steps to come
        outputs = [] if overlap else self._collect()
        began_ns = now_ns if overlap else self._clock()
        batch = self._scheduler.schedule(now_ns, hold_context)
        batch.num_to_draft = to_draft
        if self.tiers is not None:
            self.tiers.exchange()
        outputs += self._take_finished()
        if self._launcher is not None and overlap:
            outputs += self._launch(batch, self._launcher)
        elif batch.items:
            outputs += self._execute(batch)
        if not outputs and not batch.items:
            self._idle()
        if self.drafting is not None and batch.items and not is_first:
            counts = self._scheduler.draft_counts
            self.drafting.record(batch, *counts, (self._clock() - began_ns) / 1e9)
        self._computing = bool(batch.items or self._in_flight) and self.has_work()
        return outputs

    def abort(self, request_id: str) -> None:
        """End a request; unknown or finished ids are ignored. The next step() yields its ABORT."""
        if self._structured.cancel(request_id):
            self._end(request_id, End(FinishReason.ABORT))
        else:
            self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        """True while a step() would do something."""
        waiting = bool(self._finished or self._structured.num_waiting or self._in_flight)
        reading = self.tiers is not None and self.tiers.busy
        return waiting or reading or self._scheduler.has_work()

    def drain(self) -> None:
        """Refuse new requests from now on; those already here run to their end."""
        self._draining = True

    def stats(self) -> EngineStats:
        """Return the scheduler's stats, plus requests that wait for a grammar or were refused."""
        if not self._computing:
            self._meter.idle(self._clock())
        stats = self._scheduler.stats()
        stats.num_waiting += self._structured.num_waiting
        stats.step_sums = self._steps.values
        stats.kv_read_s = 0.0 if self.kv is None else self.kv.read_s
        stats.tiers = {} if self.tiers is None else self.tiers.stats()
        for reason, count in self._num_finished.items():
            stats.num_finished[reason] = stats.num_finished.get(reason, 0) + count
        return stats

    def costs(self) -> dict[str, Cost]:
        """Return what the requests that have not ended have taken so far, by id."""
        return self._scheduler.costs()

    def load(self) -> RankLoad:
        """Return the load of this engine, by which several such engines are balanced."""
        return self._scheduler.load()

    def outlook(self) -> Outlook:
        """Return what the next step would compute, by which it is decided whether prompts wait."""
        return self._scheduler.outlook()

    def reset_prefix_cache(self) -> None:
        """Forget the blocks that are cached on the device; running requests keep theirs."""
        self._scheduler.pool.clear()

    def kv_events(self) -> EventPublisher:
        """Return the publisher of the prefix cache's events from now on."""
        if self._publisher is None:
            self._publisher = EventPublisher(self._scheduler.pool.record_events())
        return self._publisher

    def kv_dump(self) -> Dump:
        publisher, hashes = self.kv_events(), self._scheduler.pool.cached_hashes()
        if self.tiers is None:
            return publisher.dump(hashes)
        return publisher.dump(hashes, self.tiers.hashes(), self.tiers.token_ms)

    # Requests come and go outside the scheduler.

    def _refusal(self, request: Request) -> tuple[str, str] | None:
        """Why a request is not taken: (stop_reason, a sentence), or None."""
        if self._draining:
            return "draining", "the engine is draining and takes no new requests"
        if request.request_id in self._structured:
            return "duplicate_id", f"request_id {request.request_id!r} is already in use"
        if not isinstance(request.task, Generate):
            return "invalid_request", "task: this engine generates text"
        problem = self._out_of_vocabulary(request) or image_problem(request, self._vision)
        if problem:
            return "invalid_request", problem
        if request.task.kv_from is not None or request.task.hold_kv_s is not None:
            if self.kv is None:
                return "invalid_request", "this engine moves no KV: give it a kv_connector"
            if (refusal := self.kv.refusal(request)) is not None:
                return refusal
        return self._structured_refusal(request) if request.task.sampling.structured else None

    def _out_of_vocabulary(self, request: Request) -> str | None:
        if self._vocab_size is None:
            return None
        sampling = request.task.sampling
        fields: tuple[tuple[str, Iterable[int]], ...] = (
            ("prompt_token_ids", request.task.prompt_token_ids),
            ("output_token_ids", request.task.output_token_ids),
            ("logit_bias", sampling.logit_bias or ()),
            ("stop_token_ids", sampling.stop_token_ids),
        )
        for name, ids in fields:
            low, high = min(ids, default=0), max(ids, default=0)
            if low < 0 or high >= self._vocab_size:
                return (
                    f"{name} must be token ids in [0, {self._vocab_size - 1}], "
                    f"got {low if low < 0 else high}"
                )
        return None

    def _structured_refusal(self, request: Request) -> tuple[str, str] | None:
        problem = self._structured.refusal(request.task.sampling)
        if problem is not None:
            return "invalid_request", problem
        return self._scheduler.limits.queue_full(request, self.stats().num_waiting)

    def _end(self, request_id: str, end: End) -> None:
        self._tell(request_id, end)
        if self.kv is not None:
            self.kv.forget(request_id)

    def _tell(self, request_id: str, end: End) -> None:
        reason = end.reason.value
        self._num_finished[reason] = self._num_finished.get(reason, 0) + 1
        self._finished.append(end.output(request_id))

    def _take_finished(self) -> list[RequestOutput]:
        finished, self._finished = self._finished, []
        return finished + self._forget(self._scheduler.take_finished())

    def _forget(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Drop what is kept here for requests that have ended: a grammar, KV on its way."""
        some = self._host_bound or self._structured.num_open or self.kv is not None
        for output in outputs if some else ():
            if output.finish_reason is not None:
                self._structured.forget(output.request_id)
                self._host_bound.discard(output.request_id)
                if self.kv is not None:
                    self.kv.forget(output.request_id)
        return outputs

    def _abort_receive(self, request_id: str, stop_reason: str, message: str) -> None:
        """End a request whose KV or whose images will not come."""
        if self._structured.cancel(request_id):
            self._end(request_id, End(FinishReason.ERROR, stop_reason, message))
        else:
            self._scheduler.end_in_error(request_id, stop_reason, message)

    def _add(self, request: Request) -> None:
        if request.task.sampling.prompt_logprobs is not None:
            self._host_bound.add(request.request_id)
        self._scheduler.add(request)

    # A step, phase by phase.

    def _admit(self, now_ns: int) -> None:
        """Hand requests whose grammar is ready to the scheduler; end those that waited too long.

        Who waits for a mask sits out.
        """
        for request, end in self._structured.take_ready(now_ns):
            if end is None:
                self._add(request)
            else:
                self._end(request.request_id, end)
        self._scheduler.hold(self._structured.late())

    def _may_overlap(self, to_draft: int) -> bool:
        """Whether the next batch is launched before the tokens of the last one are known.

        Drafts that are looked up hinder that only where there are some.
        """
        if self._launcher is None or self._host_bound or self._scheduler.drafting:
            return False
        return not to_draft or (self._scheduler.looks_up and not self._scheduler.has_matches)

    def _idle(self) -> None:
        """Give others a moment instead of spinning: compile threads, engines that read blocks."""
        if self._structured.wait():
            return
        if (self.kv, self.tiers) != (None, None) and self.has_work():
            time.sleep(_BLOCKED_WAIT_S)

    def _execute(self, batch: Batch, error: Exception | None = None) -> list[RequestOutput]:
        """Run the batch; if that fails, requests at fault end in ERROR and the engine goes on."""
        began_ns = self._clock()
        try:
            lost = self._structured.constrain(batch)
            result = self._run(batch, error)
            self._measure(batch, began_ns)
            _drop_unsampled(batch, result)
            outputs = self._scheduler.update(batch, result)
        except Exception as error:
            return self._failed(batch, error)
        except BaseException:
            self._interrupted(batch)
            raise
        self._lose_unmasked(lost)
        return self._forget(outputs)

    def _lose_unmasked(self, lost: dict[str, str]) -> None:
        """End the requests whose grammar leaves them no way on."""
        for request_id, message in lost.items():
            self._scheduler.end_in_error(request_id, "grammar", message)

    def _run(self, batch: Batch, error: Exception | None = None) -> StepResult:
        """Run a batch, in parts where it fails or has failed; its result names who is at fault."""
        try:
            if error is not None:
                raise error
            return self._runner.run(batch)
        except (RanksLostError, OutOfMemory):
            raise
        except Exception as problem:
            if not self._may_rerun or "CUDA error" in str(problem):  # which no row causes
                raise
            _log.error("a step over %d requests failed", len(batch.items), exc_info=problem)
            return run_in_parts(self._runner.run, batch, self._scheduler.pool.block_size, problem)

    def _launch(self, batch: Batch, launcher: Launcher) -> list[RequestOutput]:
        """Launch the batch, then collect the one before it, which ran meanwhile.

        Only then are the last tokens of constrained items known, and with them their masks.
        """
        launched, began_ns = None, self._clock()
        lost: dict[str, str] = {}
        outputs: list[RequestOutput] = []
        try:
            self._structured.put_off(batch)
            launched = launcher.launch(batch) if batch.items else None
            outputs = self._collect()
            if batch.masks_follow and launched is not None:
                lost = self._structured.constrain(batch, launched.runs)
                launcher.sample_late(launched)
        except Exception as error:
            return outputs + self._collect() + self._execute(batch, error)
        except BaseException:
            self._finished += outputs + self._collect()
            self._interrupted(batch)
            raise
        if launched is not None:
            self._scheduler.advance(batch)
            self._in_flight = batch, launched, began_ns
        self._lose_unmasked(lost)
        return outputs

    def _collect(self) -> list[RequestOutput]:
        """Wait for the batch under way and account for it."""
        if self._in_flight is None:
            return []
        (batch, launched, began_ns), self._in_flight = self._in_flight, None
        try:
            result = launched.wait()
            self._measure(batch, began_ns)
            _drop_unsampled(batch, result)
            outputs = self._scheduler.update(batch, result)
        except Exception as error:
            return self._failed(batch, error)
        except BaseException:
            self._interrupted(batch)
            raise
        return self._forget(outputs)

    def _measure(self, batch: Batch, began_ns: int) -> None:
        """Record how long a batch took, from the end of the one before it if that was later."""
        now_ns = self._clock()
        time_ms = (now_ns - max(began_ns, self._step_end_ns)) / 1e6
        self._step_end_ns = now_ns
        self._meter.charge(batch, now_ns)
        num_decodes = batch.num_singles()
        num_kv_tokens = self._scheduler.pool.num_used_tokens
        self._steps.add(batch.num_tokens - num_decodes, num_decodes, num_kv_tokens, time_ms)

    def _failed(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Run the requests of a failed step again if it lacked memory; else end them in ERROR."""
        if isinstance(error, RanksLostError):
            raise error
        self._meter.charge(batch, self._clock())
        message = f"the step failed: {_sentence(error)}"
        if isinstance(error, OutOfMemory):
            _log.warning("%s; it runs again in smaller steps", message)
            return self._forget(self._scheduler.preempt(batch, message))
        _log.error("a step over %d requests failed", len(batch.items), exc_info=error)
        return self._forget(self._scheduler.fail(batch, message))

    def _interrupted(self, batch: Batch) -> None:
        """End the requests of a step that Ctrl-C has interrupted; the next step() says so."""
        if batch.items:
            self._finished += self._forget(self._scheduler.fail(batch, "the step was interrupted"))


def _drop_unsampled(batch: Batch, result: StepResult) -> None:
    """Drop what was sampled for items that had no mask in time."""
    for index in batch.unsampled:
        result.token_ids[index] = []
        if result.draft_ids is not None:
            result.draft_ids[index] = []


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
