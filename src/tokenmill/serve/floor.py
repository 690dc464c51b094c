"""Many workers behind one front door: requests are routed, and go on elsewhere when a worker dies.

The floor knows every token that it passed on. When a worker is gone, its requests are sent to
another one with these tokens as output_token_ids; sampling depends on seed and position alone, so
the rest is what the first worker would have said.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from tokenmill.core.config import FloorConfig, RouterConfig
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    TokenmillError,
)
from tokenmill.sched.router import Decision, Router
from tokenmill.serve.floor_view import DecisionView, FloorView, WorkerView
from tokenmill.serve.place import Place, add_stats
from tokenmill.serve.wire import (
    Abort,
    FromWorker,
    GetKV,
    KVDump,
    KVEvents,
    ModelFacts,
    Outputs,
    OutputStream,
    Spawn,
    Submit,
    WorkerDownError,
    WorkerStartError,
)

_log = logging.getLogger(__name__)

NUM_DECISIONS = 64  # that are remembered
RETRY_S = 0.25  # before a request that a full worker refused is routed again
POLL_S = 0.02
BUSY = ("queue_full", "draining")  # why a worker may refuse what another would take


class FloorError(TokenmillError):
    """What was asked of the floor cannot be done; the message says why."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: Request
    stream: OutputStream
    index: int
    place: Place | None = None  # None: held until a worker can take it
    token_ids: list[int] = field(default_factory=list)
    num_uncached: int = 0  # tokens to compute before its first one, as far as is known
    num_migrations: int = 0

    def resumed(self) -> Request:
        """The request as the next worker has to see it."""
        if not self.token_ids:
            return self.request
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None:  # these were sent with the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(self.request, sampling=sampling, output_token_ids=list(self.token_ids))


@dataclass(frozen=True, slots=True)
class _Choice:
    request_id: str
    time_s: float
    num_resumed: int
    decision: Decision


