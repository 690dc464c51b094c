"""tokenmill plan: the group of its commands, and plan replay."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from tokenmill import console
from tokenmill.cli.plan import plan_attention_dp as attention_dp
from tokenmill.cli.plan import plan_pareto, plan_predict, plan_simulate, plan_size
from tokenmill.cli.plan.plan_record import replay_record
from tokenmill.core.config import RouterConfig
from tokenmill.settings import ROUTER, SETTINGS, Settings, SettingsError
from tokenmill.settings.commands import FRONTS, LOADS, REPLAY
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.plan.load_table import Row

RECORD = replace(
    SETTINGS["record"], owner=None, help="File of `serve --record`; other flags say what if."
)
NUM_FRONTS = replace(
    SETTINGS["fronts"],
    owner=None,
    help="API processes, each with a router of its own; a request comes to any of them.",
)
WHAT_IF = {"block-size": 64, "max-num-batched-tokens": 8192, "max-num-seqs": 256}
PANELS = {
    "Trace": (*(SETTINGS[key] for key in ("trace", "trace-speed")), *LOADS),
    "Record": (RECORD, SETTINGS["policy"], SETTINGS["chunked-prefill"]),
    "Workers": (
        SETTINGS["workers"],
        *REPLAY,
        *(
            replace(SETTINGS[key], owner=None, help=f"As in serve; {value} where not given.")
            for key, value in WHAT_IF.items()
        ),
    ),
    "Router": (*ROUTER, NUM_FRONTS, *FRONTS),
    "Output": (SETTINGS["json-only"],),
}
GROUP_HELP = "Predict and simulate systems that you do not have."
DEFAULTS = {"workers": 8}


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    group.callback()(_group)
    command(group, "replay", PANELS, defaults=DEFAULTS)(replay)
    command(group, "attention-dp", attention_dp.PANELS, defaults=attention_dp.DEFAULTS)(
        attention_dp.attention_dp
    )
    command(group, "predict", plan_predict.PREDICT, defaults=plan_predict.DEFAULTS)(
        plan_predict.predict
    )
    command(group, "size", plan_size.SIZE, defaults=plan_size.SIZE_DEFAULTS)(plan_size.size)
    command(group, "simulate", plan_simulate.SIMULATE, defaults=plan_simulate.DEFAULTS)(
        plan_simulate.simulate
    )
    command(group, "pareto", plan_pareto.PARETO, defaults=plan_pareto.DEFAULTS)(plan_pareto.pareto)
    command(group, "calibrate", plan_size.CALIBRATE, defaults=plan_size.CALIBRATE_DEFAULTS)(
        plan_size.calibrate
    )
    command(group, "validate", plan_predict.VALIDATE)(plan_predict.validate)
    app.add_typer(group, name="plan", help=GROUP_HELP)


def _group() -> None:
    """Predict and simulate systems that you do not have."""


def replay(settings: Settings) -> None:
    """Replay a trace of requests over simulated workers.

    Router, schedulers and block pools are the real ones; only the time of a
    step comes from a formula. The trace is a JSONL file as Mooncake's:
    timestamp (ms), input_length, output_length, hash_ids.

    tokenmill plan replay --trace FILE --workers 8 --router kv

    tokenmill plan replay --loads --workers 2

    With --fronts N each front has its own router, which knows of the others'
    requests from the workers' reports; with --loads it is compared with one.

    tokenmill plan replay --trace FILE --fronts 8 --report-delay 100ms

    With --record it drives one scheduler with what `serve --record` kept, says
    whether every batch is chosen again and how wrong a formula of the step time
    is, and what other settings would have given.

    tokenmill plan replay --record FILE --max-num-seqs 64
    """
    from tokenmill.core.mooncake import read_trace
    from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming

    path = settings.get("trace")
    if settings.get("record"):
        if path is not None or settings.get("loads"):
            raise SettingsError("--record: leave out --trace and --loads")
        return replay_record(settings)
    if settings.get("loads"):
        if path is not None:
            raise SettingsError(f"--trace {path}: leave it out, or --loads")
        return _replay_loads(settings)
    if path is None:
        raise SettingsError("--trace is needed: a JSONL file of requests; or --loads, or --record")
    block_tokens = settings.get("trace-block-tokens")
    trace = read_trace(path, block_tokens, settings.get("trace-speed"))
    formulas = {
        name: settings.get(f"{name}-ms")
        for name in ("prefill", "decode")
        if settings.get(f"{name}-ms") is not None
    }
    values = WHAT_IF | settings.values
    pool = ReplayConfig(
        num_workers=settings.get("workers"),
        num_blocks=settings.get("num-blocks"),
        block_size=values["block-size"],
        max_num_batched_tokens=values["max-num-batched-tokens"],
        max_num_seqs=values["max-num-seqs"],
        trace_block_tokens=block_tokens,
        timing=StepTiming(**formulas),
        num_fronts=settings.get("fronts"),
        report_delay_ms=settings.get("report-delay"),
    )
    router = settings.build(
        RouterConfig, block_size=pool.block_size, approximate_blocks=pool.num_blocks
    )
    fronts = f", {pool.num_fronts} fronts" if pool.num_fronts > 1 else ""
    console.note(f"{len(trace)} requests, {pool.num_workers} workers, {router.policy}{fronts}")
    begin = time.process_time()
    report = Replay(trace, pool, router).run()
    report["cpu_s"] = round(time.process_time() - begin, 2)
    facts = {"plan": "replay", "workers": pool.num_workers, "router": router.policy}
    if pool.num_fronts > 1 or pool.report_delay_ms:
        facts |= {"fronts": pool.num_fronts, "report_delay_ms": pool.report_delay_ms}
    report = facts | report
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


def _replay_loads(settings: Settings) -> None:
    """Every policy over every kind of load, at a low and at a high rate."""
    from tokenmill.plan import load_table
    from tokenmill.plan.loads import KINDS

    num_workers, quiet = settings.get("workers"), settings.get("json-only")
    num_requests, num_seeds = settings.get("load-requests"), settings.get("load-seeds")
    fronts = settings.get("fronts"), settings.get("report-delay")
    cells = [
        load_table.Cell(machine, kind, num_workers, utilization)
        for machine in load_table.MACHINES
        for kind in KINDS
        for utilization in (load_table.LOW, load_table.HIGH)
    ]
    console.note(
        f"{len(cells)} loads of {num_seeds} x {num_requests} requests, {num_workers} workers"
    )
    rows = []
    for row in load_table.compare(cells, num_requests, num_seeds, *fronts):
        rows.append(row)
        console.note(f"{row.cell.machine} {row.cell.kind} {row.cell.utilization:.0%}")
    if not quiet:
        _print_loads(rows)
    report = {
        "plan": "replay-loads",
        "workers": num_workers,
        "worst_ratio": round(max(row.worst for row in rows), 3),
        "loads": [load_table.as_json(row) for row in rows],
    }
    console.print_json(report)


def _print_loads(rows: list[Row]) -> None:
    policies = list(rows[0].figures)
    names = {"ttft_ms": "TTFT ms", "ttft_p99_ms": "p99", "tpot_ms": "TPOT ms", "duration_s": "s"}
    other = "best other policy" if len(policies) > 2 else policies[1]
    table = [
        [
            "load",
            "rate",
            "figure",
            *policies,
            f"{policies[0]} / {other.removesuffix(' policy')}",
            "90 % interval",
        ]
    ]
    for row in rows:
        cell, intervals = row.cell, row.intervals()
        for figure, name in names.items():
            values = [f"{row.figures[policy][figure]:.1f}" for policy in policies]
            load = f"{cell.machine} {cell.kind}"
            ratio = f"{row.ratios[figure]:.2f}"
            interval = "{:.2f} to {:.2f}".format(*intervals[figure])
            table.append([load, f"{cell.utilization:.0%}", name, *values, ratio, interval])
    console.print_table(table)
    worst = max(rows, key=lambda row: row.worst)
    console.out.print(
        f"worst: {policies[0]} is {worst.worst:.2f} times the {other}, on "
        f"{worst.cell.machine} {worst.cell.kind} at {worst.cell.utilization:.0%}"
    )


def _print(report: dict[str, Any]) -> None:
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [["simulated", *columns]]
    for key, name in (("ttft_ms", "TTFT ms"), ("itl_ms", "ITL ms")):
        if report[key]:
            rows.append([name, *(f"{report[key][column]:.1f}" for column in columns)])
    console.print_table(rows)
    console.out.print(
        f"{report['prefix_reuse']:.1%} of prompt tokens from cache, "
        f"{report['output_tok_s']} tokens/s out, {report['num_finished']}"
    )
