"""Experts: the compiled kernels against their torch references, and a row by itself."""

import pytest
import torch

from tokenmill.kernels import moe
from tokenmill.kernels.matmul import pack
from tokenmill.kernels.moe import PackedExperts, Routing
from tokenmill.kernels.rows import Activation, ClampedSwiGLU

ROUTINGS = (
    Routing(2),
    Routing(3, renormalise=False, scaling=2.5),
    Routing(4, sigmoid=True, scaling=1.7, num_groups=4, top_groups=2),
)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_route(routing: Routing, biased: bool) -> None:
    torch.manual_seed(1)
    logits, bias = 3 * torch.randn(37, 16), torch.randn(16) if biased else None
    rest = (bias, routing, torch.randn(16))
    ids, weights = moe.route(logits, *rest)
    expected_ids, expected_weights = moe.route.reference(logits, *rest)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    for size in (1, 4, 9):
        parts = [moe.route(part, *rest)[1] for part in logits.split(size)]
        assert torch.equal(torch.cat(parts), weights)


def test_of_equal_scores_the_first_expert_is_chosen() -> None:
    ids, weights = moe.route(torch.tensor([[0.0, 1.0, 1.0, 1.0]]), None, Routing(2))
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]]


def _experts(dtype: str, count: int, hidden: int, inner: int) -> tuple[PackedExperts, ...]:
    gate_up, down = PackedExperts(count), PackedExperts(count)
    for expert in range(count):
        gate_up.put(expert, pack(torch.randn(2 * inner, hidden) * hidden**-0.5, dtype))
        down.put(expert, pack(torch.randn(hidden, inner) * inner**-0.5, dtype))
    return gate_up, down


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    """Every code with every scale whose values bfloat16 has, to the last bit."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.arange(253, dtype=torch.uint8)
    blocks = codes.expand(253, 2, 16, 16).contiguous()
    of_all = scales[:, None, None].expand(253, 2, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks, of_all).transpose(1, 2)
    assert torch.equal(moe.dequantize_mxfp4(blocks, of_all), expected)
    assert torch.equal(moe.dequantize_mxfp4(blocks, of_all, torch.float32), expected.float())


def _mxfp4_experts(count: int, n: int, k: int) -> tuple[PackedExperts, torch.Tensor]:
    """Random codes with biases, and the matrices that they stand for."""
    experts = PackedExperts(count)
    for expert in range(count):
        blocks = torch.randint(0, 256, (n, k // 32, 16), dtype=torch.uint8)
        experts.put_mxfp4(expert, blocks, torch.randint(118, 124, (n, k // 32), dtype=torch.uint8))
        experts.put_bias(expert, torch.randn(n))
    assert experts.data is not None and experts.scales is not None
    return experts, moe.dequantize_mxfp4(experts.data, experts.scales, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_mxfp4(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    (gate_up, first), (down, second) = _mxfp4_experts(3, 128, 96), _mxfp4_experts(3, 96, 64)
    assert gate_up.bias is not None and down.bias is not None
    assert (gate_up.n, gate_up.k) == (128, 96) and gate_up.rounding is None
    assert gate_up.num_bytes == 3 * 128 * (96 * 17 // 32 + 4)  # 4.25 bits and a bias
    x, ids = torch.randn(7, 96).to(dtype), torch.randint(0, 3, (7, 2), dtype=torch.int32)
    found = moe.apply_experts(x, ids, gate_up, down, ClampedSwiGLU())
    for row, expert in enumerate(ids.flatten().tolist()):
        inner = first[expert] @ x[row // 2].float() + gate_up.bias[expert]
        gate, up = inner[::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
        expected = second[expert] @ (gate * (1.702 * gate).sigmoid() * (up + 1))
        bound = 1e-4 if dtype == torch.float32 else 0.1
        total = (expected + down.bias[expert]).to(dtype)
        torch.testing.assert_close(found[row], total, atol=bound, rtol=bound)


# hidden, inner size; the last is no multiple of a tile's columns
@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (320, 32), (36, 20)])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("activation", ["silu", ClampedSwiGLU()])
def test_experts(dtype: str, hidden: int, inner: int, activation: Activation) -> None:
    torch.manual_seed(2)
    gate_up, down = _experts(dtype, 5, hidden, inner)
    if activation != "silu":
        for expert in range(5):
            gate_up.put_bias(expert, torch.randn(2 * inner))
            down.put_bias(expert, torch.randn(hidden))
    x, ids = torch.randn(150, hidden), torch.randint(0, 4, (150, 2), dtype=torch.int32)
    ids[:140, 0] = 2  # more rows than a group takes; expert 4 has none
    found = moe.apply_experts(x, ids, gate_up, down, activation)
    expected = moe.apply_experts.reference(x, ids, gate_up, down, activation)
    assert torch.equal(found, expected)  # the same tiles, expert by expert
    weights, stream = torch.rand(150, 2), torch.randn(150, hidden)
    total, plain = stream.clone(), stream.clone()
    moe.add_choices(found, weights, total)
    moe.add_choices.reference(expected, weights, plain)
    torch.testing.assert_close(total, plain, atol=1e-5, rtol=1e-5)
    for rows in torch.arange(150).split(11):
        part = stream[rows].clone()
        alone = moe.apply_experts(x[rows], ids[rows], gate_up, down, activation)
        moe.add_choices(alone, weights[rows], part)
        assert torch.equal(part, total[rows])
