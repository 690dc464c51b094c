"""What this machine does at best: GEMM rates at a model's shapes, and the rate of memory reads."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from tokenmill.bench.throughput import Machine
from tokenmill.core.spec import ModelSpec
from tokenmill.kernels.matmul import activation_limit, matmul, pack, quantize_rows

ROWS = 512
READ_BYTES = 2**29
BUDGET_S = 0.5  # of each measurement; the best repeat counts


def measure_machine(spec: ModelSpec, num_threads: int, device: str) -> Machine:
    """The CPU with as many threads as the engine uses, or the GPU."""
    return _measure_gpu(num_threads) if device == "cuda" else _measure_cpu(spec, num_threads)


def _measure_gpu(num_threads: int) -> Machine:
    """bf16 products of 8,192 squared, and copies, which read and write."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)

    def product() -> None:
        _ = a @ a
        torch.cuda.synchronize()

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return Machine(
        gemm_flops={"bf16": 2.0 * 8192**3 / _best_seconds([product])},
        read_bytes_per_s=2 * source.nbytes / _best_seconds([copy]),
        num_threads=num_threads,
    )


def _measure_cpu(spec: ModelSpec, num_threads: int) -> Machine:
    """torch's thread count is put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        n, k = min(2 * spec.intermediate_size, 8192), spec.hidden_size
        flops = 2.0 * ROWS * n * k
        return Machine(
            gemm_flops={
                "fp32": flops / _best_seconds(_fp32_products(n, k)),
                "int8": flops / _best_seconds(_int8_products(n, k)),
            },
            read_bytes_per_s=READ_BYTES / _best_seconds([_read()]),
            num_threads=num_threads,
        )
    finally:
        torch.set_num_threads(before)


def _fp32_products(n: int, k: int) -> list[Callable[[], object]]:
    """torch's GEMM and this package's: the ceiling is the better of both."""
    weight, x = torch.randn(n, k), torch.randn(ROWS, k)
    packed = pack(weight, "fp32")
    return [lambda: x @ weight.T, lambda: matmul(x, packed)]


def _int8_products(n: int, k: int) -> list[Callable[[], object]]:
    weight, x = torch.randn(n, k), torch.randn(ROWS, k)
    packed, limit = pack(weight, "int8"), activation_limit(k)
    products: list[Callable[[], object]] = [lambda: matmul(quantize_rows(x, limit), packed)]
    if "fbgemm" in torch.backends.quantized.supported_engines:
        scale = weight.abs().max().item() / 127
        with warnings.catch_warnings():  # torch announces the end of its quantised tensors
            warnings.simplefilter("ignore")
            quantized = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
        prepacked = torch.ops.quantized.linear_prepack(quantized, None)
        products.append(lambda: torch.ops.quantized.linear_dynamic(x, prepacked, True))
    return products


def _read() -> Callable[[], object]:
    data = torch.ones(READ_BYTES // 4)
    return data.sum


def _best_seconds(candidates: list[Callable[[], object]]) -> float:
    """The shortest run over all candidates, each repeated for its share of the budget."""
    best = float("inf")
    for run in candidates:
        run()
        deadline = time.perf_counter() + BUDGET_S / len(candidates)
        while (begin := time.perf_counter()) < deadline:
            run()
            best = min(best, time.perf_counter() - begin)
    return best
