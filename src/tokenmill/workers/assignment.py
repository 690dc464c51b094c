"""Sends requests to workers: chooses who decodes each one, and who computes its prompt."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from tokenmill.core.requests import Generate, Request
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
        max_per_worker: int | None = None,
    ) -> None:
        """A worker has `max_per_worker` tasks at most; of text, any number."""
        self._accounts, self._max_per_worker = accounts, max_per_worker
        self.choices = Choices()
        self._slots = slots
        self._routers = routers
        self._handovers = handovers
        self._kv_lease_s = kv_lease_s

    def send(self, entries: Iterable[OpenRequest]) -> list[OpenRequest]:
        """Send each worker its requests in one message; returns those that no worker has room for.

        Text is routed, other tasks go where the least is open.
        """
        at: dict[str, Submit] = {}
        left: list[OpenRequest] = []
        for entry in entries:
            if not isinstance(entry.request.task, Generate):
                self._place(entry, at, left)
                continue
            slot, request, decision = self._route(entry)
            self._accounts.sent(slot, entry)
            message = at.setdefault(slot.name, Submit([], [], []))
            message.requests.append(request)
            message.num_uncached.append(decision.num_prompt_tokens - decision.num_cached_tokens)
            if decision.announcement is not None:
                message.hashes.append(decision.announcement.hashes)
        for name, message in at.items():
            self._slots[name].send(message)
        return left

    def _place(self, entry: OpenRequest, at: dict[str, Submit], left: list[OpenRequest]) -> None:
        """Give a task to the worker with the least work; of equal ones to the least used."""
        router, most = self._routers.main, self._max_per_worker
        loads = dict(zip(router.workers, router.loads(), strict=True))
        room = [n for n, load in loads.items() if most is None or load.num_requests < most]
        if not room:
            left.append(entry)
            return
        name = min(room, key=lambda n: (loads[n].kv_tokens, self._slots[n].num_routed, n))
        slot = entry.slot = self._slots[name]
        router.adopt(entry.sent_as, name, entry.request.task.num_units, 0)
        entry.stream.workers[entry.index] = name
        slot.num_routed += 1
        self._accounts.sent(slot, entry)
        at.setdefault(name, Submit([], [], [])).requests.append(entry.resumed())

    def _route(self, entry: OpenRequest) -> tuple[WorkerSlot, Request, Decision]:
        """Choose who decodes and who computes the prompt; returns who is sent what, and why."""
        router = self._routers.main if self._routers.main.workers else self._routers.prefill
        request, began_ns = entry.resumed(), time.monotonic_ns()
        tokens = entry.routed_tokens()
        decision = router.route(entry.sent_as, tokens, began_ns / 1e9, request.task.cache_salt)
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
        return source, request.with_task(hold_kv_s=self._kv_lease_s), begun

    def _count(
        self, entry: OpenRequest, decision: Decision, began_ns: int, computes: bool, why: str
    ) -> None:
        slot = self._slots[decision.worker]
        entry.trace.routed(decision, began_ns, slot.role)
        slot.num_routed += 1
        if computes:
            slot.num_prompt_tokens += decision.num_prompt_tokens
            slot.num_overlap_tokens += decision.num_cached_tokens
        num_resumed = len(entry.token_ids)
        self.choices.add(entry.request.request_id, decision, num_resumed, slot.role, why)
