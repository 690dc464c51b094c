"""Which worker takes a request: policies over one account of what was routed.

The KV policy predicts what a request costs on each worker, in tokens of prefill:

    cost = prefill_weight  * uncached tokens of its prompt
         + queued_weight   * uncached tokens routed there that are not computed yet
         + decode_weight   * tokens of the KV blocks in use there
         + request_weight  * requests there

The lowest cost wins, ties at random. Uncached work counts more than queued work: a queue delays
this request alone, but work that another worker need not do delays everyone behind it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenmill.core.config import RouterConfig
from tokenmill.core.types import TokenmillError
from tokenmill.sched.blocks import block_hashes
from tokenmill.sched.kv_events import Dump, EventBatch
from tokenmill.sched.kv_index import KVIndex

F64 = npt.NDArray[np.float64]
_QUEUED, _DECODE, _REQUESTS = range(3)  # rows of the account
_EPSILON = 1e-6  # costs closer than this are tied


class NoWorkerError(TokenmillError):
    """There is no worker to route to."""


@dataclass(slots=True)
class Decision:
    """The worker that was chosen, and the terms of all of them at that time."""

    worker: str
    num_prompt_tokens: int
    num_cached_tokens: int  # predicted on the worker chosen
    workers: list[str]
    cached_tokens: F64
    queued_tokens: F64
    decode_tokens: F64
    num_requests: F64
    costs: F64

    def terms(self) -> dict[str, dict[str, float]]:
        """By worker: what the policy saw."""
        columns = {
            "cached_tokens": self.cached_tokens,
            "queued_tokens": self.queued_tokens,
            "decode_tokens": self.decode_tokens,
            "num_requests": self.num_requests,
            "cost": self.costs,
        }
        return {
            name: {key: float(values[slot]) for key, values in columns.items()}
            for slot, name in enumerate(self.workers)
        }


@dataclass(slots=True)
class _Routed:
    """What a request adds to its worker's account."""

    worker: str
    queued_tokens: float
    decode_tokens: float


class Router:
    """Chooses workers and keeps account of what each has to do; the caller moves the requests."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._kv = config.policy == "kv"
        self.index = KVIndex(
            config.predict_s if config.events else config.approximate_s,
            None if config.events else config.approximate_blocks,
        )
        self._rng = random.Random(config.seed)
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._account: F64 = np.zeros((3, 0))
        self._weights: F64 = np.array(
            [config.queued_weight, config.decode_weight, config.request_weight]
        )
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
        self._account = np.hstack([self._account, np.zeros((3, 1))])

    def remove_worker(self, name: str) -> list[str]:
        """Forget a worker; returns the requests that were routed there."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return []
        self.index.remove_worker(name)
        self._names = [other for other in self._names if other != name]
        self._slots = {other: i for i, other in enumerate(self._names)}
        self._account = np.delete(self._account, slot, axis=1)
        lost = [key for key, routed in self._routed.items() if routed.worker == name]
        for request_id in lost:
            del self._routed[request_id]
        return lost

    def apply(self, worker: str, batch: EventBatch) -> bool:
        """Take a worker's events; False: pull a dump from it."""
        return self.index.apply(worker, batch)

    def load(self, worker: str, dump: Dump) -> bool:
        """Take a worker's dump; False: pull another."""
        return self.index.load(worker, dump)

    # Requests come and go.

    def route(
        self, request_id: str, token_ids: Sequence[int], now_s: float, salt: str = ""
    ) -> Decision:
        """Choose a worker for a prompt and put the request on its account."""
        if not self._names:
            raise NoWorkerError("no worker is ready")
        size = self.config.block_size
        hashes = block_hashes(token_ids, size, salt=salt) if self._kv else []
        decision = self._decide(len(token_ids), hashes, now_s)
        name = decision.worker
        if self._kv:
            known = decision.num_cached_tokens // size if self.config.events else 0
            self.index.predict(name, hashes[known:], now_s)
        queued = max(len(token_ids) - decision.num_cached_tokens, 1)
        decode = size * -(-len(token_ids) // size)
        self._routed[request_id] = _Routed(name, queued, decode)
        account, slot = self._account, self._slots[name]
        account[_QUEUED, slot] += queued
        account[_DECODE, slot] += decode
        account[_REQUESTS, slot] += 1
        return decision

    def prefill_progress(self, request_id: str, num_tokens: int) -> None:
        """A worker has computed so many more tokens of a prompt; unknown requests are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None:
            done = min(routed.queued_tokens, num_tokens)
            routed.queued_tokens -= done
            self._account[_QUEUED, self._slots[routed.worker]] -= done

    def prefill_done(self, request_id: str) -> None:
        """The first token is there; unknown requests are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None and routed.queued_tokens:
            self._account[_QUEUED, self._slots[routed.worker]] -= routed.queued_tokens
            routed.queued_tokens = 0

    def free(self, request_id: str) -> None:
        """The request has ended, in whatever way; unknown ones are ignored."""
        self.prefill_done(request_id)
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            slot = self._slots[routed.worker]
            self._account[_DECODE, slot] -= routed.decode_tokens
            self._account[_REQUESTS, slot] -= 1

    def _decide(self, num_tokens: int, hashes: list[int], now_s: float) -> Decision:
        cached = self._cached(num_tokens, hashes, now_s)
        account = self._account.copy()
        costs = self._costs(num_tokens - cached, account)
        slot = self._choose(costs)
        queued, decode, requests = account
        return Decision(
            worker=self._names[slot],
            num_prompt_tokens=num_tokens,
            num_cached_tokens=int(cached[slot]),
            workers=self._names,
            cached_tokens=cached,
            queued_tokens=queued,
            decode_tokens=decode,
            num_requests=requests,
            costs=costs,
        )

    def _cached(self, num_tokens: int, hashes: list[int], now_s: float) -> F64:
        """Tokens of the prompt that each worker has cached, [workers]; one is always computed."""
        cached = np.zeros(len(self._names))
        size, slots = self.config.block_size, self._slots
        for name, depth in self.index.overlaps(hashes, now_s).items():
            cached[slots[name]] = depth * size
        if len(hashes) * size == num_tokens:
            np.minimum(cached, max(num_tokens - size, 0), out=cached)
        return cached

    def _costs(self, uncached: F64, account: F64) -> F64:
        policy = self.config.policy
        if policy == "kv":
            return self.config.prefill_weight * uncached + self._weights @ account
        if policy == "least-loaded":
            costs: F64 = account[_REQUESTS]
            return costs
        return np.zeros(len(self._names))

    def _choose(self, costs: F64) -> int:
        """The slot with the lowest cost; among equal ones in turn for round-robin, else any."""
        if self.config.policy == "round-robin":
            self._turn += 1
            return (self._turn - 1) % len(costs)
        best = np.flatnonzero(costs <= costs.min() + _EPSILON)
        return int(best[0] if len(best) == 1 else best[self._rng.randrange(len(best))])
