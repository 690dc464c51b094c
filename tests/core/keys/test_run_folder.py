"""Run folders: who finds the token of which server, and what becomes of a dead server's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.core.keys.run_folder import (
    TOKEN,
    find_own_server,
    key_salt,
    open_run_folder,
    write_private,
)

LEAVE = """
import os
from tokenmill.core.keys.run_folder import open_run_folder, write_private
with open_run_folder("127.0.0.1", 8000) as folder:
    write_private(folder / "control-token", "old")
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "tokenmill"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_its_user_reads_a_run_folder(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    with open_run_folder("127.0.0.1", 8000) as folder:
        write_private(folder / TOKEN, "secret")
        assert folder == runtime / "8000"
        assert (mode(runtime), mode(folder), mode(folder / TOKEN)) == (0o700, 0o700, 0o600)
    assert not folder.exists(), "it goes with its server"


@pytest.mark.parametrize(
    ("host", "url", "found"),
    [
        ("127.0.0.1", "http://localhost:8000/workers", "http://127.0.0.1:8000/workers"),
        ("0.0.0.0", "http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000", "http://[::1]:8000"),
        ("127.0.0.1", "https://localhost:8000", "https://localhost:8000"),  # its name is checked
        ("127.0.0.2", "http://127.0.0.1:8000", None),  # whoever listens there, it is not ours
        ("0.0.0.0", "http://[::1]:8000", None),
        ("0.0.0.0", "http://192.0.2.1:8000", None),
        ("127.0.0.1", "http://127.0.0.1:8001", None),
    ],
)
def test_the_token_goes_to_its_own_server_alone(host: str, url: str, found: str | None) -> None:
    with open_run_folder(host, 8000) as folder:
        write_private(folder / TOKEN, "secret")
        assert find_own_server(url) == (None if found is None else (found, "secret"))
    assert find_own_server(url) is None


def test_servers_at_two_addresses_with_one_port_have_a_folder_each(runtime: Path) -> None:
    with open_run_folder("127.0.0.1", 8000) as one, open_run_folder("127.0.0.2", 8000) as other:
        write_private(one / TOKEN, "one")
        write_private(other / TOKEN, "other")
        assert find_own_server("http://127.0.0.2:8000") == ("http://127.0.0.2:8000", "other")
        assert other == runtime / "8000.1"


def test_what_a_killed_server_left_is_of_no_use_and_goes(runtime: Path) -> None:
    subprocess.run([sys.executable, "-c", LEAVE], check=True, env=os.environ)
    assert (runtime / "8000" / TOKEN).read_text() == "old"
    assert find_own_server("http://127.0.0.1:8000") is None
    with open_run_folder("127.0.0.1", 8001):
        assert not (runtime / "8000").exists(), "any other server removes it"
    subprocess.run([sys.executable, "-c", LEAVE], check=True, env=os.environ)
    with open_run_folder("127.0.0.1", 8000) as folder:
        assert folder == runtime / "8000" and not (folder / TOKEN).exists()


def test_commands_of_another_session_find_servers_of_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with open_run_folder("127.0.0.1", 8000) as folder:
        assert folder == tmp_path / ".cache/tokenmill/run/8000"
        write_private(folder / TOKEN, "secret")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        assert find_own_server("http://127.0.0.1:8000") is not None


def test_the_salt_outlives_servers(runtime: Path) -> None:
    first = key_salt()
    assert len(first) == 32 and key_salt() == first and mode(runtime / "key-salt") == 0o600
    assert [path.name for path in runtime.iterdir()] == ["key-salt"]
