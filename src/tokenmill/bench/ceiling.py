"""Measures the best rates of this machine: GEMMs at a model's shapes, and memory reads."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from tokenmill.bench.mlperf.submission import NO_ACCELERATOR
from tokenmill.bench.results.manifest import cpu_name
from tokenmill.bench.roofline import PeakRates
from tokenmill.core.installation import package_version
from tokenmill.kernels import cpu_kernels
from tokenmill.kernels.matmul import matmul, pack
from tokenmill.kernels.rows import activation_limit, by_groups, quantize_rows

ROWS = 512
READ_BYTES = 2**29
LAUNCHES = 8  # of a GPU operation in one timed run
FP8_CAPABILITY = (8, 9)
BUDGET_S = 0.5  # of each measurement; the best repeat counts


class LinearShape(Protocol):
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


def measure_machine(spec: LinearShape, num_threads: int, device: str) -> PeakRates:
    """The CPU with as many threads as the engine uses, or the GPU."""
    rates = _measure_gpu(num_threads) if device == "cuda" else _measure_cpu(spec, num_threads)
    name = torch.cuda.get_device_name() if device == "cuda" else cpu_name()
    return replace(rates, name=name, software=_software())


def _software() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if triton := package_version("triton"):
        versions["triton"] = triton
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def peak_memory_mib(device: str) -> dict[str, float]:
    """What torch took of the GPU at most; nothing on CPU, whose memory is the process's own."""
    if device != "cuda":
        return {}
    peaks = {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    return {name: round(peak / 2**20, 1) for name, peak in peaks.items()}


def accelerator(device: str) -> dict[str, str]:
    """The fields of a system description about the GPU."""
    if device != "cuda":
        return dict(NO_ACCELERATOR)
    memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    return {
        "accelerators_per_node": "1",
        "accelerator_model_name": torch.cuda.get_device_name(),
        "accelerator_memory_capacity": f"{memory_gib:.0f} GiB",
    }


def device_features(device: str) -> frozenset[str]:
    """What the rungs of the ladder ask for; see bench/commands/ladder.py."""
    if device != "cuda":
        return frozenset({"cpu"} | ({"compiled"} if cpu_kernels() else set()))
    fp8 = torch.cuda.get_device_capability() >= FP8_CAPABILITY
    return frozenset({"cuda", "compiled"} | ({"fp8"} if fp8 else set()))


def _measure_gpu(num_threads: int) -> PeakRates:
    """Products of 8,192 squared in bf16 and fp8, and copies, which read and write."""
    side = 8192
    a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    products = {"bf16": lambda: a @ a} | _fp8_product(a)
    source = torch.empty(2**29, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _best_seconds([_launched(lambda: target.copy_(source))]) / LAUNCHES
    return PeakRates(
        gemm_flops={
            name: 2.0 * side**3 * LAUNCHES / _best_seconds([_launched(product)])
            for name, product in products.items()
        },
        read_bytes_per_s=2 * source.nbytes / copy_s,
        num_threads=num_threads,
    )


def _fp8_product(a: torch.Tensor) -> dict[str, Callable[[], object]]:
    """One scale per row and column, the second matrix column by column; {} where it cannot run."""
    x = a.to(torch.float8_e4m3fn)
    ones = torch.ones(len(a), 1, device=a.device)

    def product() -> object:
        return torch._scaled_mm(
            x, x.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    try:
        product()
    except (RuntimeError, AttributeError):  # an older GPU, or a torch without it
        return {}
    return {"fp8": product}


def _launched(run: Callable[[], object]) -> Callable[[], object]:
    """Several launches before one wait: the time of a launch stays hidden."""

    def several() -> None:
        for _ in range(LAUNCHES):
            run()
        torch.cuda.synchronize()

    return several


def _measure_cpu(spec: LinearShape, num_threads: int) -> PeakRates:
    """torch's thread count is put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        n, k = min(2 * spec.intermediate_size, 8192), spec.hidden_size
        flops = 2.0 * ROWS * n * k
        return PeakRates(
            gemm_flops={
                "fp32": flops / _best_seconds(_fp32_products(n, k)),
                "int8": flops / _best_seconds(_int8_products(n, k)),
                "int16": flops / _best_seconds(_int16_products(n, k)),
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
    packed = pack(weight, "int8", grouped=True)
    products: list[Callable[[], object]] = [lambda: matmul(quantize_rows(x, by_groups(k)), packed)]
    if "fbgemm" in torch.backends.quantized.supported_engines:
        scale = weight.abs().max().item() / 127
        with warnings.catch_warnings():  # torch announces the end of its quantised tensors
            warnings.simplefilter("ignore")
            quantized = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
        prepacked = torch.ops.quantized.linear_prepack(quantized, None)
        products.append(lambda: torch.ops.quantized.linear_dynamic(x, prepacked, True))
    return products


def _int16_products(n: int, k: int) -> list[Callable[[], object]]:
    """What attention over an fp16 cache consists of: products of pairs of int16."""
    packed = pack(torch.randn(n, k), "int8")
    rows = quantize_rows(torch.randn(ROWS, k), activation_limit(k))
    return [lambda: matmul(rows, packed)]


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
