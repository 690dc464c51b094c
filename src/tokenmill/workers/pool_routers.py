"""The routers of a pool: one over the workers that take requests, one over those that prefill.

Workers report their cached blocks: a dump at the start and after a gap, otherwise events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.engine_events.publisher import CachePublisher
from tokenmill.routing.load_report import Announcement, LoadReport
from tokenmill.routing.router import Decision, Router
from tokenmill.routing.step_rates import PRIOR, StepRates, fit_rates
from tokenmill.workers.messages import BlockEvents, GetKV, KVDump
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.slot import WorkerSlot

FRONT = "front"  # the name of the only one


class Routers:
    """Owns both routers: their policy, their workers and the load that they account for."""

    def __init__(
        self, config: RouterConfig, slots: Mapping[str, WorkerSlot], front: str = FRONT
    ) -> None:
        self._asked = config
        self._front = front
        self._slots = slots
        self._pulled: set[str] = set()  # slots whose dump is on its way
        self._rates = PRIOR
        self.publisher: CachePublisher | None = None  # tells others what workers cache
        self.announce: Callable[[Announcement], None] = lambda told: None  # to the other fronts
        self.main = Router(replace(config, policy="round-robin"), front)
        self.prefill = Router(self.main.config, front)

    @property
    def num_workers(self) -> int:
        return len(self.main.workers) + len(self.prefill.workers)

    def of(self, slot: WorkerSlot) -> Router:
        return self.prefill if slot.role == "prefill" else self.main

    def set_policy(self, policy: RouterPolicy) -> None:
        """Set the policy of the next routers; renew() makes them."""
        self._asked = replace(self._asked, policy=policy)

    def welcome(self, slot: WorkerSlot, requests: Iterable[OpenRequest]) -> None:
        """Let the routers choose a worker that is ready.

        One worker needs no choice and no events; with a second slot comes the real policy.
        """
        if self._policy() != self.main.config.policy:
            self.renew(requests)
        elif slot.state == "ready":
            self._introduce(slot)

    def remove(self, slot: WorkerSlot) -> None:
        self.of(slot).remove_worker(slot.name)
        if self.publisher is not None:
            self.publisher.forget(slot.name)

    def renew(self, requests: Iterable[OpenRequest]) -> None:
        """Replace the routers by new ones, which learn of the slots and of all running requests."""
        there = [slot for slot in self._slots.values() if slot.ready and slot.state == "ready"]
        sizes = [slot.facts.block_size for slot in self._slots.values() if slot.facts is not None]
        if not sizes:
            return
        config = replace(self._asked, policy=self._policy(), block_size=sizes[0])
        self.main, self.prefill = Router(config, self._front), Router(config, self._front)
        self._set_rates(self._rates)
        for slot in there:
            self._introduce(slot)
        for entry in requests:
            self._account(entry)

    def free(self, entry: OpenRequest, num_output_tokens: int = 0) -> None:
        """Remove a request that has left its workers from the accounted load."""
        self.main.free(entry.sent_as, num_output_tokens)
        self.prefill.free(entry.sent_as)

    def on_events(self, slot: WorkerSlot, message: BlockEvents) -> None:
        """Take a worker's events; where some are missing, ask for a dump."""
        batch = message.batch()
        if self.publisher is not None:
            self.publisher.take(slot.name, batch)
        if not self.of(slot).apply(slot.name, batch):
            self._pull(slot)

    def on_dump(self, slot: WorkerSlot, message: KVDump) -> None:
        """Take a worker's dump: the hashes of all blocks that it has cached."""
        self._pulled.discard(slot.name)
        if not self.of(slot).load(slot.name, message.dump):
            self._pull(slot)

    def on_report(self, slot: WorkerSlot, report: LoadReport, made_ns: int) -> None:
        self.of(slot).report(slot.name, report, made_ns / 1e9, time.monotonic())

    def tell(self, decision: Decision, computes: bool = True) -> None:
        """Tell the other fronts, if there are any, what goes to a worker."""
        if (told := decision.announcement) is not None:
            self.announce(told if computes else replace(told, queued_tokens=0))

    def heard(self, told: Announcement, sent_s: float) -> None:
        """Take what another front has told; the router that has no such worker ignores it."""
        now_s = time.monotonic()
        for router in (self.main, self.prefill):
            router.heard(told, sent_s or now_s, now_s)

    def learn(self) -> None:
        """Fit the cost of a step to what all workers have reported."""
        if len(self._slots.values()) > 1:
            told = [slot.stats().step_sums for slot in self._slots.values()]
            sums = [sum(column) for column in zip(*(s for s in told if s), strict=True)]
            if sums:
                self._set_rates(fit_rates(sums))

    def _set_rates(self, rates: StepRates) -> None:
        self._rates = rates
        for router in (self.main, self.prefill):
            router.learn_rates(rates)

    def _policy(self) -> RouterPolicy:
        return self._asked.policy if len(self._slots.values()) > 1 else "round-robin"

    def _introduce(self, slot: WorkerSlot) -> None:
        router = self.of(slot)
        router.add_worker(slot.name)
        if (router.config.policy == "kv" and router.config.events) or self.publisher is not None:
            self._pulled.discard(slot.name)
            self._pull(slot)

    def _pull(self, slot: WorkerSlot) -> None:
        """Ask for a dump, unless one is on its way."""
        if slot.name not in self._pulled:
            self._pulled.add(slot.name)
            slot.send(GetKV(self.publisher is not None))

    def _account(self, entry: OpenRequest) -> None:
        slot, handover, num_prompt = entry.slot, entry.handover, entry.request.task.num_units
        if handover is not None and handover.source.name in self.prefill.workers:
            queued = 0 if handover.told else num_prompt
            self.prefill.adopt(entry.sent_as, handover.source.name, num_prompt, queued)
        if slot is not None and slot.name in (router := self.of(slot)).workers:
            queued = 0 if entry.token_ids or handover is not None else entry.num_uncached
            router.adopt(entry.sent_as, slot.name, num_prompt + len(entry.token_ids), queued)
