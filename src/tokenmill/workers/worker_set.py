"""The slots of a pool by name: new ones start together or not at all."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from tokenmill.core.config import PoolConfig
from tokenmill.core.types import EngineStats, add_stats
from tokenmill.workers.link import Spawn, WorkerStartError
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.slot import Owner, Role, WorkerSlot

PREFIXES: dict[Role, str] = {"both": "w", "prefill": "p", "decode": "d"}  # of names


def roles_of(config: PoolConfig) -> list[Role]:
    """The role of each worker that a pool starts with."""
    counts: dict[Role, int] = {"both": config.workers}
    if config.prefill or config.decode:
        counts = {"prefill": config.prefill, "decode": config.decode}
    return [role for role in counts for _ in range(counts[role])]


def of_role(facts: ModelFacts, role: Role) -> ModelFacts:
    """The facts that bind the pool: a prompt too long to prefill is computed where it decodes."""
    return msgspec.structs.replace(facts, max_model_len=sys.maxsize) if role == "prefill" else facts


def agreed(known: ModelFacts, new: ModelFacts) -> ModelFacts:
    """What holds for all workers, who must agree on what a token and a block are."""
    for name in ("vocab_size", "block_size"):
        ours, theirs = getattr(known, name), getattr(new, name)
        if ours != theirs:
            raise WorkerStartError(f"{name}: the pool has {ours}, a new worker {theirs}")
    queues = [n for n in (known.max_waiting, new.max_waiting) if n is not None]
    return msgspec.structs.replace(
        known,
        max_model_len=min(known.max_model_len, new.max_model_len),
        max_waiting=min(queues, default=None),
    )


class WorkerSet:
    """Who works on a pool, and what became of those who have left."""

    def __init__(
        self, spawns: dict[Role, Spawn], config: PoolConfig, owner: Owner, host: str | None
    ) -> None:
        self.slots: dict[str, WorkerSlot] = {}
        self._spawns = spawns
        self._config = config
        self._owner = owner
        self._host = host
        self._num_named: Counter[Role] = Counter()
        self._num_past_restarts = 0

    @property
    def num_restarts(self) -> int:
        """Times that a worker was started in place of another."""
        return self._num_past_restarts + sum(p.num_restarts for p in self.slots.values())

    def of_role(self, role: Role) -> list[WorkerSlot]:
        """The slots of a role, the oldest first."""
        return [slot for slot in self.slots.values() if slot.role == role]

    async def start(self, roles: list[Role], settled: Callable[[], Awaitable[None]]) -> None:
        """Start a worker for each role and wait until they are `settled`; if one fails, none is."""
        new = [self._slot(role) for role in roles]
        starts = [asyncio.create_task(slot.start()) for slot in new]
        try:
            await asyncio.gather(*starts)
            await settled()
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            for slot in new:
                del self.slots[slot.name]
                self._owner.on_down(slot)
                await slot.close(grace_s=0.0)
            raise

    def leave(self, slot: WorkerSlot) -> None:
        """A slot is no longer of this pool; the caller closes it."""
        del self.slots[slot.name]
        self._num_past_restarts += slot.num_restarts

    async def close(self, grace_s: float) -> None:
        """Stop all workers."""
        slots = list(self.slots.values())
        self.slots.clear()
        await asyncio.gather(*(slot.close(grace_s) for slot in slots))

    async def refresh(self, timeout_s: float) -> None:
        """Ask all workers for their stats of now."""
        await asyncio.gather(*(slot.refresh(timeout_s) for slot in self.slots.values()))

    def stats(self) -> EngineStats:
        """The sums over all workers as they last told."""
        total = EngineStats()
        for slot in self.slots.values():
            total = add_stats(total, slot.stats())
        return total

    def _slot(self, role: Role) -> WorkerSlot:
        name = f"{PREFIXES[role]}{self._num_named[role]}"
        self._num_named[role] += 1
        slot = WorkerSlot(name, self._spawns[role], self._config, self._owner, self._host, role)
        self.slots[name] = slot
        return slot
