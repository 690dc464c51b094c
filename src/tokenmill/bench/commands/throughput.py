"""tokenmill bench throughput."""

from __future__ import annotations

import gc
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench import offline as bench
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.options import BenchConfig
from tokenmill.bench.roofline import CellSetup, PeakRates, roofline
from tokenmill.bench.workload import BenchError, Cell, make_cells
from tokenmill.core.config import (
    DEFAULT_BLOCK_SIZE,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tokenmill.core.metrics import acceptance
from tokenmill.core.types import ModelLoadError
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    PARALLEL,
    SCHEDULER,
    Settings,
    SettingsError,
)
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.bench.results.reports import CellReport, ThroughputReport
    from tokenmill.engine.build import BuiltEngine

PANELS = {
    "Benchmark": (BenchConfig, JsonOption),
    "Model": MODEL,
    "KV cache": CACHE,
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
    "Ranks": PARALLEL,
}
SHAPES = Path(bench.__file__).parent / "shapes"
NOT_WITH_LENGTHS = ("cell", "input-len", "bench-seed")


def throughput(settings: Settings) -> None:
    """Tokens per second of the engine, beside the ceiling of the machine.

    Three cells: [bold]batch[/bold] (32 requests, 128 tokens in and 64 out),
    [bold]single[/bold] (one stream, 128 in and 128 out) and [bold]prefill[/bold] (one prompt
    of 2,048 tokens). Each is warmed up; the median of the rounds counts.
    Prompts are random tokens, all different.

    --lengths runs one workload instead, whose requests differ in length and
    arrive at once. With --random-weights a model is a config.json, or one of
    the shapes llama3.1-8b, qwen3-0.6b, qwen3-14b, qwen3-30b-a3b, gpt-oss-20b
    and gpt-oss-120b.

    tokenmill bench throughput
    tokenmill bench throughput --dtype fp32 --cell single --rounds 5
    tokenmill bench throughput --model llama3.1-8b --random-weights --device cuda
    --lengths llama3.1-8b --output-len 128 --num-prompts 2000 --dtype fp8
    tokenmill bench throughput --model qwen3-0.6b --random-weights --lengths uniform:100-1024
    """
    from tokenmill.bench.ceiling import measure_machine, peak_memory_mib
    from tokenmill.bench.results.reports import as_json

    config = settings.build(BenchConfig)
    check_flags(settings)
    cells = make_cells(config)
    num_threads = settings.build(ModelConfig).num_threads or os.cpu_count() or 1
    built, setup = build(settings, config, cells)
    with console.progress("Benchmark runs") as update:
        engine = bench.OurEngine(built.engine)
        measured = bench.measure(engine, cells, config, built.spec.vocab_size, update)
    # Before the buffers of the next measurement.
    peaks = bench.peak_rss_mib(), peak_memory_mib(built.device)
    console.note("Measuring the machine")
    machine = measure_machine(built.spec, num_threads, built.device)
    parallel = settings.build(ParallelConfig)
    if built.device == "cuda":
        machine = machine.times(parallel.num_ranks)
    report = throughput_report(cells, measured, machine, built, setup, peaks)
    if parallel.num_ranks > 1:
        report.ranks = ranks_report(parallel)
    if graphs := report.cuda_graphs:
        for warning in graphs["warnings"]:
            console.note(f"warning: {warning}")
    if not settings.get("json"):
        print_throughput(cells, report)
    console.print_json(as_json(report), settings.get("json"))


def check_flags(settings: Settings) -> None:
    """A workload has no cells, so what shapes them is refused beside --lengths."""
    for key in NOT_WITH_LENGTHS:
        if "lengths" in settings and settings.values.get(key):
            raise SettingsError(f"--{key} shapes the cells and does not go with --lengths")


def model_path(config: ModelConfig) -> Path:
    """The model's folder or file; a shape of this package only with random weights."""
    shapes = {file.stem: file for file in sorted(SHAPES.glob("*.json"))}
    shape = shapes.get(config.model.lower())
    from tokenmill.models.checkpoints.store import CATALOG, resolve

    if shape and not Path(config.model).exists():
        if config.random_weights:
            return shape
        if shape.stem not in CATALOG:
            raise ModelLoadError(f"{config.model} is a shape without weights: add --random-weights")

    try:
        with console.progress(f"Downloading {config.model}", size_in_bytes=True) as update:
            return resolve(config.model, update)
    except ModelLoadError as error:
        if not config.random_weights:
            raise
        raise ModelLoadError(f"{error}; shapes of this package: {', '.join(shapes)}") from error


