"""The routers of a floor: one over the workers that take requests, one over those that prefill.

Workers tell them what they hold: a dump when they are introduced and after a gap, events else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.sched.router import Router
from tokenmill.sched.step_cost import PRIOR, StepRates, fit_rates
from tokenmill.serve.handover import Handovers
from tokenmill.serve.open_request import OpenRequest
from tokenmill.serve.place import Place
from tokenmill.serve.wire import GetKV, KVDump, KVEvents


class Routers:
    """Which policy they have, and whom they know."""

    def __init__(self, config: RouterConfig, handovers: Handovers) -> None:
        self._asked = config
        self._handovers = handovers  # has the router over prefill workers
        self._pulled: set[str] = set()  # places whose dump is on its way
        self._rates = PRIOR
        self.main = Router(replace(config, policy="round-robin"))

    def of(self, place: Place) -> Router:
        """The router that may choose a place."""
        return self._handovers.router if place.role == "prefill" else self.main

    def set_policy(self, policy: RouterPolicy) -> None:
        """The policy of the next routers."""
        self._asked = replace(self._asked, policy=policy)

    def outdated(self, num_places: int) -> bool:
        """One worker needs no choice and no events; with a second one comes the real policy."""
        return self._policy(num_places) != self.main.config.policy

    def renew(
        self, places: Iterable[Place], requests: Iterable[OpenRequest], block_size: int
    ) -> None:
        """Begin with new routers, which hear of the places and of all that is under way."""
        places = list(places)
        policy = self._policy(len(places))
        config = replace(self._asked, policy=policy, block_size=block_size)
        self.main, self._handovers.router = Router(config), Router(config)
        self._set_rates(self._rates)
        for place in places:
            if place.ready and place.state == "ready":
                self.introduce(place)
        self._handovers.account()
        for entry in requests:
            self._account(entry)

    def introduce(self, place: Place) -> None:
        """A worker may be chosen from now on."""
        router = self.of(place)
        router.add_worker(place.name)
        if router.config.policy == "kv" and router.config.events:
            self._pulled.discard(place.name)
            self._pull(place)

    def on_events(self, place: Place, message: KVEvents) -> None:
        """What a worker has stored and removed."""
        if not self.of(place).apply(place.name, message.batch()):
            self._pull(place)

    def on_dump(self, place: Place, message: KVDump) -> None:
        """All that a worker holds."""
        self._pulled.discard(place.name)
        if not self.of(place).load(place.name, message.dump):
            self._pull(place)

    def learn(self, places: Iterable[Place]) -> None:
        """What the steps of all workers cost, as they have told."""
        told = [place.stats().step_sums for place in places]
        sums = [sum(column) for column in zip(*(s for s in told if s), strict=True)]
        if sums:
            self._set_rates(fit_rates(sums))

    def _set_rates(self, rates: StepRates) -> None:
        self._rates = rates
        for router in (self.main, self._handovers.router):
            router.learn_rates(rates)

    def _policy(self, num_places: int) -> RouterPolicy:
        return self._asked.policy if num_places > 1 else "round-robin"

    def _pull(self, place: Place) -> None:
        """Ask for a dump, unless one is on its way."""
        if place.name not in self._pulled:
            self._pulled.add(place.name)
            place.send(GetKV())

    def _account(self, entry: OpenRequest) -> None:
        place = entry.place
        if place is not None and place.name in (router := self.of(place)).workers:
            num_tokens = len(entry.request.prompt_token_ids) + len(entry.token_ids)
            waits = not entry.token_ids and self._handovers.source(entry.sent_as) is None
            router.adopt(entry.sent_as, place.name, num_tokens, entry.num_uncached * waits)
