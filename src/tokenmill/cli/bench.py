"""tokenmill bench throughput | scheduler | frontend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli import console, simulate
from tokenmill.cli.options import command
from tokenmill.cli.pull import fetch
from tokenmill.core.config import (
    DEFAULT_BLOCK_SIZE,
    BenchConfig,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
)
from tokenmill.settings import BENCH, CACHE, EXECUTION, MODEL, SCHEDULER, SETTINGS, Settings

if TYPE_CHECKING:
    from tokenmill.bench.peers import Lineup
    from tokenmill.bench.throughput import Cell
    from tokenmill.engine.build import BuiltEngine

JSON_ONLY = SETTINGS["json-only"]


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    engine = {
        "Model": MODEL,
        "KV cache": CACHE,
        "Scheduler": SCHEDULER,
        "Execution": EXECUTION,
    }
    command(group, "throughput", {"Benchmark": (*BENCH, JSON_ONLY), **engine})(throughput)
    steps = (SETTINGS["num-running"], SETTINGS["num-steps"], JSON_ONLY)
    command(group, "scheduler", {"Benchmark": steps})(scheduler)
    command(group, "frontend", {"Benchmark": (*simulate.STREAMS, JSON_ONLY)})(frontend)
    simulate.register(group)
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
    from tokenmill.cli.report import print_throughput, throughput_report

    config = settings.build(BenchConfig)
    cells = bench.make_cells(config)
    num_threads = settings.build(ModelConfig).num_threads or os.cpu_count() or 1
    built = _build(settings, cells)
    _check_context(cells, built.max_model_len)
    lineup = _start_peers(config, built, num_threads)
    try:
        contestants: list[Any] = [bench.OurEngine(built.engine)]
        contestants += lineup.running if lineup else []
        with console.progress("Benchmark runs") as update:
            measured = bench.measure(contestants, cells, config, built.spec.vocab_size, update)
    finally:
        if lineup:
            lineup.close()
    peak_rss_mib = bench.peak_rss_mib()  # before the buffers of the next measurement
    console.note("Measuring the machine")
    machine = measure_machine(built.spec, num_threads, built.device)
    report = throughput_report(cells, measured, machine, built, lineup)
    report["peak_rss_mib"] = peak_rss_mib
    if not settings.get("json-only"):
        print_throughput(cells, report)
    console.print_json(report)


def scheduler(settings: Settings) -> None:
    """Time of the scheduler in one step, without a model.

    tokenmill bench scheduler --num-running 512
    """
    from tokenmill.bench import steps
    from tokenmill.sched.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler

    num_running, num_steps = settings.get("num-running"), settings.get("num-steps")
    # Prompts of under 150 tokens at 4 a step and request: all decode after some 50 steps.
    longest = 256 + num_steps + steps.WARMUP_STEPS
    limits = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=4 * num_running,
        max_waiting=num_running,
        max_model_len=longest,
    )
    requests = steps.decode_requests(num_running)
    block_size = DEFAULT_BLOCK_SIZE
    pool = BlockPool(num_running * (longest // block_size + 1), block_size)
    report = steps.measure_steps(Scheduler(limits, pool, frozenset()), requests, num_steps)
    if not settings.get("json-only"):
        console.out.print(
            f"{num_running} running requests: {report['total_us']['p50']:.0f} us a step (schedule "
            f"{report['schedule_us']['p50']:.0f}, update {report['update_us']['p50']:.0f}) "
            f"of a limit of {report['limit_us']:.0f} us"
        )
    console.print_json(report)


def frontend(settings: Settings) -> None:
    """Streamed tokens per second of the HTTP server, without a model.

    The engine is simulated: every step takes the same time, and gives each
    stream one token. The client runs on the same machine.

    tokenmill bench frontend --num-streams 128
    """
    from tokenmill.bench.frontend import measure_frontend

    num_streams, num_tokens = settings.get("num-streams"), settings.get("stream-tokens")
    with simulate.simulated_server(settings) as (url, pid):
        console.note(f"{num_streams} streams of {num_tokens} tokens from {url}")
        report = measure_frontend(url, simulate.NAME, num_streams, num_tokens, pid)
    step_ms = settings.get("step-ms")
    report["offered_tok_s"] = 1000 * num_streams / step_ms if step_ms else None
    if not settings.get("json-only"):
        offered = report["offered_tok_s"]
        ceiling = "" if offered is None else f" of {offered:.0f} that the engine offers"
        console.out.print(
            f"{num_streams} streams: {report['tok_s']:.0f} tok/s{ceiling}; "
            f"required are {report['required_tok_s']}"
        )
    console.print_json(report)


def _build(settings: Settings, cells: list[Cell]) -> BuiltEngine:
    config = settings.build(ModelConfig)
    path = fetch(config.model)
    cache = settings.build(CacheConfig)
    if "kv-cache-memory" not in settings and "kv-cache-share" not in settings:
        cache = settings.build(CacheConfig, num_blocks=_num_blocks(cells, cache.block_size or 64))
    limits = settings.build(SchedulerConfig, max_waiting=max(c.num_prompts for c in cells))
    with console.progress("Loading weights", size_in_bytes=True) as update:
        from tokenmill.engine.build import build_engine

        model = Settings(settings.values | {"model": str(path)}).build(ModelConfig)
        return build_engine(model, cache, limits, settings.build(ExecutionConfig), progress=update)


def _num_blocks(cells: list[Cell], block_size: int) -> int:
    """Blocks that hold the largest cell and what the prefix cache keeps of the one before."""
    return 2 * max(
        cell.num_prompts * ((cell.input_len + cell.output_len) // block_size + 2) for cell in cells
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
