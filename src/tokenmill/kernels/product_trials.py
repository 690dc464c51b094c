"""Products of few rows in bf16 by cuBLAS or by cuBLASLt: by the one that was faster in a trial.

torch asks cuBLAS for x W^T, and cuBLASLt for x W^T + bias. Both read the same weights, but each
chooses its kernels by rules of its own, up to 15 % apart. A bias of zeros asks for the second one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.functional import linear

MOST_ROWS = 256  # beyond, products are bound by arithmetic, and both choose alike
LEAST_BYTES = 16 * 2**20  # of W: below, a product takes a few microseconds either way
REPEATS = 4
WORTH = 0.97  # of cuBLAS's time: a residual is then added by the norm that follows
SCRUB_BYTES = 128 * 2**20  # more than an L2 holds; twice, so that the host launches ahead of it

_faster_by_lt: dict[tuple[int, int, int], bool] = {}  # by rows, n and k
_trying = False


@contextmanager
def trials() -> Iterator[None]:
    """Products that are met for the first time within it are tried both ways."""
    global _trying
    _trying = True
    try:
        yield
    finally:
        _trying = False


def by_lt(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where x[m, k] @ weight[n, k].T is cuBLASLt's; where nothing was tried, cuBLAS's."""
    key = x.shape[0], *weight.shape
    if _trying and key not in _faster_by_lt and _is_worth_it(key[0], weight.nbytes):
        _faster_by_lt[key] = _lt_is_faster(x, weight)
    return _faster_by_lt.get(key, False)


def _is_worth_it(rows: int, num_bytes: int) -> bool:
    return rows <= MOST_ROWS and num_bytes >= LEAST_BYTES


def matmul_by_lt(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x[m, k] @ weight[n, k].T -> [m, n] by cuBLASLt."""
    return linear(x, weight, _no_bias(weight.shape[0], weight.dtype, weight.device))


def _lt_is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Both ways in turns, each with weights that are not in the L2 any more."""
    scrub = torch.empty(SCRUB_BYTES, dtype=torch.uint8, device=x.device)
    ways = linear, matmul_by_lt
    for way in ways:
        way(x, weight)  # picks its kernel
    times = [[_events(functools.partial(way, x, weight), scrub) for way in ways]
             for _ in range(REPEATS)]  # fmt: skip
    torch.cuda.synchronize(x.device)
    plain, lt = (min(row[i][0].elapsed_time(row[i][1]) for row in times) for i in range(2))
    return bool(lt < WORTH * plain)


def _events(
    product: Callable[[], torch.Tensor], scrub: torch.Tensor
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
