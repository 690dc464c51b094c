"""silu(gate(x)) * up(x) by one kernel for Hopper: emulated on CPU, as it is on a GPU."""

import random
from typing import NamedTuple

import gluon_emulator
import torch
from gluon_emulator import Descriptor, Pointer

from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.hopper import gated
from tokenmill.kernels.rows import act_and_mul

LIMIT = 0.004  # of results in bf16
NUM_DRAWN = 8


class Case(NamedTuple):
    num_rows: int
    num_tiles: int
    steps: int


CASES = (Case(5, 1, 1), Case(16, 2, 3), Case(33, 3, 5), Case(128, 2, 7))
ON_GPU = (Case(5, 24, 20), Case(33, 132, 5), Case(64, 112, 64), Case(100, 99, 7), Case(128, 131, 3))


def inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, n = case.steps * gated.STEP.value, case.num_tiles * 2 * gated.CHANNELS.value
    x = torch.randn(case.num_rows, k, device=device, dtype=torch.bfloat16)
    return x, (torch.randn(n, k, device=device) / k**0.5).bfloat16()


def emulated(case: Case, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, step, n = gated.padded_rows(case.num_rows), gated.STEP.value, weight.shape[0]
    out = torch.full((case.num_rows, n // 2), torch.nan, dtype=torch.bfloat16)
    gluon_emulator.run(
        gated, "gated_kernel", (case.num_tiles,), Descriptor(x, (rows, step)),
        Descriptor(weight, (gated.CHANNELS.value, step)), Pointer(out), case.num_rows, n,
        x.shape[1], ROWS=rows, STAGES=gated.num_stages(rows), EARLY=False,
    )  # fmt: skip
    return out


def check(case: Case, device: str) -> None:
    """Every element is written, and right."""
    x, weight = inputs(case, device)
    found = gated.gated_product(x, weight) if device == "cuda" else emulated(case, x, weight)
    expected = act_and_mul.reference(x.float() @ weight.float().T)
    assert isinstance(expected, torch.Tensor)
    error = float((found.float() - expected).norm() / expected.norm())
    assert error < LIMIT, (case, error)


def check_gated(device: str) -> None:
    if device == "cuda" and not hopper.is_here():
        return
    for case in ON_GPU if device == "cuda" else CASES:
        check(case, device)


def check_drawn_gated(device: str) -> None:
    if device == "cuda" and not hopper.is_here():
        return
    for number in range(NUM_DRAWN):
        rng = random.Random(number)
        tiles = rng.randint(1, 132 if device == "cuda" else 4)
        check(Case(rng.randint(1, gated.MOST_ROWS), tiles, rng.randint(1, 9)), device)


CHECKS = {"gated": check_gated, "drawn_gated": check_drawn_gated}
