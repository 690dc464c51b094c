"""RMSNorm and gating: the compiled kernels against their torch references."""

from functools import partial

import pytest
import torch

from tokenmill.kernels.rows import (
    FP8,
    Activation,
    ClampedSwiGLU,
    QuantizedRows,
    Rounding,
    act_and_mul,
    rms_norm,
)

INT16 = Rounding(torch.int16, 11008)
GATES = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def _dense(y: torch.Tensor | QuantizedRows) -> torch.Tensor:
    return y if isinstance(y, torch.Tensor) else y.values.float() * y.scales[:, None]


@pytest.mark.parametrize("rounding", [None, INT16])
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("width", [8, 100, 576])
def test_rms_norm(rows: int, width: int, rounding: Rounding | None) -> None:
    x, weight = 3 * torch.randn(rows, width), torch.rand(width)
    found = _dense(rms_norm(x, weight, 1e-5, rounding))
    expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    torch.testing.assert_close(found, expected, atol=1e-3 if rounding else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("rounding", [None, INT16])
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("width", [8, 100, 576])
@pytest.mark.parametrize("activation", GATES)
def test_act_and_mul(
    rows: int, width: int, rounding: Rounding | None, activation: Activation
) -> None:
    gate_up = 4 * torch.randn(rows, 2 * width)
    found = _dense(act_and_mul(gate_up, rounding, activation))
    expected = GATES[activation](gate_up[:, :width]) * gate_up[:, width:]
    torch.testing.assert_close(found, expected, atol=1e-2 if rounding else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("rounding", [None, INT16])
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("width", [8, 100])
def test_clamped_swiglu(rows: int, width: int, rounding: Rounding | None) -> None:
    gate_up = 6 * torch.randn(rows, 2 * width)
    gate_up[0, :2] = torch.tensor([-1e4, 1e4])
    found = _dense(act_and_mul(gate_up, rounding, ClampedSwiGLU(1.3, 5.0)))
    gate, up = gate_up[:, ::2].clamp(max=5.0), gate_up[:, 1::2].clamp(-5.0, 5.0)
    expected = gate * (1.3 * gate).sigmoid() * (up + 1.0)
    torch.testing.assert_close(found, expected, atol=1e-2 if rounding else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", GATES)
def test_extreme_gates_do_not_overflow(activation: Activation) -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = GATES[activation](gate_up[:, :5])
    torch.testing.assert_close(_dense(act_and_mul(gate_up, None, activation)), expected)


@pytest.mark.parametrize("rounding", [INT16, FP8])
def test_a_row_of_zeros_stays_zero(rounding: Rounding) -> None:
    zeros = rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-5, rounding)
    assert torch.equal(_dense(zeros), torch.zeros(2, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_joins_the_stream_before_the_norm(dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, 5, 64).to(dtype)
    weight, total = torch.rand(64), x + delta
    expected = torch.nn.functional.rms_norm(total.float(), (64,), weight, 1e-5)
    found = rms_norm(x, weight, 1e-5, FP8, delta)
    assert torch.equal(x, total)
    torch.testing.assert_close(_dense(found), expected, atol=0.01, rtol=0.07)
