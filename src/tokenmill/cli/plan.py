"""tokenmill plan replay, and the group around it."""

from __future__ import annotations

import time
from typing import Any

import typer

from tokenmill.cli import attention_dp, console
from tokenmill.cli.options import command
from tokenmill.core.config import RouterConfig
from tokenmill.settings import REPLAY, ROUTER, SETTINGS, Settings, SettingsError

PANELS = {
    "Trace": tuple(SETTINGS[key] for key in ("trace", "trace-speed")),
    "Floor": (
        SETTINGS["workers"],
        *REPLAY,
        *(SETTINGS[key] for key in ("block-size", "max-num-batched-tokens", "max-num-seqs")),
    ),
    "Router": ROUTER,
    "Output": (SETTINGS["json-only"],),
}
DEFAULTS = {
    "workers": 8,
    "block-size": 64,
    "max-num-batched-tokens": 8192,
    "max-num-seqs": 256,
}


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    group.callback()(_group)
    command(group, "replay", PANELS, defaults=DEFAULTS)(replay)
    command(group, "attention-dp", attention_dp.PANELS, defaults=attention_dp.DEFAULTS)(
        attention_dp.attention_dp
    )
    app.add_typer(group, name="plan", help="Try a floor of workers without one, in virtual time.")


def _group() -> None:
    """Try a floor of workers without one, in virtual time."""


def replay(settings: Settings) -> None:
    """Replay a trace of requests over simulated workers.

    Router, schedulers and block pools are the real ones; only the time of a
    step comes from a formula. The trace is a JSONL file as Mooncake's:
    timestamp (ms), input_length, output_length, hash_ids.

    tokenmill plan replay --trace FILE --workers 8 --router kv
    """
    from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming
    from tokenmill.plan.trace import read_trace

    path = settings.get("trace")
    if path is None:
        raise SettingsError("--trace is needed: a JSONL file of requests")
    block_tokens = settings.get("trace-block-tokens")
    trace = read_trace(path, block_tokens, settings.get("trace-speed"))
    formulas = {
        name: settings.get(f"{name}-ms")
        for name in ("prefill", "decode")
        if settings.get(f"{name}-ms") is not None
    }
    floor = ReplayConfig(
        num_workers=settings.get("workers"),
        num_blocks=settings.get("num-blocks"),
        block_size=settings.get("block-size"),
        max_num_batched_tokens=settings.get("max-num-batched-tokens"),
        max_num_seqs=settings.get("max-num-seqs"),
        trace_block_tokens=block_tokens,
        timing=StepTiming(**formulas),
    )
    router = settings.build(
        RouterConfig, block_size=floor.block_size, approximate_blocks=floor.num_blocks
    )
    console.note(f"{len(trace)} requests, {floor.num_workers} workers, {router.policy}")
    begin = time.process_time()
    report = Replay(trace, floor, router).run()
    report["cpu_s"] = round(time.process_time() - begin, 2)
    report = {"plan": "replay", "workers": floor.num_workers, "router": router.policy, **report}
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


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
