"""Programmatic dependent launch: a kernel is set up while the one before it still runs.

Every kernel launched with `launch_options()` calls `wait()` before it touches what another kernel
wrote: only then is everything before it complete. Weights may be read earlier, and so may what says
where a step's tokens stand: between that and the first such kernel comes the embedding, which is
launched plainly, when all before it is complete.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tokenmill.kernels import MODE


@functools.cache
def enabled() -> bool:
    """True on Hopper and later; the interpreter has no such instruction."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch_options() -> dict[str, bool]:
    """Arguments of a launch; EARLY reaches the kernel."""
    early = enabled() and "dependent_launch" not in MODE.without
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def wait(EARLY: tl.constexpr, RELEASE: tl.constexpr = True):
    """Wait until the kernels before this one are complete and what they wrote can be read.

    RELEASE: then let the kernel after this one be set up as soon as all programs of this one run.
    Sooner, kernels that wait would queue up, and the programs of a large one be spread unevenly.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if RELEASE:
            tl.extra.cuda.gdc_launch_dependents()
