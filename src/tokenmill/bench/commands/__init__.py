"""One module per `bench` command: its flags, its measurement and what it prints.

Each module declares its command in COMMANDS, and both command lines find it there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from tokenmill.settings import Panel


@dataclass(frozen=True, slots=True)
class BenchCommand:
    """`tokenmill bench NAME` calls `run(settings, ...)`, whose docstring is the help."""

    name: str
    run: Callable[..., None]
    panels: Mapping[str, Panel]  # help headings, and the settings below each
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hidden: bool = False  # a process that another command starts


def bench_commands() -> dict[str, BenchCommand]:
    found: dict[str, BenchCommand] = {}
    for module in iter_modules(__path__):
        declared = import_module(f"{__name__}.{module.name}").COMMANDS
        found |= {command.name: command for command in declared}
    return found
