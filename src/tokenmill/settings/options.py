"""Settings as typer options: a command names the groups that it reads and gets them resolved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.settings import SETTINGS, Setting, SettingsError, load
from tokenmill.settings.help_page import HelpCommand
from tokenmill.settings.help_text import EPILOG, help_of

Command = Callable[..., None]


def command(
    app: typer.Typer,
    name: str,
    panels: Mapping[str, Iterable[Setting]],
    *,
    positional: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    hidden: bool = False,
) -> Callable[[Command], Command]:
    """Register `function(settings, ...)`; `panels` maps help headings to the settings below them.

    The setting `positional` may also be given without its flag. `defaults` are this command's own.
    """

    def register(function: Command) -> Command:
        wrapped = _with_settings(function, panels, positional, defaults or {})
        app.command(name, cls=HelpCommand, hidden=hidden, epilog=EPILOG)(wrapped)
        return function

    return register


def _with_settings(
    function: Command,
    panels: Mapping[str, Iterable[Setting]],
    positional: str | None,
    defaults: Mapping[str, Any],
) -> Command:
    offered = {s.key: (panel, s) for panel, group in panels.items() for s in group}

    def run(**given: Any) -> None:
        config = given.pop("config")
        flags = {key: given.pop(_name(setting)) for key, (_, setting) in offered.items()}
        if positional and (value := given.pop(positional)) is not None:
            if flags[positional] is not None:
                raise SettingsError(f"give {positional.upper()} or --{positional}, not both")
            flags[positional] = value
        own = [setting for _, setting in offered.values()]
        function(load(flags, config=config, defaults=defaults, offered=own), **given)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    arguments = [_argument(SETTINGS[positional])] if positional else []
    options = [_option(s, panel, defaults, s.key == positional) for panel, s in offered.values()]
    parameters = [*arguments, *own, *options, _config_option()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__doc__ = function.__doc__
    return run


def _name(setting: Setting) -> str:
    return "option_" + setting.parameter


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _argument(setting: Setting) -> inspect.Parameter:
    info = typer.Argument(metavar=setting.key.upper(), help=help_of(setting, {}))
    return _parameter(setting.key, Annotated[str | None, info])


def _option(
    setting: Setting, panel: str, defaults: Mapping[str, Any], hidden: bool
) -> inspect.Parameter:
    name = "--" + setting.key
    info = typer.Option(
        f"{name}/--no-{setting.key}" if setting.is_switch else name,
        help=help_of(setting, defaults),
        metavar=setting.kind.metavar,
        rich_help_panel=panel,
        hidden=hidden,
    )
    annotation: Any = str | None
    if setting.is_switch:
        annotation = bool | None
    elif setting.repeated:
        annotation = list[str] | None
    return _parameter(_name(setting), Annotated[annotation, info])


def _config_option() -> inspect.Parameter:
    info = typer.Option("--config", metavar="FILE", help="TOML file with settings.")
    return _parameter("config", Annotated[Path | None, info])
