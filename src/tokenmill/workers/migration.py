"""Owns the open requests of a pool: passes their outputs on, and moves them when a worker dies.

Every token that was passed on is known here. When a worker dies, its requests are sent to another
worker with these tokens as output_token_ids. Sampling depends on seed and position alone, so the
rest of the answer is the same. A request that seems to kill workers ends in ERROR
(routing/suspects.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from tokenmill.core.kv import PREFILLED, KVNotice
from tokenmill.core.requests import Generate, RequestOutput
from tokenmill.core.tasks import TaskProgress
from tokenmill.core.types import EngineStats, FinishReason, add_stats
from tokenmill.routing.suspects import Suspects
from tokenmill.workers.accounts import Accounts
from tokenmill.workers.assignment import Assignment
from tokenmill.workers.exchange.handover import Handovers
from tokenmill.workers.messages import (
    Abort,
    BlockEvents,
    FromWorker,
    FrontDropped,
    FrontLost,
    KVConnected,
    KVDump,
    KVNotices,
    KVReceived,
    LeasesExpired,
    LoadReported,
    Outputs,
    Stats,
)
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.pool_routers import Routers
from tokenmill.workers.slot import OnMessage, WorkerSlot

_log = logging.getLogger(__name__)

RETRY_S = 0.25  # before a request that a full worker refused is routed again
BUSY = ("queue_full", "draining")  # why a worker may refuse what another would take
NOT_HERE = (*BUSY, "no_capacity", "too_long")  # why a prefill worker may refuse it


class Migration:
    """Owns all requests that have not ended, and moves them from one worker to the next."""

    def __init__(
        self,
        routers: Routers,
        handovers: Handovers,
        assignment: Assignment,
        suspects: Suspects[OpenRequest],
        accounts: Accounts,
    ) -> None:
        self._accounts = accounts
        self.open: dict[str, OpenRequest] = {}
        self.num_migrations = 0
        self.past_figures: dict[str, float] = {}  # counters of workers that have left
        self.leaving: set[WorkerSlot] = set()  # no slot of the pool, but not gone yet
        self._routers = routers
        self._handovers = handovers
        self._assignment = assignment
        self._suspects = suspects
        self._held: list[OpenRequest] = []
        self._retry: asyncio.TimerHandle | None = None
        self.on_front: OnMessage | None = None  # who hears of links between workers and fronts

    def submit(self, entries: list[OpenRequest]) -> None:
        """Take requests and send them to workers, of which there must be one."""
        new: dict[str, OpenRequest] = {}
        for entry in entries:
            if (name := entry.request.request_id) in self.open or name in new:
                raise ValueError(f"request_id: {name!r} is open already")
            new[name] = entry
        self.open |= new
        if all(isinstance(entry.request.task, Generate) for entry in entries):
            self._held += self._assignment.send(entries)
        else:  # a worker takes one task at a time: those that have waited longer come first
            self._held += entries
            self.send_held()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests and free what the engines hold for them; finished ids are ignored."""
        at: dict[WorkerSlot, list[str]] = {}
        for request_id in request_ids:
            entry = self.open.get(request_id)
            if entry is not None:
                self._close(entry)
                if entry.slot is not None:
                    at.setdefault(entry.slot, []).append(entry.sent_as)
        for slot, ids in at.items():
            slot.send(Abort(ids))

    def fail_all(self, message: str, stop_reason: str) -> None:
        """End every open request with one ERROR output and abort it in the engine."""
        entries = list(self.open.values())
        self.abort(list(self.open))
        for entry in entries:
            entry.put_end(FinishReason.ERROR, message, stop_reason)
        if self._retry is not None:
            self._retry.cancel()

    def at(self, slot: WorkerSlot) -> list[OpenRequest]:
        """The requests that a worker computes, decodes or holds KV for."""
        return [e for e in self.open.values() if e.slot is slot or e.source is slot]

    def no_worker(self, message: str) -> None:
        """No worker is left: what waits for one ends in ERROR."""
        self.fail_all(message, "worker_died")

    def fail(
        self, entry: OpenRequest, reason: FinishReason, message: str, stop_reason: str
    ) -> None:
        self._close(entry, failed=True)
        entry.put_end(reason, message, stop_reason)

    # Workers come and go.

    def check(self, slot: WorkerSlot) -> None:
        """Raise WorkerStartError where a new worker's KV does not go with the others'."""
        self._handovers.check(slot)

    async def settled(self) -> None:
        """Wait until the workers that exchange KV know each other."""
        await self._handovers.settled()

    def others_take(self, slot: WorkerSlot) -> bool:
        """True where other workers than this one take requests."""
        return bool(set(self._routers.main.workers) - {slot.name})

    def worker_leaving(self, slot: WorkerSlot) -> None:
        self._routers.remove(slot)

    def worker_ready(self, slot: WorkerSlot) -> None:
        """Let a worker take requests; those that waited for one go first."""
        self._routers.welcome(slot, self.open.values())
        self._handovers.connect(slot)
        self.send_held()

    def worker_down(self, slot: WorkerSlot) -> None:
        """Send the requests of a worker that died to others, or end them."""
        self._accounts.died(slot)
        self._routers.remove(slot)
        lost = self.at(slot)
        self._handovers.disconnect(slot)
        for entry in self._suspects.died(lost):
            message = f"the engine stopped: {slot.last_failure}"
            self.fail(entry, FinishReason.ERROR, message, "worker_died")
        self._migrate([e for e in lost if e.request.request_id in self.open], slot.last_failure)
        self._handovers.on_gone(slot)

    def worker_left(self, slot: WorkerSlot) -> None:
        """Abort the requests of a worker that leaves the pool, and send them to others."""
        self.leaving.add(slot)
        late = self.at(slot)
        slot.send(Abort([entry.sent_as for entry in late]))
        self._migrate(late, f"worker {slot.name} left the pool")

    def worker_gone(self, slot: WorkerSlot) -> None:
        """A worker that has left was stopped: it has nothing more to tell."""
        self._accounts.left(slot)
        self.leaving.discard(slot)
        self.past_figures = add_stats(EngineStats(figures=self.past_figures), slot.stats()).figures
        self._handovers.on_gone(slot)

    def on_message(self, slot: WorkerSlot, message: FromWorker) -> None:
        """Pass outputs to their streams, KV events to the routers, notices to the handovers."""
        match message:
            case Outputs(outputs=outputs, tokens=tokens):
                num_tokens = sum([len(o.token_ids) for o in outputs])
                slot.tokens.add(num_tokens + sum(map(len, tokens.values())))
                self._extend(slot, tokens)
                for output in outputs:
                    self._dispatch(slot, output)
                self._routers.of(slot).stepped(slot.name, time.monotonic())
            case Stats(costs=costs):
                self._accounts.told(slot, costs)
                self._routers.learn()
            case BlockEvents():
                self._routers.on_events(slot, message)
            case KVDump():
                self._routers.on_dump(slot, message)
            case LoadReported(report=report, made_ns=made_ns):
                self._routers.on_report(slot, report, made_ns)
            case FrontLost() | FrontDropped():
                if self.on_front is not None:
                    self.on_front(slot, message)
            case _:
                self._on_handover(slot, message)

    def _on_handover(self, slot: WorkerSlot, message: FromWorker) -> None:
        match message:
            case KVConnected():
                self._handovers.on_connected(slot, message)
            case KVNotices(notices=notices):
                self._on_notices(slot, notices)
            case KVReceived(request_ids=request_ids):
                for entry in self._find_all(request_ids):
                    self._on_received(entry)
            case LeasesExpired(request_ids=request_ids):
                late = [e for e in self._find_all(request_ids) if e.source is slot]
                self._keep_and_migrate(late, "its lease expired")

    # Outputs.

    def _find(self, sent_as: str) -> OpenRequest | None:
        """The request of an id at the workers; None: it was aborted here, or has moved on."""
        entry = self.open.get(sent_as) or self.open.get(sent_as.rpartition("~")[0])
        return entry if entry is not None and entry.sent_as == sent_as else None

    def _find_all(self, ids: Iterable[str]) -> list[OpenRequest]:
        return [entry for entry in map(self._find, ids) if entry is not None]

    def _on_notices(self, slot: WorkerSlot, notices: list[KVNotice]) -> None:
        for notice in notices:
            entry = self._find(notice.request_id)
            if entry is not None and entry.source is slot:
                entry.trace.transfer_began()
                self._handovers.on_notice(entry, notice)

    def _on_received(self, entry: OpenRequest) -> None:
        entry.trace.transfer_ended()
        self._handovers.on_received(entry)

    def _extend(self, slot: WorkerSlot, tokens: dict[str, list[int]]) -> None:
        """Pass on tokens: at once where they change nothing but the text, as in most steps."""
        find, now_ns = self.open.get, 0 if slot.is_behind else time.monotonic_ns()
        for request_id, token_ids in tokens.items():
            entry = find(request_id)
            if entry is not None and entry.steady is slot:
                entry.token_ids += token_ids
                entry.stream.extend(entry.index, token_ids, now_ns)
            else:
                self._dispatch(slot, RequestOutput(request_id, token_ids))

    def _dispatch(self, slot: WorkerSlot, output: RequestOutput) -> None:
        entry = self._find(output.request_id)
        if output.finish_reason is not None:
            self._accounts.ended(slot, output)
            self._handovers.on_ended(slot, output.request_id)
        if entry is None:
            return
        prefilling = entry.source is slot
        if not prefilling and entry.slot is not slot:
            return
        entry.trace.output(output)
        if not prefilling and entry.handover is not None:
            if output.token_ids:
                self._on_received(entry)
            elif output.finish_reason is not None:
                entry.handover.told = False  # it has ended there already
        if prefilling and output.stop_reason == PREFILLED:
            output.finish_reason = output.stop_reason = None
            self._routers.prefill.prefill_done(output.request_id)
        if output.finish_reason is not None:
            if self._is_to_be_tried_again(entry, output, prefilling):
                return
            slot.num_ended += 1
            self._close(entry)
        elif not entry.token_ids:
            self._routers.of(slot).prefill_done(output.request_id)
        output.request_id = entry.request.request_id
        entry.token_ids += output.token_ids
        if entry.num_deaths and self._suspects.got_on(entry):
            self._try_next()
        entry.settle(slot)
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
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self.send_held)
            return True
        return False

    def _close(self, entry: OpenRequest, failed: bool = False) -> None:
        entry.trace.ended()
        self._accounts.closed(entry)
        self._routers.free(entry, len(entry.token_ids))
        self._handovers.end(entry, failed)
        del self.open[entry.request.request_id]
        has_room = not isinstance(entry.request.task, Generate) and bool(self._held)
        if self._suspects.ended(entry) or has_room:
            self._try_next()

    # Requests move.

    def _migrate(self, entries: list[OpenRequest], reason: str, refused: bool = False) -> None:
        """Send requests on; one that was only refused had no handover that could fail."""
        for entry in entries:
            _log.debug("%s goes on elsewhere: %s", entry.sent_as, reason)
            entry.trace.migrated(reason)
            self._hold(entry, failed=not refused)
            if not isinstance(entry.request.task, Generate):  # it begins anew
                anew = RequestOutput(entry.request.request_id, [], delta=TaskProgress(0.0))
                entry.stream.put(entry.index, anew)
        self.num_migrations += len(entries)
        self.send_held()

    def _keep_and_migrate(
        self, entries: list[OpenRequest], reason: str, refused: bool = False
    ) -> None:
        """Send requests on without a handover: their prompts are computed where they decode."""
        for entry in entries:
            _log.warning("%s was not handed over: %s", entry.sent_as, reason)
            entry.stays = True
        self._migrate(entries, reason, refused)

    def _hold(self, entry: OpenRequest, failed: bool = True) -> None:
        """Take a request off its workers; it waits for the next one."""
        self._routers.free(entry)
        self._handovers.end(entry, failed)
        entry.take_back()
        self._held.append(entry)

    def _try_next(self) -> None:
        """Send a held suspect on, once the current callback is done."""
        asyncio.get_running_loop().call_soon(self.send_held)

    def send_held(self) -> None:
        """Send on what waits for a worker, as far as it may go."""
        if self._held and self._routers.num_workers:
            going: list[OpenRequest] = []
            held, self._held = self._held, []
            for entry in held:
                if self.open.get(entry.request.request_id) is entry:
                    (going if self._suspects.may_go(entry) else self._held).append(entry)
            self._held += self._assignment.send(going)
