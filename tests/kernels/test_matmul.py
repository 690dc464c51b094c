"""Packed products against plain torch, in every tile shape and remainder."""

import pytest
import torch

from tokenmill.kernels import matmul as mm
from tokenmill.kernels.rows import FP8, QuantizedRows, activation_limit, quantize_rows

ROWS = (1, 2, 3, 5, 7, 13, 131)
COLUMNS = (8, 16, 24, 33, 40, 56, 96)


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 1000 + n)
    return torch.randn(m, k), torch.randn(n, k), torch.randn(n)


@pytest.mark.parametrize("k", [64, 576])
@pytest.mark.parametrize("n", COLUMNS)
def test_fp32_matches_torch(n: int, k: int) -> None:
    for m in ROWS:
        x, weight, bias = _operands(m, n, k)
        packed = mm.pack(weight, "fp32")
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(mm.matmul(x, packed, bias), expected, atol=2e-4, rtol=1e-5)
        start = torch.randn(m, n)
        total = mm.matmul(x, packed, bias, add_to=start.clone())
        torch.testing.assert_close(total, start + expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("n", COLUMNS)
def test_int8_is_the_exact_integer_product(n: int) -> None:
    k = 64
    for m in ROWS:
        x, weight, bias = _operands(m, n, k)
        packed = mm.pack(weight, "int8")
        rows = quantize_rows(x, activation_limit(k))
        assert packed.scales is not None
        integers = rows.values.double() @ mm.unpack(packed).double().T
        expected = integers * rows.scales[:, None] * packed.scales[:n] + bias
        found = mm.matmul(rows, packed, bias)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(found, x @ weight.T + bias, atol=0.2, rtol=0.05)


def test_int8_never_overflows_at_the_limit() -> None:
    k = 576
    limit = activation_limit(k).limit
    packed = mm.pack(torch.ones(8, k), "int8")
    rows = QuantizedRows(torch.full((1, k), limit, dtype=torch.int16), torch.ones(1))
    assert packed.scales is not None
    assert limit * 127 * k <= 2**31 - 1 < (limit + 1) * 127 * k
    expected = limit * 127.0 * k * packed.scales
    torch.testing.assert_close(mm.matmul(rows, packed)[0], expected)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_row_is_bitwise_the_same_in_any_batch(dtype: str) -> None:
    x, weight, _ = _operands(50, 96, 576)
    packed = mm.pack(weight, dtype)

    def product(rows: torch.Tensor) -> torch.Tensor:
        limit = activation_limit(576)
        return mm.matmul(quantize_rows(rows, limit) if dtype == "int8" else rows, packed)

    together = product(x)
    for size in (1, 3, 7, 20):
        for start in range(0, 50, size):
            alone = product(x[start : start + size].contiguous())
            assert torch.equal(alone, together[start : start + size])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("n", COLUMNS)
def test_rows_are_the_weight_s_own(n: int, dtype: str) -> None:
    weight = torch.randn(n, 32)
    packed = mm.pack(weight, dtype)
    ids = torch.tensor([0, n - 1, n // 2, 0])
    tolerance = 0.0 if dtype == "fp32" else 0.03
    torch.testing.assert_close(packed.rows(ids), weight[ids], atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_unpacked_reference_agrees(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = _operands(9, 40, 64)
    compiled = mm.pack(weight, dtype)
    monkeypatch.setattr(mm, "cpu_kernels", lambda: False)
    plain = mm.pack(weight, dtype)
    assert compiled.tiled and not plain.tiled
    rows = quantize_rows(x, activation_limit(64)) if dtype == "int8" else x
    expected, found = mm.matmul(rows, plain, bias), mm.matmul(rows, compiled, bias)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_fp8_rows_keep_three_bits_of_mantissa() -> None:
    x = torch.randn(50, 64) * torch.logspace(-12, 12, 50)[:, None]
    x[7] = 0.0
    rows = quantize_rows(x, FP8)
    assert rows.values.dtype == torch.float8_e4m3fn
    assert torch.equal(rows.values.float().abs().amax(1) == 448, x.abs().amax(1) > 0)
    error = (rows.values.float() * rows.scales[:, None] - x).abs()
    assert (error <= x.abs() / 16 + rows.scales[:, None] * 2**-10).all()  # or a subnormal's half


@pytest.mark.parametrize("n", [16, 33])
def test_fp8_product(n: int) -> None:
    x, weight, bias = _operands(9, n, 64)
    packed, rows = mm.pack(weight.bfloat16(), "fp8"), quantize_rows(x, FP8)
    assert packed.scales is not None and packed.num_bytes == n * 64 + n * 4
    dense = packed.data.double() * packed.scales.double()[:, None]
    exact = (rows.values.double() * rows.scales.double()[:, None]) @ dense.T
    found = mm.matmul(rows, packed, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact + bias, atol=1e-2, rtol=1e-2)
    assert (found - bias - x @ weight.T).norm() / (x @ weight.T).norm() < 0.06
    start = torch.randn(9, n)
    total = mm.matmul(rows, packed, None, add_to=start.clone())
    torch.testing.assert_close(total.double(), start + exact, atol=1e-5, rtol=1e-5)
