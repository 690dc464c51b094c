"""HSTU's kernels and the whole dense part at the benchmark's size: TFLOP/s and samples/s.

    python scripts/hstu_kernels.py            one GPU, about a minute
    python scripts/hstu_kernels.py --tiny     no GPU: Triton's interpreter at a tiny size

Every shape of the attention kernel is timed, and the fastest one is used for the whole model. Each
kernel is first compared with its torch reference. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

CEILING_TFLOPS = 790.0  # bf16 products of an H200, measured
HISTORY, HISTORY_SD, CANDIDATES = 6714, 531, 2048


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="A tiny size in Triton's interpreter.")
    parser.add_argument("--users", type=int, default=16, help="Requests of a batch.")
    parser.add_argument("--rows", type=int, default=10_000_000, help="Rows of the item table.")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not args.tiny and not torch.cuda.is_available():
        sys.exit("There is no GPU here: --tiny runs the kernels in Triton's interpreter.")
    bench = Bench(args)
    print(f"ceiling: {CEILING_TFLOPS:.0f} TFLOP/s in bf16")
    found = bench.attention() | bench.products() | bench.model()
    print(json.dumps(found))


class Bench:
    """One batch of users, and what runs on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        import numpy as np
        import torch

        from tokenmill.core.specs.hstu import HstuSpec

        self.tiny = args.tiny
        self.device, self.dtype = ("cpu", torch.float32) if args.tiny else ("cuda", torch.bfloat16)
        torch.manual_seed(args.seed)
        spec = HstuSpec(num_items=args.rows, num_users=100_000)
        users, mean, deviation, candidates = args.users, HISTORY, HISTORY_SD, CANDIDATES
        if args.tiny:
            users, mean, deviation, candidates = 2, 150, 20, 40
            spec = replace(
                spec, num_items=1000, num_users=10, hidden_size=32, embedding_dim=32, num_heads=2,
                qk_dim=16, v_dim=16, preprocessor_dim=16, head_dim=32, num_layers=2,
            )  # fmt: skip
        rng = np.random.default_rng(args.seed)
        lengths = np.maximum(1, rng.normal(mean, deviation, users).round().astype(int))
        self.spec, self.rng = spec, rng
        self.lengths, self.counts = lengths, np.full(users, candidates)

    def requests(self) -> list[Any]:
        from tokenmill.ranking.requests import RankRequest

        def some(count: int, limit: int) -> Any:
            return self.rng.integers(0, limit, count)

        spec = self.spec
        return [
            RankRequest(
                str(user), int(self.rng.integers(0, spec.num_users)), some(n, spec.num_items),
                some(n, spec.num_categories), some(n, 1 << spec.num_actions),
                some(m, spec.num_items), some(m, spec.num_categories),
            )
            for user, (n, m) in enumerate(zip(self.lengths, self.counts, strict=True))
        ]  # fmt: skip

    def time_ms(self, work: Callable[[], object], repeats: int = 10) -> float:
        """Mean of several runs after two that compile and warm up."""
        import time

        import torch

        if self.tiny:
            repeats = 1
        for _ in range(1 if self.tiny else 2):
            work()
        if not self.tiny:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if not self.tiny:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000 / repeats

    def rows(self) -> Any:
        """The batch's offsets with the kernel's tiles, in the interpreter too."""
        import numpy as np
        import torch

        from tokenmill.kernels import hstu

        history = [0, *np.cumsum(self.lengths + 1).tolist()]
        candidates = [0, *np.cumsum(self.counts).tolist()]
        targets, before = hstu.query_tiles(history, candidates, hstu.TILE_ROWS)
        tiles = torch.from_numpy(np.concatenate([targets, before])).to(self.device)
        return hstu.Jagged(history, candidates, tiles, len(targets))

    def attention_flops(self, targets_only: bool) -> float:
        """Products of a row with the keys that it sees, and of weights with values."""
        pair = 2 * self.spec.num_heads * (self.spec.qk_dim + self.spec.v_dim)
        n, m = self.lengths + 1.0, self.counts
        seen = m * (n + 1) + (0 if targets_only else n * (n + 1) / 2)
        return float(pair * seen.sum())

    def attention(self) -> dict[str, Any]:
        import torch

        from tokenmill.kernels import hstu
        from tokenmill.kernels.gpu import hstu as gpu

        rows, spec = self.rows(), self.spec
        n, heads, dim = rows.num_history, spec.num_heads, spec.qk_dim
        matrix = torch.randn(
            n + rows.num_candidates, spec.uvqk_dim, device=self.device, dtype=self.dtype
        )
        _, v, q, k = (part.view(-1, heads, dim) for part in matrix.chunk(4, dim=1))
        parts = k[:n], v[:n], k[n:], v[n:], rows, 1000
        expected = hstu.silu_attention.reference(q, *parts)
        shapes = [
            gpu.AttentionShape(keys, stages, ahead=ahead)
            for keys, stages in ((64, 2), (64, 3), (64, 4), (128, 2))
            for ahead in (False, True)
        ]
        timed = {}
        for shape in shapes[:2] if self.tiny else shapes:
            gpu.ATTENTION = shape
            try:
                error = float((gpu.silu_attention(q, *parts) - expected).abs().max())
                error /= float(expected.abs().max())
                assert error < 2e-2, f"relative error {error}"
                timed[shape] = self.time_ms(lambda: gpu.silu_attention(q, *parts))
            except Exception as fault:  # one shape that does not fit must not hide the others
                print(f"attention {shape}: {type(fault).__name__}: {str(fault)[:120]}")
                continue
            rate = self.attention_flops(False) / timed[shape] / 1e9
            print(
                f"attention {shape}: {timed[shape]:.2f} ms, {rate:.1f} TFLOP/s, error {error:.1e}"
            )
        best = gpu.ATTENTION = min(timed, key=timed.__getitem__)
        targets_ms = self.time_ms(lambda: gpu.silu_attention(q[n:], *parts))
        rate = self.attention_flops(False) / timed[best] / 1e9
        return {
            "attention_tflops": round(rate, 1),
            "attention_of_ceiling": round(rate / CEILING_TFLOPS, 3),
            "attention_shape": best._asdict(),
            "targets_tflops": round(self.attention_flops(True) / targets_ms / 1e9, 1),
        }

    def products(self) -> dict[str, Any]:
        """LayerNorm + uvqk, and LayerNorm-mul-output, beside torch's plain operations."""
        import torch

        from tokenmill.kernels import hstu
        from tokenmill.kernels.gpu import hstu as gpu

        spec, m = self.spec, int((self.lengths + 1 + self.counts).sum())
        d, width = spec.hidden_size, spec.num_heads * spec.v_dim

        def some(*shape: int) -> Any:
            return torch.randn(*shape, device=self.device, dtype=self.dtype)

        x, norm = some(m, d), hstu.AffineNorm(1 + some(d) / 10, some(d) / 10)
        product = hstu.NormProduct(norm, some(d, spec.uvqk_dim) / d**0.5, some(spec.uvqk_dim))
        u, o, out = some(m, spec.uvqk_dim)[:, :width], some(m, width), some(3 * width, d) / d**0.5
        out_norm = hstu.AffineNorm(1 + some(width) / 10, some(width) / 10)
        cases: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], float]] = {
            "uvqk": (
                gpu.norm_uvqk, hstu.norm_uvqk.reference, (x, product, width),
                2.0 * m * d * spec.uvqk_dim,
            ),
            "output": (
                gpu.gate_output, hstu.gate_output.reference, (x, u, o, out_norm, out),
                2.0 * m * 3 * width * d,
            ),
        }  # fmt: skip
        found: dict[str, Any] = self.products_fp8(x, u, o, product, out_norm, out)
        for name, (kernel, reference, parts, flops) in cases.items():
            expected = reference(*parts)
            error = float((kernel(*parts) - expected).abs().max() / expected.abs().max())
            assert error < 3e-2, f"{name}: relative error {error}"
            ours = flops / self.time_ms(partial(kernel, *parts)) / 1e9
            plain = flops / self.time_ms(partial(reference, *parts)) / 1e9
            print(f"{name}: {ours:.1f} TFLOP/s, torch {plain:.1f}, error {error:.1e}")
            found |= {f"{name}_tflops": round(ours, 1), f"{name}_torch_tflops": round(plain, 1)}
        return found

    def products_fp8(self, x: Any, u: Any, o: Any, product: Any, norm: Any, out: Any) -> Any:
        """The same two with rows rounded by row and weights by channel; errors against bf16."""
        from torch.nn.functional import silu

        from tokenmill.kernels import hstu

        rounded, weight = hstu.round_product(product), hstu.round_weight(out)
        calls: dict[str, tuple[Callable[[], Any], Any, float]] = {
            "uvqk_fp8": (
                lambda: hstu.norm_product_fp8(x, rounded),
                hstu.norm_uvqk.reference(x, product, 0),
                2.0 * x.shape[0] * product.weight.numel(),
            ),
            "output_fp8": (
                lambda: hstu.gate_output_fp8(x, u, o, norm, weight),
                hstu.gate_output.reference(x, silu(u), o, norm, out),
                2.0 * x.shape[0] * out.numel(),
            ),
        }
        found = {}
        for name, (call, expected, flops) in calls.items():
            error = float((call() - expected).abs().max() / expected.abs().max())
            assert error < 8e-2, f"{name}: relative error {error}"
            rate = flops / self.time_ms(call) / 1e9
            print(f"{name}: {rate:.1f} TFLOP/s, rounding and product; error {error:.1e}")
            found[f"{name}_tflops"] = round(rate, 1)
        return found

    def engine_ms(self, model: Any, requests: list[Any], batches: int = 20) -> float:
        """A batch through the engine, which makes the next one while it runs."""
        import time

        from tokenmill.ranking.engine import RankingEngine
        from tokenmill.ranking.policy import BatchLimits

        limits = BatchLimits(2**31, len(requests), latency_ms=3.6e6)
        engine, batches = RankingEngine(model, limits), 2 if self.tiny else batches
        start, answered = 0.0, 0
        for turn in range(batches + 2):
            for request in requests:
                name = f"{turn}-{request.request_id}"
                engine.submit(replace(request, request_id=name))
            answered += len(engine.step())
            if turn == 1:  # the first batch has compiled
                start, answered = time.perf_counter(), 0
        while engine.has_work():
            answered += len(engine.step())
        assert engine.stats().finished == {"done": (batches + 2) * len(requests)}
        return (time.perf_counter() - start) * 1000 * len(requests) / answered

    def model(self) -> dict[str, Any]:
        """Requests on the host to scores on the host, with random weights."""
        import torch

        from tokenmill.models.hstu import HstuModel, dense_tensors
        from tokenmill.ranking.batch import make_batch
        from tokenmill.ranking.model import RankingModel
        from tokenmill.ranking.stores.table import DeviceTable

        spec = self.spec
        tensors = {
            name: torch.randn(shape, device=self.device, dtype=self.dtype) * 0.05
            for name, shape in dense_tensors(spec).items()
        }
        counts = {"item": spec.num_items, "user": spec.num_users, "category": spec.num_categories}
        stores = {
            name: DeviceTable(
                torch.empty(
                    count, spec.embedding_dim, device=self.device, dtype=torch.float16
                ).normal_()
            )
            for name, count in counts.items()
        }
        model = RankingModel(HstuModel(spec, tensors), stores)
        requests, users = self.requests(), len(self.lengths)
        batch = make_batch(requests, spec, self.device)
        whole_ms = self.engine_ms(model, requests)
        dense_ms = self.time_ms(lambda: model.score_batch(batch))
        embedded = model.embed(batch)
        inputs_ms = self.time_ms(lambda: model.dense.inputs(batch, embedded))
        embed_ms = self.time_ms(lambda: model.embed(batch))
        batch_ms = self.time_ms(lambda: make_batch(requests, spec, self.device))
        print(
            f"of a batch: rows of the tables {embed_ms:.2f} ms, inputs of the layers "
            f"{inputs_ms:.2f} ms; the batch made on host and device {batch_ms:.2f} ms"
        )
        rounded = RankingModel(HstuModel(spec, tensors, fp8=True), stores)
        fp8_ms = self.time_ms(lambda: rounded.score_batch(batch))
        pairs = zip(self.lengths.tolist(), self.counts.tolist(), strict=True)
        flops = sum(spec.flops(n, m) for n, m in pairs)
        rate, ceiling = users / dense_ms * 1e3, CEILING_TFLOPS * 1e12 * users / flops
        print(
            f"model: {rate:.1f} samples/s ({flops / dense_ms / 1e9:.1f} TFLOP/s), with the batch "
            f"made on the host and two in flight {users / whole_ms * 1e3:.1f}; "
            f"ceiling {ceiling:.0f}; item table of {spec.num_items} rows"
        )
        print(f"model in fp8: {users / fp8_ms * 1e3:.1f} samples/s")
        return {
            "samples_per_s": round(rate, 1),
            "inputs_ms": round(inputs_ms, 3),
            "embed_ms": round(embed_ms, 3),
            "samples_per_s_fp8": round(users / fp8_ms * 1e3, 1),
            "samples_per_s_with_host": round(users / whole_ms * 1e3, 1),
            "ceiling_samples_per_s": round(ceiling, 1),
            "item_rows": spec.num_items,
            "users": users,
        }


if __name__ == "__main__":
    main()
