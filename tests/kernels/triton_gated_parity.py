"""silu(gate(x)) * up(x) by one kernel for Hopper: emulated on CPU, as it is on a GPU."""

import random
from typing import NamedTuple

import gluon_emulator
import torch
from gluon_emulator import Descriptor, Pointer

from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.hopper import gated
from tokenmill.kernels.norm import act_and_mul_reference

LIMIT = 0.004  # of results in bf16
NUM_DRAWN = 8


class Case(NamedTuple):
    num_rows: int
    num_tiles: int
    steps: int
    programs: int  # on CPU; a GPU has as many as processors, or tiles


CASES = (
    Case(5, 1, 1, 1),
    Case(16, 2, 3, 2),  # whole tiles
    Case(33, 4, 5, 3),  # every tile but one in two parts
    Case(128, 3, 7, 2),
    Case(129, 3, 4, 2),
    Case(192, 5, 9, 4),
)
ON_GPU = (
    Case(5, 24, 20, 0),
    Case(33, 133, 5, 0),
    Case(64, 136, 80, 0),
    Case(100, 200, 7, 0),
    Case(128, 264, 3, 0),  # two whole tiles each
    Case(130, 112, 64, 0),
    Case(176, 136, 80, 0),
    Case(192, 140, 33, 0),
)


def inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    k, n = case.steps * gated.STEP.value, case.num_tiles * 2 * gated.CHANNELS.value
    x = torch.randn(case.num_rows, k, device=device, dtype=torch.bfloat16)
    return x, (torch.randn(n, k, device=device) / k**0.5).bfloat16()


def emulated(
    case: Case, x: torch.Tensor, weight: torch.Tensor, backwards: bool = False
) -> torch.Tensor:
    """Backwards: the end of a tile, another program's, is complete before its beginning."""
    main, tail = gated.shape(case.num_rows)
    step, n = gated.STEP.value, weight.shape[0]
    out = torch.full((case.num_rows, n // 2), torch.nan, dtype=torch.bfloat16)
    sums = torch.full((2 * case.programs, 2 * gated.CHANNELS.value * (main + tail)), torch.nan)
    flags = torch.zeros(2 * case.num_tiles, dtype=torch.int32)
    gluon_emulator.run(
        gated, "gated_kernel", (case.programs,), Descriptor(x, (main, step)),
        Descriptor(x, (tail or main, step)), Descriptor(weight, (gated.CHANNELS.value, step)),
        *(Pointer(part) for part in (out, sums, flags)), case.num_rows, n, x.shape[1],
        MAIN=main, TAIL=tail, STAGES=gated.num_stages(main, tail), EARLY=False, backwards=backwards,
    )  # fmt: skip
    assert not flags.any(), "flags are left as they were"
    return out


def check(case: Case, device: str) -> None:
    x, weight = inputs(case, device)
    if device == "cuda":
        found = gated.gated_product(x, weight)
        assert torch.equal(gated.gated_product(x, weight), found), "the same bits again"
    else:
        found = emulated(case, x, weight)
        assert torch.equal(emulated(case, x, weight, backwards=True), found), "in any order"
    expected = act_and_mul_reference(x.float() @ weight.float().T)
    assert isinstance(expected, torch.Tensor)
    error = float((found.float() - expected).norm() / expected.norm())
    assert error < LIMIT, (case, error)


def check_gated(device: str) -> None:
    """Every element is written, and right, in tiles of one and of two programs."""
    if device == "cuda" and not hopper.is_here():
        return
    for case in ON_GPU if device == "cuda" else CASES:
        check(case, device)


def check_drawn_gated(device: str) -> None:
    if device == "cuda" and not hopper.is_here():
        return
    for number in range(NUM_DRAWN):
        rng = random.Random(number)
        tiles = rng.randint(100, 300) if device == "cuda" else rng.randint(1, 5)
        rows, programs = rng.randint(1, gated.MOST_ROWS), rng.randint(1, tiles)
        check(Case(rows, tiles, rng.randint(1, 9), programs), device)


CHECKS = {"gated": check_gated, "drawn_gated": check_drawn_gated}
