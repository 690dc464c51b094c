"""tokenmill bench campaign from the command line to the files of a submission."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.sample_runs import page_data
from bench.scripted_server import NUM_TOKENS, ScriptedServer
from tokenmill.__main__ import run
from tokenmill.bench.client.datasets import Prompts, PromptTurn, Shuffled
from tokenmill.bench.commands.campaign import PANELS, Campaign
from tokenmill.bench.mlperf import endpoints_submission
from tokenmill.bench.mlperf.endpoints_submission import (
    TEMPLATE,
    read_disclosure,
    required_values,
    to_yaml,
)
from tokenmill.bench.options import EndpointConfig
from tokenmill.bench.workload import BenchError
from tokenmill.settings import Settings, defaults_of

pytestmark = pytest.mark.usefixtures("clean_folder")


def fill(text: str, **values: Any) -> str:
    """The template with an answer for every question."""

    def answer(match: re.Match[str]) -> str:
        number = any(kinds.get(match[1]) is int for kinds in required_values().values())
        value = values.get(match[1], 1 if number else f"our-{match[1]}")
        return f"{match[1]} = {json.dumps(value)}"

    return re.sub(r'^(\w+) = ""', answer, text, flags=re.M)


@pytest.fixture
def disclosure(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/README.md").write_text("how to build")
    (tmp_path / "notes").mkdir()
    path = tmp_path / "d.toml"
    names = {"src": str(tmp_path / "engine"), "docs": str(tmp_path / "notes")}
    seed = {"sample_index_rng_seed": 586478644936801402}
    known = {"model_name": "llama3_1-8b", "division": "RDI", **names, **seed}
    path.write_text(fill(TEMPLATE.read_text(), **known))
    return path


def test_quick_campaign(
    server: ScriptedServer,
    disclosure: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [json.dumps({"prompt": f"number {index}", "output_len": 6}) for index in range(5)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    flags = ["--url", server.url, "--model", "ok", "--quick", "--duration", "0.05"]
    flags += ["--max-concurrency", "33", "--prompts", "p.jsonl", "--warmup-requests", "1"]
    flags += ["--submission-dir", "sub", "--disclosure", str(disclosure), "--output-dir", "out"]
    flags += ["--gpus", "2", "--price-per-gpu-hour", "3.5", "--no-audit", "--no-server-metrics"]
    assert run(["bench", "campaign", *flags]) == 0
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert report["benchmark"] == "campaign" and not report["valid_submission"]
    assert report["max_concurrency_source"] == "given" and report["search"] is None
    assert "not a valid submission: a quick run" in out
    assert "--quick" in report["not_valid_because"][0]
    points = report["points"]
    assert [p["concurrency"] for p in points] == [1, 2, 3, 5, 7, 15, 33]
    assert points[0]["region"] == "low_latency" and points[-1]["region"] == "high_concurrency"
    for point in points:
        assert point["tps_per_user"] == pytest.approx(1000 / point["tpot_ms"]["p90"], rel=1e-3)
        assert point["system_tps"] == point["output_tok_s"] and "price" in point
    assert json.loads((tmp_path / "out/summary.json").read_text()) == report
    page = page_data((tmp_path / "out/report.html").read_text())
    assert page["notices"][0]["title"] == "Not a valid submission"
    assert "--quick" in page["notices"][0]["lines"][0]
    curve = page["sections"][0]["blocks"][2]["charts"][0]
    assert [one["shape"] for one in curve["series"]] == ["dots", "steps"]
    assert sorted(curve["names"], key=int) == ["1", "2", "3", "5", "7", "15", "33"]
    assert all("per M output tokens" in label for label in curve["labels"])
    assert "ignore_eos" not in server.seen[-1].body  # answers of a dataset end by themselves
    assert (tmp_path / "out/events/r33.jsonl").is_file()
    check_files(tmp_path / "sub/our-organization/our-submission_id", points)


def test_a_full_disk_costs_the_submission_alone(
    server: ScriptedServer,
    disclosure: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(endpoints_submission, "write_submission", full)
    flags = ["--url", server.url, "--model", "ok", "--quick", "--duration", "0.05"]
    flags += ["--max-concurrency", "33", "--warmup-requests", "1", "--output-dir", "out"]
    flags += ["--submission-dir", "sub", "--disclosure", str(disclosure), "--no-server-metrics"]
    assert run(["bench", "campaign", *flags, "--no-audit"]) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out.splitlines()[-1])
    assert len(report["points"]) == 7 and report["submission"] is None
    assert json.loads(Path("out/summary.json").read_text()) == report
    assert "error: --submission-dir sub: No space left on device" in shown.err
    assert "the result above is not in all of its folders" in shown.err


def check_files(root: Path, points: list[dict[str, Any]]) -> None:
    """What the checker reads, and a mark in every file."""
    assert "not a valid submission" in (root / "NOT_A_VALID_SUBMISSION.txt").read_text()
    assert (root / "src/engine/README.md").is_file() and (root / "docs").is_dir()
    model = root / "results/our-system/llama3_1-8b"
    best = max(point["system_tps"] for point in points)
    for point in points:
        folder = model / f"r{point['concurrency']}"
        result = json.loads((folder / "result_summary.json").read_text())
        assert result["n_samples_completed"] == result["n_samples_issued"]
        total = result["output_sequence_lengths"]["total"]
        assert total == NUM_TOKENS * result["n_samples_completed"]
        tps = total / result["duration_ns"] * 1e9
        assert tps == pytest.approx(point["system_tps"], rel=1e-3)
        p90_ms = result["tpot"]["percentiles"]["90"] / 1e6
        assert 1000 / p90_ms == pytest.approx(point["tps_per_user"], rel=1e-3)
        system = json.loads((folder / "system_desc.json").read_text())
        assert system["max_supported_concurrency"] == 33 and system["division"] == "RDI"
        assert system["tps_utilization"] == pytest.approx(tps / best, rel=1e-2)
        text = (folder / "point.yaml").read_text()
        assert f'region: "{point["region"]}"' in text and "requests_issued: 1\n" in text
        assert "    sample_index_rng_seed: 586478644936801402\n" in text
        elected = "elected" if point["concurrency"] == 33 else "none"
        assert f'offline: "{elected}"' in text
        for path in folder.iterdir():
            assert path.suffix == ".jsonl" or "--quick" in path.read_text(), path
    assert (folder / "warmup_events.jsonl").is_file()


def test_without_quick_the_rules_hold(server: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    settings = Settings(
        {"url": server.url, "model": "ok", "prompts": "p.jsonl"}, defaults_of(*PANELS.values())
    )
    campaign = Campaign(settings, settings.build(EndpointConfig))
    loads: list[Any] = []

    class Stop(Exception):
        pass

    def measure(load: Any) -> None:
        loads.append(load)
        raise Stop

    campaign._bench.measure = measure  # type: ignore[method-assign,assignment]
    for concurrency in (32, 33):
        with pytest.raises(Stop):
            campaign._measure(concurrency)
    assert [load.duration_s for load in loads] == [600, 1200]
    assert [load.pass_size for load in loads] == [2, 2]


def test_passes_are_whole_and_in_an_order_of_their_own() -> None:
    data = Prompts(tuple(PromptTurn(str(number)) for number in range(20)))
    shuffled = Shuffled(data, 20, 586478644936801402)
    texts = [shuffled.session(index).turns[0].content for index in range(40)]
    first, second = texts[:20], texts[20:]
    assert set(first) == set(second) == {str(number) for number in range(20)}
    assert first != second and first != sorted(first, key=lambda text: int(str(text)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'model_name = "llama3_1-8b"',
            'model_name = ""',
            "model_name is not filled in yet, it is ''",
        ),
        (
            'driver = "our-driver"',
            'driver = "TODO: ask"',
            "[system.node_types] driver is not filled",
        ),
        ('driver = "our-driver"', "", "[system.node_types] driver is missing"),
        ("model_seed = 1", 'model_seed = "a"', "[seeds] model_seed must be a whole number"),
        (
            'system_size = "our',
            'tps_utilization = 1\nsystem_size = "our',
            "is measured by",
        ),
        ('organization = "our-', 'organization = "../', "must be the name of a folder"),
        ("[seeds]", "[other]", "[seeds] is missing"),
        ("[[system.node_types]]", "[later]", "[[system.node_types]] is missing"),
        ("[seeds]", "[seeds", "not a TOML file"),
        ("engine", "gone", "there is no README.md"),
    ],
)
def test_open_questions_are_refused(disclosure: Path, old: str, new: str, message: str) -> None:
    text = disclosure.read_text()
    assert old in text
    disclosure.write_text(text.replace(old, new))
    with pytest.raises(BenchError, match=re.escape(message)):
        read_disclosure(disclosure)


def test_template_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "campaign", "--write-disclosure", "d.toml"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == "d.toml"
    with pytest.raises(BenchError, match=r"\[submission\] organization is not filled in yet"):
        read_disclosure(tmp_path / "d.toml")
    assert run(["bench", "campaign", "--write-disclosure", "d.toml"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_yaml() -> None:
    text = to_yaml({"a": 1, "b": {"c": "x: y", "d": {}}, "e": [1, 'q"']})
    assert text == 'a: 1\nb:\n  c: "x: y"\n  d: {}\ne: [1, "q\\""]\n'


URL = ("--url", "http://127.0.0.1:9", "--model", "m")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ((), 2, "--url is missing"),
        ((*URL, "--max-concurrency", "32"), 1, "--max-concurrency must be above 32"),
        ((*URL, "--points", "6"), 2, "--points must be a whole number from 7 to 32"),
        ((*URL, "--duration", "5"), 2, "--duration needs --quick"),
        ((*URL, "--submission-dir", "x"), 2, "--submission-dir and --disclosure go together"),
        ((*URL, "--submission-dir", "x", "--disclosure", "gone"), 1, "--disclosure gone: cannot"),
        ((*URL, "--gpus", "2"), 2, "a price needs both"),
    ],
)
def test_bad_flags(
    flags: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "campaign", *flags]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert captured.err.startswith(f"error: {message}")
