"""The time of a decode step and its parts, beside the least time of each part."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.bench.ceiling import measure_machine
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.roofline import BYTES, HEAD_DTYPE, PeakRates, expert_bytes, expert_dtype
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import SchedulerConfig, Setup
from tokenmill.core.flags import count, numbers, read_int, setting
from tokenmill.core.requests import Generate, Request
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import choose_device, resolve_setup
from tokenmill.engine.graphs.capture import CaptureLimits, capture_all
from tokenmill.engine.graphs.decode_graphs import DecodeGraphs
from tokenmill.engine.runner import ModelRunner
from tokenmill.kernels import MODE
from tokenmill.sched.sequence import Batch, Sequence
from tokenmill.settings import CACHE, EXECUTION, MODEL, Settings

GRAPH_BYTES = 2**34
PROFILED = 3
# Nothing of it shows in single steps without drafts.
UNUSED = {"draft", "prefix-cache", "kv-connector", "overlap", "mtp", "mtp-adaptive"}
ENGINE = tuple(s for s in (*MODEL, *CACHE, *EXECUTION) if s.key not in UNUSED)
PARTS = ("attention", "experts", "linear", "other")
# Where a kernel belongs, by a part of its name; the first that fits.
_KERNELS = {
    "latent_kernel": "attention",
    "_attention_kernel": "attention",
    "prefill_kernel": "attention",
    "_join_kernel": "attention",
    "_unpack_kernel": "attention",
    "grouped_kernel": "experts",
    "_skinny_kernel": "linear",
    "gated_kernel": "linear",
    "_matmul_kernel": "linear",
    "_scale_kernel": "linear",
    "_join_parts_kernel": "linear",
    "nvjet": "linear",
    "gemm": "linear",
    "gemv": "linear",  # cuBLAS's, for one row
    "cutlass": "linear",
    "splitKreduce": "linear",
}
# Triton kernels that can be left out one by one, and what stands in for them.
FUSIONS = {
    "rms_norm": "norm, residual and rounding in one pass",
    "act_and_mul": "gate and rounding in one pass",
    "gated_product": "gate and up, and their gate, in one kernel, where it is quicker",
    "quantize_rows": "rounding in one pass",
    "route": "the choice of experts in one kernel",
    "latent_cache": "latent norm, rotation and cache write in one kernel",
    "rope_and_cache": "head norms, rotation and cache write in one kernel",
    "dependent_launch": "kernels set up, and weights read ahead, while others still run",
}


@dataclass(frozen=True)
class Options:
    batch: tuple[int, ...] = setting(
        (32, 64, 128, 256), "Sequences of a step.", numbers(read_int, 1, "N,N")
    )
    context: int = setting(4096, "Tokens that each sequence has in the cache.", count(1))
    fusions: bool = setting(False, "Also leave out one fused kernel after another.")


def run(options: Options, settings: Settings) -> Report:
    """Time of a decode step by batch size, its parts, and the least time of each part.

    Every sequence has the same context, and the cache holds zeros. On a GPU the step runs as a CUDA
    graph. Its parts are timed kernel by kernel, none of which begins before the last has ended:
    their sum may exceed the step. With --fusions each fused kernel in turn is replaced by torch's
    operations, at the largest batch.

    The shape deepseek-r1-rank is one rank of 32: all layers' attention, dense and shared parts, and
    8 of 256 experts, each of which gets as many rows as there are sequences; no dispatch between
    ranks.

    python -m benchmarks.decode --model deepseek-r1-rank --random-weights --dtype fp8
    python -m benchmarks.decode --batch 1,8 --context 512
    """
    setup = settings.setup()
    built = build(setup, options)
    console.note("Measuring the machine")
    threads = setup.model.num_threads or os.cpu_count() or 1
    machine = measure_machine(built.spec, threads, built.device)
    graphs = built.device == "cuda" and setup.execution.cuda_graphs
    report = {
        "model": built.description,
        "dtype": built.dtype,
        "kv_dtype": built.kv_dtype,
        "context": options.context,
        "cuda_graphs": graphs,
        "machine": {
            "name": machine.name,
            "gemm_gflops": {n: round(rate / 1e9, 1) for n, rate in machine.gemm_flops.items()},
            "read_gb_s": round(machine.read_bytes_per_s / 1e9, 1),
            "software": machine.software,
        },
        "steps": [measure(built, size, options.context, graphs, machine) for size in options.batch],
    }
    if options.fusions:
        probe = DecodeProbe(built.runner, max(options.batch), options.context)
        report["fusions"] = _fusions(probe, graphs)
    return report


def build(setup: Setup, options: Options) -> BuiltEngine:
    largest, context = max(options.batch), options.context
    model = replace(setup.model, model=str(model_path(setup.model)))
    device, cache = choose_device(model), setup.cache
    if options.fusions and device != "cuda":
        raise BenchError("--fusions needs a GPU: on a CPU no kernel can be left out alone")
    if device == "cpu" and cache.num_blocks is None and cache.memory_bytes is None:
        cache = replace(cache, num_blocks=largest * (context // (cache.block_size or 16) + 1))
    with console.progress("Loading weights", size_in_bytes=True) as loaded:
        limits = SchedulerConfig(max_num_seqs=largest)
        launched = replace(setup.execution, cuda_graphs=False)
        built = build_engine(resolve_setup(Setup(model, cache, limits, launched)), progress=loaded)
    if context + 1 > built.max_model_len:
        raise BenchError(f"--context {context}: the model's context is {built.max_model_len}")
    room = built.num_blocks // pages_per_seq(built.runner, context)
    if largest > room:
        raise BenchError(f"--batch {largest}: the KV cache holds {room} sequences of {context}")
    return built


def measure(
    built: BuiltEngine, size: int, context: int, graphs: bool, machine: PeakRates
) -> Report:
    """A step of so many sequences, and its parts on a GPU."""
    probe = DecodeProbe(built.runner, size, context)
    if graphs:
        probe.capture()
    least = least_seconds(built.spec, built.dtype, built.kv_dtype, size, context, machine)
    seconds, parts = probe.seconds(), {}
    if built.device == "cuda":
        with without(["dependent_launch"]):  # one after another: no kernel waits in its time
            if graphs:
                probe.capture()
            parts = by_part(probe.kernels())
    ms = {part: round(1e3 * value, 4) for part, value in parts.items()}
    least_ms = {part: round(1e3 * value, 4) for part, value in least.items()}
    total = sum(least.values())
    return {
        "batch": size,
        "ms": round(1e3 * seconds, 4),
        "tok_s": round(size / seconds, 1),
        "least_ms": round(1e3 * total, 4),
        "share_of_ceiling": round(total / seconds, 4),
        "parts_ms": ms,
        "parts_least_ms": least_ms,
        "parts_share": {
            p: round(least_ms[p] / ms[p], 4) for p in least_ms if ms.get(p) and least_ms[p]
        },
    }


def _fusions(probe: DecodeProbe, graphs: bool) -> list[dict[str, Any]]:
    """The step without one fused kernel after another, and without graphs."""

    def seconds() -> float:
        if graphs:
            probe.capture()
        return probe.seconds()

    whole = seconds()
    found: dict[str, float] = {}
    for kernel in FUSIONS:
        with without([kernel]):
            found[kernel] = seconds()
    if graphs:
        probe.runner.decode.graphs = None
        found["cuda_graphs"] = probe.seconds()
    return [
        {"left_out": name, "ms": round(1e3 * slow, 4), "slower": round(slow / whole, 4)}
        for name, slow in found.items()
    ]


def show(report: Report) -> None:
    out = console.out.print
    rates = report["machine"]
    gemm = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates["gemm_gflops"].items())
    out(f"{report['model']}, computed in {report['dtype']}, KV cache in {report['kv_dtype']}")
    out(f"{rates['name']}: GEMM {gemm} GFLOP/s, memory {rates['read_gb_s']:,.0f} GB/s")
    out(f"context of {report['context']} tokens; time of a step and its parts, (share of ceiling)")
    for row in report["steps"]:
        parts = "; ".join(
            f"{part} {ms:.2f} ms"
            + (f" ({row['parts_share'][part]:.0%})" if part in row["parts_share"] else "")
            for part, ms in row["parts_ms"].items()
        )
        share = f"{row['share_of_ceiling']:.0%} of its ceiling, {row['least_ms']:.2f} ms"
        out(f"  batch {row['batch']:4d}: {row['ms']:.2f} ms, {row['tok_s']:,.0f} tok/s, {share}")
        if parts:
            out(f"              {parts}")
    for row in report.get("fusions", ()):
        what = FUSIONS.get(row["left_out"], "one launch a step")
        out(f"  without {row['left_out']} ({what}): {row['ms']:.2f} ms, x{row['slower']:.2f}")


def part_of(kernel: str) -> str:
    """The part of the step that a kernel computes."""
    return next((part for name, part in _KERNELS.items() if name in kernel), "other")


def by_part(kernels: Mapping[str, float]) -> dict[str, float]:
    parts = dict.fromkeys(PARTS, 0.0)
    for kernel, seconds in kernels.items():
        parts[part_of(kernel)] += seconds
    return parts


def least_seconds(
    spec: ModelSpec, dtype: str, kv_dtype: str, batch: int, context: int, machine: PeakRates
) -> dict[str, float]:
    """The roofline of each part: arithmetic or reading, whichever takes longer."""
    seen = batch * spec.attended_positions(context + 1) - batch * spec.attended_positions(context)
    entry = spec.num_kv_heads * sum(spec.cache_dims) * BYTES[kv_dtype]
    attention = max(
        seen * spec.seen_flops(decode=True) / machine.flops_per_s(kv_dtype),
        seen * entry / machine.read_bytes_per_s,
    )
    head_type, head = HEAD_DTYPE.get(dtype, dtype), spec.vocab_size * spec.hidden_size
    rate, experts = machine.flops_per_s(dtype), 0.0
    rounded, plain, expert_params = spec.step_params(batch)
    if spec.moe is not None:
        one = sum(spec.moe.layers) * spec.moe.expert_params(spec.hidden_size)
        experts = max(
            2 * batch * spec.moe.top_k * one / machine.flops_per_s(expert_dtype(spec, dtype)),
            expert_params * expert_bytes(spec, dtype) / machine.read_bytes_per_s,
        )
    linear = max(
        2 * batch * (rounded / rate + (plain + head) / machine.flops_per_s(head_type)),
        (rounded * BYTES[dtype] + (plain + head) * BYTES[head_type]) / machine.read_bytes_per_s,
    )
    return {"attention": attention, "experts": experts, "linear": linear}


class DecodeProbe:
    """Repeats one decode step: `size` sequences that have `context` tokens in the cache each.

    The cache holds zeros, so nothing is learnt from the answers. The newest tokens differ, so that
    they choose experts of their own.
    """

    def __init__(self, runner: ModelRunner, size: int, context: int) -> None:
        self.runner, self.size = runner, size
        vocab, source = runner.model.spec.vocab_size, random.Random(0)
        num_blocks, per_seq = context // runner.block_size + 1, pages_per_seq(runner, context)
        items = []
        for slot in range(size):
            token_ids = [0] * context + [source.randrange(vocab)]
            seq = Sequence(
                Request(str(slot), Generate(token_ids)), (0, 0, slot), context + 2, frozenset()
            )
            pages = list(range(slot * per_seq, (slot + 1) * per_seq))
            seq.block_ids, seq.window_ids = pages[:num_blocks], pages[num_blocks:]
            if groups := runner.sliding.num_groups:
                seq.window_first = num_blocks - len(seq.window_ids) // groups
            seq.slot, seq.num_computed_tokens = slot, context
            items.append((seq, 1))
        self.batch = Batch(items, size, [(seq, 0) for seq, _ in items])

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture this size alone; without it the kernels are launched one by one."""
        runner = self.runner
        graphs = runner.decode.graphs = DecodeGraphs(
            runner.model, runner.kv_cache, runner.builder, self.size, [self.size]
        )
        jobs = graphs.jobs(torch.cuda.graph_pool_handle())
        graphs.start(capture_all(jobs, CaptureLimits(math.inf, GRAPH_BYTES)))

    def seconds(self, repeats: int = 20) -> float:
        self._run(3)
        begin = time.perf_counter()
        self._run(repeats)
        return (time.perf_counter() - begin) / repeats

    def kernels(self) -> dict[str, float]:
        """Seconds of a step by kernel of the GPU."""
        self._run(1)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self._run(PROFILED)
        return {
            event.key: event.self_device_time_total * 1e-6 / PROFILED
            for event in profiled.key_averages()
            if event.self_device_time_total
        }

    def _run(self, repeats: int) -> None:
        """As in the overlapped loop, a step is launched before the one before it is over."""
        running = self.runner.launch(self.batch)
        for _ in range(repeats - 1):
            running, last = self.runner.launch(self.batch), running
            last.wait()
        running.wait()


def pages_per_seq(runner: ModelRunner, context: int) -> int:
    """Blocks of the cache that a sequence takes which decodes after so many tokens."""
    return runner.sliding.num_pages(context // runner.block_size + 1, 1, runner.block_size)


@contextmanager
def without(kernels: Iterable[str]) -> Iterator[None]:
    """Let torch's operations stand in for these Triton kernels."""
    before, MODE.without = MODE.without, frozenset(kernels)
    try:
        yield
    finally:
        MODE.without = before


BENCHMARK = Benchmark("decode", Options, run, show, ENGINE)

if __name__ == "__main__":
    BENCHMARK.main()
