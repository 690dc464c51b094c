"""The examples run as their first lines say; that of ranking is run in tests/ranking."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api.sim_server import sim_server
from examples import batch, tool_calls

ROOT = Path(__file__).parents[1]
RUN = {"batch.py", "tool_calls.py", "rank_train.py"}


def test_every_example_is_run_and_named_on_a_page() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == RUN
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert [name for name in RUN if f"python examples/{name}" not in pages] == []


def test_a_batch(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, answers = tmp_path / "questions.txt", tmp_path / "answers.jsonl"
    questions.write_text("What is the capital of France?\n\nName a colour.\n", encoding="utf-8")
    batch.main([str(questions), str(answers), "--model", str(smollm2_path)])
    assert "2 answers of " in capsys.readouterr().out
    found = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert [line["question"][:4] for line in found] == ["What", "Name"]
    assert "Paris" in found[0]["answer"] and {line["ended"] for line in found} == {"stop"}


def test_tool_calls(capsys: pytest.CaptureFixture[str]) -> None:
    with sim_server() as server:
        tool_calls.main(["How warm is it in Bern?", "--url", f"{server.url}/v1"])
    called, *answer = capsys.readouterr().out.splitlines()
    name, _, result = called.partition(": ")
    assert name == "temperature" and json.loads(result)["city"] in tool_calls.CITIES
    assert "".join(answer).strip()
