"""HSTU's kernels and the whole ranking model in bf16 and fp8 on a GPU, against fp32."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.kernels import hstu
from tokenmill.kernels.gpu import hstu as gpu
from tokenmill.models.hstu import HstuModel
from tokenmill.ranking.batch import make_batch
from tokenmill.ranking.engine import RankingEngine
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.stores.table import DeviceTable

HEADS, DIM, WIDTH = 4, 128, 512
ROWS = hstu.jagged([0, 700, 701, 1203], [0, 3, 260, 261], "cpu")
# The benchmark's widths, which the kernels' tiles need, over short histories.
WIDE = replace(
    TINY, embedding_dim=64, hidden_size=WIDTH, num_heads=HEADS, qk_dim=DIM, v_dim=DIM,
    preprocessor_dim=256, head_dim=WIDTH, max_seq_len=2048, max_candidates=512, num_positions=1024,
)  # fmt: skip


FP8_ERROR = 6e-2  # of the largest value: codes have 4 bits, and errors of a sum partly cancel
FP8_STEP = 0.075  # between two codes near the largest


def close(found: torch.Tensor, expected: torch.Tensor, limit: float = 2e-2) -> None:
    """bf16 has 8 bits, and sums are in fp32."""
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < limit, f"relative error {error}"


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
    expected = hstu.silu_attention.reference(
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
    close(found, hstu.norm_uvqk.reference(x, product, WIDTH))
    u, o, weight = found[:, :WIDTH], some(1000, WIDTH), some(3 * WIDTH, WIDTH) / 39
    close(
        hstu.gate_output(x, u, o, norm, weight), hstu.gate_output.reference(x, u, o, norm, weight)
    )


@pytest.mark.parametrize("rows", [3, 50, 1000])
def test_products_in_fp8(rows: int) -> None:
    """Each way of the products by their rows, against the same codes in torch and against bf16."""

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    norm = hstu.AffineNorm(1 + some(WIDTH) / 10, some(WIDTH) / 10)
    product = hstu.NormProduct(norm, some(WIDTH, 4 * WIDTH) / 23, some(4 * WIDTH))
    rounded, x = hstu.round_product(product), some(rows, WIDTH) * 3 + 1
    found = hstu.norm_product_fp8(x, rounded)
    close(found, hstu.norm_uvqk.reference(x, product, 0), FP8_ERROR)
    u, o, weight = found[:, :WIDTH], some(rows, WIDTH), some(3 * WIDTH, WIDTH) / 39
    codes, expected = hstu.gate_rows(u, o, norm), hstu.gate_rows.reference(u, o, norm)
    torch.testing.assert_close(codes.scales, expected.scales, rtol=1e-2, atol=0.0)
    close(codes.values, expected.values, FP8_STEP)
    packed, gate = hstu.round_weight(weight), torch.nn.functional.silu(u)
    plain = hstu.gate_output.reference(x, gate, o, norm, weight)
    close(hstu.gate_output_fp8(x, u, o, norm, packed), plain, FP8_ERROR)


def on_gpu(plain: RankingModel, **levers: Any) -> RankingModel:
    """The same model in bf16 or fp8."""
    dense = {name: t.to("cuda", torch.bfloat16) for name, t in plain.dense.tensors.items()}
    stores = {
        name: DeviceTable(store.lookup(torch.arange(store.spec.num_rows)).cuda())
        for name, store in plain.stores.items()
    }
    return RankingModel(HstuModel(plain.spec, dense, **levers), stores)


def test_rows_are_those_of_fp32() -> None:
    """Users with and without times, one of them too short for its own row to count."""
    times = np.arange(1200) * 500
    long = replace(tiny_request(1200, 300, WIDE), timestamps=times, query_time=600_000)
    requests = [long, tiny_request(5, 4, WIDE, user=2)]
    plain = tiny_model(WIDE)
    for name in ("positions", "times"):  # as large as the rest: a wrong one must show
        plain.dense.tensors[name].mul_(1000)
    fast = on_gpu(plain)
    found, expected = (
        model.dense.inputs(batch, model.embed(batch))
        for model in (fast, plain)
        for batch in [make_batch(requests, WIDE, model.dense.device)]
    )
    close(found.cpu(), expected)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("chunk", [None, 100])
def test_scores_are_those_of_fp32(chunk: int | None, fp8: bool) -> None:
    plain = tiny_model(WIDE)
    requests = [tiny_request(1200, 300, WIDE), tiny_request(5, 4, WIDE, user=2)]
    fast = on_gpu(plain, candidate_chunk=chunk, fp8=fp8)
    for expected, found in zip(plain.score(requests), fast.score(requests), strict=True):
        np.testing.assert_allclose(found, expected, atol=6e-2 if fp8 else 3e-2)


@pytest.mark.parametrize("chunk", [None, 100])
def test_the_host_never_waits_before_it_has_to(chunk: int | None) -> None:
    """A batch is made and launched without a wait, and its scores come past what follows it."""
    model = on_gpu(tiny_model(WIDE), candidate_chunk=chunk)
    requests = [tiny_request(1200, 300, WIDE), tiny_request(5, 4, WIDE, user=2)]
    expected = model.score(requests)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(10**8)  # a batch that runs still
        scores = model.launch(make_batch(requests, WIDE, "cuda"))
        assert not torch.cuda.current_stream().query()
        torch.cuda._sleep(2 * 10**9)  # the batch after it: about a second
    finally:
        torch.cuda.set_sync_debug_mode("default")
    np.testing.assert_array_equal(scores.wait(), np.concatenate(expected))
    assert not torch.cuda.current_stream().query()


@pytest.mark.parametrize("fp8", [False, True])
def test_no_kernel_is_compiled_once_the_engine_is_warm(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are multiples of 16 now and then, and so are the places of a batch's columns."""
    from triton import knobs

    engine, compiled = RankingEngine(on_gpu(tiny_model(WIDE), fp8=fp8)), list[str]()
    engine.warm_up()

    def note(**about: object) -> bool:
        compiled.append(str(about.get("repr")))
        return False

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    for history, candidates in ((1, 1), (15, 16), (240, 15), (239, 16), (1007, 512), (97, 3)):
        for name, count in (("a", 1), ("b", 2), ("c", 5)):
            for index in range(count):
                request = tiny_request(history, candidates, WIDE)
                engine.submit(replace(request, request_id=f"{name}{index}").asked())
            while engine.has_work():
                assert all(output.finish_reason == "stop" for output in engine.step())
    assert compiled == []
