"""tokenmill bench throughput | scheduler | frontend."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli import console
from tokenmill.cli.options import command
from tokenmill.cli.pull import fetch
from tokenmill.core.config import BenchConfig, CacheConfig, ModelConfig, SchedulerConfig
from tokenmill.settings import BENCH, CACHE, MODEL, SCHEDULER, SETTINGS, Settings

if TYPE_CHECKING:
    from rich.table import Table

    from tokenmill.bench.peers import Lineup
    from tokenmill.bench.throughput import Cell, Machine, Measured
    from tokenmill.engine.build import BuiltEngine

Report = dict[str, Any]
JSON_ONLY = SETTINGS["json-only"]


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    engine = {"Model": MODEL, "KV cache": CACHE, "Scheduler": SCHEDULER}
    command(group, "throughput", {"Benchmark": (*BENCH, JSON_ONLY), **engine})(throughput)
    steps = (SETTINGS["num-running"], SETTINGS["num-steps"], JSON_ONLY)
    command(group, "scheduler", {"Benchmark": steps})(scheduler)
    streams = (SETTINGS["num-streams"], SETTINGS["stream-tokens"], JSON_ONLY)
    command(group, "frontend", {"Benchmark": streams})(frontend)
    app.add_typer(group, name="bench", help="Measure speed; the last line is one JSON object.")


def throughput(settings: Settings) -> None:
    """Tokens per second of the engine, beside what the machine could do.

    Three cells: [bold]batch[/bold] (32 requests, 128 tokens in and 64 out),
    [bold]single[/bold] (one stream, 128 in and 128 out) and [bold]prefill[/bold] (one prompt
    of 2,048 tokens). Each is warmed up; the median of the rounds counts.
    Prompts are random tokens, all different.

    tokenmill bench throughput
    tokenmill bench throughput --dtype fp32 --cell single --rounds 5
    tokenmill bench throughput --peers    other engines as well, in turns
    """
    from tokenmill.bench import throughput as bench
    from tokenmill.cli.ceiling import measure_machine

    config = settings.build(BenchConfig)
    cells = bench.make_cells(config)
    built = _build(settings)
    _check_context(cells, built.max_model_len)
    num_threads = settings.build(ModelConfig).num_threads or os.cpu_count() or 1
    lineup = _start_peers(config, built, num_threads)
    try:
        console.note("Measuring the machine")
        machine = measure_machine(built.spec, num_threads)
        contestants: list[Any] = [
            bench.OurEngine(built.engine),
            *(lineup.running if lineup else ()),
        ]
        with console.progress("Benchmark runs") as update:
            measured = bench.measure(contestants, cells, config, built.spec.vocab_size, update)
        report = _report(cells, measured, machine, built, lineup)
    finally:
        if lineup:
            lineup.close()
    if not settings.get("json-only"):
        _print_throughput(cells, report)
    _print_json(report)


def scheduler(settings: Settings) -> None:
    """Time of the scheduler in one step, without a model.

    tokenmill bench scheduler --num-running 512
    """
    from tokenmill.bench import steps
    from tokenmill.sched.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler

    num_running, num_steps = settings.get("num-running"), settings.get("num-steps")
    limits = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=max(num_running, 2048),
        max_waiting=num_running,
    )
    requests = steps.decode_requests(num_running, num_steps)
    longest = max(len(r.prompt_token_ids) for r in requests) + num_steps + steps.WARMUP_STEPS + 64
    num_blocks = num_running * (longest // CacheConfig.block_size + 2)
    pool = BlockPool(num_blocks, CacheConfig.block_size)
    report = steps.measure_steps(Scheduler(limits, pool, frozenset()), requests, num_steps)
    if not settings.get("json-only"):
        p50, limit = report["total_us"]["p50"], report["limit_us"]
        console.out.print(
            f"{num_running} running requests: {p50:.0f} us a step (schedule "
            f"{report['schedule_us']['p50']:.0f}, update {report['update_us']['p50']:.0f}) "
            f"of a limit of {limit:.0f} us"
        )
    _print_json(report)


def frontend(settings: Settings) -> None:
    """Streamed tokens per second of the HTTP server, against a simulated engine.

    tokenmill bench frontend --num-streams 128
    """
    raise NotImplementedError


def _build(settings: Settings) -> BuiltEngine:
    config = settings.build(ModelConfig)
    path = fetch(config.model)
    with console.progress("Loading weights") as update:
        from tokenmill.engine.build import build_engine

        return build_engine(
            settings.build(ModelConfig, model=str(path)),
            settings.build(CacheConfig),
            settings.build(SchedulerConfig),
            progress=update,
        )


def _check_context(cells: list[Cell], max_model_len: int) -> None:
    from tokenmill.bench.throughput import BenchError

    for cell in cells:
        needed = cell.input_len + cell.output_len
        if needed > max_model_len:
            raise BenchError(
                f"cell {cell.name} needs {needed} tokens, but the model's context is "
                f"{max_model_len}; choose others with --cell"
            )


def _start_peers(config: BenchConfig, built: BuiltEngine, num_threads: int) -> Lineup | None:
    if not config.peers:
        return None
    from tokenmill.bench.peers import start_peers

    console.note("Loading the peers")
    return start_peers(built.path, num_threads, config.skip_peers)


def _report(
    cells: list[Cell],
    measured: Measured,
    machine: Machine,
    built: BuiltEngine,
    lineup: Lineup | None,
) -> Report:
    from tokenmill.bench import throughput as bench

    reports: dict[str, dict[str, Report]] = {}
    for cell in cells:
        runs = measured.runs[cell.name]
        figures = {who: bench.cell_report(cell, r) for who, r in runs.items()}
        ours = bench.with_ceiling(figures[bench.OURS], cell, built.spec, built.dtype, machine)
        reports[cell.name] = figures | {bench.OURS: ours}
    report = {
        "benchmark": "throughput",
        "model": built.description,
        "dtype": built.dtype,
        "num_threads": machine.num_threads,
        "peak_rss_mib": bench.peak_rss_mib(),
        "weight_mib": round(built.weight_bytes / 2**20, 1),
        "machine": {
            **{f"{name}_gemm_gflops": round(f / 1e9, 1) for name, f in machine.gemm_flops.items()},
            "read_gb_s": round(machine.read_bytes_per_s / 1e9, 1),
        },
        "cells": reports,
    }
    if lineup:
        absent = lineup.absent | measured.failures
        peers = {"versions": lineup.versions, "absent": absent}
        report |= {"peers": peers, "ratios": bench.ratios(reports)}
    return report


def _print_throughput(cells: list[Cell], report: Report) -> None:
    machine, out = report["machine"], console.out
    out.print(
        f"{report['model']}, {report['dtype']}, {report['num_threads']} threads; "
        f"peak memory {report['peak_rss_mib']:.0f} MiB, weights {report['weight_mib']:.0f} MiB"
    )
    out.print(
        f"machine: fp32 GEMM {machine['fp32_gemm_gflops']:.0f} GFLOP/s, "
        f"int8 GEMM {machine['int8_gemm_gflops']:.0f} GOP/s, "
        f"memory read {machine['read_gb_s']:.1f} GB/s"
    )
    out.print(_table(cells, report))
    for name, reason in report.get("peers", {}).get("absent", {}).items():
        out.print(f"{name}: {reason}", markup=False)
    for name, ratio in report.get("ratios", {}).items():
        shown = "no peer ran" if ratio is None else f"{ratio:.2f}x the best peer"
        out.print(f"{name}: {shown}")


def _table(cells: list[Cell], report: Report) -> Table:
    from rich.table import Table

    table = Table("cell", "engine", "tok/s", "runs", "ceiling", "MFU", "MBU", box=None)
    for heading in ("total tok/s", "TTFT p50/p99 ms", "TPOT p50/p99 ms"):
        table.add_column(heading)
    for cell in cells:
        for who, figures in report["cells"][cell.name].items():
            table.add_row(f"{cell.name} {cell.shape}", who, *_row(cell, figures))
    return table


def _row(cell: Cell, figures: Report) -> list[str]:
    unit = "prompt" if cell.counts_prompt else "output"
    row = [f"{figures['tok_s']:.1f} {unit}", " ".join(f"{r:.0f}" for r in figures["tok_s_runs"])]
    if "ceiling_tok_s" in figures:
        share = f"{figures['ceiling_tok_s']:.0f} ({figures['share_of_ceiling']:.0%})"
        row += [share, f"{figures['mfu']:.0%}", f"{figures['mbu']:.0%}"]
    else:
        row += ["", "", ""]
    row.append(f"{figures['total_tok_s']:.1f}")
    for key in ("ttft_ms", "tpot_ms"):
        summary = figures.get(key)
        row.append(f"{summary['p50']:.1f} / {summary['p99']:.1f}" if summary else "")
    return row


def _print_json(report: Report) -> None:
    typer.echo(json.dumps(report))
