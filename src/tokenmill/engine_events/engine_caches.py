"""What the backends of a router hold in their caches, as far as their events tell.

Each backend has one cache for each data-parallel rank of each of its streams of events. Which rank
takes a call is the backend's choice, so the cache that holds the most of a prompt counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard, get_args

from tokenmill.core.kv import DEVICE
from tokenmill.core.kv_events import Event, Stored
from tokenmill.engine_events.engine_blocks import EngineBlocks
from tokenmill.engine_events.wire import EngineBatch
from tokenmill.routing.kv_index import KVIndex
from tokenmill.routing.prices import cached_tokens, tier_price
from tokenmill.routing.router import Basis
from tokenmill.sched.cache.blocks import U64, hash_chain

BASES: tuple[Basis, ...] = get_args(Basis)
Rank = tuple[int, int]  # the stream, and the data-parallel rank that its batches name


class EngineCaches:
    """One index over the caches of all backends that publish events.

    Predictions are blocks of `block_size` tokens in a cache of their own for each backend.
    """

    def __init__(self, block_size: int, predict_s: float) -> None:
        self._block_size, self._predict_s = block_size, predict_s
        self._index = KVIndex()
        self._streams: dict[str, dict[int, Basis]] = {}  # by backend
        self._caches: dict[str, dict[Rank, EngineBlocks]] = {}
        # Of the caches in the index, by their names:
        self._backend_of: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def basis(self, backend: str) -> Basis:
        """How it is known what a backend has cached: as its worst stream tells."""
        known = set(self._streams.get(backend, {}).values()) or {"assumed"}
        return max(known, key=BASES.index)

    def num_blocks(self, backend: str) -> int:
        """How many blocks its events say that a backend holds on its devices."""
        caches = (name for name, owner in self._backend_of.items() if owner == backend)
        return sum(map(self._index.num_blocks, caches))

    # What streams of events tell.

    def begin(self, backend: str, stream: int, basis: Basis) -> None:
        """Forget what a stream said is cached; `basis` is how much it will tell from now on."""
        self._add(backend, backend, self._block_size)  # without its predictions
        self._streams.setdefault(backend, {})[stream] = basis
        for rank, blocks in self._caches.setdefault(backend, {}).items():
            if rank[0] == stream:
                blocks.forget()
                self._index.add_worker(_name(backend, rank))

    def restart(self, backend: str, stream: int) -> None:
        """As begin(), where another process publishes: its hashes stand for other blocks."""
        self.begin(backend, stream, "assumed")
        for rank in [rank for rank in self._caches[backend] if rank[0] == stream]:
            del self._caches[backend][rank]

    def take(self, backend: str, stream: int, batch: EngineBatch) -> int:
        """Take the next batch of a stream that has begun; returns how many tokens were computed.

        Raises WireError.
        """
        rank = stream, batch.data_parallel_rank or 0
        name = _name(backend, rank)
        blocks = self._caches[backend].get(rank)
        if blocks is None:
            blocks = self._caches[backend][rank] = EngineBlocks()
            self._add(name, backend, self._block_size)
        num_stored = 0
        for event in batch.events:
            changes = blocks.take(event)
            self._index.take(name, changes)
            num_stored += sum(len(c.hashes) for c in changes if _is_computed(c))
        self._sizes[name] = blocks.block_size or self._block_size
        return num_stored * self._sizes[name]

    def _add(self, name: str, backend: str, size: int) -> None:
        self._index.add_worker(name)
        self._backend_of[name], self._sizes[name] = backend, size

    # What a prompt finds.

    def overlay(
        self, assumed: dict[str, int], token_ids: Sequence[int] | U64, salt: str, now_s: float
    ) -> dict[str, int]:
        """Tokens of a prompt by backend: those that events tell of, where they tell of all."""
        self._index.expire(now_s)
        bases = {backend: self.basis(backend) for backend in self._streams}
        known = {name: n for name, n in assumed.items() if bases.get(name) != "events"}
        for size in set(self._sizes.values()):
            chain = hash_chain(token_ids, size, salt=salt)
            found = cached_tokens(self._index, chain, len(token_ids), size, _price)
            for name, num_tokens in found.items():
                backend = self._backend_of[name]
                if bases[backend] != "assumed":
                    known[backend] = max(known.get(backend, 0), num_tokens)
        return known

    def predict(
        self, backend: str, token_ids: Sequence[int] | U64, salt: str, now_s: float
    ) -> None:
        """A prompt was sent to a backend, whose events will tell of its blocks."""
        if self.basis(backend) != "assumed":
            chain = hash_chain(token_ids, self._block_size, salt=salt)
            self._index.predict(backend, chain, 0, now_s + self._predict_s)


def _name(backend: str, rank: Rank) -> str:
    return f"{backend}#{rank[0]}.{rank[1]}"


def _is_computed(change: Event) -> TypeGuard[Stored]:
    return isinstance(change, Stored) and change.tier == DEVICE


def _price(_name: str, tier: str) -> float:
    return tier_price(tier, {}, 0.0)
