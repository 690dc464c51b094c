"""Kernels made for Hopper alone, and when they run."""

from __future__ import annotations

import functools

import torch

from tokenmill.kernels import MODE

ALLOWED = True  # off: prompts, answers and experts by the plain kernels on every GPU


@functools.cache
def is_here() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def is_usable() -> bool:
    """False where a row's bits may not depend on its batch: their sums do."""
    return ALLOWED and is_here() and not MODE.batch_invariant
