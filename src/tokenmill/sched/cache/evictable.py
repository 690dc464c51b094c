"""Free blocks that still hold a prefix: whoever has most of them gives the oldest one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

SLACK = 16  # blocks that an owner may give though another has more, so that few pops compare owners


class Evictable:
    """Blocks by their owner's number, least recently used first."""

    def __init__(self) -> None:
        self._by_owner: dict[int, OrderedDict[int, None]] = {}
        self._count = 0
        self._largest: OrderedDict[int, None] = OrderedDict()  # within SLACK
        self._until = 0  # as long as it has more, it is

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (block_id for queue in self._by_owner.values() for block_id in queue)

    def add(self, block_id: int, owner: int) -> None:
        queue = self._by_owner.get(owner)
        if queue is None:
            queue = self._by_owner[owner] = OrderedDict()
        queue[block_id] = None
        self._count += 1
        if len(queue) > len(self._largest) and queue is not self._largest:
            self._largest, self._until = queue, max(0, len(queue) - SLACK)

    def remove(self, block_id: int, owner: int) -> None:
        del self._by_owner[owner][block_id]
        self._count -= 1

    def pop(self) -> int:
        """Remove the block whose prefix is to go."""
        if len(self._largest) <= self._until:
            queues = sorted(self._by_owner.values(), key=len)
            self._largest = queues[-1]
            self._until = max(0, len(queues[-2]) - SLACK) if len(queues) > 1 else 0
        block_id, _ = self._largest.popitem(last=False)
        self._count -= 1
        return block_id
