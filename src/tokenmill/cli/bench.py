"""tokenmill bench: the group of all commands that bench/commands declares."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from tokenmill.bench.commands import BenchCommand, bench_commands
from tokenmill.settings.help_page import HelpGroup
from tokenmill.settings.options import command


def register(app: typer.Typer) -> None:
    add_group(app, bench_commands().values())


def add_group(app: typer.Typer, commands: Iterable[BenchCommand]) -> None:
    group = typer.Typer(cls=HelpGroup, no_args_is_help=True, rich_markup_mode="rich")
    for one in commands:
        add = command(group, one.name, one.panels, defaults=one.defaults, hidden=one.hidden)
        add(one.run)
    app.add_typer(group, name="bench", help="Measure speed; --json, or a pipe, gets one JSON line.")
