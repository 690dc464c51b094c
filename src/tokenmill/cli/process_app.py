"""The command line of processes that other commands start, with nothing but their own command.

The whole command line takes half a second to import, which every worker would add to its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from tokenmill.settings.help_page import HelpGroup

MODULES = {"worker-process": "serve", "front": "front"}  # of tokenmill.cli


def empty_app(completion: bool = False) -> typer.Typer:
    """An app without commands; with flags that install the completion of a shell."""
    return typer.Typer(
        name="tokenmill",
        cls=HelpGroup,
        no_args_is_help=True,
        add_completion=completion,
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
        case _:
            return None
    return app


def _root() -> None:
    """Run what another process asked for."""
