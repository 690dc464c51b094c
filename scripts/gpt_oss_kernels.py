"""Times the kernels of a GPT-OSS layer on a GPU against their ceilings, by shapes of tiles.

    python scripts/gpt_oss_kernels.py --experts 128

For each number of tokens both products of the experts are timed with every shape of tiles of
SHAPES, then attention with sinks, with and without a window, and a whole layer's experts with their
router. A ceiling is the longer of what the bytes take at --bandwidth and the products at --flops.
Choices are random and even. The last line is one JSON object: for each product and number of tokens
the fastest shape, and what kernels/gpu/mxfp4.py takes by itself. A shape's name begins with the
rows of a tile, or with 1 where each choice has a tile of its own.

`--decode 512` times a few shapes for so many tokens alone, evenly chosen and not, and the sort in
one launch and in three: about half a minute.

`TRITON_INTERPRET=1 python scripts/gpt_oss_kernels.py --tiny` runs all of it once without a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tokenmill.kernels import moe
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.gpu import attention as gpu_attention
from tokenmill.kernels.gpu import expert_tiles, mxfp4
from tokenmill.kernels.gpu import moe as gpu_moe
from tokenmill.kernels.gpu.mxfp4 import TileShape
from tokenmill.kernels.matmul import PackedWeight
from tokenmill.kernels.moe import PackedExperts, Routing
from tokenmill.kernels.rows import ClampedSwiGLU

SHAPES = {  # by rows of tokens per tile: blocks, turn, warps, stages, levels of smaller tiles
    16: ((1, 3, 4, 3), (2, 3, 4, 3), (1, 3, 4, 4), (1, 5, 4, 2), (2, 3, 4, 2), (2, 3, 8, 3),
         (4, 3, 8, 2)),
    32: ((2, 3, 4, 3), (2, 3, 4, 3, 1), (1, 3, 4, 3, 1), (2, 3, 8, 3, 1), (4, 3, 8, 3, 1)),
    64: ((2, 3, 4, 3), (2, 3, 4, 3, 2), (2, 3, 4, 2, 2), (1, 3, 4, 3, 2), (2, 3, 8, 2, 2)),
    128: ((2, 3, 4, 2), (2, 3, 4, 2, 2), (1, 3, 4, 2, 2), (2, 3, 8, 2, 2), (2, 2, 4, 2, 2)),
    256: ((2, 3, 8, 2, 2), (1, 3, 4, 2, 2)),
}  # fmt: skip
DECODE_SHAPES = (2, 3, 4, 3, 1), (4, 3, 8, 3, 1), (4, 3, 8, 2, 1)  # of 32 rows
SKEWS = 0.0, 0.4  # spread of what routers prefer, of the spread of a token's scores
TOKENS = (1, 4, 64, 256, 768, 1024, 2048, 8192)
TOP_K = 4
HEADS, KV_HEADS, DIM, BLOCK = 64, 8, 64, 64
WINDOW = 128
SWIGLU = ClampedSwiGLU()


@dataclass(frozen=True, slots=True)
class Bench:
    """What is timed, and by what it is bounded."""

    device: str
    dtype: torch.dtype
    experts: int
    size: int  # of the stream and of an expert
    bandwidth: float
    flops: float

    def ceiling_us(self, num_bytes: float, flops: float) -> float:
        return 1e6 * max(num_bytes / self.bandwidth, flops / self.flops)

    def time_us(self, calls: list[Callable[[], object]]) -> float:
        """Of one call, out of a graph of all of them."""
        for call in calls:
            call()
        if self.device == "cpu":
            return 1.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(8):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / len(calls))
        return float(np.median(times[2:]))


def main() -> None:
    args = _arguments()
    tiny = args.tiny
    bench = Bench(
        "cpu" if tiny else "cuda",
        torch.float32 if tiny else torch.bfloat16,
        4 if tiny else args.experts,
        64 if tiny else 2880,
        args.bandwidth,
        args.flops,
    )
    torch.manual_seed(0)
    began = time.monotonic()
    stored, packed = _experts(bench)
    report: dict[str, Any] = {
        "benchmark": "gpt-oss-kernels",
        "experts": bench.experts,
        "pack_s": round(time.monotonic() - began, 2),
        "bytes": sum(weight.num_bytes for weight in packed),
        "relative_error": _error(bench, stored, packed),
    }
    del stored
    print(json.dumps(report), flush=True)
    if args.decode:
        report["decode"] = _printed(_decode(bench, packed, args.decode, skew) for skew in SKEWS)
        print(json.dumps(report))
        return
    tokens = (1, 8) if tiny else TOKENS
    report["attention"] = _printed(_attention(bench, (1, 2) if tiny else (1, 64, 256)))
    report["layer"] = _printed(_layer(bench, packed, count) for count in tokens)
    report["products"] = _printed(e for count in tokens for e in _products(bench, packed, count))
    print(json.dumps(report))


def _printed(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each is printed when it is known, so that a run that is cut leaves something."""
    found = []
    for entry in entries:
        print(json.dumps(entry), flush=True)
        found.append(entry)
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--experts", type=int, default=128, help="128: 120b, 32: 20b")
    parser.add_argument("--bandwidth", type=float, default=4.28e12, help="bytes a second")
    parser.add_argument("--flops", type=float, default=790e12)
    parser.add_argument("--decode", type=int, default=0, help="only this many tokens, few shapes")
    parser.add_argument("--tiny", action="store_true", help="small shapes, without a GPU")
    return parser.parse_args()


