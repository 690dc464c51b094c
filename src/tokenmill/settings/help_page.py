"""The page that --help prints; no flag is cut, whatever the width of the terminal."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from tokenmill.settings.removed import what_is_so_now
from tokenmill.settings.setting import SettingsError

MAX_WIDTH, LEAST_WIDTH = 100, 40
FLAG_WIDTH = 26  # a longer name stands on a line of its own, above its help
INDENT = "  "
HELP_ALL = "help_all"  # of a command that shows its common flags alone


class HelpCommand(TyperCommand):
    """A command whose help wraps texts, and never cuts a name."""

    common: frozenset[str] = frozenset()  # flags that --help shows; empty: all of them

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say what is so now where a flag was removed."""
        known = {name for p in self.get_params(ctx) for name in (*p.opts, *p.secondary_opts)}
        for word in args[: args.index("--")] if "--" in args else args:
            flag = word.partition("=")[0]
            if flag not in known and (now := what_is_so_now(flag.removeprefix("--"))):
                raise SettingsError(f"{flag}: {now}")
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print usage, text, flags by panel, and the epilog."""
        params = [p for p in self.get_params(ctx) if not getattr(p, "hidden", False)]
        shown, epilog = params, self.epilog or ""
        if self.common and not ctx.params.get(HELP_ALL):
            shown = [p for p in params if self._is_common(p)]
            left = len(params) - len(shown)
            epilog = f"{left} more flags: {ctx.command_path} --help-all\n\n{epilog}"
        _print_page(self, ctx, _panels(shown), epilog)

    def _is_common(self, param: Any) -> bool:
        return param.param_type_name != "option" or not self.common.isdisjoint(param.opts)


class HelpGroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print usage, text, and the commands in the order in which they were added."""
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        rows = [(c.name or "", c.get_short_help_str(200)) for c in commands if c and not c.hidden]
        _print_page(self, ctx, {"Commands": rows} | _panels(self.get_params(ctx)), "")


def _print_page(
    command: Any, ctx: Any, panels: Mapping[str, list[tuple[str, str]]], epilog: str
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(LEAST_WIDTH, min(console.width, MAX_WIDTH))
    usage = " ".join((ctx.command_path, *command.collect_usage_pieces(ctx)))
    console.print(Text.assemble(("Usage: ", "bold"), usage), "", sep="\n")
    for line in inspect.cleandoc(command.help or "").splitlines():
        _print_wrapped(console, Text.from_markup(line), INDENT, width)
    for title, rows in panels.items():
        console.print("", Text(title, "bold"), sep="\n")
        for name, text in rows:
            _print_row(console, name, Text.from_markup(text), width)
    if epilog:
        console.print("")
        _print_wrapped(console, Text.from_markup(epilog), "", width)


def _panels(params: list[Any]) -> dict[str, list[tuple[str, str]]]:
    """(name, help) of each argument and flag, by heading."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        if not getattr(param, "hidden", False):
            is_option = param.param_type_name == "option"
            default = "Options" if is_option else "Arguments"
            title = getattr(param, "rich_help_panel", None) or default
            name = _flag(param) if is_option else (param.metavar or param.name).upper()
            panels.setdefault(title, []).append((name, param.help or ""))
    general = panels.pop("Options", [])
    return panels | ({"Options": general} if general else {})


def _flag(param: Any) -> str:
    names = "/".join((", ".join(sorted(param.opts, key=_is_short)), *param.secondary_opts))
    return names if param.is_flag else f"{names} {param.metavar or 'TEXT'}"


def _is_short(flag: str) -> bool:
    """To have long names first: names of --help come in any order."""
    return not flag.startswith("--")


def _print_row(console: Console, name: str, text: Text, width: int) -> None:
    """The name, and its help in a column beside it, or below where there is no room."""
    column = min(FLAG_WIDTH, width // 2)
    indent = INDENT + " " * column + INDENT
    lines = _wrapped(console, text, width - len(indent))
    if len(name) <= column:
        beside = next(lines, Text())
        gap = " " * (column - len(name)) + INDENT
        console.print(Text.assemble(INDENT, (name, "cyan"), gap, beside))
    else:
        console.print(Text.assemble(INDENT, (name, "cyan")))
    for line in lines:
        console.print(Text.assemble(indent, line))


def _print_wrapped(console: Console, text: Text, indent: str, width: int) -> None:
    for line in _wrapped(console, text, width - len(indent)):
        console.print(Text.assemble(indent, line) if line else "")


def _wrapped(console: Console, text: Text, width: int) -> Iterator[Text]:
    """Lines that end between words; a text without any is one empty line."""
    for line in text.wrap(console, width) or [Text()]:
        line.rstrip()
        yield line
