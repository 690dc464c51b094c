"""Moves prompts from a prefill worker to a decode worker, and tracks the KV that is held for it.

The messages are those of messages.py. A handover begins when a prompt is sent to a prefill worker
and ends when the decode worker has the KV, or when either side's request ends or dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from tokenmill.core.kv import KVAddress, KVNotice, mismatch
from tokenmill.core.requests import Request
from tokenmill.routing.disaggregation import DisaggregationRule, place_prefill
from tokenmill.routing.router import Decision
from tokenmill.workers.accounts import Accounts
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.messages import (
    Abort,
    ConnectKV,
    DisconnectKV,
    KVConnected,
    KVNotices,
    ReleaseKV,
    Submit,
)
from tokenmill.workers.open_request import OpenHandover, OpenRequest
from tokenmill.workers.pool_routers import Routers
from tokenmill.workers.slot import Role, WorkerSlot

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
POLL_S = 0.01
READERS: dict[Role, tuple[Role, ...]] = {  # who reads what a role has computed
    "both": (),
    "prefill": ("decode",),
    "decode": (),
}
Pair = tuple[str, str]  # (engine that computes, slot that decodes)


class Handovers:
    """Which workers are connected, and the prompts on their way from prefill to decode workers."""

    def __init__(
        self,
        rule: DisaggregationRule,
        slots: Mapping[str, WorkerSlot],
        routers: Routers,
        accounts: Accounts,
    ) -> None:
        self._accounts = accounts
        self.num_received = 0
        self.num_failed = 0  # taken up by a prefill worker, in vain
        self._rule = rule
        self._slots = slots
        self._routers = routers
        self._leaving: dict[tuple[WorkerSlot, str], WorkerSlot] = {}  # who computed, see end()
        self._asked: set[Pair] = set()
        self._connected: set[Pair] = set()
        self._problem = ""

    # Workers come and go.

    @property
    def num_connecting(self) -> int:
        """Pairs of workers whose connection is being made."""
        return len(self._asked)

    def check(self, slot: WorkerSlot) -> None:
        """Raise WorkerStartError where KV cannot move between the slot and its peers."""
        for source, target in self._pairs(slot):
            one, other = _address(source), _address(target)
            if one is None or other is None:
                name = source.name if one is None else target.name
                raise WorkerStartError(
                    f"worker {name} cannot move KV: start it with --kv-connector auto"
                )
            if (reason := mismatch(one, other)) is not None:
                raise WorkerStartError(f"{source.name} cannot hand over to {target.name}: {reason}")

    def connect(self, slot: WorkerSlot) -> None:
        """Connect decode workers to the prefill workers that they read from."""
        for source, target in self._pairs(slot):
            address = _address(source)
            assert address is not None
            self._asked.add((address.engine_id, target.name))
            target.send(ConnectKV(address))

    def on_connected(self, target: WorkerSlot, message: KVConnected) -> None:
        pair = (message.engine_id, target.name)
        self._asked.discard(pair)
        if message.error is None:
            self._connected.add(pair)
        else:
            self._problem = f"{target.name} cannot read from another worker: {message.error}"
            _log.error("%s", self._problem)

    async def settled(self) -> None:
        """Wait for all answers; raises WorkerStartError when one is a refusal."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while self._asked and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        problem, self._problem = self._problem, ""
        if problem:
            raise WorkerStartError(problem)

    def disconnect(self, slot: WorkerSlot) -> None:
        """Forget the connections of a worker that is gone, and tell its peers.

        Where only a link to it broke, its peers still read for other fronts.
        """
        engine_id = _engine_id(slot)
        for pairs in (self._asked, self._connected):
            pairs -= {p for p in pairs if p[0] == engine_id or p[1] == slot.name}
        for other in self._slots.values() if engine_id and not slot.worker_lives else ():
            if other.role in READERS[slot.role]:
                other.send(DisconnectKV(engine_id))

    def _pairs(self, slot: WorkerSlot) -> list[tuple[WorkerSlot, WorkerSlot]]:
        """(who is read from, who reads) for each pair of the slot and a worker that is there."""
        there = [other for other in self._slots.values() if other is not slot and other.ready]
        return [(slot, other) for other in there if other.role in READERS[slot.role]] + [
            (other, slot) for other in there if slot.role in READERS[other.role]
        ]

    # Requests.

    def begin(
        self, entry: OpenRequest, request: Request, target: WorkerSlot, seen: Decision
    ) -> Decision | str:
        """Choose who computes the prompt; a text says why the target itself does.

        `request` is what the target would be sent, `seen` how it was chosen.
        """
        router = self._routers.prefill
        connected = {
            name
            for name in router.workers
            if (_engine_id(self._slots[name]), target.name) in self._connected
        }
        num_tokens, num_cached = seen.num_prompt_tokens, seen.num_cached_tokens
        placement = place_prefill(num_tokens, num_cached, self._rule, bool(connected))
        _log.debug("%s: remote prefill %s", entry.sent_as, placement)
        if not placement.remote:
            return f"computes the prompt, too: {placement.reason}"
        tokens = entry.routed_tokens()
        decision = router.route(entry.sent_as, tokens, time.monotonic(), request.task.cache_salt)
        if decision.worker not in connected:
            router.free(entry.sent_as)
            return f"computes the prompt, too: it is not connected with {decision.worker}"
        entry.handover = OpenHandover(request, self._slots[decision.worker])
        return decision

    def on_notice(self, entry: OpenRequest, notice: KVNotice) -> None:
        """Pass on which blocks are ready; the first notice brings the request itself."""
        handover, target = entry.handover, entry.slot
        assert handover is not None and target is not None
        if not handover.told:
            handover.told = True
            request = handover.request.with_task(kv_from=_engine_id(handover.source))
            target.send(Submit([request], [0]))  # its KV comes from another
            self._accounts.sent(target, entry)
        target.send(KVNotices([notice]))

    def on_received(self, entry: OpenRequest) -> None:
        """Release the lease: the decode worker has the KV."""
        if entry.handover is not None:
            self.num_received += 1
            self._routers.prefill.free(entry.sent_as)
            entry.handover.source.send(ReleaseKV([entry.sent_as]))
            entry.handover = None

    def end(self, entry: OpenRequest, failed: bool = False) -> None:
        """End a handover that is under way, at both sides.

        The KV is held until the decode worker has said that it ended the request: else it might
        read blocks that are others' by then, and keep them in its prefix cache.
        """
        handover, entry.handover = entry.handover, None
        if handover is None:
            return
        self.num_failed += failed
        if handover.told and entry.slot is not None:
            self._leaving[entry.slot, entry.sent_as] = handover.source
            entry.slot.send(Abort([entry.sent_as]))
        else:
            handover.source.send(Abort([entry.sent_as]))

    def on_ended(self, target: WorkerSlot, sent_as: str) -> None:
        """A worker has ended a request: it reads no KV for it any more."""
        source = self._leaving.pop((target, sent_as), None)
        if source is not None:
            source.send(Abort([sent_as]))

    def on_gone(self, target: WorkerSlot) -> None:
        for slot, sent_as in list(self._leaving):
            if slot is target:
                self.on_ended(slot, sent_as)


def _address(slot: WorkerSlot) -> KVAddress | None:
    return None if slot.facts is None else slot.facts.kv


def _engine_id(slot: WorkerSlot) -> str:
    address = _address(slot)
    return "" if address is None else address.engine_id
