"""tokenmill recipes, and tokenmill demo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from tokenmill import console
from tokenmill.core.installation import recipes_folder
from tokenmill.core.types import TokenmillError
from tokenmill.settings.help_page import HelpCommand


def register(app: typer.Typer) -> None:
    app.command("recipes", cls=HelpCommand)(recipes)
    app.command("demo", cls=HelpCommand)(demo)


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this file.")] = None,
    copy: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy the file, or all, to this folder.")
    ] = None,
) -> None:
    """List the recipes and sample traces of this package, print one, or copy them.

    tokenmill recipes
    tokenmill recipes serve-smollm2-cpu.toml
    tokenmill recipes --copy recipes

    Every command takes recipes/NAME for a recipe, also where the current folder has no recipes.
    """
    files = sorted(file for file in recipes_folder().iterdir() if file.is_file())
    if name is not None:
        files = [file for file in files if file.name == name.removeprefix("recipes/")]
        if not files:
            raise TokenmillError(f"no recipe {name!r}: 'tokenmill recipes' lists their names")
    if copy is not None:
        _copy(files, copy)
    elif name is not None:
        console.out.print(files[0].read_text(encoding="utf-8").rstrip(), markup=False)
    else:
        _list(files)


def demo() -> None:
    """Show what the package does: a chat, a quick MLPerf run, images, a video and a ranking.

    tokenmill demo
    """
    from tokenmill.demo import main

    raise typer.Exit(main())


def _list(files: list[Path]) -> None:
    width = max(len(file.name) for file in files)
    for file in files:
        console.out.print(f"{file.name:<{width}}  {_about(file)}".rstrip(), markup=False)


def _about(file: Path) -> str:
    """The command of a TOML recipe, which stands in its first line."""
    if file.suffix != ".toml":
        return ""
    with file.open(encoding="utf-8") as lines:
        return next(lines).removeprefix("# ").partition(" --config")[0].strip()


def _copy(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if taken := [file.name for file in files if (folder / file.name).exists()]:
        raise TokenmillError(f"{folder / taken[0]} is there already: name a folder without it")
    for file in files:
        shutil.copy(file, folder)
    console.note(f"{len(files)} files are in {folder}")
