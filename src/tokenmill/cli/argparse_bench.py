"""The command line of the benchmarks where typer is not installed: argparse, same settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn

from tokenmill.bench.commands import BenchCommand, bench_commands
from tokenmill.console import without_markup
from tokenmill.settings import Setting, SettingsError, load
from tokenmill.settings.help_text import EPILOG, help_of


def missing_text(commands: Mapping[str, BenchCommand], missing: Sequence[str]) -> str:
    """Which commands work without these packages, and how to install the rest."""
    names = " | ".join(name for name, one in commands.items() if not one.hidden)
    return (
        f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed, so there is "
        f"only tokenmill bench {names}; pip install {' '.join(missing)} brings the rest"
    )


class Parser(argparse.ArgumentParser):
    """Raises SettingsError for wrong arguments, as typer's command line does."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def run_plain(arguments: Sequence[str], missing: Sequence[str]) -> int:
    """Run `bench COMMAND ...`; the exit status."""
    commands = bench_commands()
    about = missing_text(commands, missing)
    if not arguments or arguments[0] != "bench":
        raise SettingsError(about)
    parser = Parser(prog="tokenmill bench", description=about)
    parsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for one in commands.values():
        _add(parsers, one)
    try:
        given = vars(parser.parse_args(arguments[1:]))
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    one, config = commands[given.pop("command")], given.pop("config")
    offered = [setting for group in one.panels.values() for setting in group]
    one.run(load(given, config=config, defaults=one.defaults, offered=offered))
    return 0


def _add(parsers: Any, one: BenchCommand) -> None:
    about = without_markup(cleandoc(one.run.__doc__ or ""))
    parser = parsers.add_parser(
        one.name,
        help=about.splitlines()[0],
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for panel, settings in one.panels.items():
        group = parser.add_argument_group(panel)
        for setting in settings:
            group.add_argument("--" + setting.key, dest=setting.key, **_option(setting))
    parser.add_argument("--config", metavar="FILE", type=Path, help="TOML file with settings.")


def _option(setting: Setting) -> dict[str, Any]:
    """Values stay text: the settings read them, as they read a file's and the environment's."""
    text = without_markup(help_of(setting, {})).replace("%", "%%")
    if setting.is_switch:
        return {"action": argparse.BooleanOptionalAction, "default": None, "help": text}
    action = "append" if setting.repeated else "store"
    return {"action": action, "metavar": setting.kind.metavar, "help": text}