def _experts(bench: Bench) -> tuple[tuple[PackedExperts, ...], tuple[PackedExperts, ...]]:
    """Gate with up and down, random: as a checkpoint has them and as the kernels read them."""
    stored, packed = [], []
    for n, k in ((2 * bench.size, bench.size), (bench.size, bench.size)):
        shape, device = (bench.experts, n, k // 32), bench.device
        codes = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device=device)
        powers = torch.randint(118, 122, shape, dtype=torch.uint8, device=device)
        bias = torch.randn(bench.experts, n, device=device).to(bench.dtype)
        stored.append(PackedExperts(bench.experts, codes, powers, n, k, bias=bias))
        both = PackedExperts(bench.experts, n=n, k=k, bias=bias)
        for expert in range(bench.experts):
            words, scales = mxfp4.pack_expert(codes[expert], powers[expert])
            both.data = both._kept(both.data, expert, words)
            both.scales = both._kept(both.scales, expert, scales)
        packed.append(both)
    return tuple(stored), tuple(packed)


def _choices(bench: Bench, tokens: int, skew: float = 0.0) -> torch.Tensor:
    scores = torch.randn(tokens, bench.experts, device=bench.device)
    scores += skew * torch.randn(bench.experts, device=bench.device)
    return scores.topk(min(TOP_K, bench.experts), dim=1)[1].int()


def _rows(bench: Bench, tokens: int) -> torch.Tensor:
    x = torch.randn(tokens, bench.size, device=bench.device) * bench.size**-0.5
    return x.to(bench.dtype)


def _error(
    bench: Bench, stored: tuple[PackedExperts, ...], packed: tuple[PackedExperts, ...]
) -> float:
    x, ids = _rows(bench, 6), _choices(bench, 6)
    expected = moe.apply_experts.reference(x.float(), ids, *stored, SWIGLU)
    found = gpu_moe.apply_experts(x, ids, *packed, SWIGLU).float()
    found = found.sum(0) if found.dim() == 3 else found  # parts of a few tokens' results
    return round(((found - expected).norm() / expected.norm()).item(), 6)


