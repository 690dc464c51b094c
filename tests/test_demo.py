"""What `tokenmill demo` says around its parts, which other tests run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenmill import demo


@pytest.mark.parametrize(
    ("installed", "name"), [("/usr/bin/tokenmill", "tokenmill"), (None, ".venv/bin/tokenmill")]
)
def test_it_says_what_it_will_do_and_what_to_type_next(
    installed: str | None,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "fetch", lambda _: tmp_path)
    monkeypatch.setattr(demo, "_chats", lambda: True)
    monkeypatch.setattr(demo, "_measured", lambda *_: False)
    monkeypatch.setattr(subprocess, "run", lambda *_: SimpleNamespace(returncode=0))
    monkeypatch.setattr("shutil.which", lambda _: installed)
    assert demo.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in lines[:3]] == ["1.", "2.", "3."]
    assert "chats on a prefill and a decode worker: went well" in lines
    assert "MLPerf Offline: FAILED" in lines
    assert lines[-2].startswith(f"What to type next: {name} chat, or {name} serve")
    assert lines[-1].startswith(f"{name} bench endpoint --url http://127.0.0.1:8000/v1")
