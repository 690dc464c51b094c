"""Sends requests to workers: chooses who decodes each one, and who computes its prompt."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tokenmill.core.types import Request
from tokenmill.routing.router import Decision
from tokenmill.workers.accounts import Accounts
from tokenmill.workers.exchange.handover import Handovers
from tokenmill.workers.messages import Submit
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.pool_routers import Routers
from tokenmill.workers.pool_view import Choices
from tokenmill.workers.slot import WorkerSlot


class Assignment:
    """Sends requests to workers, and remembers the latest choices."""

    def __init__(
        self,
        slots: Mapping[str, WorkerSlot],
        routers: Routers,
        handovers: Handovers,
        kv_lease_s: float,
        accounts: Accounts,
    ) -> None:
        self._accounts = accounts
        self.choices = Choices()
        self._slots = slots
        self._routers = routers
        self._handovers = handovers
        self._kv_lease_s = kv_lease_s

    def send(self, entries: Iterable[OpenRequest]) -> None:
        """Route requests and send each worker its own in one message."""
        at: dict[str, Submit] = {}
        for entry in entries:
            slot, request, decision = self._route(entry)
            self._accounts.sent(slot, entry)
            message = at.setdefault(slot.name, Submit([], [], []))
            message.requests.append(request)
            message.num_uncached.append(decision.num_prompt_tokens - decision.num_cached_tokens)
            if decision.announcement is not None:
                message.hashes.append(decision.announcement.hashes)
        for name, message in at.items():
            self._slots[name].send(message)

    def _route(self, entry: OpenRequest) -> tuple[WorkerSlot, Request, Decision]:
        """Choose who decodes and who computes the prompt; returns who is sent what, and why."""
        router = self._routers.main if self._routers.main.workers else self._routers.prefill
        request, began_ns = entry.resumed(), time.monotonic_ns()
        tokens = entry.routed_tokens()
        decision = router.route(entry.sent_as, tokens, began_ns / 1e9, request.cache_salt)
        slot = entry.slot = self._slots[decision.worker]
        entry.stream.workers[entry.index] = slot.name
        entry.num_uncached = decision.num_prompt_tokens - decision.num_cached_tokens
        begun: Decision | str = ""
        if entry.may_hand_over and slot.role == "decode":
            begun = self._handovers.begin(entry, request, slot, decision)
        if isinstance(begun, str):
            self._routers.tell(decision)
            self._count(entry, decision, began_ns, True, begun)
            return slot, request, decision
        source = self._slots[begun.worker]
        self._routers.tell(decision, computes=False)
        self._routers.tell(begun)
        self._count(entry, decision, began_ns, False, f"{source.name} computes the prompt")
        router.prefill_done(entry.sent_as)
        self._count(entry, begun, began_ns, True, f"hands over to {slot.name}")
        return source, replace(request, hold_kv_s=self._kv_lease_s), begun

    def _count(
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
        self.choices.add(entry.request.request_id, decision, num_resumed, slot.role, why)
