"""What `tokenmill demo` says around its parts, which other tests run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.sample_runs import mlperf_run
from tokenmill import demo
from tokenmill.bench.results.reports import as_json


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


def test_a_headline_names_the_model_that_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = mlperf_run()
    report.model = "/cache/smollm2.gguf"
    line = json.dumps(as_json(report))
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=f"text\n{line}\n")
    )
    assert demo._measured()
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"smollm2.gguf under the load of MLPerf {report.mlperf_benchmark}, ")
    assert "QUICK" in said and "VALID" not in said
