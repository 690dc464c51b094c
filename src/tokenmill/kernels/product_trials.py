"""Products of few rows in bf16 that can be computed in two ways: by the one that won a trial.

torch asks cuBLAS for x W^T, and cuBLASLt for x W^T + bias. Both read the same weights, but each
chooses its kernels by rules of its own, up to 15 % apart. A bias of zeros asks for the second one.
A product that is added to a residual may take longer than one whose result the next norm adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.nn.functional import linear

MOST_ROWS = 256  # beyond, products are bound by arithmetic, and both choose alike
LEAST_BYTES = 16 * 2**20  # of W: below, a product takes a few microseconds either way
REPEATS = 4
WORTH = 0.97  # of cuBLAS's time: a residual is then added by the norm that follows
SCRUB_BYTES = 128 * 2**20  # more than an L2 holds; twice, so that the host launches ahead of it


class Way(Protocol):
    """A product of x[m, k] and weight[n, k]."""

    __name__: str

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, /) -> object: ...


_second_is_faster: dict[str, bool] = {}  # by the names of the ways, rows, n and k
_trying = False


@contextmanager
def trials(held: bool = True) -> Iterator[None]:
    """Products that are met for the first time within it are tried both ways, if `held`."""
    global _trying
    _trying = held
    try:
        yield
    finally:
        _trying = False


def second_is_faster(
    ways: tuple[Way, Way],
    x: torch.Tensor,
    weight: torch.Tensor,
    worth: float = 1.0,
    untried: bool = False,
) -> bool:
    """Whether the second way took less than `worth` of the first one's time; else `untried`."""
    key = _name(ways, x.shape[0], *weight.shape)
    if _trying and key not in _second_is_faster and _is_worth_it(x.shape[0], weight.nbytes):
        first, second = _times(ways, x, weight)
        _second_is_faster[key] = second < worth * first
    return _second_is_faster.get(key, untried)


def _name(ways: tuple[Way, Way], rows: int, n: int, k: int) -> str:
    return f"{ways[0].__name__} {ways[1].__name__} {rows} {n} {k}"


def found() -> dict[str, bool]:
    """What all trials so far have found, by name: whether the second way is faster."""
    return dict(_second_is_faster)


def adopt(choices: Mapping[str, bool]) -> None:
    _second_is_faster.update(choices)


def _is_worth_it(rows: int, num_bytes: int) -> bool:
    return rows <= MOST_ROWS and num_bytes >= LEAST_BYTES


def by_lt(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where x[m, k] @ weight[n, k].T is cuBLASLt's; where nothing was tried, cuBLAS's."""
    return second_is_faster((linear, matmul_by_lt), x, weight, WORTH)


def adds_slowly(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where cuBLAS takes longer to add the product to a residual; where not tried, False."""
    return second_is_faster((_added, linear), x, weight, WORTH)


def _added(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0]).addmm_(x, weight.T)


def matmul_by_lt(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x[m, k] @ weight[n, k].T -> [m, n] by cuBLASLt."""
    return linear(x, weight, _no_bias(weight.shape[0], weight.dtype, weight.device))


def _times(ways: tuple[Way, Way], x: torch.Tensor, weight: torch.Tensor) -> list[float]:
    """Milliseconds of both ways, in turns, with weights that are not in the L2 any more."""
    scrub = torch.empty(SCRUB_BYTES, dtype=torch.uint8, device=x.device)
    for way in ways:
        way(x, weight)  # picks its kernel
    times = [[_events(functools.partial(way, x, weight), scrub) for way in ways]
             for _ in range(REPEATS)]  # fmt: skip
    torch.cuda.synchronize(x.device)
    return [min(row[i][0].elapsed_time(row[i][1]) for row in times) for i in range(2)]


def _events(
    product: Callable[[], object], scrub: torch.Tensor
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scrub.zero_()
    scrub.zero_()
    start.record()
    product()
    end.record()
    return start, end


@functools.cache
def _no_bias(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. A trial makes them: inside a graph's capture they would be its memory."""
    return torch.zeros(n, dtype=dtype, device=device)
