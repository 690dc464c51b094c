"""RMSNorm and SiLU-mul: the compiled kernels against their torch references."""

import pytest
import torch

from tokenmill.kernels import norm
from tokenmill.kernels.matmul import QuantizedRows


def _dense(y: torch.Tensor | QuantizedRows) -> torch.Tensor:
    return y if isinstance(y, torch.Tensor) else y.values.float() * y.scales[:, None]


@pytest.mark.parametrize("limit", [0, 11008])
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("width", [8, 100, 576])
def test_rms_norm(rows: int, width: int, limit: int) -> None:
    x, weight = 3 * torch.randn(rows, width), torch.rand(width)
    found = _dense(norm.rms_norm(x, weight, 1e-5, limit))
    expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    torch.testing.assert_close(found, expected, atol=1e-3 if limit else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("limit", [0, 11008])
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("width", [8, 100, 576])
def test_silu_mul(rows: int, width: int, limit: int) -> None:
    gate_up = 4 * torch.randn(rows, 2 * width)
    found = _dense(norm.silu_mul(gate_up, limit))
    expected = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
    torch.testing.assert_close(found, expected, atol=1e-2 if limit else 1e-5, rtol=1e-5)


def test_extreme_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    expected = torch.nn.functional.silu(gate_up[:, :5])
    torch.testing.assert_close(_dense(norm.silu_mul(gate_up)), expected)


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = norm.rms_norm(torch.zeros(2, 16), torch.ones(16), 1e-5, limit=100)
    assert torch.equal(_dense(zeros), torch.zeros(2, 16))
