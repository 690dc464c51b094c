"""Many workers behind one front door: requests are routed, and go on elsewhere when a worker dies.

The pool knows every token that it passed on. When a worker is gone, its requests are sent to
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
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tokenmill.core.config import PoolConfig, RouterConfig, RouterPolicy
from tokenmill.core.kv import PREFILLED
from tokenmill.core.types import EngineStats, FinishReason, Request, RequestOutput, TokenmillError
from tokenmill.routing.disaggregation import DisaggregationRule
from tokenmill.routing.role_balance import match_rates
from tokenmill.routing.router import Decision, Router
from tokenmill.sched.blocks import U64
from tokenmill.workers.handover import Handovers
from tokenmill.workers.link import Spawn, WorkerDownError
from tokenmill.workers.messages import (
    Abort,
    FromWorker,
    KVConnected,
    KVDump,
    KVEvents,
    KVNotices,
    KVReceived,
    LeasesExpired,
    ModelFacts,
    Outputs,
    Submit,
)
from tokenmill.workers.open_request import OpenRequest, end, seeded
from tokenmill.workers.output_stream import OutputStream
from tokenmill.workers.pool_routers import Routers
from tokenmill.workers.pool_view import Choices, PoolView, worker_view
from tokenmill.workers.slot import Role, WorkerSlot
from tokenmill.workers.suspects import Suspects
from tokenmill.workers.trace import NO_TRACE, RequestTrace
from tokenmill.workers.worker_set import PREFIXES, WorkerSet, agreed, of_role, roles_of

_log = logging.getLogger(__name__)

RETRY_S = 0.25  # before a request that a full worker refused is routed again
POLL_S = 0.02
BUSY = ("queue_full", "draining")  # why a worker may refuse what another would take
NOT_HERE = (*BUSY, "no_capacity", "too_long")  # why a prefill worker may refuse it


class PoolError(TokenmillError):
    """What was asked of the pool cannot be done; the message says why."""


class WorkerPool:
    """The engines as the API process sees them: submit, abort, stats, and workers kept alive.

    With a `host` the workers connect by TCP. A request outlives its worker; one that workers seem
    to die of ends in ERROR (suspects.py). When no slot has a worker any more and none can be
    started, `gave_up` is set.
    """

    def __init__(
        self,
        spawn: Spawn,
        config: PoolConfig | None = None,
        router: RouterConfig | None = None,
        host: str | None = None,
        prefill_spawn: Spawn | None = None,
    ) -> None:
        self.config = config or PoolConfig()
        spawns: dict[Role, Spawn] = dict.fromkeys(PREFIXES, spawn)
        spawns["prefill"] = prefill_spawn or spawn
        self._workers = WorkerSet(spawns, self.config, self, host)
        self._slots = self._workers.slots
        self._open: dict[str, OpenRequest] = {}
        self._sent: dict[str, OpenRequest] = {}  # by their ids at the workers
        self._handovers = Handovers(DisaggregationRule(self.config.remote_prefill_tokens))
        self._routers = Routers(router or RouterConfig(), self._handovers)
        self._suspects = Suspects(self.config.max_migrations)
        self._held: list[str] = []
        self._retry: asyncio.TimerHandle | None = None
        self._choices = Choices()
        self._draining = False
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
        return self._workers.num_restarts

    @property
    def num_ready(self) -> int:
        """Workers that take requests."""
        return len(self._router.workers) + len(self._handovers.router.workers)

    async def start(self) -> ModelFacts:
        """Start all workers; raises WorkerStartError when one does not come up."""
        await self._workers.start(roles_of(self.config), self._handovers.settled)
        assert self.facts is not None
        return self.facts

    def submit(
        self,
        requests: list[Request],
        traces: Sequence[RequestTrace] = (),
        hash_inputs: Sequence[U64] = (),
    ) -> OutputStream:
        """Route requests to workers; their outputs come by their index in the stream.

        A trace for each request hears what becomes of it. `hash_inputs` are the prompts as
        sched.blocks.hash_input() has them, if that was done before.
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
            entry.hash_input = hash_inputs[index] if hash_inputs else None
            entry.trace = traces[index] if traces else NO_TRACE
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
                if entry.slot is not None:
                    at.setdefault(entry.slot.name, []).append(entry.sent_as)
        for name, ids in at.items():
            self._slots[name].send(Abort(ids))

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The sums over all workers; last known figures of those that do not answer in time."""
        await self._workers.refresh(timeout_s)
        return self.known_stats()

    def known_stats(self) -> EngineStats:
        """The sums over all workers as they last told, a heartbeat ago at most; asks nobody."""
        return self._workers.stats()

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
        await self._workers.close(grace_s)

    def view(self, decisions: bool = True) -> PoolView:
        """The pool now."""
        slots = list(self._slots.values())
        roles: tuple[Role, Role] = ("prefill", "decode")
        sides = [[slot.busy() for slot in self._workers.of_role(role)] for role in roles]
        return PoolView(
            router=self._router.config.policy,
            num_open=self.num_open,
            num_held=sum(entry.slot is None for entry in self._open.values()),
            migrations=self.num_migrations,
            workers=[worker_view(p, self._routers.of(p), self._entries_at(p)) for p in slots],
            decisions=self._choices.views() if decisions else [],
            transfers=self._handovers.num_received,
            failed_transfers=self._handovers.num_failed,
            transferred_bytes=sum(slot.received_bytes() for slot in slots),
            rates=match_rates(*sides) if all(sides) else None,
        )

    # The pool changes.

    async def scale(self, num_workers: int, role: Role = "both") -> None:
        """Have this many workers: new ones are started, surplus ones drained, youngest first."""
        what = "workers" if role == "both" else role
        if num_workers < 1:
            raise PoolError(f"{what}: at least 1 is needed, got {num_workers}")
        async with self._changing:
            roles = {slot.role for slot in self._slots.values()}
            if role not in roles:
                have = " and ".join(sorted("workers" if r == "both" else r for r in roles))
                raise PoolError(f"{what}: this pool has {have}")
            staying = [p.name for p in self._workers.of_role(role) if p.state != "draining"]
            new = [role] * (num_workers - len(staying))
            await self._workers.start(new, self._handovers.settled)
            for name in reversed(staying[num_workers:]):
                await self._remove(name)

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        """Take a worker out of the pool when its requests are done; late ones move elsewhere."""
        async with self._changing:
            if name not in self._slots:
                known = ", ".join(self._slots)
                raise PoolError(f"worker: there is no {name!r}; the pool has {known}")
            takers = self._router.workers
            if self._slots[name].role != "prefill" and not set(takers) - {name}:
                raise PoolError(f"worker: {name!r} is the only one that takes requests")
            await self._remove(name, timeout_s)

    async def _remove(self, name: str, timeout_s: float = 30.0) -> None:
        slot = self._slots[name]
        slot.state = "draining"
        self._routers.of(slot).remove_worker(name)
        deadline_s = time.monotonic() + timeout_s
        while self._entries_at(slot):
            if time.monotonic() > deadline_s or not slot.ready:
                break
            await asyncio.sleep(POLL_S)
        self._workers.leave(slot)
        late = self._entries_at(slot)
        slot.send(Abort([entry.sent_as for entry in late]))
        self._migrate(late, f"worker {name} left the pool")
        await slot.close(grace_s=5.0)

    def renew_router(self, policy: RouterPolicy | None = None) -> None:
        """Begin with a new router, of another policy if asked; it asks the workers what they hold.

        Nothing of what is under way changes.
        """
        if policy is not None:
            self._routers.set_policy(policy)
        self._renew_routers()

    def _renew_routers(self) -> None:
        if self.facts is not None:
            requests = self._open.values()
            self._routers.renew(self._slots.values(), requests, self.facts.block_size)

    @property
    def _router(self) -> Router:
        return self._routers.main

    def _entries_at(self, slot: WorkerSlot) -> list[OpenRequest]:
        """The requests that a worker computes, decodes, or holds KV for."""
        moving = self._handovers.ids_at(slot)
        return [e for e in self._open.values() if e.slot is slot or e.sent_as in moving]

    # What slots tell.

    def on_ready(self, slot: WorkerSlot) -> None:
        """A worker takes requests from now on; those that waited for one go first."""
        if self._slots.get(slot.name) is not slot or slot.facts is None:
            return
        self._handovers.check(slot, self._slots.values())
        self._agree(slot, slot.facts)
        if self._routers.outdated(len(self._slots)):
            self._renew_routers()
        elif slot.state == "ready":
            self._routers.introduce(slot)
        self._handovers.connect(slot, self._slots.values())
        self._assign_held()

    def _agree(self, slot: WorkerSlot, facts: ModelFacts) -> None:
        """Hold to what this worker can do, too, and tell what it warns of."""
        binding = of_role(facts, slot.role)
        self.facts = agreed(self.facts or binding, binding)
        for warning in facts.warnings:
            _log.warning("worker %s: %s", slot.name, warning)

    def on_down(self, slot: WorkerSlot) -> None:
        """Whatever the worker had goes on elsewhere."""
        self._routers.of(slot).remove_worker(slot.name)
        lost = self._entries_at(slot)
        self._handovers.on_down(slot, self._slots.values())
        for entry in self._suspects.died(lost):
            self._close(entry, failed=True)
            self._put_error(entry, f"the engine stopped: {slot.last_failure}", "worker_died")
        self._migrate([e for e in lost if e.request.request_id in self._open], slot.last_failure)

    def on_failed(self, slot: WorkerSlot) -> None:
        """A slot is given up; with the last one the pool is."""
        _log.error("worker %s is given up", slot.name)
        if all(p.state == "failed" for p in self._slots.values()):
            self.fail_open(f"the engine stopped: {slot.last_failure}", "worker_died")
            self.gave_up.set()

    def on_message(self, slot: WorkerSlot, message: FromWorker) -> None:
        """Outputs go to their streams, events to the router."""
        match message:
            case Outputs(outputs=outputs):
                slot.tokens.add(sum([len(o.token_ids) for o in outputs]))
                for output in outputs:
                    self._dispatch(slot, output)
                self._routers.of(slot).stepped(slot.name, time.monotonic())
            case KVEvents():
                self._routers.on_events(slot, message)
            case KVDump():
                self._routers.on_dump(slot, message)
            case KVConnected():
                self._handovers.on_connected(slot, message)
            case KVNotices(notices=notices):
                for trace in self._traces([notice.request_id for notice in notices]):
                    trace.transfer_began()
                self._handovers.on_notices(slot, notices)
            case KVReceived(request_ids=request_ids):
                self._on_received(request_ids)
            case LeasesExpired(request_ids=request_ids):
                sent = [self._sent[i] for i in request_ids if i in self._sent]
                late = [e for e in sent if self._handovers.source(e.sent_as) is slot]
                self._keep_and_migrate(late, "its lease expired")

    def on_stats(self, slot: WorkerSlot) -> None:
        """The routers hear what steps cost."""
        if len(self._slots) > 1:
            self._routers.learn(self._slots.values())

    def _on_received(self, request_ids: list[str]) -> None:
        for trace in self._traces(request_ids):
            trace.transfer_ended()
        self._handovers.on_received(request_ids)

    def _traces(self, request_ids: list[str]) -> list[RequestTrace]:
        """The traces of those that are open and traced, by their ids at the workers."""
        entries = [self._sent[i] for i in request_ids if i in self._sent]
        return [entry.trace for entry in entries]

    # Requests move.

    def _migrate(self, entries: Iterable[OpenRequest], reason: str, refused: bool = False) -> None:
        """Send requests on; one that was only refused had no handover that could fail."""
        moved = list(entries)
        for entry in moved:
            _log.debug("%s goes on elsewhere: %s", entry.sent_as, reason)
            entry.trace.migrated(reason)
            self._hold(entry, failed=not refused)
        self.num_migrations += len(moved)
        self._assign_held()

    def _keep_and_migrate(
        self, entries: list[OpenRequest], reason: str, refused: bool = False
    ) -> None:
        """There is no handover: the prompt is computed where it will decode."""
        for entry in entries:
            _log.warning("%s was not handed over: %s", entry.sent_as, reason)
            entry.stays = True
        self._migrate(entries, reason, refused)

    def _hold(self, entry: OpenRequest, failed: bool = True) -> None:
        """Take a request off its workers; it waits for the next one under a new id."""
        self._forget(entry, failed)
        entry.num_sent += 1
        entry.slot = None
        self._held.append(entry.request.request_id)
        self._sent[entry.sent_as] = entry

    def _forget(self, entry: OpenRequest, failed: bool = False, num_output_tokens: int = 0) -> None:
        """Whatever workers and routers know of a request is over; a handover may have failed."""
        self._router.free(entry.sent_as, num_output_tokens)
        self._handovers.end(entry.sent_as, failed)
        self._sent.pop(entry.sent_as, None)

    def _close(self, entry: OpenRequest, failed: bool = False) -> None:
        """A request has ended, in whatever way."""
        entry.trace.ended()
        self._forget(entry, failed, len(entry.token_ids))
        del self._open[entry.request.request_id]
        if self._suspects.ended(entry):
            self._try_next()

    def _try_next(self) -> None:
        """Another suspect may be tried, once what is being done is done."""
        asyncio.get_running_loop().call_soon(self._assign_held)

    def _assign_held(self) -> None:
        if self.ready and self._held:
            held = [self._open[i] for i in self._held if i in self._open]
            self._held = []
            going: list[str] = []
            for entry in held:
                goes = self._suspects.may_go(entry)
                (going if goes else self._held).append(entry.request.request_id)
            self._assign(going)

    def _assign(self, request_ids: Iterable[str]) -> None:
        """Route requests and send each worker its own in one message."""
        at: dict[str, list[Request]] = {}
        for request_id in request_ids:
            slot, request = self._route(self._open[request_id])
            at.setdefault(slot.name, []).append(request)
        for name, requests in at.items():
            self._slots[name].send(Submit(requests))

    def _route(self, entry: OpenRequest) -> tuple[WorkerSlot, Request]:
        """Choose who decodes and who computes the prompt; returns who is sent what."""
        router = self._router if self._router.workers else self._handovers.router
        request = entry.resumed()
        tokens, began_ns = entry.routed_tokens(), time.monotonic_ns()
        decision = router.route(entry.sent_as, tokens, began_ns / 1e9, request.cache_salt)
        slot = entry.slot = self._slots[decision.worker]
        entry.stream.workers[entry.index] = slot.name
        entry.num_uncached = decision.num_prompt_tokens - decision.num_cached_tokens
        begun: tuple[WorkerSlot, Decision] | str = ""
        if entry.may_hand_over and slot.role == "decode":
            begun = self._handovers.begin(request, tokens, slot, decision, self._slots)
        if isinstance(begun, str):
            self._count_choice(entry, decision, began_ns, True, begun)
            return slot, request
        source, chosen = begun
        self._count_choice(entry, decision, began_ns, False, f"{source.name} computes the prompt")
        router.prefill_done(entry.sent_as)
        self._count_choice(entry, chosen, began_ns, True, f"hands over to {slot.name}")
        return source, replace(request, hold_kv_s=self.config.kv_lease_s)

    def _count_choice(
        self, entry: OpenRequest, decision: Decision, began_ns: int, computes: bool, why: str
    ) -> None:
        """Count a request where it goes, and its prompt where it is computed."""
        slot = self._slots[decision.worker]
        entry.trace.routed(decision, began_ns, slot.role)
        slot.num_routed += 1
        if computes:
            slot.num_prompt_tokens += decision.num_prompt_tokens
            slot.num_overlap_tokens += decision.num_cached_tokens
        num_resumed = len(entry.token_ids)
        self._choices.add(entry.request.request_id, decision, num_resumed, slot.role, why)

    def _dispatch(self, slot: WorkerSlot, output: RequestOutput) -> None:
        entry = self._sent.get(output.request_id)
        if entry is None:  # aborted here, or it has moved on
            return
        prefilling = self._handovers.source(output.request_id) is slot
        if not prefilling and entry.slot is not slot:
            return
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
            self._routers.of(slot).prefill_done(output.request_id)
        output.request_id = entry.request.request_id
        entry.token_ids += output.token_ids
        if entry.num_deaths and self._suspects.got_on(entry):
            self._try_next()
        entry.stream.put(entry.index, output)

    def _is_to_be_tried_again(
        self, entry: OpenRequest, output: RequestOutput, prefilling: bool
    ) -> bool:
        """A request that was taken once is not refused because the next worker is full.

        Nor does it end because its KV did not arrive.
        """
        why = output.stop_reason
        if why == "kv_transfer" and not entry.stays:
            self._keep_and_migrate([entry], output.error or "")
            return True
        if output.finish_reason is not FinishReason.REJECT:
            return False
        if prefilling and why in NOT_HERE:
            self._keep_and_migrate([entry], output.error or "", refused=True)
            return True
        if why in BUSY and entry.num_sent:
            self._hold(entry)
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._assign_held)
            return True
        return False

    def _put_error(self, entry: OpenRequest, message: str, stop_reason: str) -> None:
        request_id = entry.request.request_id
        entry.stream.put(entry.index, end(request_id, FinishReason.ERROR, message, stop_reason))
