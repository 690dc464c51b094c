"""tokenmill bench: throughput, endpoint, campaign, ladder, mlperf, mtp, compare and more."""

from __future__ import annotations

import typer

from tokenmill.cli import (
    campaign,
    compare,
    console,
    decode,
    endpoint,
    eplb,
    kv_moves,
    ladder,
    mlperf,
    mtp,
    price,
    published,
    routing,
    simulate,
    steps,
    throughput,
    verify,
)
from tokenmill.cli.options import command
from tokenmill.settings import SETTINGS, Settings

JSON_ONLY = SETTINGS["json-only"]


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    command(group, "throughput", throughput.PANELS)(throughput.throughput)
    command(group, "decode", decode.PANELS)(decode.decode)
    command(group, "endpoint", endpoint.PANELS)(endpoint.endpoint)
    command(group, "campaign", campaign.PANELS)(campaign.campaign)
    command(group, "ladder", ladder.PANELS)(ladder.ladder)
    command(group, "mlperf", mlperf.PANELS)(mlperf.mlperf)
    command(group, mlperf.CHILD, mlperf.PANELS, hidden=True)(mlperf.run_child)
    command(group, "mtp", mtp.PANELS)(mtp.mtp)
    command(group, "verify", verify.PANELS)(verify.verify)
    command(group, "compare", compare.PANELS)(compare.compare)
    command(group, "price", price.PANELS)(price.price)
    command(group, "published", published.PANELS)(published.published)
    command(group, "scheduler", steps.PANELS)(steps.scheduler)
    command(group, "router", routing.PANELS, defaults=routing.DEFAULTS)(routing.router)
    command(group, "kv-transfer", kv_moves.PANELS)(kv_moves.kv_transfer)
    command(group, "eplb", eplb.PANELS)(eplb.eplb)
    command(group, "frontend", {"Benchmark": (*simulate.STREAMS, JSON_ONLY)})(frontend)
    simulate.register(group)
    app.add_typer(group, name="bench", help="Measure speed; the last line is one JSON object.")


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
