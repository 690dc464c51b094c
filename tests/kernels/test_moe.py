"""Experts: the compiled kernels against their torch references, and a row by itself."""

import pytest
import torch

from tokenmill.kernels import moe
from tokenmill.kernels.matmul import pack
from tokenmill.kernels.moe import PackedExperts, Routing

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
    ids, weights = moe.route(logits, bias, routing)
    expected_ids, expected_weights = moe.route_reference(logits, bias, routing)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)
    for size in (1, 4, 9):
        parts = [moe.route(part, bias, routing)[1] for part in logits.split(size)]
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


# hidden, inner size; the last is no multiple of a tile's columns
@pytest.mark.parametrize(("hidden", "inner"), [(64, 24), (320, 32), (36, 20)])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_experts(dtype: str, hidden: int, inner: int) -> None:
    torch.manual_seed(2)
    gate_up, down = _experts(dtype, 5, hidden, inner)
    x, ids = torch.randn(150, hidden), torch.randint(0, 4, (150, 2), dtype=torch.int32)
    ids[:140, 0] = 2  # more rows than a group takes; expert 4 has none
    found = moe.apply_experts(x, ids, gate_up, down)
    expected = moe.apply_experts_reference(x, ids, gate_up, down)
    assert torch.equal(found, expected)  # the same tiles, expert by expert
    weights, stream = torch.rand(150, 2), torch.randn(150, hidden)
    total, plain = stream.clone(), stream.clone()
    moe.add_choices(found, weights, total)
    moe.add_choices_reference(expected, weights, plain)
    torch.testing.assert_close(total, plain, atol=1e-5, rtol=1e-5)
    for rows in torch.arange(150).split(11):
        part, alone = stream[rows].clone(), moe.apply_experts(x[rows], ids[rows], gate_up, down)
        moe.add_choices(alone, weights[rows], part)
        assert torch.equal(part, total[rows])
