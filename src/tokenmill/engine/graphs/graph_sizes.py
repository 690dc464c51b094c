"""Which batch sizes get a CUDA graph, which of them first, and which graph a batch takes; pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

PER_DOUBLING = 8  # sizes between n and 2 n: no batch is padded by more than an eighth


def graph_sizes(max_size: int) -> list[int]:
    """Ascending sizes up to max_size, each at most an eighth above the one before."""
    sizes = []
    size = 1
    while size < max_size:
        sizes.append(size)
        size += max(1, 2 ** (size.bit_length() - 1) // PER_DOUBLING)
    return [*sizes, max_size]


def capture_rank(size: int) -> int:
    """How fine a division of its doubling a size is: 0 for 2^n, 1 for 1.5 * 2^n, then 2 and 3."""
    trailing_zeros = (size & -size).bit_length() - 1
    return size.bit_length() - 1 - trailing_zeros


def capture_order(sizes: Sequence[int]) -> list[int]:
    """The largest first, whose memory the others share; then 1, 2, 4, ... and what lies between.

    Wherever capture is cut off, the sizes so far are spread over the whole range.
    """
    largest = max(sizes)
    others = sorted((s for s in sizes if s != largest), key=lambda s: (capture_rank(s), s))
    return [largest, *others]


def graph_for(captured: Sequence[int], count: int) -> int | None:
    """The smallest of the ascending sizes that holds the batch; None if that pads it by a half."""
    place = bisect_left(captured, count)
    if place == len(captured) or 2 * captured[place] >= 3 * count:
        return None
    return captured[place]


def most_padding(captured: Sequence[int]) -> float:
    """The largest share that a batch which takes a graph is padded by."""
    counts = range(1, max(captured, default=0) + 1)
    return max((size / n - 1 for n in counts if (size := graph_for(captured, n))), default=0.0)


def without_graph(captured: Sequence[int], max_size: int) -> list[range]:
    missing: list[range] = []
    for count in range(1, max_size + 1):
        if graph_for(captured, count) is None:
            if missing and missing[-1].stop == count:
                missing[-1] = range(missing[-1].start, count + 1)
            else:
                missing.append(range(count, count + 1))
    return missing
