"""A trace in virtual time over the real router, schedulers and block pools.

With several fronts each has a router of its own, and requests come to any of them. A front sees its
own requests at once; events and load reports of the workers reach all fronts, late if asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from tokenmill.bench.results.mooncake import TraceRequest
from tokenmill.core.config import RouterConfig, SchedulerConfig
from tokenmill.core.kv_events import EventBatch, EventPublisher
from tokenmill.core.metrics import NS_PER_MS, RequestTimes, summarize
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.engine_events.engine_blocks import salt_of
from tokenmill.engine_events.engine_caches import EngineCaches
from tokenmill.engine_events.publisher import engine_event
from tokenmill.engine_events.wire import EngineBatch, decode_batch, encode_batch
from tokenmill.plan.virtual_time import VirtualTime
from tokenmill.routing.load_report import Announcement, LoadAccount
from tokenmill.routing.router import Router
from tokenmill.routing.step_rates import StepSums, fit_rates
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

OUTPUT_TOKEN = 1 << 62  # plus the request's number: no answer is another's prefix
REPORT_NS = 10**8  # workers report their steps as often
HOP_NS = NS_PER_MS  # until the other fronts hear what one of them has sent
START_NS = NS_PER_MS  # RequestTimes reads 0 as "not yet"


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Milliseconds of a step: polynomials, highest power first, in tokens and in KV share.

    The defaults are those of Dynamo's simulated engine.
    """

    prefill: tuple[float, float, float] = (4.209989e-7, 1.518344e-2, 16.50142)
    decode: tuple[float, float, float] = (-25.74, 54.01, 5.74)
    sequence: float = 0.0  # more for each request that decodes

    def step_ms(self, num_prefill_tokens: int, num_decodes: int, kv_share: float) -> float:
        """A step that computes so many prompt tokens, and decodes with this share of KV in use."""
        time_ms = 0.0
        if num_prefill_tokens:
            a, b, c = self.prefill
            time_ms += (a * num_prefill_tokens + b) * num_prefill_tokens + c
        if num_decodes:
            a, b, c = self.decode
            time_ms += (a * kv_share + b) * kv_share + c + self.sequence * num_decodes
        return time_ms


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    num_workers: int = 8
    num_blocks: int = 16384  # of each worker
    block_size: int = 64
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    trace_block_tokens: int = 512
    timing: StepTiming = field(default_factory=StepTiming)
    num_fronts: int = 1
    report_delay_ms: float = 0.0  # until what a worker tells has reached the fronts
    # The router stands before servers and hears of their caches by the events that they publish,
    # as `tokenmill route` does; of their steps it sees the first tokens and the ends of answers.
    by_events: bool = False


class SimWorker:
    """A real scheduler and block pool whose steps take the time that a formula says."""

    def __init__(self, name: str, config: ReplayConfig, max_model_len: int, max_waiting: int):
        self.name = name
        self._timing = config.timing
        self._pool = BlockPool(config.num_blocks, config.block_size)
        self._publisher = EventPublisher(self._pool.record_events())
        if config.by_events:
            self._publisher.record_tokens()
        limits = SchedulerConfig(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_waiting=max_waiting,
            max_model_len=max_model_len,
        )
        self.scheduler = Scheduler(limits, self._pool, frozenset())
        self.account = LoadAccount(config.block_size)  # told of by several fronts alone
        self.sums = StepSums()
        self._batch: Batch | None = None

    @property
    def running(self) -> bool:
        return self._batch is not None

    def start(self, now_ns: int) -> int | None:
        """Choose a step; returns when it ends, None when there is nothing to do."""
        batch = self.scheduler.schedule(now_ns) if self.scheduler.has_work() else Batch()
        if not batch.items:
            return None
        self._batch = batch
        num_prefill, num_decodes = 0, 0
        for seq, num_new in batch.items:
            if seq.num_computed_tokens < seq.num_prompt_tokens:
                num_prefill += num_new
            else:
                num_decodes += 1
        num_used, num_blocks = self._pool.num_used, self._pool.num_blocks
        time_ms = self._timing.step_ms(num_prefill, num_decodes, num_used / num_blocks)
        self.sums.add(num_prefill, num_decodes, num_used * self._pool.block_size, time_ms)
        return now_ns + round(time_ms * NS_PER_MS)

    def finish(self, progress: Callable[[str, int], None]) -> list[RequestOutput]:
        """End the step: tell which prompts got how many tokens further; what is new comes out."""
        batch, self._batch = self._batch, None
        assert batch is not None
        tokens: list[list[int]] = []
        for seq, num_new in batch.items:
            end = seq.num_computed_tokens + num_new
            if end <= seq.num_prompt_tokens:
                progress(seq.request_id, num_new)
            samples = end == len(seq.token_ids)
            tokens.append([OUTPUT_TOKEN + int(seq.request_id)] if samples else [])
        return self.scheduler.update(batch, StepResult(tokens))

    def take_events(self) -> EventBatch | None:
        """What was cached and dropped since the last call; None: nothing."""
        return self._publisher.take()

    def tell(self, events: EventBatch, router: Router, now_s: float) -> None:
        """Let a router know of events; one that has missed some gets a dump."""
        if not router.apply(self.name, events):
            router.load(self.name, self._publisher.dump(self._pool.cached_hashes()))


