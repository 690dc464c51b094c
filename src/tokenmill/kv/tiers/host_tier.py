"""Which blocks lie in host memory: slots, the least recently used ones leave first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

Slots = tuple[int, ...]
Left = Callable[[bytes], None]
Change = Callable[[bytes, bool], None]  # a name, and whether it is held now


class HostTier:
    """Names of blocks and the slots that hold them; a pinned one stays where it is.

    A slot is free, held by a name, or claimed for a name that follows.
    """

    def __init__(
        self,
        num_slots: int,
        on_left: Left = lambda name: None,
        on_change: Change = lambda name, held: None,
    ) -> None:
        self.num_slots = num_slots
        self._on_left, self._on_change = on_left, on_change  # on_left: what makes room for others
        self._held: OrderedDict[bytes, Slots] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._pins: Counter[bytes] = Counter()
        self._num_kept = 0  # slots that are pinned or claimed

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def names(self) -> list[bytes]:
        return list(self._held)

    def touch(self, name: bytes) -> None:
        self._held.move_to_end(name)

    def num_loadable(self, sizes: Iterable[tuple[bytes, int]]) -> int:
        """How many of these (name, slots) can be pinned or claimed together, in order."""
        room, count = self.num_slots - self._num_kept, 0
        for name, num_slots in sizes:
            room -= 0 if name in self._pins else num_slots
            if room < 0:
                break
            count += 1
        return count

    def pin(self, name: bytes) -> Slots:
        """Keep a block that is here until unpin(); returns its slots."""
        slots = self._held[name]
        if name not in self._pins:
            self._num_kept += len(slots)
        self._pins[name] += 1
        return slots

    def unpin(self, name: bytes) -> None:
        self._pins[name] -= 1
        if not self._pins[name]:
            del self._pins[name]
            self._num_kept -= len(self._held[name])

    def claim(self, count: int) -> Slots | None:
        """Take slots, where needed from the least recently used blocks; None if all are pinned."""
        while len(self._free) < count:
            name = self.oldest()
            if name is None:
                return None
            self.drop(name)
            self._on_left(name)
        self._num_kept += count
        return tuple(self._free.pop() for _ in range(count))

    def oldest(self) -> bytes | None:
        """The least recently used block that is not pinned."""
        return next((name for name in self._held if name not in self._pins), None)

    def put(self, name: bytes, slots: Slots) -> None:
        """Hold a block in slots that were claimed."""
        self._held[name] = slots
        self._on_change(name, True)
        self._num_kept -= len(slots)

    def give_back(self, slots: Sequence[int]) -> None:
        """Free slots that were claimed and not put."""
        self._free += slots
        self._num_kept -= len(slots)

    def drop(self, name: bytes) -> Slots:
        """Forget a block that is not pinned, and free its slots."""
        slots = self._held.pop(name)
        self._on_change(name, False)
        self._free += slots
        return slots
