"""What a terminal of 80 columns shows: tables that fit, and no JSON unless it is asked for."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench.sample_rounds import write_result
from bench.sample_runs import endpoint_run, mlperf_run
from tokenmill import console
from tokenmill.__main__ import run
from tokenmill.bench.commands import endpoint
from tokenmill.bench.mlperf.loadgen_tests import print_report as print_mlperf
from tokenmill.bench.results.reports import PromptsReport
from tokenmill.cli.chat import chat_command

REPLAY = ("plan", "replay", "--trace", "recipes/sample-trace.jsonl", "--workers", "4")
SIMULATED = ("--num-requests", "5", "--lengths", "uniform:10-20")
COMMANDS = (
    ("bench", "price", "--tok-s", "250634", "--gpus", "72", "--price-per-gpu-hour", "3.76"),
    ("bench", "published"),
    ("bench", "published", "--benchmark", "llama3.1-8b", "--scenario", "Offline"),
    ("plan", "validate"),
    ("plan", "predict", "--benchmark", "llama3.1-8b"),
    ("plan", "size", "--model", "llama3.1-8b", "--rate", "5", "--lengths", "llama3.1-8b"),
    ("plan", "pareto", "--benchmark", "llama3.1-8b", "--gpu", "h200", "--gpus", "1"),
    ("plan", "simulate", *("--model", "qwen3-0.6b", "--gpu", "h200", "--gpus", "1"), *SIMULATED),
    ("models",),
    ("recipes",),
    REPLAY,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr(console, "sys", SimpleNamespace(stdout=shown, stderr=sys.stderr))
    monkeypatch.setattr(console, "out", Console(file=shown, width=80, highlight=False))
    return shown


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_terminal_shows_lines_that_fit_and_no_json(
    command: tuple[str, ...], terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    assert run(command) == 0
    lines = terminal.getvalue().splitlines()
    assert lines and max(map(len, lines)) <= 80
    assert not [line for line in lines if line.startswith("{")]


def test_reports_of_runs_fit(terminal: Terminal, tmp_path: Path) -> None:
    """Those of a server's benchmark, of two of them side by side, and of an MLPerf run."""
    folders = [str(write_result(tmp_path / str(ttft), 1, ttft)) for ttft in (100, 300)]
    report = endpoint_run((1, 64))[0]
    report.prompts = PromptsReport(seed=1, seed_drawn=True, same_at_every_point=False, salt=None)
    endpoint.print_report(report)
    assert run(["bench", "compare", *folders]) == 0
    print_mlperf(mlperf_run())
    lines = re.sub(r"\x1b\[\d*m", "", terminal.getvalue()).splitlines()
    assert len(lines) > 40 and [line for line in lines if len(line) > 80] == []


def test_json_is_one_line_alone(terminal: Terminal) -> None:
    assert run([*REPLAY, "--json"]) == 0
    (line,) = terminal.getvalue().splitlines()
    assert json.loads(line)["num_finished"] == {"length": 60}


def test_a_pipe_gets_text_and_then_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(REPLAY) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["num_finished"] == {"length": 60} and len(text) == 5


def shown_at(width: int, rows: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> str:
    shown = Terminal()
    out: Any = Console(file=shown, width=width, highlight=False)
    monkeypatch.setattr(console, "out", out)
    console.print_table(rows)
    return shown.getvalue()


def test_columns_that_do_not_fit_follow_below(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["name", "first", "second"], ["a", "1", "2"]]
    assert shown_at(20, rows, monkeypatch) == "name  first  second\na         1       2\n"
    below = "name  first\na         1\n\nname  second\na          2\n"
    assert shown_at(13, rows, monkeypatch) == below


SAID = "The sea is a vast and mysterious realm.\n\n    def indented(): pass\n" + "x" * 30 + " ends"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_answers_wrap_at_words(size: int) -> None:
    """Whatever the pieces; indented lines and words that are too long stay whole."""
    texts = [SAID[at : at + size] for at in range(0, len(SAID), size)]
    shown = "".join(chat_command.wrapped(texts, 24))
    assert shown.split() == SAID.split() and "\n    def indented(): pass\n" in shown
    assert shown.startswith("The sea is a vast and\nmysterious realm.\n\n")
    assert shown.endswith("\n" + "x" * 30 + "\nends")
    assert "".join(chat_command.wrapped(texts, 80)) == SAID
    assert "".join(chat_command.wrapped(["海は広い ", "大きい"], 12)) == "海は広い\n大きい"


def test_chat_says_which_model_answers(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def source(messages: Any, answer: Any) -> Any:
        answer.text = "word " * 30
        yield answer.text

    monkeypatch.setattr(chat_command, "_local", lambda *_: ("tiny", source))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\n"))
    assert run(["chat"]) == 0
    shown = capsys.readouterr()
    assert "tiny answers. /reset" in " ".join(shown.err.split())
    assert shown.out.split() == ["word"] * 30 and max(map(len, shown.out.splitlines())) <= 80


PRICE = ("bench", "price", "--tok-s", "5", "--gpus", "1", "--price-per-gpu-hour", "3")


@pytest.fixture
def settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file of the current folder, and an environment without settings."""
    for name in [name for name in os.environ if name.startswith("TOKENMILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tokenmill.toml"


def test_a_file_of_the_folder_is_announced_and_sets_its_own_command(
    settings_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_file.write_text("[serve]\nport = 8123\n[bench.price]\ngpus = 2\n")
    assert run(["bench", "price", "--tok-s", "5", "--price-per-gpu-hour", "3", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["gpus"] == 2
    assert shown.err == "settings are taken from tokenmill.toml\n"
    monkeypatch.setenv("TOKENMILL_API_KEY", "secret")
    assert run(["config"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["port", "8123", "tokenmill.toml"] in rows and ["api-key", "***", "environment"] in rows
    assert run(["config", "bench", "price"]) == 0
    assert "gpus" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 1", "'port' is no setting of bench price; write it below the name of its command"),
        ("[bench.price]\nport = 1", "'port' is no setting of bench price"),
        ("[serv]\nport = 1", "[serv] is no command of tokenmill"),
        ("prot = 1", "unknown key 'prot'; did you mean"),
    ],
)
def test_what_a_file_cannot_set_is_refused_by_name(
    text: str, said: str, settings_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_file.write_text(text)
    assert run(PRICE) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_variable_is_named(
    settings_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_PROT", "9")
    monkeypatch.setenv("TOKENMILL_MAX_NUM_SEQS", "9")  # of other commands
    assert run(PRICE) == 0
    assert "warning: TOKENMILL_PROT is no setting; did you mean" in capsys.readouterr().err
    assert run(["config", "nothing"]) == 2
