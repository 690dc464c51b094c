"""Prompts that one worker computes and another goes on with: who reads from whom, and what is held.

The messages are those of kv_wire.py. A handover begins when a prompt is sent to a prefill worker
and ends when the decode worker has the KV, or when either side's request ends or dies.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenmill.core.config import RouterConfig
from tokenmill.core.kv import KVAddress, KVNotice, mismatch
from tokenmill.core.types import Request
from tokenmill.routing.disaggregation import DisaggregationRule, place_prefill
from tokenmill.routing.router import Decision, Router
from tokenmill.sched.blocks import U64
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
from tokenmill.workers.slot import WorkerSlot

_log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
POLL_S = 0.01
Pair = tuple[str, str]  # (engine that computes, slot that decodes)


@dataclass(slots=True)
class _Handover:
    request: Request
    source: WorkerSlot
    target: WorkerSlot
    told: bool = False  # the target has the request and waits for its KV


class Handovers:
    """The prompts on their way from prefill to decode workers, and the router of the former."""

    def __init__(self, rule: DisaggregationRule) -> None:
        self.router = Router(RouterConfig(policy="round-robin"))
        self.num_received = 0
        self.num_failed = 0  # taken up by a prefill worker, in vain
        self._rule = rule
        self._open: dict[str, _Handover] = {}
        self._asked: set[Pair] = set()
        self._connected: set[Pair] = set()
        self._problem = ""

    # Workers come and go.

    def check(self, slot: WorkerSlot, others: Iterable[WorkerSlot]) -> None:
        """Raise WorkerStartError where KV cannot move between the slot and its peers."""
        for source, target in _pairs(slot, others):
            problem = _address(source), _address(target)
            if problem[0] is None or problem[1] is None:
                name = source.name if problem[0] is None else target.name
                raise WorkerStartError(f"worker {name} moves no KV: give it a kv-connector")
            if (reason := mismatch(problem[0], problem[1])) is not None:
                raise WorkerStartError(f"{source.name} cannot hand over to {target.name}: {reason}")

    def connect(self, slot: WorkerSlot, others: Iterable[WorkerSlot]) -> None:
        """Let whoever decodes be ready to read from whoever computes."""
        for source, target in _pairs(slot, others):
            address = _address(source)
            assert address is not None
            self._asked.add((address.engine_id, target.name))
            target.send(ConnectKV(address))

    def on_connected(self, target: WorkerSlot, message: KVConnected) -> None:
        """The answer of a decode worker."""
        pair = (message.engine_id, target.name)
        self._asked.discard(pair)
        if message.error is None:
            self._connected.add(pair)
        else:
            self._problem = f"{target.name} cannot read KV: {message.error}"
            _log.error("%s", self._problem)

    async def settled(self) -> None:
        """Wait for all answers; raises WorkerStartError when one is a refusal."""
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while self._asked and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        problem, self._problem = self._problem, ""
        if problem:
            raise WorkerStartError(problem)

    def on_down(self, slot: WorkerSlot, others: Iterable[WorkerSlot]) -> set[str]:
        """A worker is gone; returns the ids of the requests that were between it and another."""
        address = _address(slot)
        engine_id = address.engine_id if address is not None else ""
        for pairs in (self._asked, self._connected):
            pairs -= {p for p in pairs if p[0] == engine_id or p[1] == slot.name}
        if slot.role == "prefill" and address is not None:
            for other in others:
                if other.role == "decode":
                    other.send(DisconnectKV(engine_id))
        return self.ids_at(slot)

    def ids_at(self, slot: WorkerSlot) -> set[str]:
        """Requests whose prompt is computed or held there, or awaited there."""
        return {i for i, h in self._open.items() if h.source is slot or h.target is slot}

    def account(self) -> None:
        """A new router hears what is under way."""
        for request_id, handover in self._open.items():
            if handover.source.name in self.router.workers:
                num_tokens = len(handover.request.prompt_token_ids)
                queued = 0 if handover.told else num_tokens
                self.router.adopt(request_id, handover.source.name, num_tokens, queued)

    # Requests.

    def begin(
        self,
        request: Request,
        hash_input: U64,
        target: WorkerSlot,
        seen: Decision,
        slots: dict[str, WorkerSlot],
    ) -> tuple[WorkerSlot, Decision] | str:
        """Choose who computes the prompt; a text says why the target itself does.

        `hash_input` has its tokens, `seen` is how the target was chosen; the caller sends it.
        """
        connected = [
            name
            for name in self.router.workers
            if (_engine_id(slots[name]), target.name) in self._connected
        ]
        num_tokens, num_cached = seen.num_prompt_tokens, seen.num_cached_tokens
        placement = place_prefill(num_tokens, num_cached, self._rule, bool(connected))
        _log.debug("%s: remote prefill %s", request.request_id, placement)
        if not placement.remote:
            return f"computes the prompt, too: {placement.reason}"
        decision = self.router.route(
            request.request_id, hash_input, time.monotonic(), request.cache_salt
        )
        if decision.worker not in connected:
            self.router.free(request.request_id)
            return f"computes the prompt, too: it is not connected with {decision.worker}"
        source = slots[decision.worker]
        self._open[request.request_id] = _Handover(request, source, target)
        return source, decision

    def source(self, request_id: str) -> WorkerSlot | None:
        """Who computes the prompt of a request, while that is another one than who decodes."""
        handover = self._open.get(request_id)
        return None if handover is None else handover.source

    def on_notices(self, source: WorkerSlot, notices: list[KVNotice]) -> None:
        """Pass on which blocks are ready; the first notice brings the request itself."""
        for notice in notices:
            handover = self._open.get(notice.request_id)
            if handover is None or handover.source is not source:
                continue
            if not handover.told:
                handover.told = True
                request = replace(handover.request, kv_from=_engine_id(source))
                handover.target.send(Submit([request]))
            handover.target.send(KVNotices([notice]))

    def on_received(self, request_ids: list[str]) -> None:
        """The KV is where it is needed: its lease ends."""
        for request_id in request_ids:
            handover = self._open.pop(request_id, None)
            if handover is not None:
                self.num_received += 1
                self.router.free(request_id)
                handover.source.send(ReleaseKV([request_id]))

    def end(self, request_id: str, failed: bool = False) -> None:
        """End a handover that is under way, at both sides; unknown ids are ignored."""
        self.router.free(request_id)
        handover = self._open.pop(request_id, None)
        if handover is not None:
            self.num_failed += failed
            handover.source.send(Abort([request_id]))
            if handover.told:
                handover.target.send(Abort([request_id]))


def _pairs(slot: WorkerSlot, others: Iterable[WorkerSlot]) -> list[tuple[WorkerSlot, WorkerSlot]]:
    """(prefill, decode) for each worker that is there and of the other role."""
    there = [other for other in others if other is not slot and other.ready]
    if slot.role == "prefill":
        return [(slot, other) for other in there if other.role == "decode"]
    if slot.role == "decode":
        return [(other, slot) for other in there if other.role == "prefill"]
    return []


def _address(slot: WorkerSlot) -> KVAddress | None:
    return None if slot.facts is None else slot.facts.kv


def _engine_id(slot: WorkerSlot) -> str:
    address = _address(slot)
    return "" if address is None else address.engine_id
