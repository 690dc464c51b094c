"""Where a later request can start in layers that slide, and whose pages stay cached for that."""

from __future__ import annotations

from collections import OrderedDict

from tokenmill.sched.cache.evictable import Evictable

OWNERS = (1 << 20) - 1  # the bits of an identity that are its owner's number
SHARE = 10  # points inside the tree of prefixes keep at most one page of so many
_BRANCHES = 2  # as many requests have to start at a point before it is kept for others


class StartPoints:
    """Windows of sliding layers that are kept although nobody holds them.

    A point is named by the identity of the block before it. A request can start there if sliding
    layers still have the blocks of the window before it. An end is where a request has left off:
    without its window nothing of its prefix is of use, so both last equally long. Points inside are
    ends of prompts, and blocks behind which requests branch. All of them together keep the pages
    beside at most `most` blocks, those of ends not counted.

    A point inside is stale once a request has started there or behind it: it goes before anything
    else does. It is not if at least two requests have started there, as after a prompt that many
    share. Before stale points go those where none has started: guesses, some way before the end of
    a prompt, and ends of prompts whose conversations went on.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ends: dict[int, list[int]] = {}  # the blocks of a point's window, by identity
        self._inside: dict[int, list[int]] = {}
        self._order = Evictable()  # of points inside that are not stale
        # Those that go first, the oldest of each: where nobody has started, and where one has.
        self._stale: tuple[OrderedDict[int, None], ...] = (OrderedDict(), OrderedDict())
        self._num_starts: dict[int, int] = {}  # at a block that is cached
        self._covers: dict[int, list[int]] = {}  # the points whose windows have a block
        self.num_inside_blocks = 0  # that points inside keep, and no end

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    def __contains__(self, point: int) -> bool:
        return point in self._inside or point in self._ends

    def keeps(self, block: int) -> bool:
        """Whether sliding layers' pages for a block stay cached."""
        return block in self._covers

    def add_end(self, window: list[int]) -> list[int]:
        """A request ends behind these blocks; returns those that nothing keeps any more."""
        point = window[-1]
        if point in self._ends:
            return []
        lost = self._take(point) if point in self._inside else []
        self._put(self._ends, window)
        return [block for block in lost if block not in self._covers]

    def add_inside(
        self, window: list[int], branches: bool = False, guess: bool = False
    ) -> list[int]:
        """A prompt ends behind these blocks, or a request branches or may; as add_end()."""
        point = window[-1]
        if branches:
            self._num_starts[point] = self._num_starts.get(point, 0) + 1
        if point in self._inside and not guess:
            self._rank(point, None)
        if point in self:
            return []
        return self._put_inside(window, 0 if guess else None)

    def passes(self, chain: list[int]) -> tuple[list[int], list[int]]:
        """A request runs over these blocks.

        Returns blocks whose pages many requests use, and those that nothing keeps any more.
        """
        used: list[int] = []
        lost: list[int] = []
        for point in chain:
            if point in self._ends:
                window = self._ends[point]
                lost += self._take(point)
                lost += self._put_inside(window, self._rank_of(point))
            elif point in self._inside:
                rank = self._rank_of(point)
                self._rank(point, rank)
                used += self._inside[point] if rank is None else []
        lost += self._trim()
        return used, [block for block in lost if block not in self._covers]

    def starts(self, point: int) -> None:
        """A request that goes on in a way of its own starts here."""
        self._num_starts[point] = self._num_starts.get(point, 0) + 1

    def take_stale(self) -> list[int]:
        """Give up the oldest stale point, if there is one; returns what nothing keeps any more."""
        for points in self._stale:
            if points:
                return self._take(next(iter(points)))
        return []

    @property
    def has_stale(self) -> bool:
        return bool(self._stale[0] or self._stale[1])

    def lose(self, block: int) -> list[int]:
        """Sliding layers have lost a block; returns those that nothing keeps any more."""
        lost: list[int] = []
        for point in list(self._covers.get(block, ())):
            lost += self._take(point)
        return lost + self._trim()

    def forget(self, block: int) -> None:
        """A block is not cached any more."""
        self._num_starts.pop(block, None)

    def _put_inside(self, window: list[int], rank: int | None) -> list[int]:
        if sum(not self._is_of_an_end(block) for block in window) > self._most:
            return [block for block in window if block not in self._covers]
        self._put(self._inside, window)
        self._stale[0][window[-1]] = None
        self._rank(window[-1], rank)
        return self._trim()

    def _trim(self) -> list[int]:
        lost: list[int] = []
        while self.num_inside_blocks > self._most:
            if self.has_stale:
                lost += self.take_stale()
            else:
                point = self._order.pop()
                self._order.add(point, point & OWNERS)
                lost += self._take(point)
        return lost

    def _rank_of(self, point: int) -> int | None:
        """The rank among stale points of one that a request has passed; None: it is not stale."""
        num_starts = self._num_starts.get(point, 0)
        return num_starts if num_starts < _BRANCHES else None

    def _rank(self, point: int, rank: int | None) -> None:
        self._unrank(point)
        if rank is None:
            self._order.add(point, point & OWNERS)
        else:
            self._stale[rank][point] = None

    def _unrank(self, point: int) -> None:
        for points in self._stale:
            if point in points:
                del points[point]
                return
        self._order.remove(point, point & OWNERS)

    def _put(self, points: dict[int, list[int]], window: list[int]) -> None:
        self._count(window, -1)
        points[window[-1]] = window
        for block in window:
            self._covers.setdefault(block, []).append(window[-1])
        self._count(window, 1)

    def _take(self, point: int) -> list[int]:
        """Give up a point; returns the blocks that nothing keeps any more."""
        points = self._ends if point in self._ends else self._inside
        window = points[point]
        if points is self._inside:
            self._unrank(point)
        self._count(window, -1)
        del points[point]
        for block in window:
            self._covers[block].remove(point)
            if not self._covers[block]:
                del self._covers[block]
        self._count(window, 1)
        return [block for block in window if block not in self._covers]

    def _count(self, window: list[int], sign: int) -> None:
        for block in window:
            if block in self._covers and not self._is_of_an_end(block):
                self.num_inside_blocks += sign

    def _is_of_an_end(self, block: int) -> bool:
        return any(point in self._ends for point in self._covers.get(block, ()))
