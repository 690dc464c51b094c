"""Many workers behind one front door: requests are routed, and go on elsewhere when a worker dies.

The floor knows every token that it passed on. When a worker is gone, its requests are sent to
another one with these tokens as output_token_ids; sampling depends on seed and position alone, so
the rest is what the first worker would have said.

With prefill and decode workers a long prompt is computed by one and handed over to the other
(handover.py); whatever fails on the way, the request begins or goes on elsewhere all the same.
Without any decode worker, prefill workers do it all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec

from tokenmill.core.config import FloorConfig, RouterConfig
from tokenmill.core.kv import LEASE_S, PREFILLED
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    TokenmillError,
    add_stats,
)
from tokenmill.sched.disaggregate import DisaggregationRule
from tokenmill.sched.rates import match_rates
from tokenmill.sched.router import Decision, Router
from tokenmill.serve.floor_view import Choice, FloorView, decision_view, worker_view
from tokenmill.serve.handover import Handovers
from tokenmill.serve.kv_wire import KVConnected, KVNotices, KVReceived, LeasesExpired
from tokenmill.serve.open_request import OpenRequest, end, seeded
from tokenmill.serve.place import Place, Role
from tokenmill.serve.request_trace import RequestTrace
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
NOT_HERE = (*BUSY, "no_capacity", "too_long")  # why a prefill worker may refuse it
PREFIXES: dict[Role, str] = {"both": "w", "prefill": "p", "decode": "d"}  # of names


class FloorError(TokenmillError):
    """What was asked of the floor cannot be done; the message says why."""


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
        prefill_spawn: Spawn | None = None,
    ) -> None:
        self.config = config or FloorConfig()
        self._spawns: dict[Role, Spawn] = dict.fromkeys(PREFIXES, spawn)
        if prefill_spawn is not None:
            self._spawns["prefill"] = prefill_spawn
        self._host = host
        self._router_config = router or RouterConfig()
        self._router = Router(replace(self._router_config, policy="round-robin"))
        self._places: dict[str, Place] = {}
        self._num_named: Counter[Role] = Counter()
        self._open: dict[str, OpenRequest] = {}
        self._sent: dict[str, OpenRequest] = {}  # by their ids at the workers
        self._handovers = Handovers(DisaggregationRule(self.config.remote_prefill_tokens))
        self._held: list[str] = []
        self._retry: asyncio.TimerHandle | None = None
        self._pulled: set[str] = set()  # places whose dump is on its way
        self._choices: deque[Choice] = deque(maxlen=NUM_DECISIONS)
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
        return bool(self._router.workers or self._handovers.router.workers)

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
        return len(self._router.workers) + len(self._handovers.router.workers)

    async def start(self) -> ModelFacts:
        """Start all workers; raises WorkerStartError when one does not come up."""
        config = self.config
        counts: dict[Role, int] = {"both": config.workers}
        if config.prefill or config.decode:
            counts = {"prefill": config.prefill, "decode": config.decode}
        await self._add_places([role for role in counts for _ in range(counts[role])])
        assert self.facts is not None
        return self.facts

    def submit(self, requests: list[Request], traces: Sequence[RequestTrace] = ()) -> OutputStream:
        """Route requests to workers; their outputs come by their index in the stream.

        A trace for each request hears what becomes of it.
        """
        if not self.ready:
            raise WorkerDownError("the engine is restarting; try again shortly")
        stream = OutputStream([r.request_id for r in requests])
        if self._draining:
            message = "the server is draining and takes no new requests"
            for index, request_id in enumerate(stream.request_ids):
                reject = end(request_id, FinishReason.REJECT, message, "draining")
                stream.put(index, reject)
            return stream
        for index, request in enumerate(requests):
            request_id = request.request_id
            entry = OpenRequest(seeded(request), stream, index)
            entry.trace = traces[index] if traces else None
            self._open[request_id] = self._sent[request_id] = entry
        self._assign(stream.request_ids)
        return stream

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free what the engines hold for them; finished ids are ignored."""
        at: dict[str, list[str]] = {}
        for request_id in request_ids:
            entry = self._open.get(request_id)
            if entry is not None:
                self._close(entry)
                if entry.place is not None:
                    at.setdefault(entry.place.name, []).append(entry.sent_as)
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
        places = list(self._places.values())
        sides = [[p.busy() for p in places if p.role == role] for role in ("prefill", "decode")]
        return FloorView(
            router=self._router.config.policy,
            num_open=self.num_open,
            num_held=sum(entry.place is None for entry in self._open.values()),
            migrations=self.num_migrations,
            workers=[
                worker_view(p, self._router_of(p), self._entries_at(p))
                for p in self._places.values()
            ],
            decisions=[decision_view(choice) for choice in self._choices],
            transfers=self._handovers.num_received,
            failed_transfers=self._handovers.num_failed,
            rates=match_rates(*sides) if all(sides) else None,
        )

    # The floor changes.

    async def scale(self, num_workers: int, role: Role = "both") -> None:
        """Have this many workers: new ones are started, surplus ones drained, youngest first."""
        what = "workers" if role == "both" else role
        if num_workers < 1:
            raise FloorError(f"{what}: at least 1 is needed, got {num_workers}")
        async with self._changing:
            roles = {place.role for place in self._places.values()}
            if role not in roles:
                have = " and ".join(sorted("workers" if r == "both" else r for r in roles))
                raise FloorError(f"{what}: this floor has {have}")
            places = [p for p in self._places.values() if p.role == role]
            staying = [p.name for p in places if p.state != "draining"]
            await self._add_places([role] * (num_workers - len(staying)))
            for name in reversed(staying[num_workers:]):
                await self._remove(name)

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        """Take a worker off the floor when its requests are done; late ones move elsewhere."""
        async with self._changing:
            if name not in self._places:
                known = ", ".join(self._places)
                raise FloorError(f"worker: there is no {name!r}; the floor has {known}")
            takers = self._router.workers
            if self._places[name].role != "prefill" and not set(takers) - {name}:
                raise FloorError(f"worker: {name!r} is the only one that takes requests")
            await self._remove(name, timeout_s)

    async def _add_places(self, roles: list[Role]) -> None:
        names = []
        for role in roles:
            name = f"{PREFIXES[role]}{self._num_named[role]}"
            self._num_named[role] += 1
            names.append(name)
            spawn = self._spawns[role]
            self._places[name] = Place(name, spawn, self.config, self, self._host, role)
        starts = [asyncio.create_task(self._places[name].start()) for name in names]
        try:
            await asyncio.gather(*starts)
            await self._handovers.settled()
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
        self._router_of(place).remove_worker(name)
        deadline_s = time.monotonic() + timeout_s
        while self._entries_at(place):
            if time.monotonic() > deadline_s or not place.ready:
                break
            await asyncio.sleep(POLL_S)
        del self._places[name]
        self._num_past_restarts += place.num_restarts
        late = self._entries_at(place)
        place.send(Abort([entry.sent_as for entry in late]))
        self._migrate(late, f"worker {name} left the floor")
        await place.close(grace_s=5.0)

    def _choose_router(self) -> None:
        """One worker needs no choice and no events; with a second one comes the real policy."""
        policy = self._router_config.policy if len(self._places) > 1 else "round-robin"
        facts = self.facts
        if policy == self._router.config.policy or facts is None:
            return
        config = replace(self._router_config, policy=policy, block_size=facts.block_size)
        self._router, self._handovers.router = Router(config), Router(config)
        for place in self._places.values():
            if place.ready and place.state == "ready":
                self._introduce(place)

    def _introduce(self, place: Place) -> None:
        router = self._router_of(place)
        router.add_worker(place.name)
        if router.config.policy == "kv" and router.config.events:
            self._pulled.discard(place.name)
            self._pull(place)

    def _router_of(self, place: Place) -> Router:
        return self._handovers.router if place.role == "prefill" else self._router

    def _entries_at(self, place: Place) -> list[OpenRequest]:
        """The requests that a worker computes, decodes, or holds KV for."""
        moving = self._handovers.ids_at(place)
        return [e for e in self._open.values() if e.place is place or e.sent_as in moving]

    # What places tell.

    def on_ready(self, place: Place) -> None:
        """A worker takes requests from now on; those that waited for one go first."""
        if self._places.get(place.name) is not place or place.facts is None:
            return
        if self.facts is None:
            self.facts = place.facts
        self._check(place.facts)
        self._handovers.check(place, self._places.values())
        before = self._router
        self._choose_router()
        if self._router is before and place.state == "ready":
            self._introduce(place)
        self._handovers.connect(place, self._places.values())
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
        self._router_of(place).remove_worker(place.name)
        lost = self._entries_at(place)
        self._handovers.on_down(place, self._places.values())
        failed = [e for e in lost if e.num_migrations >= self.config.max_migrations]
        for entry in failed:
            self._close(entry)
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
                if not self._router_of(place).apply(place.name, message.batch()):
                    self._pull(place)
            case KVDump(dump=dump):
                self._pulled.discard(place.name)
                if not self._router_of(place).load(place.name, dump):
                    self._pull(place)
            case KVConnected():
                self._handovers.on_connected(place, message)
            case KVNotices(notices=notices):
                for trace in self._traces([notice.request_id for notice in notices]):
                    trace.transfer_began()
                self._handovers.on_notices(place, notices)
            case KVReceived(request_ids=request_ids):
                self._on_received(request_ids)
            case LeasesExpired(request_ids=request_ids):
                sent = [self._sent[i] for i in request_ids if i in self._sent]
                late = [e for e in sent if self._handovers.source(e.sent_as) is place]
                self._keep_and_migrate(late, "its lease expired")

    def _on_received(self, request_ids: list[str]) -> None:
        for trace in self._traces(request_ids):
            trace.transfer_ended()
        self._handovers.on_received(request_ids)

    def _traces(self, request_ids: list[str]) -> list[RequestTrace]:
        """The traces of those that are open and traced, by their ids at the workers."""
        entries = [self._sent[i] for i in request_ids if i in self._sent]
        return [entry.trace for entry in entries if entry.trace is not None]

    def _pull(self, place: Place) -> None:
        """Ask for a dump, unless one is on its way."""
        if place.name not in self._pulled:
            self._pulled.add(place.name)
            place.send(GetKV())

    # Requests move.

    def _migrate(self, entries: Iterable[OpenRequest], reason: str) -> None:
        moved = list(entries)
        for entry in moved:
            _log.debug("%s goes on elsewhere: %s", entry.sent_as, reason)
            if entry.trace is not None:
                entry.trace.migrated(reason)
            self._hold(entry)
        self.num_migrations += len(moved)
        self._assign_held()

    def _keep_and_migrate(self, entries: list[OpenRequest], reason: str) -> None:
        """A handover failed: the prompt is computed where it will decode."""
        for entry in entries:
            _log.warning("%s was not handed over: %s", entry.sent_as, reason)
            entry.stays = True
            entry.num_migrations += 1
        self._migrate(entries, reason)

    def _hold(self, entry: OpenRequest) -> None:
        """Take a request off its workers; it waits for the next one under a new id."""
        self._handovers.num_failed += self._handovers.source(entry.sent_as) is not None
        self._forget(entry)
        entry.num_sent += 1
        entry.place = None
        self._held.append(entry.request.request_id)
        self._sent[entry.sent_as] = entry

    def _forget(self, entry: OpenRequest) -> None:
        """Whatever workers and routers know of a request is over."""
        self._router.free(entry.sent_as)
        self._handovers.end(entry.sent_as)
        self._sent.pop(entry.sent_as, None)

    def _close(self, entry: OpenRequest) -> None:
        """A request has ended, in whatever way."""
        if entry.trace is not None:
            entry.trace.ended()
        self._forget(entry)
        del self._open[entry.request.request_id]

    def _assign_held(self) -> None:
        if self.ready and self._held:
            held, self._held = self._held, []
            self._assign([i for i in held if i in self._open])

    def _assign(self, request_ids: Iterable[str]) -> None:
        """Route requests and send each worker its own in one message."""
        at: dict[str, list[Request]] = {}
        for request_id in request_ids:
            place, request = self._route(self._open[request_id])
            at.setdefault(place.name, []).append(request)
        for name, requests in at.items():
            self._places[name].send(Submit(requests))

    def _route(self, entry: OpenRequest) -> tuple[Place, Request]:
        """Choose who decodes and who computes the prompt; returns who is sent what."""
        router = self._router if self._router.workers else self._handovers.router
        request = entry.resumed()
        token_ids = request.prompt_token_ids + request.output_token_ids
        began_ns = time.monotonic_ns()
        decision = router.route(entry.sent_as, token_ids, began_ns / 1e9, request.cache_salt)
        place = entry.place = self._places[decision.worker]
        entry.num_uncached = decision.num_prompt_tokens - decision.num_cached_tokens
        self._count_choice(entry, decision, began_ns)
        if entry.may_hand_over and place.role == "decode":
            begun = self._handovers.begin(request, place, decision, self._places)
            if begun is not None:
                router.prefill_done(entry.sent_as)
                self._count_choice(entry, begun[1], began_ns)
                return begun[0], replace(request, hold_kv_s=LEASE_S)
        return place, request

    def _count_choice(self, entry: OpenRequest, decision: Decision, began_ns: int) -> None:
        place = self._places[decision.worker]
        if entry.trace is not None:
            entry.trace.routed(decision, began_ns, place.role)
        place.num_routed += 1
        place.num_prompt_tokens += decision.num_prompt_tokens
        place.num_overlap_tokens += decision.num_cached_tokens
        if len(decision.workers) > 1:
            request_id = entry.request.request_id
            choice = Choice(request_id, time.time(), len(entry.token_ids), decision)
            self._choices.append(choice)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s -> %s: %s", request_id, place.name, decision.terms())

    def _dispatch(self, place: Place, output: RequestOutput) -> None:
        entry = self._sent.get(output.request_id)
        if entry is None:  # aborted here, or it has moved on
            return
        prefilling = self._handovers.source(output.request_id) is place
        if not prefilling and entry.place is not place:
            return
        if entry.trace is not None:
            entry.trace.output(output)
        if not prefilling and output.token_ids:
            self._on_received([output.request_id])
        if prefilling and output.stop_reason == PREFILLED:
            output.finish_reason = output.stop_reason = None
            self._handovers.router.prefill_done(output.request_id)
        if output.finish_reason is not None:
            if self._is_to_be_tried_again(entry, output, prefilling):
                return
            self._close(entry)
        elif not entry.token_ids:
            self._router_of(place).prefill_done(output.request_id)
        output.request_id = entry.request.request_id
        entry.token_ids += output.token_ids
        entry.stream.put(entry.index, output)

    def _is_to_be_tried_again(
        self, entry: OpenRequest, output: RequestOutput, prefilling: bool
    ) -> bool:
        """A request that was taken once is not refused because the next worker is full.

        Nor does it end because its KV did not arrive.
        """
        why = output.stop_reason
        if why == "kv_transfer" and entry.num_migrations < self.config.max_migrations:
            self._keep_and_migrate([entry], output.error or "")
            return True
        if output.finish_reason is not FinishReason.REJECT:
            return False
        if prefilling and why in NOT_HERE:
            self._keep_and_migrate([entry], output.error or "")
            return True
        if why in BUSY and (entry.num_migrations or entry.token_ids):
            self._hold(entry)
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._assign_held)
            return True
        return False

    def _put_error(self, entry: OpenRequest, message: str, stop_reason: str) -> None:
        request_id = entry.request.request_id
        entry.stream.put(entry.index, end(request_id, FinishReason.ERROR, message, stop_reason))
