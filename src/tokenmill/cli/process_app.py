"""The command line of processes that other commands start, with nothing but their own command.

The whole command line takes half a second to import, which every worker would add to its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from tokenmill.cli.bench import add_group

MODULES = {"worker": "serve", "front": "front", "route-front": "route"}  # of tokenmill.cli
BENCH_MODULES = {"start-once": "start"}  # of tokenmill.bench.commands


def empty_app() -> typer.Typer:
    """An app without commands."""
    return typer.Typer(
        name="tokenmill",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def process_app(arguments: Sequence[str]) -> typer.Typer | None:
    """What parses these arguments as the whole command line does; None where that is to do it."""
    app = empty_app()
    app.callback()(_root)  # else a single command would have no name
    match arguments:
        case [name, *_] if name in MODULES:
            import_module(f"tokenmill.cli.{MODULES[name]}").register(app)
        case ["bench", name, *_] if name in BENCH_MODULES:
            module = import_module(f"tokenmill.bench.commands.{BENCH_MODULES[name]}")
            add_group(app, module.COMMANDS)
        case _:
            return None
    return app


def _root() -> None:
    """Run what another process asked for."""
