"""tokenmill pull | models | rm: models on this machine's disk."""

from __future__ import annotations

from typing import Annotated

import typer

from tokenmill import console
from tokenmill.settings.help_page import HelpCommand


def register(app: typer.Typer) -> None:
    for function in (pull, models, rm):
        app.command(function.__name__, cls=HelpCommand)(function)


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


def models() -> None:
    """List the models on this machine's disk with their sizes.

    tokenmill models
    """
    from tokenmill.models.checkpoints.store import stored_models

    found = stored_models()
    if not found:
        console.note("No model is here yet: tokenmill pull lists the catalog")
        return
    console.print_table([["model", "MB"], *([m.name, _mb(m.num_bytes)] for m in found)])
    for folder in sorted({str(model.path.parent) for model in found}):
        console.note(f"in {folder}")


def rm(
    name: Annotated[str, typer.Argument(help="Its name, as `tokenmill models` shows it.")],
) -> None:
    """Remove a model from this machine's disk.

    tokenmill rm Qwen/Qwen3-0.6B
    """
    from tokenmill.models.checkpoints.store import find_stored

    model = find_stored(name)
    model.remove()
    console.out.print(f"{model.name} is removed: {_mb(model.num_bytes)} MB are free", markup=False)


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


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
