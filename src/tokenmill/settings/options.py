"""Settings as typer options: a command names the groups that it reads and gets them resolved."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.core.flags import IMAGE_SIZE, SIZE
from tokenmill.settings import (
    Panel,
    Setting,
    SettingsError,
    config_path,
    load,
    settings_in,
    tables_of,
    unknown_variables,
)
from tokenmill.settings.help_page import HELP_ALL, HelpCommand

EPILOG = (
    "Every flag can also be set in the environment (--max-num-seqs is TOKENMILL_MAX_NUM_SEQS) or "
    "in a TOML file (max-num-seqs = 64): --config FILE, TOKENMILL_CONFIG, or ./tokenmill.toml. "
    "A flag wins over the environment, and the environment over the file."
)


def help_of(setting: Setting, defaults: Mapping[str, Any]) -> str:
    notes = []
    if setting.kind.choices:
        notes.append(" | ".join(setting.kind.choices))
    if default := shown_default(setting, defaults):
        notes.append(f"default: {default}")
    return setting.help + "".join(f" [dim]({note})[/dim]" for note in notes)


def shown_default(setting: Setting, defaults: Mapping[str, Any]) -> str:
    """The default in the words of a flag; empty where there is none to show."""
    value = defaults.get(setting.key, setting.default)
    if value is None or value == ():
        return ""
    if setting.is_switch:
        return "on" if value else "off"
    if setting.kind is SIZE:
        return f"{value // 2**20}MiB"
    if setting.kind is IMAGE_SIZE:
        return "x".join(map(str, value))
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


Command = Callable[..., None]
GENERAL = ("config", "help-all", "help")


def command(
    app: typer.Typer,
    name: str,
    panels: Mapping[str, Panel],
    *,
    positional: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    hidden: bool = False,
    common: Iterable[str] = (),
) -> Callable[[Command], Command]:
    """Register `function(settings, ...)`; `panels` maps help headings to the settings below them.

    The setting `positional` may also be given without its flag. `defaults` are this command's own.
    Where `common` names settings, --help shows these, and --help-all shows all.
    """
    shown = {"common": frozenset(f"--{key}" for key in (*common, *GENERAL))} if common else {}
    page = type("HelpPage", (HelpCommand,), shown)

    def register(function: Command) -> Command:
        wrapped = _with_settings(function, panels, positional, defaults or {}, hidden, bool(common))
        app.command(name, cls=page, hidden=hidden, epilog=EPILOG)(wrapped)
        return function

    return register


def _with_settings(
    function: Command,
    panels: Mapping[str, Panel],
    positional: str | None,
    defaults: Mapping[str, Any],
    hidden: bool,
    help_all: bool,
) -> Command:
    offered = {s.key: (panel, s) for panel, group in panels.items() for s in settings_in(group)}
    taken = {key: setting for key, (_, setting) in offered.items()}

    def run(**given: Any) -> None:
        config = given.pop("config")
        given.pop(HELP_ALL, None)
        flags = {key: given.pop(_name(setting)) for key, (_, setting) in offered.items()}
        if positional and (value := given.pop(positional)) is not None:
            if flags[positional] is not None:
                raise SettingsError(f"give {positional.upper()} or --{positional}, not both")
            flags[positional] = value
        context = given.pop("context")
        words = () if hidden else tuple(context.command_path.split()[1:])
        known = None if hidden else all_settings(context.find_root().command)
        found = load(flags, taken, config=config, defaults=defaults, known=known, command=words)
        if known is not None:
            _announce(context, config, known)
        function(found, **given)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    arguments = [_argument(taken[positional])] if positional else []
    options = [_option(s, panel, defaults, s.key == positional) for panel, s in offered.values()]
    parameters = [_parameter("context", typer.Context), *arguments, *own, *options]
    parameters.append(_config_option())
    if help_all:
        parameters.append(_parameter(HELP_ALL, Annotated[bool, _HELP_ALL]))
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__doc__ = function.__doc__
    run.taken = taken  # type: ignore[attr-defined]
    return run


def all_settings(group: Any) -> list[Setting]:
    found = list(getattr(group.callback, "taken", {}).values())
    for command in getattr(group, "commands", {}).values():
        found += all_settings(command)
    return found


def _announce(context: typer.Context, config: Path | None, every: list[Setting]) -> None:
    """A line on stderr for each source of settings that a user may not expect."""
    known = getattr(context.find_root().command, "commands", {})
    for said in unknown_variables(os.environ, every):
        typer.echo(f"warning: {said}", err=True)
    path = config_path(config, os.environ)
    if path is not None and (strange := tables_of(path) - set(known)):
        raise SettingsError(f"{path}: [{min(strange)}] is no command of tokenmill")
    if path is not None and config is None:
        typer.echo(f"settings are taken from {path}", err=True)


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


def _print_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.params[HELP_ALL] = True
        context.get_help()
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all", help="Show all flags and exit.", is_eager=True, callback=_print_help
)


def _config_option() -> inspect.Parameter:
    info = typer.Option("--config", metavar="FILE", help="TOML file with settings.")
    return _parameter("config", Annotated[Path | None, info])
