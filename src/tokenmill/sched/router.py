"""Which worker takes a request: policies over one account of what was routed.

The KV policy predicts what a request costs on each worker, in tokens of prefill:

    cost = prefill_weight * uncached tokens of its prompt
         + queued_weight  * uncached tokens routed there that are not computed yet
         + decode_weight  * tokens of the KV blocks in use there
         + request_weight * requests there

The lowest cost wins, ties at random. Uncached work counts more than queued work: a queue delays
this request alone, but work that another worker need not do delays everyone behind it.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.config import RouterConfig
from tokenmill.core.types import TokenmillError
from tokenmill.sched.blocks import U64, hash_chain
from tokenmill.sched.kv_events import Dump, EventBatch
from tokenmill.sched.kv_index import KVIndex


class NoWorkerError(TokenmillError):
    """There is no worker to route to."""


@dataclass(slots=True)
class Account:
    """What was routed to each worker and has not ended; lists by slot."""

    queued_tokens: list[int] = field(default_factory=list)  # uncached and not computed yet
    decode_tokens: list[int] = field(default_factory=list)  # of KV blocks; shared ones count twice
    num_requests: list[int] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)  # the policy's weighted sum of these

    def copy(self) -> Account:
        return Account(
            self.queued_tokens.copy(),
            self.decode_tokens.copy(),
            self.num_requests.copy(),
            self.costs.copy(),
        )


@dataclass(slots=True)
class Decision:
    """The worker that was chosen, and what the policy saw of all of them."""

    worker: str
    num_prompt_tokens: int
    num_cached_tokens: int  # on the worker chosen, as far as is known
    workers: list[str]
    account: Account  # before this request
    cached_tokens: dict[str, int]  # by worker; those without any are left out
    prefill_weight: float

    def terms(self) -> dict[str, dict[str, float]]:
        """The terms of the score by worker, for logs and metrics."""
        return {name: self._terms(slot, name) for slot, name in enumerate(self.workers)}

    def _terms(self, slot: int, name: str) -> dict[str, float]:
        uncached = self.num_prompt_tokens - self.cached_tokens.get(name, 0)
        return {
            "uncached_tokens": uncached,
            "queued_tokens": self.account.queued_tokens[slot],
            "decode_tokens": self.account.decode_tokens[slot],
            "num_requests": self.account.num_requests[slot],
            "cost": self.prefill_weight * uncached + self.account.costs[slot],
        }


@dataclass(slots=True)
class _Routed:
    """What a request adds to its worker's account."""

    worker: str
    queued_tokens: int
    decode_tokens: int


