"""The places of a floor by name: new ones start together or not at all."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from tokenmill.core.config import FloorConfig
from tokenmill.core.types import EngineStats, add_stats
from tokenmill.serve.place import Owner, Place, Role
from tokenmill.serve.wire import ModelFacts, Spawn, WorkerStartError

PREFIXES: dict[Role, str] = {"both": "w", "prefill": "p", "decode": "d"}  # of names


def roles_of(config: FloorConfig) -> list[Role]:
    """The role of each worker that a floor starts with."""
    counts: dict[Role, int] = {"both": config.workers}
    if config.prefill or config.decode:
        counts = {"prefill": config.prefill, "decode": config.decode}
    return [role for role in counts for _ in range(counts[role])]


def of_role(facts: ModelFacts, role: Role) -> ModelFacts:
    """The facts that bind the floor: a prompt too long to prefill is computed where it decodes."""
    return msgspec.structs.replace(facts, max_model_len=sys.maxsize) if role == "prefill" else facts


def agreed(known: ModelFacts, new: ModelFacts) -> ModelFacts:
    """What holds for all workers, who must agree on what a token and a block are."""
    for name in ("vocab_size", "block_size"):
        ours, theirs = getattr(known, name), getattr(new, name)
        if ours != theirs:
            raise WorkerStartError(f"{name}: the floor has {ours}, a new worker {theirs}")
    queues = [n for n in (known.max_waiting, new.max_waiting) if n is not None]
    return msgspec.structs.replace(
        known,
        max_model_len=min(known.max_model_len, new.max_model_len),
        max_waiting=min(queues, default=None),
    )


class Staff:
    """Who works on a floor, and what became of those who have left."""

    def __init__(
        self, spawns: dict[Role, Spawn], config: FloorConfig, owner: Owner, host: str | None
    ) -> None:
        self.places: dict[str, Place] = {}
        self._spawns = spawns
        self._config = config
        self._owner = owner
        self._host = host
        self._num_named: Counter[Role] = Counter()
        self._num_past_restarts = 0

    @property
    def num_restarts(self) -> int:
        """Times that a worker was started in place of another."""
        return self._num_past_restarts + sum(p.num_restarts for p in self.places.values())

    def of_role(self, role: Role) -> list[Place]:
        """The places of a role, the oldest first."""
        return [place for place in self.places.values() if place.role == role]

    async def start(self, roles: list[Role], settled: Callable[[], Awaitable[None]]) -> None:
        """Start a worker for each role and wait until they are `settled`; if one fails, none is."""
        new = [self._place(role) for role in roles]
        starts = [asyncio.create_task(place.start()) for place in new]
        try:
            await asyncio.gather(*starts)
            await settled()
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for place in new:
                del self.places[place.name]
                self._owner.on_down(place)
                await place.close(grace_s=0.0)
            raise

    def leave(self, place: Place) -> None:
        """A place is no longer of this floor; the caller closes it."""
        del self.places[place.name]
        self._num_past_restarts += place.num_restarts

    async def close(self, grace_s: float) -> None:
        """Stop all workers."""
        places = list(self.places.values())
        self.places.clear()
        await asyncio.gather(*(place.close(grace_s) for place in places))

    async def refresh(self, timeout_s: float) -> None:
        """Ask all workers for their stats of now."""
        await asyncio.gather(*(place.refresh(timeout_s) for place in self.places.values()))

    def stats(self) -> EngineStats:
        """The sums over all workers as they last told."""
        total = EngineStats()
        for place in self.places.values():
            total = add_stats(total, place.stats())
        return total

    def _place(self, role: Role) -> Place:
        name = f"{PREFIXES[role]}{self._num_named[role]}"
        self._num_named[role] += 1
        place = Place(name, self._spawns[role], self._config, self._owner, self._host, role)
        self.places[name] = place
        return place
