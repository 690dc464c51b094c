"""tokenmill bench: throughput, endpoint, campaign, ladder, mlperf, mtp, compare and more."""

from __future__ import annotations

import typer

from tokenmill.bench.commands import (
    campaign,
    compare,
    decode,
    endpoint,
    eplb,
    frontend,
    kv_transfer,
    ladder,
    mlperf,
    mtp,
    price,
    published,
    router,
    scheduler,
    throughput,
    verify,
)
from tokenmill.settings.options import command


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
    command(group, "scheduler", scheduler.PANELS)(scheduler.scheduler)
    command(group, "router", router.PANELS, defaults=router.DEFAULTS)(router.router)
    command(group, "kv-transfer", kv_transfer.PANELS)(kv_transfer.kv_transfer)
    command(group, "eplb", eplb.PANELS)(eplb.eplb)
    command(group, "frontend", frontend.PANELS)(frontend.frontend)
    frontend.register(group)
    app.add_typer(group, name="bench", help="Measure speed; the last line is one JSON object.")
