"""Settings: fields of configs that a flag, the environment or a TOML file fills.

A setting has one name everywhere: `--max-num-seqs` is TOKENMILL_MAX_NUM_SEQS in the environment
and `max-num-seqs` in the file. A flag wins over the environment, the environment over the file,
the file over the default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.core.config import (
    KV_CACHE_SHARE,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    PoolConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
    Setup,
)
from tokenmill.core.flags import IMAGE_SIZE, split_list
from tokenmill.core.images import VisionConfig
from tokenmill.core.installation import with_recipes
from tokenmill.core.types import SamplingParams
from tokenmill.core.video import VideoParams
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.settings.removed import what_is_so_now
from tokenmill.settings.setting import Panel as Panel
from tokenmill.settings.setting import Setting as Setting
from tokenmill.settings.setting import SettingsError as SettingsError
from tokenmill.settings.setting import only as only
from tokenmill.settings.setting import settings_in as settings_in
from tokenmill.settings.setting import settings_of as settings_of
from tokenmill.settings.setting import without as without

MODEL, CACHE = settings_of(ModelConfig), settings_of(CacheConfig)
SCHEDULER, EXECUTION = settings_of(SchedulerConfig), settings_of(ExecutionConfig)
PARALLEL, SAMPLING = settings_of(ParallelConfig), settings_of(SamplingParams)
SERVER, POOL, ROUTER = (settings_of(c) for c in (ServerConfig, PoolConfig, RouterConfig))
VISION, VIDEO = settings_of(VisionConfig), settings_of(VideoParams)
VIDEO_PARALLEL = settings_of(VideoParallel)
CONFIG_FILE = "tokenmill.toml"
CONFIG_VARIABLE = "TOKENMILL_CONFIG"
OTHER_VARIABLES = {
    CONFIG_VARIABLE,
    "TOKENMILL_CACHE",
    "TOKENMILL_CPU_ISA",
    KV_CACHE_SHARE,
    "TOKENMILL_TRACEBACK",
}

Config = TypeVar("Config")


def by_key(*panels: Panel) -> dict[str, Setting]:
    """The settings below all these headings; of two with one key the last."""
    return {setting.key: setting for panel in panels for setting in settings_in(panel)}


def defaults_of(*panels: Panel) -> dict[str, Any]:
    """The defaults of the settings below these headings."""
    return {setting.key: setting.default for panel in panels for setting in settings_in(panel)}


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by setting, each from the strongest source that gave one."""

    values: dict[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of what a command takes

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __or__(self, values: Mapping[str, Any]) -> Settings:
        """These settings, where nothing stronger is in `values`."""
        return Settings(self.values | dict(values), self.defaults)

    def __ror__(self, values: Mapping[str, Any]) -> Settings:
        return Settings(dict(values) | self.values, self.defaults)

    def get(self, key: str) -> Any:
        return self.values[key] if key in self.values else self.defaults[key]

    def build(self, owner: type[Config], **more: Any) -> Config:
        """The config `owner` with every field that a source gave; `more` fills other fields."""
        given = {s.field: self.values[s.key] for s in settings_of(owner) if s.key in self.values}
        return owner(**(more | given))

    def setup(self) -> Setup:
        return Setup(
            self.build(ModelConfig),
            self.build(CacheConfig),
            self.build(SchedulerConfig),
            self.build(ExecutionConfig),
            self.build(ParallelConfig),
        )

    def flags(self, settings: Iterable[Setting]) -> list[str]:
        """Command line that gives these settings again, for a child process."""
        line: list[str] = []
        for setting in settings:
            if setting.key in self.values:
                line += _flag(setting, self.values[setting.key])
        return line


def _flag(setting: Setting, value: Any) -> list[str]:
    name = "--" + setting.key
    if setting.is_switch:
        return [name if value else "--no-" + setting.key]
    values = value if setting.repeated else (value,)
    if setting.kind is IMAGE_SIZE:
        values = ["x".join(map(str, sides)) for sides in values]
    return [f"{name}={item}" for item in values]


def load(
    flags: Mapping[str, Any],
    table: Mapping[str, Setting],
    *,
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
    known: Iterable[Setting] | None = (),
    command: Sequence[str] = (),
) -> Settings:
    """Join flags (by key; None is not given), environment, TOML file and a command's defaults.

    `config` is the --config flag. `table` is what the command takes: the environment may also set
    what other commands read, and so may a file below their names. `known` are their settings; None:
    whatever else a file has is theirs.
    """
    values = dict(defaults or {})
    path = config_path(config, environ)
    for _, given in sources(path, environ, table, known, command):
        values |= given
    for key, value in flags.items():
        if value is not None and value != () and value != []:
            values[key] = read_value(table[key], value, "--" + key)
    return Settings(values, defaults_of(table.values()))


def sources(
    path: Path | None,
    environ: Mapping[str, str],
    table: Mapping[str, Setting],
    known: Iterable[Setting] | None,
    command: Sequence[str],
) -> list[tuple[str, dict[str, Any]]]:
    """What the file and then the environment set of a command's table, each under its name."""
    file = {} if path is None else _from_file(path, table, known, command)
    return list({str(path): file, "environment": _from_environment(environ, table)}.items())


def unknown_variables(environ: Mapping[str, str], known: Iterable[Setting]) -> Iterator[str]:
    """A sentence for each variable of ours that nothing reads."""
    names = {name for s in known for name, _ in _names(s, s.variable, "TOKENMILL_NO_")}
    for name in sorted(environ):
        if name.startswith("TOKENMILL_") and name not in names | OTHER_VARIABLES:
            key = name.removeprefix("TOKENMILL_").replace("_", "-").lower()
            near = get_close_matches(name, names, 1)
            meant = f" is no setting; did you mean {near[0]}?" if near else " is no setting"
            yield name + (f": {now}" if (now := what_is_so_now(key)) else meant)


def config_path(flag: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file of --config, of TOKENMILL_CONFIG, or ./tokenmill.toml where there is one."""
    if flag is not None:
        return with_recipes(flag)
    if environ.get(CONFIG_VARIABLE):
        return with_recipes(Path(environ[CONFIG_VARIABLE]))
    return Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None


def read_value(setting: Setting, value: Any, source: str) -> Any:
    """`value` as the setting's kind; SettingsError names the source and what it expects."""
    try:
        if not setting.repeated:
            return setting.kind.read(value)
        items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        if setting.listed:
            items = split_list(value)
        return tuple(setting.kind.read(item) for item in items)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SettingsError(f"{source} must be {setting.kind.expected}, got {value!r}") from None


def _from_environment(environ: Mapping[str, str], table: Mapping[str, Setting]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in table.values():
        for name, negated in _names(setting, setting.variable, "TOKENMILL_NO_"):
            text: str | list[str] = environ.get(name, "")
            if not text and not (setting.listed and name in environ):
                continue
            if setting.repeated and not setting.listed:
                text = [part for part in str(text).split(",") if part]
            _put(values, setting, text, name, negated)
    return values


def _names(setting: Setting, name: str, no: str) -> list[tuple[str, bool]]:
    """The names of a setting in one source; a switch also has a negated one."""
    negated = no + name.removeprefix("TOKENMILL_")
    return [(name, False), (negated, True)] if setting.is_switch else [(name, False)]


def _put(values: dict[str, Any], setting: Setting, raw: Any, source: str, negated: bool) -> None:
    if setting.key in values:
        raise SettingsError(f"{source} sets {setting.key} a second time: leave one out")
    value = read_value(setting, raw, source)
    values[setting.key] = not value if negated else value


def _from_file(
    path: Path,
    table: Mapping[str, Setting],
    known: Iterable[Setting] | None,
    command: Sequence[str],
) -> dict[str, Any]:
    """The keys outside all tables, and those of the command's own, such as [bench.endpoint]."""
    found = _read_toml(path)
    others = None if known is None else {n for s in known for n, _ in _names(s, s.key, "no-")}
    values, foreign = _flat(path, found, table, others)
    own: Any = found
    for word in command:
        own = own.get(word, {}) if isinstance(own, dict) else {}
    if command and isinstance(own, dict):
        below, foreign_below = _flat(path, own, table, others)
        values |= below
        if strange := sorted({*foreign, *foreign_below}):
            now = what_is_so_now(strange[0]) if command == ("serve",) else ""
            raise SettingsError(
                f"{path}: {strange[0]!r} is no setting of {' '.join(command)}; "
                + (now or "write it below the name of its command, such as [serve]")
            )
    return values


def _flat(
    path: Path, found: Mapping[str, Any], table: Mapping[str, Setting], others: set[str] | None
) -> tuple[dict[str, Any], list[str]]:
    """The values of a command's settings, and the keys of other commands."""
    own = {
        name: (setting, negated)
        for setting in table.values()
        for name, negated in _names(setting, setting.key, "no-")
    }
    values: dict[str, Any] = {}
    foreign = []
    for key, raw in found.items():
        if isinstance(raw, dict):
            continue
        name = key.replace("_", "-")
        if name in own:
            setting, negated = own[name]
            _put(values, setting, raw, f"{path}: {key}", negated)
        elif others is None or name in others:
            foreign.append(name)
        else:
            raise SettingsError(f"{path}: unknown key {key!r}{_suggestion(name, {*own, *others})}")
    return values, foreign


def tables_of(path: Path) -> set[str]:
    """The names of a file's tables, which are words of commands."""
    return {key for key, value in _read_toml(path).items() if isinstance(value, dict)}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the settings: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file: {error}") from None


def _suggestion(name: str, known: Iterable[str]) -> str:
    if now := what_is_so_now(name):
        return f"; {now}"
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else "; keys are the flags, such as max-num-seqs"
