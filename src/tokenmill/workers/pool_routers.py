"""The routers of a pool: one over the workers that take requests, one over those that prefill.

Workers tell them what they hold: a dump when they are introduced and after a gap, events else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.routing.router import Router
from tokenmill.routing.step_cost import PRIOR, StepRates, fit_rates
from tokenmill.workers.handover import Handovers
from tokenmill.workers.messages import GetKV, KVDump, KVEvents
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.slot import WorkerSlot


class Routers:
    """Which policy they have, and whom they know."""

    def __init__(self, config: RouterConfig, handovers: Handovers) -> None:
        self._asked = config
        self._handovers = handovers  # has the router over prefill workers
        self._pulled: set[str] = set()  # slots whose dump is on its way
        self._rates = PRIOR
        self.main = Router(replace(config, policy="round-robin"))

    def of(self, slot: WorkerSlot) -> Router:
        """The router that may choose a slot."""
        return self._handovers.router if slot.role == "prefill" else self.main

    def set_policy(self, policy: RouterPolicy) -> None:
        """The policy of the next routers."""
        self._asked = replace(self._asked, policy=policy)

    def outdated(self, num_places: int) -> bool:
        """One worker needs no choice and no events; with a second one comes the real policy."""
        return self._policy(num_places) != self.main.config.policy

    def renew(
        self, slots: Iterable[WorkerSlot], requests: Iterable[OpenRequest], block_size: int
    ) -> None:
        """Begin with new routers, which hear of the slots and of all that is under way."""
        slots = list(slots)
        policy = self._policy(len(slots))
        config = replace(self._asked, policy=policy, block_size=block_size)
        self.main, self._handovers.router = Router(config), Router(config)
        self._set_rates(self._rates)
        for slot in slots:
            if slot.ready and slot.state == "ready":
                self.introduce(slot)
        self._handovers.account()
        for entry in requests:
            self._account(entry)

    def introduce(self, slot: WorkerSlot) -> None:
        """A worker may be chosen from now on."""
        router = self.of(slot)
        router.add_worker(slot.name)
        if router.config.policy == "kv" and router.config.events:
            self._pulled.discard(slot.name)
            self._pull(slot)

    def on_events(self, slot: WorkerSlot, message: KVEvents) -> None:
        """What a worker has stored and removed."""
        if not self.of(slot).apply(slot.name, message.batch()):
            self._pull(slot)

    def on_dump(self, slot: WorkerSlot, message: KVDump) -> None:
        """All that a worker holds."""
        self._pulled.discard(slot.name)
        if not self.of(slot).load(slot.name, message.dump):
            self._pull(slot)

    def learn(self, slots: Iterable[WorkerSlot]) -> None:
        """What the steps of all workers cost, as they have told."""
        told = [slot.stats().step_sums for slot in slots]
        sums = [sum(column) for column in zip(*(s for s in told if s), strict=True)]
        if sums:
            self._set_rates(fit_rates(sums))

    def _set_rates(self, rates: StepRates) -> None:
        self._rates = rates
        for router in (self.main, self._handovers.router):
            router.learn_rates(rates)

    def _policy(self, num_places: int) -> RouterPolicy:
        return self._asked.policy if num_places > 1 else "round-robin"

    def _pull(self, slot: WorkerSlot) -> None:
        """Ask for a dump, unless one is on its way."""
        if slot.name not in self._pulled:
            self._pulled.add(slot.name)
            slot.send(GetKV())

    def _account(self, entry: OpenRequest) -> None:
        slot = entry.slot
        if slot is not None and slot.name in (router := self.of(slot)).workers:
            num_tokens = len(entry.request.prompt_token_ids) + len(entry.token_ids)
            waits = not entry.token_ids and self._handovers.source(entry.sent_as) is None
            router.adopt(entry.sent_as, slot.name, num_tokens, entry.num_uncached * waits)
