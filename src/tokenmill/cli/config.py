"""tokenmill config: the settings in force, and where each comes from."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from tokenmill import console
from tokenmill.settings import SettingsError, config_path, sources
from tokenmill.settings.help_page import HelpCommand
from tokenmill.settings.options import all_settings


def register(app: typer.Typer) -> None:
    def config(
        words: Annotated[
            list[str] | None, typer.Argument(metavar="[COMMAND]", help="Such as bench endpoint.")
        ] = None,
    ) -> None:
        """Print what the environment and ./tokenmill.toml set for a command (serve by default).

        tokenmill config
        tokenmill config bench endpoint
        """
        _show(app, tuple(words or ("serve",)))

    app.command("config", cls=HelpCommand)(config)


def _show(app: typer.Typer, words: tuple[str, ...]) -> None:
    taken = _find(app, words)
    path = config_path(None, os.environ)
    rows: dict[str, list[str]] = {}
    for source, values in sources(
        path, os.environ, taken, all_settings(typer.main.get_command(app)), words
    ):
        for key, value in values.items():
            shown = "***" if "key" in key or "token" in key.split("-") else str(value)
            rows[key] = [key, shown, source]
    if rows:
        console.print_table([["setting", "value", "from"], *rows.values()])
    files = f"no file ({path or './tokenmill.toml'} would be read)" if path is None else str(path)
    console.note(
        f"{' '.join(words)} takes {len(taken)} settings; {len(taken) - len(rows)} are at their "
        f"defaults, which --help shows. File: {files}"
    )


def _find(app: typer.Typer, words: tuple[str, ...]) -> Any:
    """The settings that the command of these words takes."""
    first, *rest = words
    for group in app.registered_groups:
        if group.name == first and rest and group.typer_instance is not None:
            return _find(group.typer_instance, tuple(rest))
    for found in app.registered_commands:
        taken = getattr(found.callback, "taken", None)
        if found.name == first and not rest and taken is not None:
            return taken
    raise SettingsError(f"{' '.join(words)!r} is no command with settings; tokenmill --help")
