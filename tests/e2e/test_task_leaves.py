"""Ranking and video can move into packages of their own: without them all else is as it was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill
from api.sim_server import sim_server

TESTS = Path(__file__).parents[1]
# All modules but those that a machine may be without, such as ray's.
IMPORT_ALL = """
import importlib, pkgutil, sys, tokenmill
assert tokenmill.__file__.startswith(sys.argv[1])
for module in pkgutil.walk_packages(tokenmill.__path__, "tokenmill."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as missing:
        assert not str(missing.name).startswith("tokenmill"), (module.name, missing)
"""


@pytest.mark.parametrize("package", ["ranking", "video"])
def test_without_a_tasks_package_all_else_imports_and_a_chat_is_answered(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(tokenmill.__file__ or "").parent
    leave_out = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(source, tmp_path / "tokenmill", ignore=leave_out)
    shutil.rmtree(tmp_path / "tokenmill" / package)
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", IMPORT_ALL, str(tmp_path)], env=environ, check=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{TESTS}")
    with sim_server() as server:
        body = {"messages": [{"role": "user", "content": "say: all is well"}]}
        answer = server.call("POST", "/v1/chat/completions", body)
    assert answer.json["choices"][0]["message"]["content"] == "all is well"
