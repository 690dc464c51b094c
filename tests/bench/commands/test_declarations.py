"""Every module of bench/commands declares its command, and the command line offers it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import typer.main

from tokenmill.bench import commands
from tokenmill.bench.commands import BenchCommand, bench_commands
from tokenmill.cli.app import app

MODULES = [module.name for module in iter_modules(commands.__path__)]


@pytest.mark.parametrize("stem", MODULES)
def test_a_module_declares_the_command_of_its_name(stem: str) -> None:
    declared = import_module(f"tokenmill.bench.commands.{stem}").COMMANDS
    assert declared and all(isinstance(command, BenchCommand) for command in declared)
    names = [command.name for command in declared if not command.hidden]
    name = stem.replace("_", "-")  # or commands that begin with it
    assert names == [name] or all(other.startswith(f"{name}-") for other in names)
    assert all(command.run.__doc__ for command in declared)


def test_no_name_is_declared_twice() -> None:
    modules = [import_module(f"tokenmill.bench.commands.{stem}") for stem in MODULES]
    names = [command.name for module in modules for command in module.COMMANDS]
    assert sorted(names) == sorted(bench_commands())


def test_the_command_line_offers_every_command() -> None:
    group = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    assert {name: command.hidden for name, command in group.commands.items()} == {
        name: command.hidden for name, command in bench_commands().items()
    }
