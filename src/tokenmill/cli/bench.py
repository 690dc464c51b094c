"""tokenmill bench: the group of all commands that bench/commands declares."""

from __future__ import annotations

import typer

from tokenmill.bench.commands import bench_commands
from tokenmill.settings.options import command


def register(app: typer.Typer) -> None:
    """Add the command group to the app."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
    for one in bench_commands().values():
        add = command(group, one.name, one.panels, defaults=one.defaults, hidden=one.hidden)
        add(one.run)
    app.add_typer(group, name="bench", help="Measure speed; the last line is one JSON object.")
