"""HSTU's kernels and the whole ranking model in bf16 on a GPU, against fp32."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.kernels import hstu
from tokenmill.kernels.gpu import hstu as gpu
from tokenmill.models.hstu import HstuModel
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.stores.table import DeviceTable

HEADS, DIM, WIDTH = 4, 128, 512
ROWS = hstu.jagged([0, 700, 701, 1203], [0, 3, 260, 261], "cpu")
# The benchmark's widths, which the kernels' tiles need, over short histories.
WIDE = replace(
    TINY, embedding_dim=64, hidden_size=WIDTH, num_heads=HEADS, qk_dim=DIM, v_dim=DIM,
    max_seq_len=2048, max_candidates=512, num_positions=1024,
)  # fmt: skip


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16 has 8 bits, and sums are in fp32."""
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < 2e-2, f"relative error {error}"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("targets_only", [False, True])
def test_attention(ahead: bool, targets_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ATTENTION", gpu.ATTENTION._replace(ahead=ahead))
    rows = hstu.jagged(ROWS.history, ROWS.candidates, "cuda")
    n = rows.num_history
    matrix = torch.randn(n + rows.num_candidates, 4 * WIDTH, device="cuda", dtype=torch.bfloat16)
    _, v, q, k = (part.view(-1, HEADS, DIM) for part in matrix.chunk(4, dim=1))
    parts = k[:n], v[:n], k[n:], v[n:]
    queries = q[n:] if targets_only else q
    keys, values, own_keys, own_values = (part.float() for part in parts)
    expected = hstu.silu_attention_reference(
        queries.float(), keys, values, own_keys, own_values, rows, 900
    )
    close(hstu.silu_attention(queries, *parts, rows, 900), expected)


def test_products() -> None:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    norm = hstu.AffineNorm(1 + some(WIDTH) / 10, some(WIDTH) / 10)
    product = hstu.NormProduct(norm, some(WIDTH, 4 * WIDTH) / 23, some(4 * WIDTH))
    x = some(1000, WIDTH) * 3 + 1
    found = hstu.norm_uvqk(x, product, WIDTH)
    close(found, hstu.norm_uvqk_reference(x, product, WIDTH))
    u, o, weight = found[:, :WIDTH], some(1000, WIDTH), some(3 * WIDTH, WIDTH) / 39
    close(
        hstu.gate_output(x, u, o, norm, weight), hstu.gate_output_reference(x, u, o, norm, weight)
    )


@pytest.mark.parametrize("chunk", [None, 100])
def test_scores_are_those_of_fp32(chunk: int | None) -> None:
    plain = tiny_model(WIDE)
    requests = [tiny_request(1200, 300, WIDE), tiny_request(5, 4, WIDE, user=2)]
    dense = {name: t.to("cuda", torch.bfloat16) for name, t in plain.dense.tensors.items()}
    stores = {
        name: DeviceTable(store.lookup(torch.arange(store.spec.num_rows)).cuda())
        for name, store in plain.stores.items()
    }
    fast = RankingModel(HstuModel(WIDE, dense, candidate_chunk=chunk), stores)
    for expected, found in zip(plain.score(requests), fast.score(requests), strict=True):
        np.testing.assert_allclose(found, expected, atol=3e-2)
