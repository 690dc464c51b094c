"""tokenmill pull."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill import console
from tokenmill.settings.help_page import HelpCommand


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("pull", cls=HelpCommand)(pull)


def pull(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A catalog or hub name.")
    ] = None,
) -> None:
    """Download or make a model and print where it is; without a name, list the catalog.

    tokenmill pull smollm2
    tokenmill pull Qwen/Qwen3-0.6B
    tokenmill pull qwen3-vl-tiny    random weights, for trying out images
    """
    if name is None:
        _print_catalog()
    else:
        console.out.print(str(console.fetch(name)), markup=False)


def _print_catalog() -> None:
    from tokenmill.models.checkpoints import store

    for entry in store.list_catalog():
        size = f"{entry.num_bytes / 1e6:.0f} MB"
        where = store.cached(entry.name) or f"not here yet: tokenmill pull {entry.name}"
        for line in (f"{entry.name}  {size}, {entry.licence}, {entry.source}", f"  {where}"):
            console.out.print(line, markup=False)
    for name, about in store.MADE.items():
        where = store.cached(name) or f"not here yet: tokenmill pull {name}"
        for line in (f"{name}  {about}", f"  {where}"):
            console.out.print(line, markup=False)
    console.note("Any Hugging Face name (org/model) or local folder works as well.")