def build(
    settings: Settings, config: BenchConfig, cells: list[Cell]
) -> tuple[BuiltEngine, CellSetup]:
    """An engine with room for these cells, and what bounds its speed."""
    path = model_path(settings.build(ModelConfig))
    with (
        console.progress("Loading weights", size_in_bytes=True) as loaded,
        console.progress("Capturing CUDA graphs") as captured,
    ):
        from tokenmill.engine.build import build_engine
        from tokenmill.engine.choices import choose_device, resolve_setup

        asked = settings.setup()
        model = replace(asked.model, model=str(path))
        limits = _limits(asked.scheduler, cells)
        cache = _cache(settings, config, cells, limits, choose_device(model))
        asked = replace(asked, model=model, cache=cache, scheduler=limits)
        built = build_engine(resolve_setup(asked), progress=loaded, capture_progress=captured)
    _check_context(cells, built)
    gc.freeze()  # the loaded model is not garbage; do not scan it on every collection
    parallel = asked.parallel
    num_caches = parallel.num_ranks if parallel.attention_dp else 1
    return built, CellSetup(
        dtype=built.dtype,
        kv_dtype=built.kv_dtype,
        max_num_seqs=num_caches * built.max_num_seqs,
        kv_tokens=num_caches * built.whole_tokens,
    )


def _limits(limits: SchedulerConfig, cells: list[Cell]) -> SchedulerConfig:
    """Room for all requests to wait."""
    num_prompts = max(cell.num_prompts for cell in cells)
    return replace(limits, max_waiting=max(limits.max_waiting, num_prompts))


def _cache(
    settings: Settings,
    config: BenchConfig,
    cells: list[Cell],
    limits: SchedulerConfig,
    device: str,
) -> CacheConfig:
    """A workload has no use for a prefix cache; on CPU there are as many blocks as it takes."""
    cache = settings.build(CacheConfig, prefix_cache=config.lengths is None)
    if device == "cuda" or "kv-cache-memory" in settings:
        return cache
    block_size = cache.block_size or DEFAULT_BLOCK_SIZE
    return replace(cache, num_blocks=num_blocks(cells, block_size, limits.num_seqs))


