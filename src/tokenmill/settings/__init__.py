"""Settings: one table of what can be set, and one loader for flag, environment and TOML file.

A setting has one name everywhere: `--max-num-seqs` is TOKENMILL_MAX_NUM_SEQS in the environment
and `max-num-seqs` in the file. A flag wins over the environment, the environment over the file,
the file over the default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.core.bench_config import BenchConfig, EndpointConfig
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    PoolConfig,
    RouteConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
    Setup,
)
from tokenmill.core.flags import IMAGE_SIZE, split_list
from tokenmill.core.installation import with_recipes
from tokenmill.core.types import SamplingParams
from tokenmill.core.video import VideoParams, VideoServerConfig
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.core.vision_config import VisionConfig
from tokenmill.settings import commands
from tokenmill.settings.setting import Setting as Setting
from tokenmill.settings.setting import SettingsError as SettingsError
from tokenmill.settings.setting import settings_of

MODEL, CACHE = settings_of(ModelConfig), settings_of(CacheConfig)
SCHEDULER, EXECUTION = settings_of(SchedulerConfig), settings_of(ExecutionConfig)
PARALLEL, SAMPLING = settings_of(ParallelConfig), settings_of(SamplingParams)
SERVER, POOL = settings_of(ServerConfig), (*settings_of(PoolConfig), *commands.POOL)
ROUTER, ROUTE = settings_of(RouterConfig), settings_of(RouteConfig)
VISION, VIDEO = settings_of(VisionConfig), settings_of(VideoParams)
VIDEO_SERVER = settings_of(VideoServerConfig)
VIDEO_PARALLEL = settings_of(VideoParallel)
BENCH, ENDPOINT = settings_of(BenchConfig), settings_of(EndpointConfig)


def _endpoint(first: str, last: str) -> tuple[Setting, ...]:
    keys = [setting.key for setting in ENDPOINT]
    return ENDPOINT[keys.index(first) : keys.index(last) + 1]


ENDPOINT_REQUESTS, ENDPOINT_LOAD = (
    _endpoint("api", "extra-body"),
    _endpoint("concurrency", "slo-percentile"),
)
ENDPOINT_DATA, ENDPOINT_REPORT = (
    _endpoint("prompts", "tokenizer"),
    _endpoint("goodput", "output-dir"),
)
CONFIG_FILE = "tokenmill.toml"
CONFIG_VARIABLE = "TOKENMILL_CONFIG"
OTHER_VARIABLES = {
    CONFIG_VARIABLE,
    "TOKENMILL_CACHE",
    "TOKENMILL_CPU_ISA",
    "TOKENMILL_TRACEBACK",
}

Config = TypeVar("Config")
SETTINGS: dict[str, Setting] = {
    s.key: s
    for group in (  # of two with one key the config's is the last
        *(value for value in vars(commands).values() if isinstance(value, tuple)),
        *(MODEL, CACHE, SCHEDULER, EXECUTION, PARALLEL, SERVER, SAMPLING),
        *(POOL, ROUTER, ROUTE, VISION, VIDEO, VIDEO_SERVER, VIDEO_PARALLEL, BENCH, ENDPOINT),
    )
    for s in group
}

_MODEL_OF_VIDEO = {
    "model": "Folder or hub name of a diffusers pipeline; with --random-weights a shape: "
    "wan2.2-t2v-a14b or wan-tiny.",
    "dtype": "Compute type of the experts; auto: bf16 on a GPU, else fp32.",
    "device": "",
    "share-gpus": "",
    "num-threads": "",
    "random-weights": "Random weights: the video is noise.",
    "weights-seed": "",
    "offload": "",
}


def video_model() -> tuple[Setting, ...]:
    """The settings of a model, in the words of those that make videos."""
    return tuple(
        replace(SETTINGS[key], help=help) if help else SETTINGS[key]
        for key, help in _MODEL_OF_VIDEO.items()
    )


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by setting, each from the strongest source that gave one."""

    values: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        """The value of a setting, or its default."""
        return self.values.get(key, SETTINGS[key].default)

    def build(self, owner: type[Config], **more: Any) -> Config:
        """The config `owner` with every field that a source gave; `more` fills other fields."""
        given = {
            SETTINGS[key].field: value
            for key, value in self.values.items()
            if SETTINGS[key].owner is owner
        }
        return owner(**(more | given))

    def setup(self) -> Setup:
        """All that an engine is built from."""
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
    *,
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
    offered: Iterable[Setting] = (),
    command: Sequence[str] = (),
) -> Settings:
    """Join flags (by key; None is not given), environment, TOML file and a command's defaults.

    `config` is the --config flag. Only keys of `flags` are taken: the environment may also set
    what other commands read, and so may a file below their names. `offered` are settings with a
    kind of this command's own, such as several numbers where others take one.
    """
    table = SETTINGS | {setting.key: setting for setting in offered}
    values = dict(defaults or {})
    path = config_path(config, environ)
    for _, given in sources(flags, path, environ, table, command):
        values |= given
    for key, value in flags.items():
        if value is not None and value != () and value != []:
            values[key] = read_value(table[key], value, "--" + key)
    return Settings(values)


def sources(
    keys: Iterable[str],
    path: Path | None,
    environ: Mapping[str, str],
    table: Mapping[str, Setting],
    command: Sequence[str],
) -> list[tuple[str, dict[str, Any]]]:
    """What the file and then the environment set of these keys, each under its name."""
    wanted = set(keys)
    file = {} if path is None else _from_file(path, table, wanted, command)
    found = {"environment": _from_environment(environ, table)}
    return [
        (name, {key: value for key, value in values.items() if key in wanted})
        for name, values in ({str(path): file} | found).items()
    ]


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable of ours that nothing reads."""
    known = {name for s in SETTINGS.values() for name, _ in _names(s, s.variable, "TOKENMILL_NO_")}
    for name in sorted(environ):
        if name.startswith("TOKENMILL_") and name not in known | OTHER_VARIABLES:
            near = get_close_matches(name, known, 1)
            yield f"{name} is no setting" + (f"; did you mean {near[0]}?" if near else "")


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
    path: Path, table: Mapping[str, Setting], wanted: set[str], command: Sequence[str]
) -> dict[str, Any]:
    """The keys outside all tables, and those of the command's own, such as [bench.endpoint]."""
    found = _read_toml(path)
    values = _flat(path, found, table)
    own: Any = found
    for word in command:
        own = own.get(word, {}) if isinstance(own, dict) else {}
    if command and isinstance(own, dict):
        values |= _flat(path, own, table)
        if foreign := sorted(values.keys() - wanted):
            raise SettingsError(
                f"{path}: {foreign[0]!r} is no setting of {' '.join(command)}; "
                "write it below the name of its command, such as [serve]"
            )
    return values


def _flat(path: Path, found: Mapping[str, Any], table: Mapping[str, Setting]) -> dict[str, Any]:
    known = {
        name: (setting, negated)
        for setting in table.values()
        for name, negated in _names(setting, setting.key, "no-")
    }
    values: dict[str, Any] = {}
    for key, raw in found.items():
        if isinstance(raw, dict):
            continue
        name = key.replace("_", "-")
        if name not in known:
            raise SettingsError(f"{path}: unknown key {key!r}{_suggestion(name, known)}")
        setting, negated = known[name]
        _put(values, setting, raw, f"{path}: {key}", negated)
    return values


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
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else "; keys are the flags, such as max-num-seqs"