class Replay:
    def __init__(
        self, trace: Items[TraceRequest], config: ReplayConfig, router: RouterConfig
    ) -> None:
        self._trace = trace
        self._config = config
        self._fronts = [f"front-{number}" for number in range(config.num_fronts)]
        self._by_events = config.by_events
        told = EngineCaches(config.block_size, router.predict_s) if config.by_events else None
        known = router.events and not config.by_events
        self._routers = {
            front: Router(replace(router, seed=router.seed + number, events=known), front)
            for number, front in enumerate(self._fronts)
        }
        self._front_of: dict[str, str] = {}  # by request
        self._rng = random.Random(router.seed)  # which front a request comes to
        longest = max(r.num_prompt_tokens + r.num_output_tokens for r in trace) + 1
        names = [f"worker-{number}" for number in range(config.num_workers)]
        self._workers = {
            name: SimWorker(name, config, longest, max(len(trace), 1)) for name in names
        }
        for name, front in product(names, self._fronts):
            self._routers[front].add_worker(name)
            self._workers[name].account.front_joined(front)
        for made in self._routers.values():
            made.told = told
        if told is not None:
            for name in names:
                told.begin(name, 0, "events")
        self._told = told
        self._events = router.events
        self._time = VirtualTime()
        self._report_ns = REPORT_NS
        self._times: dict[str, RequestTimes] = {}
        self._itl_ms: list[float] = []
        self._cached: dict[str, int] = {}
        self._num_finished: dict[str, int] = {}
        self._sent_ns: dict[str, list[int]] = {name: [] for name in names}  # by worker

    def run(self) -> dict[str, Any]:
        """Play all arrivals and steps in order of time; the report."""
        for name in self._workers:
            self._tell_load(name, START_NS, at_once=True)
        for number, request in enumerate(self._trace):
            arrival_ns = START_NS + round(request.arrival_ms * NS_PER_MS)
            self._time.run(arrival_ns)
            if arrival_ns >= self._report_ns and not self._by_events:
                self._report_ns = arrival_ns + REPORT_NS
                rates = fit_rates(self._sums())
                for router in self._routers.values():
                    router.learn_rates(rates)
            self._arrive(str(number), request, arrival_ns)
        self._time.run()
        return self._report()

    @property
    def times(self) -> list[RequestTimes]:
        return list(self._times.values())

    def _end_step(self, name: str, now_ns: int) -> None:
        """End a worker's step, tell the fronts, and start its next one."""
        worker = self._workers[name]
        outputs = worker.finish(partial(self._progress, worker))
        if self._events:
            self._tell_events(worker, now_ns)
        for output in outputs:
            self._record(worker, output, now_ns)
        for front in self._seeing(outputs):
            self._routers[front].stepped(name, now_ns / 1e9)
        self._tell_load(name, now_ns, at_once=not worker.scheduler.has_work())
        self._start(name, now_ns)

    def _progress(self, worker: SimWorker, request_id: str, num_tokens: int) -> None:
        if not self._by_events:
            self._router_of(request_id).prefill_progress(request_id, num_tokens)
        worker.account.progress(request_id, num_tokens)

    def _router_of(self, request_id: str) -> Router:
        return self._routers[self._front_of[request_id]]

    def _seeing(self, outputs: list[RequestOutput]) -> Items[str]:
        """The fronts that see a step end: with one it is always that one.

        A router sees the pieces of streams, and learns of other steps by events.
        """
        if len(self._fronts) == 1:
            return () if self._by_events and not outputs else self._fronts
        return sorted({self._front_of[output.request_id] for output in outputs})

    def _tell_events(self, worker: SimWorker, now_ns: int) -> None:
        events = worker.take_events()
        if events is not None and self._told is not None:
            self._publish(worker.name, events, self._told, now_ns)
        elif events is not None:
            self._tell(now_ns, partial(worker.tell, events))

    def _publish(self, name: str, events: EventBatch, told: EngineCaches, now_ns: int) -> None:
        """Pass events on as a server publishes them and a router reads them."""
        batch = EngineBatch(now_ns / 1e9, [engine_event(event) for event in events.events])
        payload = encode_batch(batch)

        def hear(router: Router, now_s: float) -> None:
            router.told_step(name, told.take(name, 0, decode_batch(payload)), now_s)

        self._tell(now_ns, hear, HOP_NS)

    def _tell_load(self, name: str, now_ns: int, at_once: bool) -> None:
        """Report a worker's load to all fronts, if there are several and it is time."""
        worker = self._workers[name]
        if len(self._fronts) > 1 and worker.account.is_due(now_ns / NS_PER_MS, at_once):
            report, made_s = worker.account.report(), now_ns / 1e9
            self._tell(now_ns, lambda router, now_s: router.report(name, report, made_s, now_s))

    def _announce(self, told: Announcement, now_ns: int) -> None:
        sent_s = now_ns / 1e9
        self._tell(now_ns, lambda router, now_s: router.heard(told, sent_s, now_s), HOP_NS)

    def _tell(self, now_ns: int, say: Callable[[Router, float], None], least_ns: int = 0) -> None:
        """Say something to the router of every front, as late as it gets there."""

        def arrive(then_ns: int) -> None:
            for router in self._routers.values():
                say(router, then_ns / 1e9)

        delay_ns = max(round(self._config.report_delay_ms * NS_PER_MS), least_ns)
        if delay_ns:
            self._time.at(now_ns + delay_ns, "", arrive)
        else:
            arrive(now_ns)

    def _sums(self) -> list[float]:
        columns = zip(*(worker.sums.values for worker in self._workers.values()), strict=True)
        return [sum(column) for column in columns]

    def _arrive(self, request_id: str, request: TraceRequest, now_ns: int) -> None:
        prompt = request.prompt(self._config.trace_block_tokens)
        front = self._rng.choice(self._fronts)
        self._front_of[request_id] = front
        salt = salt_of("", "")
        decision = self._routers[front].route(request_id, prompt, now_ns / 1e9, told_salt=salt)
        name, worker = decision.worker, self._workers[decision.worker]
        num_prompt, size = decision.num_prompt_tokens, self._config.block_size
        uncached = num_prompt - decision.num_cached_tokens
        self._sent_ns[name].append(now_ns)
        hashes = [] if decision.announcement is None else decision.announcement.hashes
        worker.account.sent(front, request_id, uncached, size * -(-num_prompt // size), hashes)
        if decision.announcement is not None:
            self._announce(decision.announcement, now_ns)
        sampling = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
        scheduler = worker.scheduler
        scheduler.add(Request(request_id, Generate(prompt, sampling), arrival_ns=now_ns))
        self._times[request_id] = RequestTimes(now_ns)
        for output in scheduler.take_finished():  # refused
            self._record(worker, output, now_ns)
        if not worker.running:
            self._tell_load(name, now_ns, at_once=True)
            self._start(name, now_ns)

    def _start(self, name: str, now_ns: int) -> None:
        end_ns = self._workers[name].start(now_ns)
        if end_ns is not None:
            self._time.at(end_ns, name, partial(self._end_step, name))

    def _record(self, worker: SimWorker, output: RequestOutput, now_ns: int) -> None:
        request_id, router = output.request_id, self._router_of(output.request_id)
        if output.token_ids:
            itl_ms = self._times[request_id].record(now_ns, len(output.token_ids))
            if itl_ms is None:
                self._cached[request_id] = output.num_cached_tokens
                router.prefill_done(request_id)
                worker.account.first_token(request_id)
            else:
                self._itl_ms.append(itl_ms)
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            self._num_finished[reason] = self._num_finished.get(reason, 0) + 1
            router.free(request_id, self._times[request_id].num_tokens)
            worker.account.ended(request_id)

    def _report(self) -> dict[str, Any]:
        times = self._times.values()
        prompt_tokens = sum(request.num_prompt_tokens for request in self._trace)
        output_tokens = sum(t.num_tokens for t in times)
        end_ns = max((t.last_ns for t in times), default=0)
        duration_s = (end_ns - min(t.arrival_ns for t in times)) / 1e9
        stats = [worker.scheduler.stats() for worker in self._workers.values()]
        return {
            "num_requests": len(self._trace),
            "num_finished": self._num_finished,
            "ttft_ms": summarize((t.ttft_ms for t in times), 2),
            "tpot_ms": summarize((t.tpot_ms for t in times), 2),
            "itl_ms": summarize(self._itl_ms, 2),
            "prefix_reuse": round(sum(self._cached.values()) / prompt_tokens, 4),
            "duration_s": round(duration_s, 3),
            "output_tok_s": round(output_tokens / duration_s, 1) if duration_s > 0 else None,
            "total_tok_s": (
                round((prompt_tokens + output_tokens) / duration_s, 1) if duration_s > 0 else None
            ),
            "most_sent_1s": max(_most_within(sent_ns, 10**9) for sent_ns in self._sent_ns.values()),
            "num_steps": sum(s.num_steps for s in stats),
            "num_preemptions": sum(s.num_preemptions for s in stats),
        }


def _most_within(times_ns: list[int], window_ns: int) -> int:
    """The most of these times, in order, that lie within so long."""
    first = most = 0
    for number, time_ns in enumerate(times_ns):
        while time_ns - times_ns[first] >= window_ns:
            first += 1
        most = max(most, number - first + 1)
    return most
