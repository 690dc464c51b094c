"""Builds the JSON report of the throughput benchmark, and prints it as text."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tokenmill.bench import offline as bench
from tokenmill.bench.roofline import CellSetup, PeakRates, roofline
from tokenmill.bench.workload import Cell
from tokenmill.console import out
from tokenmill.core.config import ParallelConfig
from tokenmill.core.metrics import acceptance

if TYPE_CHECKING:
    from tokenmill.bench.results.reports import CellReport, ThroughputReport
    from tokenmill.engine.build import BuiltEngine


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
    out.print(f"{report.model}, {types}", markup=False)
    rates = [
        f"{key.removesuffix('_gemm_gflops')} GEMM {rate:,.0f} GFLOP/s"
        for key, rate in machine.items()
        if key.endswith("_gemm_gflops")
    ]
    where = machine["name"]
    if report.device != "cuda":
        where += f", {report.num_threads} threads"
    rates.append(f"memory {machine['read_gb_s']:,.1f} GB/s")
    out.print(f"{where}: {', '.join(rates)}", markup=False)
    peaks = [f"{name} {mib:,.0f} MiB of the GPU" for name, mib in report.peak_gpu_mib.items()]
    peaks.append(f"{report.peak_rss_mib:,.0f} MiB of the host")
    out.print(f"peak memory {', '.join(peaks)}; weights {report.weight_mib:,.0f} MiB")
    if ranks := report.ranks:
        names = ", ".join(f"{name} {value}" for name, value in ranks.items() if name != "count")
        out.print(f"{ranks['count']} ranks ({names}); memory and weights are the first one's")
    if report.mtp:
        shares = report.mtp["acceptance"]
        first, length = shares["first"], shares["length"]
        out.print(f"drafts: {first:.1%} of the first are accepted, {length:.2f} tokens per step")
    for cell in cells:
        _print_cell(cell, report.cells[cell.name][bench.OURS])


def _print_cell(cell: Cell, ours: CellReport) -> None:
    unit = "prompt" if cell.counts_prompt else "output"
    out.print(
        f"\n[bold]{cell.name}[/bold] {cell.shape}: {ours.tok_s:,.1f} {unit} tok/s of a ceiling "
        f"of ~{ours.ceiling_tok_s:,.0f} ({ours.share_of_ceiling:.0%})"
    )
    out.print(
        "  ceiling: prefill, decode's linear layers and decode's attention one after another at "
        f"the measured rates; all of it overlapped: ~{ours.overlap_ceiling_tok_s:,.0f}"
    )
    out.print(
        f"  total {ours.total_tok_s:,.1f} tok/s, MFU {ours.mfu:.0%} of the "
        f"GEMM rate, MBU {ours.mbu:.0%} of the read rate"
    )
    for label, summary in (("TTFT", ours.ttft_ms), ("TPOT", ours.tpot_ms)):
        if summary:
            parts = ", ".join(f"{p} {summary[p]:.1f}" for p in ("p50", "p90", "p99"))
            out.print(f"  {label} ms: {parts}")
