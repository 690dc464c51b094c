"""Flag over environment over file over default; whatever is not a setting is an error."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer

from tokenmill.__main__ import run
from tokenmill.bench.commands import endpoint as bench
from tokenmill.bench.options import CompareOptions, EndpointConfig
from tokenmill.cli.app import app
from tokenmill.cli.plan.plan_pareto import PARETO
from tokenmill.cli.plan.plan_predict import PREDICT
from tokenmill.cli.plan.plan_simulate import SIMULATE
from tokenmill.cli.plan.plan_size import CALIBRATE, SIZE
from tokenmill.cli.serve import SERVED
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from tokenmill.core.flags import parse_size
from tokenmill.core.types import SamplingParams
from tokenmill.settings import (
    SAMPLING,
    Settings,
    SettingsError,
    by_key,
    load,
    only,
    settings_in,
)
from tokenmill.settings.options import all_settings
from tokenmill.settings.removed import _NOW, what_is_so_now

ROOT = Path(__file__).parents[1]
PAST = ("log", "changes")
EVERY = all_settings(typer.main.get_command(app))
TABLE = by_key(SAMPLING, *SERVED.values())


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
    given = {key.replace("_", "-"): v for key, v in flags.items()}
    return load(given, TABLE, config=config, environ=environ or {}, defaults=defaults)


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
    table = by_key(only(SAMPLING, "max-tokens"))
    settings = load({}, table, environ={"TOKENMILL_HOST": "h"}, known=EVERY)
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
    with pytest.raises(SettingsError, match=r"GPU_MEMORY_UTILIZATION must be a number .* 'nan'"):
        load_with({"TOKENMILL_GPU_MEMORY_UTILIZATION": "nan"})


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
    line = first.flags(TABLE.values())
    assert "--no-prefix-cache" in line and "--kv-cache-memory=1073741824" in line
    assert "--random-weights" in line and "--stop=--" in line and "--stop=a b" in line


def test_every_setting_fits_its_config() -> None:
    for setting in EVERY:
        assert setting.key == setting.key.lower().replace("_", "-")
        assert setting.field in setting.owner.__dataclass_fields__, setting.key


def test_a_command_may_read_a_setting_in_its_own_way(tmp_path: Path) -> None:
    several, one = (by_key(only(owner, "gpus")) for owner in (CompareOptions, EndpointConfig))
    path = toml(tmp_path, "gpus = [1, 2]", "several.toml")
    assert load({"gpus": "8,16"}, several, environ={}).values == {"gpus": (8, 16)}
    environ = {"TOKENMILL_GPUS": "8,16"}
    assert load({}, several, environ=environ).values == {"gpus": (8, 16)}
    assert load({}, several, config=path, environ={}).values == {"gpus": (1, 2)}
    with pytest.raises(SettingsError, match="TOKENMILL_GPUS must be a whole number"):
        load({}, one, environ=environ)


def test_no_command_takes_a_key_twice() -> None:
    """Of two settings with one key the second would take the place of the first."""
    for command in (SERVED, bench.PANELS, PREDICT, SIZE, SIMULATE, PARETO, CALIBRATE):
        keys = Counter(setting.key for panel in command.values() for setting in settings_in(panel))
        assert [key for key, number in keys.items() if number > 1] == []


def test_serve_takes_few_settings_and_docs_use_each() -> None:
    taken = by_key(*SERVED.values())
    assert len(taken) <= 81  # 80, and --generation-config
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md") if path.stem not in PAST]
    words = "\n".join([*pages, (ROOT / "README.md").read_text()])
    unused = {key for key in taken if not re.search(rf"--(no-)?{key}(?![\w-])", words)}
    assert not unused - {"model"}, f"no page uses {unused}"


def test_what_was_removed_says_what_is_so_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = by_key(*SERVED.values())
    for key in _NOW:
        assert key not in known, key
        assert run(["serve", f"--{key}=1"]) == 2
        assert f"--{key}: {what_is_so_now(key)}" in " ".join(capsys.readouterr().err.split())
    toml(tmp_path, "heartbeat = 1")
    assert run(["serve"]) == 2
    assert "'heartbeat'; it is no setting any more" in " ".join(capsys.readouterr().err.split())
