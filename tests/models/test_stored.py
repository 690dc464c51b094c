"""`tokenmill models` and `rm`, over a cache of ours and one of huggingface_hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "own/smollm2").mkdir(parents=True)
    (tmp_path / "own/smollm2/m.gguf").write_bytes(bytes(3_000_000))
    hub = tmp_path / "hf/hub/models--org--name"
    for folder in ("blobs", "refs", "snapshots/" + "a" * 40):
        (hub / folder).mkdir(parents=True)
    (hub / "refs/main").write_text("a" * 40)
    (hub / "blobs/b").write_bytes(bytes(2_000_000))
    (hub / "snapshots" / ("a" * 40) / "model.safetensors").symlink_to("../../blobs/b")
    return tmp_path


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TOKENMILL_CACHE": str(home / "own"), "HF_HOME": str(home / "hf")}
    line = [sys.executable, "-m", "tokenmill", *words]
    return subprocess.run(line, env=env, capture_output=True, text=True)


def test_models_are_listed_with_their_sizes_and_removed(home: Path) -> None:
    assert command(home, "models").stdout.split() == [
        "model",
        "MB",
        "org/name",
        "2.0",
        "smollm2",
        "3.0",
    ]
    removed = command(home, "rm", "ORG/name")
    assert removed.returncode == 0 and removed.stdout == "org/name is removed: 2.0 MB are free\n"
    assert not (home / "hf/hub/models--org--name").exists()
    assert command(home, "rm", "smollm2").returncode == 0
    assert not (home / "own/smollm2").exists()
    empty = command(home, "models")
    assert empty.stdout == "" and "No model is here yet" in empty.stderr


def test_what_is_not_there_is_not_removed(home: Path) -> None:
    done = command(home, "rm", "other/name")
    assert done.returncode == 1 and "there: org/name, smollm2" in done.stderr.replace("\n", " ")