def num_blocks(cells: list[Cell], block_size: int, max_num_seqs: int) -> int:
    """Blocks that hold the largest cell and what the prefix cache keeps of the one before."""

    def needed(cell: Cell) -> int:
        sizes = sorted((sum(both) // block_size + 2 for both in cell.lengths), reverse=True)
        return sum(sizes[:max_num_seqs])

    return 2 * max(needed(cell) for cell in cells)


def _check_context(cells: list[Cell], built: BuiltEngine) -> None:
    limit, advice = built.max_model_len, "choose others with --cell or --lengths"
    if limit == built.kv_tokens:
        advice = "the KV cache holds no more, raise --kv-cache-memory"
    for cell in cells:
        if cell.longest > limit:
            raise BenchError(
                f"cell {cell.name} needs {cell.longest} tokens, but the model's context is "
                f"{limit}; {advice}"
            )


def throughput_report(
    cells: list[Cell],
    measured: dict[str, list[bench.CellRun]],
    machine: PeakRates,
    built: BuiltEngine,
    setup: CellSetup,
    peaks: tuple[float, dict[str, float]],
) -> ThroughputReport:
    """All figures of a run; `peaks` is the memory of the process and of the GPU in MiB."""
    from tokenmill.bench.results.reports import ThroughputReport

    reports: dict[str, dict[str, CellReport]] = {}
    for cell in cells:
        runs = measured[cell.name]
        gained = bench.tokens_per_step(cell, runs)
        roof = roofline(cell, built.spec, replace(setup, tokens_per_step=gained), machine)
        figures = bench.cell_report(cell, runs)
        figures = bench.with_ceiling(figures, cell, roof, machine, setup.dtype)
        reports[cell.name] = {bench.OURS: figures}
    report = ThroughputReport(
        model=built.description,
        dtype=setup.dtype,
        kv_dtype=setup.kv_dtype,
        device=built.device,
        num_threads=machine.num_threads,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=built.max_num_batched_tokens,
        kv_tokens=setup.kv_tokens,
        weight_mib=round(built.weight_bytes / 2**20, 1),
        machine={
            "name": machine.name,
            "software": machine.software,
            **{f"{name}_gemm_gflops": round(f / 1e9, 1) for name, f in machine.gemm_flops.items()},
            "read_gb_s": round(machine.read_bytes_per_s / 1e9, 1),
        },
        cells=reports,
        peak_rss_mib=peaks[0],
        peak_gpu_mib=peaks[1],
    )
    stats = built.engine.stats()
    if stats.num_drafted:
        shares = acceptance(stats.num_drafted, stats.num_accepted)
        report.mtp = {"acceptance": shares}
    if built.runner.decode.graphs is not None:
        report.cuda_graphs = built.runner.decode.graphs.report.as_json()
    return report


def ranks_report(parallel: ParallelConfig) -> dict[str, Any]:
    """How many ranks a figure is of, and how the work is split among them."""
    default = asdict(ParallelConfig())
    given = {name: value for name, value in asdict(parallel).items() if value != default[name]}
    return {"count": parallel.num_ranks, **given}


def print_throughput(cells: list[Cell], report: ThroughputReport) -> None:
    """Cell by cell: the rate beside its ceiling."""
    machine = report.machine
    types = f"computed in {report.dtype}, KV cache in {report.kv_dtype}"
    console.out.print(f"{report.model}, {types}", markup=False)
    rates = [
        f"{key.removesuffix('_gemm_gflops')} GEMM {rate:,.0f} GFLOP/s"
        for key, rate in machine.items()
        if key.endswith("_gemm_gflops")
    ]
    where = machine["name"]
    if report.device != "cuda":
        where += f", {report.num_threads} threads"
    rates.append(f"memory {machine['read_gb_s']:,.1f} GB/s")
    console.out.print(f"{where}: {', '.join(rates)}", markup=False)
    peaks = [f"{name} {mib:,.0f} MiB of the GPU" for name, mib in report.peak_gpu_mib.items()]
    peaks.append(f"{report.peak_rss_mib:,.0f} MiB of the host")
    console.out.print(f"peak memory {', '.join(peaks)}; weights {report.weight_mib:,.0f} MiB")
    if ranks := report.ranks:
        names = ", ".join(f"{name} {value}" for name, value in ranks.items() if name != "count")
        console.out.print(
            f"{ranks['count']} ranks ({names}); memory and weights are the first one's"
        )
    if report.mtp:
        shares = report.mtp["acceptance"]
        first, length = shares["first"], shares["length"]
        console.out.print(
            f"drafts: {first:.1%} of the first are accepted, {length:.2f} tokens per step"
        )
    for cell in cells:
        _print_cell(cell, report.cells[cell.name][bench.OURS])


def _print_cell(cell: Cell, ours: CellReport) -> None:
    unit = "prompt" if cell.counts_prompt else "output"
    console.out.print(
        f"\n[bold]{cell.name}[/bold] {cell.shape}: {ours.tok_s:,.1f} {unit} tok/s of a ceiling "
        f"of ~{ours.ceiling_tok_s:,.0f} ({ours.share_of_ceiling:.0%})"
    )
    console.out.print(
        "  ceiling: prefill, decode's linear layers and decode's attention one after another at "
        f"the measured rates; all of it overlapped: ~{ours.overlap_ceiling_tok_s:,.0f}"
    )
    console.out.print(
        f"  total {ours.total_tok_s:,.1f} tok/s, MFU {ours.mfu:.0%} of the "
        f"GEMM rate, MBU {ours.mbu:.0%} of the read rate"
    )
    for label, summary in (("TTFT", ours.ttft_ms), ("TPOT", ours.tpot_ms)):
        if summary:
            parts = ", ".join(f"{p} {summary[p]:.1f}" for p in ("p50", "p90", "p99"))
            console.out.print(f"  {label} ms: {parts}")


COMMANDS = (BenchCommand("throughput", throughput, PANELS),)
