"""Attention of prompts on one GPU: TFLOP/s of the plain kernel, that for Hopper, and cuDNN's.

    python scripts/prefill_kernels.py            one Hopper GPU, about half a minute
    python scripts/prefill_kernels.py --tiny     no GPU: the reference at a tiny size

Prompts lie in a paged cache of bfloat16, in blocks of 64 tokens in any order; cuDNN's kernel gets
them side by side, without pages. Products that the causal mask drops are not counted. Errors are
relative to fp32 at a small size with a context. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.kernels import attention
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.gpu import hopper

CEILING_TFLOPS = 790.0  # bf16 products of an H200, measured
MODELS = {"llama-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}
OTHERS = {"gpt-oss": (64, 8, 64)}  # at one size alone
SIZES = ((1, 8192, 0), (8, 1024, 0), (16, 512, 0), (1, 32_768, 0), (1, 2048, 6144), (1, 256, 0))
BLOCK_SIZE = 64
Work = Callable[[], torch.Tensor]


class Prompts:
    """`count` prompts of `length` tokens after `context` tokens, and their caches."""

    def __init__(
        self, heads: tuple[int, int, int], size: tuple[int, int, int], device: str
    ) -> None:
        self.heads, self.kv_heads, self.dim = heads
        self.count, self.length, self.context = size
        width = -(-(self.length + self.context) // BLOCK_SIZE)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        shape = (self.count * width, self.kv_heads, BLOCK_SIZE, self.dim)
        rows = (self.heads + 2 * self.kv_heads) * self.dim
        qkv = torch.randn(self.count * self.length, rows, device=device, dtype=self.dtype)
        self.q = qkv.mul_(self.dim**-0.5)[:, : self.heads * self.dim]
        self.v_cache = torch.randn(shape, device=device, dtype=self.dtype)
        keys = torch.randn(shape, device=device, dtype=self.dtype)
        self.k_cache = keys if device == "cuda" else keys.mT.contiguous()
        self.batch = self._batch(width, device)

    def _batch(self, width: int, device: str) -> AttentionBatch:
        lens = np.full(self.count, self.length)
        plans = plan_tiles(lens, self.heads // self.kv_heads, self.kv_heads, device == "cuda")
        starts = torch.arange(self.count + 1, device=device) * self.length
        blocks = torch.randperm(self.count * width, device=device).view(self.count, width)
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        return AttentionBatch(
            positions=nothing,
            slots=nothing,
            query_starts=starts.int(),
            context_lens=torch.full_like(starts[1:], self.context).int(),
            block_tables=blocks.int(),
            table_rows=torch.arange(self.count, dtype=torch.int32, device=device),
            tiles=tuple(QueryTiles.of(plan, device) for plan in plans),
        )

    def flops(self) -> float:
        keys = self.length * self.context + self.length * (self.length + 1) / 2
        return 4.0 * self.count * keys * self.heads * self.dim

    def by_kernel(self, name: str) -> Work:
        def work() -> torch.Tensor:
            hopper.ALLOWED = name == "hopper"
            return attention.paged_attention(
                self.q, self.k_cache, self.v_cache, self.batch, self.heads
            )

        return work

    def by_cudnn(self) -> Work:
        """Without pages; torch's causal mask has no context."""
        shape = (self.count, self.length, -1, self.dim)
        q = self.q.contiguous().view(shape).transpose(1, 2)
        k, v = (torch.randn_like(q[:, : self.kv_heads]) for _ in range(2))

        def work() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=1.0, enable_gqa=True
                )

        return work

    def reference(self) -> torch.Tensor:
        caches = (self.k_cache.float(), self.v_cache.float())
        out = torch.empty_like(self.q, dtype=torch.float32)
        attention.attend_paged.reference(self.q.float(), out, self.batch, *caches, self.heads)
        return out

    def error(self, kernel: str) -> float:
        """The relative error of a kernel."""
        expected = self.reference()
        return float((self.by_kernel(kernel)().float() - expected).norm() / expected.norm())


def seconds(work: Work, repeats: int = 5) -> float:
    """Of one run; on a GPU of several in a graph, so that launching them does not count."""
    work()
    if not torch.cuda.is_available():
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(min(times)) / repeats / 1e3


def measure(name: str, prompts: Prompts, kernels: tuple[str, ...]) -> dict[str, float]:
    """TFLOP/s by kernel; one that fails is named, and the others go on."""
    works = {kernel: prompts.by_kernel(kernel) for kernel in kernels}
    if torch.cuda.is_available() and not prompts.context:
        works["cudnn"] = prompts.by_cudnn()
    rates: dict[str, float] = {}
    for kernel, work in works.items():
        try:
            spent = seconds(work)
        except Exception as fault:
            print(f"{name} {kernel}: {type(fault).__name__}: {str(fault)[:160]}", flush=True)
            continue
        rates[kernel] = round(prompts.flops() / spent / 1e12, 1)
        share = rates[kernel] / CEILING_TFLOPS
        print(
            f"{name:32s} {kernel:7s} {spent * 1e6:9.1f} us {rates[kernel]:7.1f} TFLOP/s, "
            f"{share:.0%} of {CEILING_TFLOPS:.0f}",
            flush=True,
        )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="A tiny size on CPU.")
    tiny = parser.parse_args().tiny
    if not tiny and not torch.cuda.is_available():
        sys.exit("There is no GPU here: --tiny runs the reference at a tiny size on CPU.")
    torch.manual_seed(0)
    device, kernels = ("cpu", ("triton",)) if tiny else ("cuda", ("triton", "hopper"))
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for model, heads in (MODELS | OTHERS).items():
            small = Prompts(heads, (2, 333, 100), device)
            errors = {kernel: small.error(kernel) for kernel in kernels}
            print(model, "relative error:", {k: f"{e:.1e}" for k, e in errors.items()}, flush=True)
            found[f"{model} error"] = errors
            sizes = ((2, 40, 9),) if tiny else SIZES if model in MODELS else SIZES[:1]
            for size in sizes:
                name = f"{model} {size[0]} x {size[1]}" + (f" after {size[2]}" if size[2] else "")
                found[name] = measure(name, Prompts(heads, size, device), kernels)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