class Floor:
    """The engines as the API process sees them: submit, abort, stats, and workers kept alive.

    With a `host` the workers connect by TCP. A request outlives its worker up to
    `max_migrations` times; then it gets one ERROR output. When no place has a worker any more and
    none can be started, `gave_up` is set.
    """

    def __init__(
        self,
        spawn: Spawn,
        config: FloorConfig | None = None,
        router: RouterConfig | None = None,
        host: str | None = None,
    ) -> None:
        self.config = config or FloorConfig()
        self._spawn = spawn
        self._host = host
        self._router_config = router or RouterConfig()
        self._router = Router(replace(self._router_config, policy="round-robin"))
        self._places: dict[str, Place] = {}
        self._num_named = 0
        self._open: dict[str, _Open] = {}
        self._held: list[str] = []
        self._retry: asyncio.TimerHandle | None = None
        self._pulled: set[str] = set()  # places whose dump is on its way
        self._choices: deque[_Choice] = deque(maxlen=NUM_DECISIONS)
        self._draining = False
        self._num_past_restarts = 0
        self._changing = asyncio.Lock()
        self.facts: ModelFacts | None = None
        self.num_migrations = 0
        self.gave_up = asyncio.Event()

    # What the API sees.

    @property
    def ready(self) -> bool:
        """True while a worker is there to take requests."""
        return bool(self._router.workers)

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._open)

    @property
    def num_pending(self) -> int:
        """Open requests without a first token."""
        return sum(not entry.token_ids for entry in self._open.values())

    @property
    def num_restarts(self) -> int:
        """Times that a worker was started in place of another."""
        return self._num_past_restarts + sum(p.num_restarts for p in self._places.values())

    @property
    def num_ready(self) -> int:
        """Workers that take requests."""
        return len(self._router.workers)

    async def start(self) -> ModelFacts:
        """Start all workers; raises WorkerStartError when one does not come up."""
        await self._add_places(self.config.workers)
        assert self.facts is not None
        return self.facts

    def submit(self, requests: list[Request]) -> OutputStream:
        """Route requests to workers; their outputs come by their index in the stream."""
        if not self.ready:
            raise WorkerDownError("the engine is restarting; try again shortly")
        stream = OutputStream([r.request_id for r in requests])
        if self._draining:
            message = "the server is draining and takes no new requests"
            for index, request_id in enumerate(stream.request_ids):
                reject = _end(request_id, FinishReason.REJECT, message, "draining")
                stream.put(index, reject)
            return stream
        for index, request in enumerate(requests):
            self._open[request.request_id] = _Open(_seeded(request), stream, index)
        self._assign(stream.request_ids)
        return stream

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free what the engines hold for them; finished ids are ignored."""
        at: dict[str, list[str]] = {}
        for request_id in request_ids:
            entry = self._open.pop(request_id, None)
            if entry is not None:
                self._router.free(request_id)
                if entry.place is not None:
                    at.setdefault(entry.place.name, []).append(request_id)
        for name, ids in at.items():
            self._places[name].send(Abort(ids))

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The sums over all workers; last known figures of those that do not answer in time."""
        await asyncio.gather(*(place.refresh(timeout_s) for place in self._places.values()))
        return self.known_stats()

    def known_stats(self) -> EngineStats:
        """The sums over all workers as they last told, a heartbeat ago at most; asks nobody."""
        total = EngineStats()
        for place in self._places.values():
            total = add_stats(total, place.stats())
        return total

    def drain(self) -> None:
        """Refuse new requests from now on; open ones finish, on another worker if need be."""
        self._draining = True

    def fail_open(self, message: str, stop_reason: str) -> None:
        """End every open request with one ERROR output and abort it in the engine."""
        entries = list(self._open.values())
        self.abort(list(self._open))
        for entry in entries:
            self._put_error(entry, message, stop_reason)

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop the workers; open requests end in ERROR."""
        self.fail_open("the server is shutting down", "shutdown")
        if self._retry is not None:
            self._retry.cancel()
        places, self._places = list(self._places.values()), {}
        await asyncio.gather(*(place.close(grace_s) for place in places))

    def view(self) -> FloorView:
        """The floor now."""
        return FloorView(
            router=self._router.config.policy,
            num_open=self.num_open,
            num_held=sum(entry.place is None for entry in self._open.values()),
            migrations=self.num_migrations,
            workers=[self._worker_view(place) for place in self._places.values()],
            decisions=[_decision_view(choice) for choice in self._choices],
        )

    # The floor changes.

    async def scale(self, num_workers: int) -> None:
        """Have this many workers: new ones are started, surplus ones drained, youngest first."""
        if num_workers < 1:
            raise FloorError(f"workers: at least 1 is needed, got {num_workers}")
        async with self._changing:
            staying = [p.name for p in self._places.values() if p.state != "draining"]
            await self._add_places(num_workers - len(staying))
            for name in reversed(staying[num_workers:]):
                await self._remove(name)

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        """Take a worker off the floor when its requests are done; late ones move elsewhere."""
        async with self._changing:
            if name not in self._places:
                known = ", ".join(self._places)
                raise FloorError(f"worker: there is no {name!r}; the floor has {known}")
            if not any(other != name for other in self._router.workers):
                raise FloorError(f"worker: {name!r} is the only one that takes requests")
            await self._remove(name, timeout_s)

    async def _add_places(self, count: int) -> None:
        if count <= 0:
            return
        names = [f"w{self._num_named + i}" for i in range(count)]
        self._num_named += count
        for name in names:
            self._places[name] = Place(name, self._spawn, self.config, self, self._host)
        starts = [asyncio.create_task(self._places[name].start()) for name in names]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for name in names:
                place = self._places.pop(name)
                self.on_down(place)
                await place.close(grace_s=0.0)
            raise

    async def _remove(self, name: str, timeout_s: float = 30.0) -> None:
        place = self._places[name]
        place.state = "draining"
        self._router.remove_worker(name)
        deadline_s = time.monotonic() + timeout_s
        while any(e.place is place for e in self._open.values()):
            if time.monotonic() > deadline_s or not place.ready:
                break
            await asyncio.sleep(POLL_S)
        del self._places[name]
        self._num_past_restarts += place.num_restarts
        late = [e for e in self._open.values() if e.place is place]
        place.send(Abort([e.request.request_id for e in late]))
        self._migrate(late, f"worker {name} left the floor")
        await place.close(grace_s=5.0)

    def _choose_router(self) -> None:
        """One worker needs no choice and no events; with a second one comes the real policy."""
        policy = self._router_config.policy if len(self._places) > 1 else "round-robin"
        facts = self.facts
        if policy == self._router.config.policy or facts is None:
            return
        self._router = Router(
            replace(self._router_config, policy=policy, block_size=facts.block_size)
        )
        for place in self._places.values():
            if place.ready and place.state == "ready":
                self._introduce(place)

    def _introduce(self, place: Place) -> None:
        self._router.add_worker(place.name)
        if self._router.config.policy == "kv" and self._router.config.events:
            self._pulled.discard(place.name)
            self._pull(place)

    # What places tell.

    def on_ready(self, place: Place) -> None:
        """A worker takes requests from now on; those that waited for one go first."""
        if self._places.get(place.name) is not place or place.facts is None:
            return
        if self.facts is None:
            self.facts = place.facts
        self._check(place.facts)
        before = self._router
        self._choose_router()
        if self._router is before and place.state == "ready":
            self._introduce(place)
        self._assign_held()

    def _check(self, facts: ModelFacts) -> None:
        """Workers must agree on what a token and a block are."""
        known = self.facts
        assert known is not None
        for name in ("vocab_size", "block_size"):
            ours, theirs = getattr(known, name), getattr(facts, name)
            if ours != theirs:
                raise WorkerStartError(f"{name}: the floor has {ours}, a new worker {theirs}")
        if facts.max_model_len < known.max_model_len:
            self.facts = msgspec.structs.replace(known, max_model_len=facts.max_model_len)

    def on_down(self, place: Place) -> None:
        """Whatever the worker had goes on elsewhere."""
        self._router.remove_worker(place.name)
        lost = [entry for entry in self._open.values() if entry.place is place]
        failed = [e for e in lost if e.num_migrations >= self.config.max_migrations]
        for entry in failed:
            del self._open[entry.request.request_id]
            self._put_error(entry, f"the engine stopped: {place.last_failure}", "worker_died")
        for entry in lost:
            entry.num_migrations += 1
        self._migrate([e for e in lost if e.request.request_id in self._open], place.last_failure)

    def on_failed(self, place: Place) -> None:
        """A place is given up; with the last one the floor is."""
        _log.error("worker %s is given up", place.name)
        if all(p.state == "failed" for p in self._places.values()):
            self.fail_open(f"the engine stopped: {place.last_failure}", "worker_died")
            self.gave_up.set()

    def on_message(self, place: Place, message: FromWorker) -> None:
        """Outputs go to their streams, events to the router."""
        match message:
            case Outputs(outputs=outputs):
                place.tokens.add(sum([len(o.token_ids) for o in outputs]))
                for output in outputs:
                    self._dispatch(place, output)
            case KVEvents():
                if not self._router.apply(place.name, message.batch()):
                    self._pull(place)
            case KVDump(dump=dump):
                self._pulled.discard(place.name)
                if not self._router.load(place.name, dump):
                    self._pull(place)

    def _pull(self, place: Place) -> None:
        """Ask for a dump, unless one is on its way."""
        if place.name not in self._pulled:
            self._pulled.add(place.name)
            place.send(GetKV())

    # Requests move.

    def _migrate(self, entries: Iterable[_Open], reason: str) -> None:
        moved = list(entries)
        for entry in moved:
            request_id = entry.request.request_id
            _log.debug("%s goes on elsewhere: %s", request_id, reason)
            self._router.free(request_id)
            entry.place = None
            self._held.append(request_id)
        self.num_migrations += len(moved)
        self._assign_held()

    def _assign_held(self) -> None:
        if self.ready and self._held:
            held, self._held = self._held, []
            self._assign([i for i in held if i in self._open])

    def _assign(self, request_ids: Iterable[str]) -> None:
        """Route requests and send each worker its own in one message."""
        at: dict[str, list[Request]] = {}
        for request_id in request_ids:
            entry = self._open[request_id]
            at.setdefault(self._route(entry), []).append(entry.resumed())
        for name, requests in at.items():
            self._places[name].send(Submit(requests))

    def _route(self, entry: _Open) -> str:
        request = entry.request
        token_ids = request.prompt_token_ids + entry.token_ids
        decision = self._router.route(
            request.request_id, token_ids, time.monotonic(), request.cache_salt
        )
        place = entry.place = self._places[decision.worker]
        entry.num_uncached = decision.num_prompt_tokens - decision.num_cached_tokens
        place.num_routed += 1
        place.num_prompt_tokens += decision.num_prompt_tokens
        place.num_overlap_tokens += decision.num_cached_tokens
        if len(decision.workers) > 1:
            choice = _Choice(request.request_id, time.time(), len(entry.token_ids), decision)
            self._choices.append(choice)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s -> %s: %s", request.request_id, place.name, decision.terms())
        return decision.worker

    def _dispatch(self, place: Place, output: RequestOutput) -> None:
        entry = self._open.get(output.request_id)
        if entry is None or entry.place is not place:  # aborted here, or it has moved on
            return
        if output.finish_reason is not None:
            if self._is_to_be_tried_again(entry, output):
                return
            del self._open[output.request_id]
            self._router.free(output.request_id)
        elif not entry.token_ids:
            self._router.prefill_done(output.request_id)
        entry.token_ids += output.token_ids
        entry.stream.put(entry.index, output)

    def _is_to_be_tried_again(self, entry: _Open, output: RequestOutput) -> bool:
        """A request that was taken once is not refused because the next worker is full."""
        refused = output.finish_reason is FinishReason.REJECT and output.stop_reason in BUSY
        if not (refused and entry.num_migrations):
            return False
        self._router.free(output.request_id)
        entry.place = None
        self._held.append(output.request_id)
        self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._assign_held)
        return True

    def _put_error(self, entry: _Open, message: str, stop_reason: str) -> None:
        request_id = entry.request.request_id
        entry.stream.put(entry.index, _end(request_id, FinishReason.ERROR, message, stop_reason))

    def _worker_view(self, place: Place) -> WorkerView:
        stats = place.stats()
        entries = [entry for entry in self._open.values() if entry.place is place]
        known = place.name in self._router.workers
        return WorkerView(
            name=place.name,
            role=place.role,
            state=place.state,
            num_requests=len(entries),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queued_tokens=sum(e.num_uncached for e in entries if not e.token_ids),
            kv_blocks=stats.num_kv_blocks,
            kv_blocks_used=stats.num_kv_blocks_used,
            cached_blocks=self._router.index.num_blocks(place.name) if known else 0,
            routed=place.num_routed,
            routed_tokens=place.num_prompt_tokens,
            overlap_tokens=place.num_overlap_tokens,
            tokens_per_s=round(place.tokens.per_s(), 1),
            output_tokens=place.tokens.total,
            restarts=place.num_restarts,
            failures=place.num_failures,
            hangs=place.num_hangs,
            last_failure=place.last_failure,
        )


def _seeded(request: Request) -> Request:
    """The request with a seed of its own, so that any worker continues it alike."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.greedy:
        return request
    return replace(request, sampling=replace(sampling, seed=random.getrandbits(63)))


def _end(request_id: str, reason: FinishReason, message: str, stop_reason: str) -> RequestOutput:
    return RequestOutput(
        request_id, [], finish_reason=reason, stop_reason=stop_reason, error=message
    )


def _decision_view(choice: _Choice) -> DecisionView:
    decision = choice.decision
    return DecisionView(
        request_id=choice.request_id,
        time_s=choice.time_s,
        worker=decision.worker,
        prompt_tokens=decision.num_prompt_tokens,
        cached_tokens=decision.num_cached_tokens,
        resumed_tokens=choice.num_resumed,
        terms=decision.terms(),
    )
