"""What the benchmarks share: flags, child processes, and a report whose last line is JSON.

A benchmark is a module with a config of its flags, a function that measures, and one that prints
for a terminal. Figures stand beside their ceiling, or beside what else could be done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn

from rich.text import Text

import tokenmill.bench
from tokenmill import console
from tokenmill.bench.commands.ladder import run_benchmark
from tokenmill.core.types import TokenmillError
from tokenmill.settings import Setting, Settings, SettingsError, read_value
from tokenmill.settings.options import help_of
from tokenmill.settings.setting import settings_of

ROOT = Path(__file__).parents[1]
SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
Report = dict[str, Any]


class Parser(argparse.ArgumentParser):
    """Wrong arguments are a SettingsError, as in tokenmill's own commands."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


@dataclass(frozen=True)
class Benchmark:
    """`python -m benchmarks.NAME`: `run(options)`, or `run(options, settings)` with an engine.

    `engine` are settings of tokenmill that the benchmark takes as well. What follows after `--`
    goes to the options' field `rest`.
    """

    name: str
    options: type[Any]
    run: Callable[..., Report]
    show: Callable[[Report], None]
    engine: Sequence[Setting] = ()

    @property
    def own(self) -> tuple[Setting, ...]:
        return settings_of(self.options)

    @property
    def others(self) -> list[Setting]:
        own = {setting.key for setting in self.own}
        return [setting for setting in self.engine if setting.key not in own]

    def call(self, words: Sequence[str]) -> Report:
        """Measure with these flags, print, and return the report."""
        words, rest = _split(words)
        given = vars(self.parser().parse_args(words))
        only_json = given.pop("json")
        values = _read((*self.own, *self.others), given)
        fields = {s.field: values.pop(s.key) for s in self.own if s.key in values}
        if rest:
            fields["rest"] = tuple(rest)
        options = self.options(**fields)
        found = self.run(options, Settings(values)) if self.engine else self.run(options)
        report = {"benchmark": self.name} | found
        if not only_json:
            self.show(report)
        console.print_json(report, only_json)
        return report

    def flags(self, options: Any) -> list[str]:
        """The command line of these options, for a child process."""
        default, words = self.options(), []
        for setting in self.own:
            value = getattr(options, setting.field)
            if value == getattr(default, setting.field):
                continue
            no = "no-" if value is False else ""
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(f"--{no}{setting.key}" + ("" if setting.is_switch else f"={text}"))
        return words

    def main(self) -> None:
        """Run as a process: an error is one sentence on stderr and exit status 1 or 2."""
        try:
            self.call(sys.argv[1:])
        except TokenmillError as error:
            console.fail(str(error))
            sys.exit(2 if isinstance(error, SettingsError) else 1)

    def parser(self) -> Parser:
        parser = Parser(
            prog=f"python -m benchmarks.{self.name}",
            description=cleandoc(self.run.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON line alone.")
        for setting in self.own:
            _add(parser, setting)
        group = parser.add_argument_group("engine")
        for setting in self.others:
            _add(group, setting)
        return parser


def parse(offered: Iterable[Setting], words: Sequence[str]) -> Settings:
    parser, offered = Parser(allow_abbrev=False), tuple(offered)
    for setting in offered:
        _add(parser, setting)
    return Settings(_read(offered, vars(parser.parse_args(words))))


def _read(offered: Iterable[Setting], given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        setting.key: read_value(setting, given[setting.key], "--" + setting.key)
        for setting in offered
        if given[setting.key] is not None
    }


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    if "--" not in words:
        return words, ()
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _add(parser: Any, setting: Setting) -> None:
    """Values stay text: `read_value` reads and checks them."""
    text = Text.from_markup(help_of(setting, {})).plain.replace("%", "%%")
    how: dict[str, Any] = {"action": "append" if setting.repeated else "store"}
    if setting.is_switch:
        how = {"action": argparse.BooleanOptionalAction}
    else:
        how["metavar"] = setting.kind.metavar
    parser.add_argument("--" + setting.key, dest=setting.key, default=None, help=text, **how)


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tokenmill", *words]


def child(module: str, *words: str) -> list[str]:
    """The command line of a module of the benchmarks; it needs `environment()`."""
    return [sys.executable, "-m", f"benchmarks.{module}", *words]


def environment(**more: str) -> dict[str, str]:
    """The environment in which a child finds the benchmarks from any folder."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | more


def run_child(command: Sequence[str], **more: str) -> Any:
    """The JSON line of a benchmark in a process of its own; an error where it fails."""
    report, error = run_benchmark(command, environment(**more))
    if error:
        raise TokenmillError(f"{' '.join(command[1:6])} ... failed: {error}")
    return report


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure that all rounds have."""
    common = set.intersection(*(set(figures) for figures in rounds))
    return {key: statistics.median(f[key] for f in rounds) for key in rounds[0] if key in common}
