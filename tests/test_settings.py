"""Flag over environment over file over default; whatever is not a setting is an error."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill import settings as settings_module
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from tokenmill.core.flags import parse_size
from tokenmill.core.types import SamplingParams
from tokenmill.settings import SETTINGS, Setting, Settings, SettingsError, load


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_with(
    environ: dict[str, str] | None = None,
    config: Path | None = None,
    defaults: dict[str, Any] | None = None,
    **flags: Any,
) -> Settings:
    given = dict.fromkeys(SETTINGS) | {key.replace("_", "-"): v for key, v in flags.items()}
    return load(given, config=config, environ=environ or {}, defaults=defaults)


def toml(folder: Path, text: str, name: str = "tokenmill.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_source_and_their_order(tmp_path: Path) -> None:
    toml(tmp_path, "port = 1001\nmax-num-seqs = 3\nmax_queue = 5\nhost = '::1'")
    environ = {"TOKENMILL_PORT": "1002", "TOKENMILL_MAX_NUM_SEQS": "4"}
    settings = load_with(environ, defaults={"max-tokens": 7, "host": "x"}, port="1003")
    server = settings.build(ServerConfig)
    assert (server.port, server.host) == (1003, "::1")
    scheduler = settings.build(SchedulerConfig)
    assert (scheduler.max_num_seqs, scheduler.max_waiting) == (4, 5)
    assert scheduler.max_num_batched_tokens == SchedulerConfig().max_num_batched_tokens
    assert settings.build(SamplingParams).max_tokens == 7


def test_file_of_flag_wins_over_variable_over_folder(tmp_path: Path) -> None:
    toml(tmp_path, "port = 1")
    second = toml(tmp_path, "port = 2", "second.toml")
    third = toml(tmp_path, "port = 3", "third.toml")
    environ = {"TOKENMILL_CONFIG": str(second)}
    assert load_with().get("port") == 1
    assert load_with(environ).get("port") == 2
    assert load_with(environ, config=third).get("port") == 3


def test_empty_sources_give_the_defaults() -> None:
    settings = load_with({"TOKENMILL_PORT": ""})
    assert settings.build(ServerConfig) == ServerConfig()
    assert settings.build(CacheConfig) == CacheConfig()
    assert settings.build(ModelConfig) == ModelConfig()


def test_only_offered_settings_are_taken(tmp_path: Path) -> None:
    toml(tmp_path, "port = 1\nmax-tokens = 5")
    settings = load({"max-tokens": None}, environ={"TOKENMILL_HOST": "h"})
    assert settings.values == {"max-tokens": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt = 1", r"tokenmill\.toml: unknown key 'prt'; did you mean 'port'\?"),
        ("port = 'high'", r"tokenmill\.toml: port must be a whole number from 0 to 65535, got 'hi"),
        ("port = 1.5", r"tokenmill\.toml: port must be a whole number"),
        ("prefix-cache = 1", r"tokenmill\.toml: prefix-cache must be true or false, got 1"),
        ("prefix-cache = true\nno-prefix-cache = true", r"no-prefix-cache sets prefix-cache"),
        ("port", r"tokenmill\.toml: not a TOML file"),
    ],
)
def test_bad_file(tmp_path: Path, text: str, message: str) -> None:
    toml(tmp_path, text)
    with pytest.raises(SettingsError, match=message):
        load_with()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml: cannot read the settings: No such file"):
        load_with(config=tmp_path / "gone.toml")


def test_bad_values_name_their_source() -> None:
    with pytest.raises(SettingsError, match=r"--dtype must be one of auto, fp32, .*, got 'fp9'"):
        load_with(dtype="fp9")
    with pytest.raises(
        SettingsError, match="TOKENMILL_TOP_P must be a number from 0 to 1, got '2'"
    ):
        load_with({"TOKENMILL_TOP_P": "2"})
    with pytest.raises(SettingsError, match=r"TOKENMILL_KV_CACHE_SHARE must be a number .* 'nan'"):
        load_with({"TOKENMILL_KV_CACHE_SHARE": "nan"})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TOKENMILL_PREFIX_CACHE": "0"}, False),
        ({"TOKENMILL_NO_PREFIX_CACHE": "true"}, False),
        ({"TOKENMILL_NO_PREFIX_CACHE": "off"}, True),
        ({"TOKENMILL_PREFIX_CACHE": "Yes"}, True),
    ],
)
def test_switches(environ: dict[str, str], expected: bool) -> None:
    assert load_with(environ).build(CacheConfig).prefix_cache is expected


def test_repeated_settings(tmp_path: Path) -> None:
    toml(tmp_path, "api-key = ['x', 'y']\nstop = 'z'")
    settings = load_with()
    assert settings.build(ServerConfig).api_keys == ("x", "y")
    assert settings.build(SamplingParams).stop == ("z",)
    assert load_with(stop=["a,b", "c"]).get("stop") == ("a,b", "c")


def test_api_keys_are_separated_by_commas_in_every_source(tmp_path: Path) -> None:
    assert load_with(api_key=["a,b", " c "]).build(ServerConfig).api_keys == ("a", "b", "c")
    assert load_with({"TOKENMILL_API_KEY": "a, b"}).get("api-key") == ("a", "b")
    for text in ("api-key = 'x,y'", "api-key = ['x', 'y']", "api-key = ' x , y'"):
        toml(tmp_path, text)
        assert load_with().get("api-key") == ("x", "y")
    toml(tmp_path, "")
    for empty in ("", " ", "a,,b", "a,"):
        with pytest.raises(SettingsError, match="--api-key must be keys separated by commas"):
            load_with(api_key=[empty])
        with pytest.raises(SettingsError, match="TOKENMILL_API_KEY must be"):
            load_with({"TOKENMILL_API_KEY": empty})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("512MB", 512_000_000),
        ("64K", 65_536),
        ("1000", 1000),
        (4096, 4096),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2XB", "2GiB or so", "0", True, 1.5])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_flags_give_the_same_settings_again() -> None:
    first = load_with(
        {"TOKENMILL_NO_PREFIX_CACHE": "1", "TOKENMILL_KV_CACHE_MEMORY": "1GiB"},
        stop=["--", "a b"],
        random_weights=True,
    )
    line = first.flags(SETTINGS.values())
    assert "--no-prefix-cache" in line and "--kv-cache-memory=1073741824" in line
    assert "--random-weights" in line and "--stop=--" in line and "--stop=a b" in line


def test_every_setting_fits_its_config() -> None:
    for setting in SETTINGS.values():
        assert setting.key == setting.key.lower().replace("_", "-")
        if setting.owner is not None:
            assert setting.field in setting.owner.__dataclass_fields__, setting.key


def test_no_key_is_given_twice() -> None:
    groups = (value for value in vars(settings_module).values() if isinstance(value, tuple))
    listed = {id(s): s for group in groups for s in group if isinstance(s, Setting)}
    assert len({s.key for s in listed.values()}) == len(listed)


def test_a_command_may_read_a_setting_in_its_own_way(tmp_path: Path) -> None:
    several = replace(SETTINGS["gpus"], kind=SETTINGS["concurrency"].kind, owner=None)
    path = toml(tmp_path, "gpus = [1, 2]", "several.toml")
    assert load({"gpus": "8,16"}, environ={}, offered=[several]).values == {"gpus": (8, 16)}
    environ = {"TOKENMILL_GPUS": "8,16"}
    assert load({"gpus": None}, environ=environ, offered=[several]).values == {"gpus": (8, 16)}
    found = load({"gpus": None}, config=path, environ={}, offered=[several])
    assert found.values == {"gpus": (1, 2)}
    with pytest.raises(SettingsError, match="TOKENMILL_GPUS must be a whole number"):
        load({"gpus": None}, environ=environ)


def test_no_key_is_declared_twice() -> None:
    """Of two settings with one key the second would take the place of the first everywhere."""
    groups = [value for value in vars(settings_module).values() if isinstance(value, tuple)]
    groups += [
        value for value in vars(settings_module.commands).values() if isinstance(value, tuple)
    ]
    declared = {id(s): s for group in groups for s in group if isinstance(s, Setting)}
    keys = Counter(s.key for s in declared.values())
    assert [key for key, number in keys.items() if number > 1] == []
