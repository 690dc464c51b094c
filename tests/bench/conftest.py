"""Fixtures of benchmarks that measure a server from the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.scripted_server import ScriptedServer, scripted_server


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as running:
        yield running


@pytest.fixture
def clean_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and no settings in the environment."""
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