def _products(
    bench: Bench, packed: tuple[PackedExperts, ...], tokens: int
) -> Iterator[dict[str, Any]]:
    """Both products of so many tokens: the fastest shape of tiles, and all others."""
    x, sets = _rows(bench, tokens), [_choices(bench, tokens) for _ in range(_variants(tokens))]
    count, size = tokens * sets[0].shape[1], bench.size
    touched = sum(len(ids.unique()) for ids in sets) / len(sets)
    usual = mxfp4.tile_rows(count, bench.experts)
    tried: dict[str, dict[str, float | None]] = {"gate_up": {}, "down": {}}
    for rows in sorted({max(16, usual // 2), usual, min(256, 2 * usual)}):
        if single := rows == usual and count <= mxfp4.SINGLE_ROWS:
            tiles = [expert_tiles.single_tiles(ids) for ids in sets]
        else:
            tiles = [expert_tiles.sort_by_expert(ids, bench.experts, rows) for ids in sets]
        gated = [torch.randn(t.most * rows, size, device=bench.device) for t in tiles]
        gated = [values.to(bench.dtype) for values in gated]
        for shape in map(TileShape._make, SHAPES[rows]):
            name = f"{1 if single else rows}:{','.join(map(str, shape))}"
            calls: dict[str, list[Callable[[], object]]] = {
                "gate_up": [
                    lambda t=t, s=shape: mxfp4.gate_up_product(x, packed[0], t, TOP_K, SWIGLU, s)
                    for t in tiles
                ],
            }
            for splits in (1, 2) if tokens <= 4 and shape.blocks == 1 else (1,):
                calls[f"down{splits}"] = [
                    lambda t=t, g=g, s=shape, p=splits: mxfp4.down_product(
                        g, packed[1], t, count, s, p
                    )
                    for t, g in zip(tiles, gated, strict=True)
                ]
            for call, each in calls.items():
                product, split = call.rstrip("12"), " in 2 parts" * call.endswith("2")
                tried[product][name + split] = _attempt(bench, each)
    for product, weight in zip(tried, packed, strict=True):
        num_bytes = touched * weight.num_bytes / bench.experts + 2 * count * size * 2
        yield {
            "product": product,
            "tokens": tokens,
            "experts_touched": touched,
            **_fastest(tried[product], _taken(usual, count, weight)),
            "ceiling_us": round(bench.ceiling_us(num_bytes, 2.0 * count * weight.n * size), 2),
            "tried_us": tried[product],
        }


def _decode(
    bench: Bench, packed: tuple[PackedExperts, ...], tokens: int, skew: float
) -> dict[str, Any]:
    """Both products of one step by shapes of tiles of 32 rows, and the sort by expert."""
    x, sets = _rows(bench, tokens), [_choices(bench, tokens, skew) for _ in range(4)]
    tiles = [expert_tiles.sort_by_expert(ids, bench.experts, 32) for ids in sets]
    count, size = sets[0].numel(), bench.size
    gated = torch.randn(tiles[0].most * 32, size, device=bench.device).to(bench.dtype)
    products: dict[str, list[float | None]] = {}
    for shape in map(TileShape._make, DECODE_SHAPES):
        first: list[Callable[[], object]] = [
            lambda t=t, s=shape: mxfp4.gate_up_product(x, packed[0], t, TOP_K, SWIGLU, s)
            for t in tiles
        ]
        second: list[Callable[[], object]] = [
            lambda t=t, s=shape: mxfp4.down_product(gated, packed[1], t, count, s) for t in tiles
        ]
        products[",".join(map(str, shape))] = [_attempt(bench, first), _attempt(bench, second)]
    usual, sorts = expert_tiles.FEW_ROWS, {}
    for name, most in (("one_launch", count), ("three_launches", 0)):
        expert_tiles.FEW_ROWS = most
        sorts[name] = _attempt(
            bench, [lambda i=i: expert_tiles.sort_by_expert(i, bench.experts, 32) for i in sets]
        )
    expert_tiles.FEW_ROWS = usual
    rows = torch.bincount(sets[0].flatten().long(), minlength=bench.experts).float()
    return {
        "tokens": tokens,
        "skew": skew,
        "busiest_over_mean": round((rows.max() / rows.mean()).item(), 2),
        "gate_up_and_down_us": products,
        "sort_us": sorts,
    }


def _variants(tokens: int) -> int:
    """Choices that take turns: what one has read is not in the cache for the next."""
    return 6 if tokens <= 64 else 2


def _taken(rows: int, count: int, weight: PackedExperts) -> str:
    assert weight.data is not None
    most = min(count, count // rows + weight.num_experts) * weight.data.shape[1]
    name = 1 if count <= mxfp4.SINGLE_ROWS else rows
    return f"{name}:{','.join(map(str, mxfp4.tile_shape(rows, most)))}"


def _attempt(bench: Bench, calls: list[Callable[[], object]]) -> float | None:
    """Microseconds; None where a shape does not fit into a multiprocessor."""
    try:
        return round(bench.time_us(calls), 2)
    except Exception as error:
        print(f"does not run: {error}", flush=True)
        return None


def _fastest(tried: dict[str, float | None], taken: str) -> dict[str, Any]:
    best = min(tried, key=lambda name: tried[name] or float("inf"))
    return {"fastest": best, "us": tried[best], "taken": taken, "taken_us": tried.get(taken)}


def _layer(bench: Bench, packed: tuple[PackedExperts, ...], tokens: int) -> dict[str, Any]:
    """Router, choice, sort, both products and the sum, as a step runs them."""
    router = torch.randn(bench.experts, bench.size, device=bench.device).to(bench.dtype)
    weight = PackedWeight(router, None, bench.experts, bench.size, tiled=False)
    bias = torch.randn(bench.experts, device=bench.device).to(bench.dtype)
    inputs = [_rows(bench, tokens) for _ in range(_variants(tokens))]
    out = torch.zeros_like(inputs[0])
    routing = Routing(min(TOP_K, bench.experts))

    def run(x: torch.Tensor) -> None:
        ids, weights = gpu_moe.route(moe.router_logits(x, weight), None, routing, bias)
        gpu_moe.add_choices(gpu_moe.apply_experts(x, ids, *packed, SWIGLU), weights, out)

    taken = bench.time_us([lambda x=x: run(x) for x in inputs])
    return {
        "tokens": tokens,
        "us": round(taken, 2),
        "launches": _launches(bench, lambda: run(inputs[0])),
    }


def _launches(bench: Bench, call: Callable[[], object]) -> int | None:
    """Kernels and memory operations of a call."""
    if bench.device == "cpu":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.self_device_time_total)


def _attention(bench: Bench, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """One query of each sequence, with sinks; a window's keys split over programs and not."""
    for seqs in batches:
        for context in (100,) if bench.device == "cpu" else (1024, 8192):
            cases = ((0, 256), (WINDOW, 0), (WINDOW, 256))
            for window, narrow in cases:
                gpu_attention.NARROW_WINDOW = narrow
                yield _attend(bench, seqs, context, window) | {"narrow_window": narrow}
    gpu_attention.NARROW_WINDOW = 256


def _attend(bench: Bench, seqs: int, context: int, window: int) -> dict[str, Any]:
    width, device = context // BLOCK + 1, bench.device
    plans = plan_tiles(np.ones(seqs, np.int64), HEADS // KV_HEADS, KV_HEADS, on_gpu=True)
    tables = torch.randperm(seqs * width, device=device).int().view(seqs, width)
    batch = AttentionBatch(
        torch.full((seqs,), context, dtype=torch.int32, device=device),
        torch.zeros(seqs, dtype=torch.int32, device=device),
        torch.arange(seqs + 1, dtype=torch.int32, device=device),
        torch.full((seqs,), context, dtype=torch.int32, device=device),
        tables,
        torch.arange(seqs, dtype=torch.int32, device=device),
        tuple(QueryTiles.of(plan, device) for plan in plans),
    )
    shape = (seqs * width, KV_HEADS, BLOCK, DIM)
    k_cache, v_cache = (torch.randn(shape, device=device).to(bench.dtype) for _ in range(2))
    q = torch.randn(seqs, HEADS * DIM, device=device).to(bench.dtype) * DIM**-0.5
    sinks, out = torch.randn(HEADS, device=device), torch.empty_like(q)

    def run() -> None:
        gpu_attention.attend_paged(q, out, batch, k_cache, v_cache, HEADS, window, sinks)

    seen = min(context + 1, window) if window else context + 1
    num_bytes = 2.0 * seqs * seen * KV_HEADS * DIM * 2
    return {
        "seqs": seqs,
        "context": context,
        "window": window,
        "us": round(bench.time_us([run] * 4), 2),
        "ceiling_us": round(bench.ceiling_us(num_bytes, 4.0 * seqs * seen * HEADS * DIM), 2),
        "launches": _launches(bench, run),
    }


if __name__ == "__main__":
    main()
