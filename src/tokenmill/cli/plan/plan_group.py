"""tokenmill plan: the group of its commands, and plan replay."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from tokenmill import console
from tokenmill.cli.plan import plan_pareto, plan_predict, plan_simulate, plan_size
from tokenmill.cli.plan.plan_options import (
    ROUTER,
    FrontOptions,
    RecordOptions,
    ReplayOptions,
    TraceOptions,
)
from tokenmill.cli.plan.plan_record import replay_record
from tokenmill.core.config import RouterConfig
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.help_page import HelpGroup
from tokenmill.settings.options import command
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.bench.results.mooncake import TraceRequest
    from tokenmill.plan.replay import ReplayConfig

WHAT_IF = {"block-size": 64, "max-num-batched-tokens": 8192, "max-num-seqs": 256}
PANELS = {
    "Trace": TraceOptions,
    "Record": RecordOptions,
    "Workers": ReplayOptions,
    "Router": (*ROUTER, FrontOptions),
    "Output": JsonOption,
}
GROUP_HELP = "Predict and simulate systems that you do not have."


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=HelpGroup, no_args_is_help=True, rich_markup_mode="rich")
    group.callback()(_group)
    command(group, "replay", PANELS)(replay)
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

    With --fronts N each front has its own router, which knows of the others'
    requests from the workers' reports.

    tokenmill plan replay --trace FILE --fronts 8 --report-delay 100ms

    With --by-events it is replayed twice: with the router of serve, and with
    one that knows of caches by published events, as route does.

    tokenmill plan replay --trace FILE --workers 4 --by-events

    With --record it drives one scheduler with what `serve --record` kept, says
    whether every batch is chosen again and how wrong a formula of the step time
    is, and what other settings would have given.

    tokenmill plan replay --record FILE --max-num-seqs 64
    """
    from tokenmill.bench.results.mooncake import read_trace
    from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming

    path = settings.get("trace")
    if settings.get("record"):
        if path is not None:
            raise SettingsError("--record: leave out --trace")
        return replay_record(settings)
    if path is None:
        raise SettingsError("--trace is needed: a JSONL file of requests; or --record")
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
    if settings.get("by-events"):
        return _compare_events(settings, trace, pool, router)
    fronts = f", {pool.num_fronts} fronts" if pool.num_fronts > 1 else ""
    console.note(f"{len(trace)} requests, {pool.num_workers} workers, {router.policy}{fronts}")
    begin = time.process_time()
    report = Replay(trace, pool, router).run()
    report["cpu_s"] = round(time.process_time() - begin, 2)
    facts = {"plan": "replay", "workers": pool.num_workers, "router": router.policy}
    if pool.num_fronts > 1 or pool.report_delay_ms:
        facts |= {"fronts": pool.num_fronts, "report_delay_ms": pool.report_delay_ms}
    report = facts | report
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


def _compare_events(
    settings: Settings, trace: list[TraceRequest], pool: ReplayConfig, router: RouterConfig
) -> None:
    """The same trace with serve's own router, and with one that hears published events."""
    from tokenmill.plan.replay import Replay

    if pool.num_fronts > 1 or not router.events or router.policy != "kv":
        raise SettingsError("--by-events compares one front of --router kv with --router-events")
    console.note(f"{len(trace)} requests, {pool.num_workers} workers, twice: a simulation")
    runs = {
        name: Replay(trace, replace(pool, by_events=by_events), router).run()
        for name, by_events in (("serve", False), ("events", True))
    }
    own, told = runs["serve"], runs["events"]
    report = {
        "plan": "replay-events",
        "workers": pool.num_workers,
        "num_requests": len(trace),
        "hits_ratio": round(told["prefix_reuse"] / max(own["prefix_reuse"], 1e-9), 4),
        "ttft_ratio": round(told["ttft_ms"]["mean"] / own["ttft_ms"]["mean"], 4),
        **runs,
    }
    if not settings.get("json"):
        rows = [["simulated, router of", "prompt tokens from cache", "mean TTFT ms", "p99"]]
        for name, run in runs.items():
            ttft = run["ttft_ms"]
            figures = (f"{run['prefix_reuse']:.2%}", f"{ttft['mean']:.1f}", f"{ttft['p99']:.1f}")
            rows.append([name if name == "serve" else "route, by events", *figures])
        console.print_table(rows)
        console.out.print(f"hits: {report['hits_ratio']:.3f}x, TTFT: {report['ttft_ratio']:.3f}x")
    console.print_json(report, settings.get("json"))


def _print(report: dict[str, Any]) -> None:
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [["simulated", *columns]]
    for key, name in (("ttft_ms", "TTFT ms"), ("itl_ms", "ITL ms")):
        if report[key]:
            rows.append([name, *(f"{report[key][column]:.1f}" for column in columns)])
    console.print_table(rows)
    console.out.print(
        f"{report['prefix_reuse']:.1%} of prompt tokens from cache, "
        f"{report['output_tok_s']} tokens/s out"
    )
    ends = ", ".join(f"{count} {reason}" for reason, count in report["num_finished"].items())
    console.out.print(f"requests by finish reason: {ends}")