class Router:
    """Chooses workers and keeps account of what each has to do; the caller moves the requests."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.index = KVIndex()
        self._weights = _weights(config)
        self._rng = random.Random(config.seed)
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._account = Account()
        self._routed: dict[str, _Routed] = {}
        self._turn = 0

    # Workers come and go.

    @property
    def workers(self) -> list[str]:
        return list(self._names)

    def add_worker(self, name: str) -> None:
        """A worker that may be chosen from now on; one of the same name is replaced."""
        self.remove_worker(name)
        self.index.add_worker(name)
        self._slots[name] = len(self._names)
        self._names = [*self._names, name]
        for column in self._columns():
            column.append(0)

    def remove_worker(self, name: str) -> list[str]:
        """Forget a worker; returns the requests that were routed there."""
        slot = self._slots.get(name)
        if slot is None:
            return []
        self.index.remove_worker(name)
        self._names = [other for other in self._names if other != name]
        self._slots = {other: i for i, other in enumerate(self._names)}
        for column in self._columns():
            del column[slot]
        lost = [key for key, routed in self._routed.items() if routed.worker == name]
        for request_id in lost:
            del self._routed[request_id]
        return lost

    def _columns(self) -> tuple[list[Any], ...]:
        account = self._account
        return account.queued_tokens, account.decode_tokens, account.num_requests, account.costs

    def apply(self, worker: str, batch: EventBatch) -> bool:
        """Take a worker's events; False: pull a dump from it."""
        return self.index.apply(worker, batch)

    def load(self, worker: str, dump: Dump) -> bool:
        """Take a worker's dump; False: pull another."""
        return self.index.load(worker, dump)

    # Requests come and go.

    def route(
        self,
        request_id: str,
        token_ids: Sequence[int],
        now_s: float,
        salt: str = "",
        without: Collection[str] = (),
    ) -> Decision:
        """Choose a worker for a prompt, but none of `without`, and put it on its account."""
        if not self._names or (without and not set(self._names).difference(without)):
            raise NoWorkerError("no worker is ready")
        config, num_tokens = self.config, len(token_ids)
        size = config.block_size
        chain = hash_chain(token_ids, size, salt=salt) if config.policy == "kv" else None
        cached = {} if chain is None else self._cached(num_tokens, chain, now_s)
        name = self._choose(cached, without)
        num_cached = cached.get(name, 0)
        decision = Decision(
            name,
            num_tokens,
            num_cached,
            self._names,
            self._account.copy(),
            cached,
            config.prefill_weight,
        )
        if chain is not None and config.events:
            self.index.predict(name, chain, num_cached // size, now_s + config.predict_s)
        elif chain is not None:
            self.index.assume(name, chain, now_s, config.approximate_blocks)
        if request_id in self._routed:  # again, to another worker
            self.free(request_id)
        routed = _Routed(name, num_tokens - num_cached, size * -(-num_tokens // size))
        self._routed[request_id] = routed
        self._add(name, routed.queued_tokens, routed.decode_tokens, 1)
        return decision

    def prefill_progress(self, request_id: str, num_tokens: int) -> None:
        """A worker has computed so many more tokens of a prompt; unknown requests are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None and routed.queued_tokens:
            done = min(routed.queued_tokens, num_tokens)
            routed.queued_tokens -= done
            self._add(routed.worker, -done, 0, 0)

    def prefill_done(self, request_id: str) -> None:
        """The first token is there; unknown requests are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None:
            self.prefill_progress(request_id, routed.queued_tokens)

    def free(self, request_id: str) -> None:
        """The request has ended, in whatever way; unknown ones are ignored."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            self._add(routed.worker, -routed.queued_tokens, -routed.decode_tokens, -1)

    def _add(self, name: str, queued_tokens: int, decode_tokens: int, num_requests: int) -> None:
        account, slot = self._account, self._slots[name]
        account.queued_tokens[slot] += queued_tokens
        account.decode_tokens[slot] += decode_tokens
        account.num_requests[slot] += num_requests
        queued, decode, request = self._weights
        account.costs[slot] = (
            queued * account.queued_tokens[slot]
            + decode * account.decode_tokens[slot]
            + request * account.num_requests[slot]
        )

    def _cached(self, num_tokens: int, chain: U64, now_s: float) -> dict[str, int]:
        """Prompt tokens that each worker has cached, as far as is known; one is always computed."""
        if self.config.events:
            self.index.expire(now_s)
        else:
            self.index.forget(now_s - self.config.approximate_s)
        size = self.config.block_size
        most = (num_tokens - 1) // size * size
        overlaps = self.index.overlaps(chain)
        return {name: min(depth * size, most) for name, depth in overlaps.items()}

    def _choose(self, cached: dict[str, int], without: Collection[str]) -> str:
        """The worker with the lowest cost, any of several; round-robin takes them in turn."""
        names, costs = self._names, self._account.costs
        if without:
            names = [name for name in names if name not in without]
            costs = [costs[self._slots[name]] for name in names]
            cached = {name: n for name, n in cached.items() if name not in without}
        if self.config.policy == "round-robin":
            self._turn += 1
            return names[self._turn % len(names)]
        lowest = min(costs)
        best: list[str] = []
        if cached:  # what is cached lowers the cost
            weight, slots = self.config.prefill_weight, self._slots
            all_costs = self._account.costs
            reduced = {name: all_costs[slots[name]] - weight * n for name, n in cached.items()}
            least = min(reduced.values())
            if least <= lowest:
                best = [name for name, cost in reduced.items() if cost == least]
        if not best or least == lowest:
            best += [n for n, cost in zip(names, costs, strict=True) if cost == lowest]
        return best[0] if len(best) == 1 else self._rng.choice(best)


def _weights(config: RouterConfig) -> tuple[float, float, float]:
    """Of queued tokens, decode tokens and requests."""
    if config.policy == "kv":
        return config.queued_weight, config.decode_weight, config.request_weight
    return (0.0, 0.0, 1.0) if config.policy == "least-loaded" else (0.0, 0.0, 0.0)
