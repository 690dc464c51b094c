"""A server's keys: where its control token lies, whom it warns, and what keeps accounts apart."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.api.keys import Keys, open_keys
from tokenmill.core.config import ServerConfig
from tokenmill.core.keys.run_folder import find_own_server
from tokenmill.core.requests import Generate, Request

KEYED = ServerConfig(api_keys=("a", "b"))
URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "tokenmill"


def test_accounts_share_no_cached_prefix_unless_they_are_to() -> None:
    requests = [Request("r", Generate([1, 2])), Request("s", Generate([1], cache_salt="own"))]
    salts = [
        [r.task.cache_salt for r in Keys.of(KEYED, "t", b"s").salted(requests, who)]
        for who in ("x", "y")
    ]
    assert salts == [["x\0", "x\0own"], ["y\0", "y\0own"]]
    for config in (ServerConfig(), replace(KEYED, share_prefix_cache=True)):
        assert Keys.of(config, "t", b"s").salted(requests, "x") is requests


def test_the_token_of_each_start_is_another_one_and_names_stay(runtime: Path) -> None:
    found = []
    for _ in range(2):
        with open_keys(KEYED, 8000) as keys:
            own = find_own_server(URL)
            assert own is not None and keys.ring.is_control(own[1])
            found.append((own[1], keys.ring.account_of("a"), keys.ring.account_of("b")))
    (first, *names), (second, *again) = found
    assert first != second and names == again and len(set(names)) == 2
    with open_keys(replace(KEYED, control_token="mine"), 8000) as keys:
        assert keys.ring.is_control("mine") and find_own_server(URL) is None
        assert not any("mine" in path.read_text() for path in (runtime / "8000").iterdir())


def test_a_server_without_a_run_folder_says_what_that_means(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/dev/null")
    monkeypatch.setenv("HOME", "/dev/null")
    with open_keys(KEYED, 8000) as keys:
        assert keys.ring.account_of("a") and not keys.ring.is_control("")
    assert "--control-token" in caplog.text


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("::1", (), False),
        ("0.0.0.0", (), True),
        ("10.1.2.3", (), True),
        ("0.0.0.0", ("k",), False),
    ],
)
def test_a_server_that_others_reach_wants_keys(
    host: str, keys: tuple[str, ...], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with open_keys(ServerConfig(host=host, api_keys=keys), 8000):
        lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == warns
    assert all(f"--host {host} without API keys" in line for line in lines)


def test_children_do_not_get_the_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TOKENMILL_API_KEY", "TOKENMILL_CONTROL_TOKEN"):
        monkeypatch.setenv(name, "secret")
    with open_keys(KEYED, 8000):
        assert "secret" not in os.environ.values()
