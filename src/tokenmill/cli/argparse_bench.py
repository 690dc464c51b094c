"""The benchmarks' command line where typer cannot run: argparse over the same settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn

from tokenmill.bench.commands import (
    campaign,
    decode,
    endpoint,
    eplb,
    ladder,
    mlperf,
    mtp,
    published,
    throughput,
)
from tokenmill.bench.commands import router as routing
from tokenmill.bench.commands import scheduler as steps
from tokenmill.console import without_markup
from tokenmill.settings import Setting, Settings, SettingsError, load
from tokenmill.settings.help_text import EPILOG, help_of

Panels = Mapping[str, Iterable[Setting]]
COMMANDS: dict[str, tuple[Callable[[Settings], None], Panels]] = {
    "throughput": (throughput.throughput, throughput.PANELS),
    "decode": (decode.decode, decode.PANELS),
    "endpoint": (endpoint.endpoint, endpoint.PANELS),
    "campaign": (campaign.campaign, campaign.PANELS),
    "ladder": (ladder.ladder, ladder.PANELS),
    "mlperf": (mlperf.mlperf, mlperf.PANELS),
    mlperf.CHILD: (mlperf.run_child, mlperf.PANELS),
    "mtp": (mtp.mtp, mtp.PANELS),
    "published": (published.published, published.PANELS),
    "scheduler": (steps.scheduler, steps.PANELS),
    "router": (routing.router, routing.PANELS),
    "eplb": (eplb.eplb, eplb.PANELS),
}
DEFAULTS: dict[str, Mapping[str, Any]] = {"router": routing.DEFAULTS}


def missing_text(missing: Sequence[str]) -> str:
    """What there is without these packages, and how to get the rest."""
    names = " | ".join(name for name in COMMANDS if name != mlperf.CHILD)
    return (
        f"{', '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed, so there is "
        f"only tokenmill bench {names}; pip install {' '.join(missing)} brings the rest"
    )


class Parser(argparse.ArgumentParser):
    """Errors as the rest of the package has them."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def run_plain(arguments: Sequence[str], missing: Sequence[str]) -> int:
    """Run `bench COMMAND ...`; the exit status."""
    about = missing_text(missing)
    if not arguments or arguments[0] != "bench":
        raise SettingsError(about)
    parser = Parser(prog="tokenmill bench", description=about)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for name, (function, panels) in COMMANDS.items():
        _add(commands, name, function, panels)
    try:
        given = vars(parser.parse_args(arguments[1:]))
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    name, config = given.pop("command"), given.pop("config")
    function, panels = COMMANDS[name]
    offered = [setting for group in panels.values() for setting in group]
    function(load(given, config=config, defaults=DEFAULTS.get(name, {}), offered=offered))
    return 0


def _add(commands: Any, name: str, function: Callable[[Settings], None], panels: Panels) -> None:
    about = without_markup(cleandoc(function.__doc__ or ""))
    parser = commands.add_parser(
        name,
        help=about.splitlines()[0],
        description=about,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for panel, settings in panels.items():
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
