"""Rounds side by side: verdicts on synthetic events, GPUs and prices, matching, the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.sample_rounds import write_result
from tokenmill.__main__ import run
from tokenmill.bench.report.page import Notice, Table, Whisker, render
from tokenmill.bench.report.table_pages import comparison_page
from tokenmill.bench.results.comparison import MIXED, UNLIKE, WORSE, compare
from tokenmill.bench.results.reading import read_round
from tokenmill.bench.results.reports import as_json
from tokenmill.bench.results.result import ResultPoint, ToolResult
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import summarize


def row(comparison: dict[str, Any], metric: str, point: int = 0) -> dict[str, Any]:
    rows = comparison["points"][point]["rows"]
    return next(row for row in rows if row["metric"] == metric)


def compared(*rounds: ToolResult, threshold: float = 0.05) -> dict[str, Any]:
    return as_json(compare(rounds, threshold).comparisons[0])


def test_pure_noise_is_called_noise(tmp_path: Path) -> None:
    verdicts = []
    for seed in range(0, 16, 2):
        one, two = (
            read_round(write_result(tmp_path / str(number), number, 100))
            for number in (seed, seed + 1)
        )
        found = compared(one, two)
        verdicts.append(found["verdict"])
        assert not found["changed"] and not found["warnings"]
        for metric in ("ttft_ms.p50", "tpot_ms.p50", "request_s", "output_tok_s"):
            low, high = row(found, metric)["ci95"]
            assert 0.85 < low <= row(found, metric)["speedup"] <= high < 1.15
    assert verdicts.count("within noise") >= 6  # of 8; 1 in 20 errs by chance


def sampled_round(rng: np.random.Generator, size: int, correlation: float) -> ToolResult:
    """A round whose latencies are those of every other: only chance makes them different."""
    point = ResultPoint("concurrency 4", ("concurrency", 4.0))
    for name, scale in (("ttft_ms", 100.0), ("tpot_ms", 10.0), ("e2e_ms", 400.0)):
        state, values = rng.normal(), []
        for noise in rng.normal(size=size):
            state = correlation * state + (1 - correlation**2) ** 0.5 * noise
            values.append(scale * float(np.exp(0.4 * state)))
        point.samples[name] = values
        point.add(name, summarize(values))
    rates = rng.normal(100, 10, 40)
    point.values["output_tok_s"] = float(rates.mean())
    point.samples["output_tok_s"] = rates.tolist()
    return ToolResult("x", "t", [point], {})


@pytest.mark.parametrize(("size", "correlation"), [(100, 0.8), (400, 0.0), (400, 0.9)])
def test_equal_rounds_are_seldom_called_different(size: int, correlation: float) -> None:
    """5 % of them at most; 60 pairs of rounds, so up to 7 by chance (0.995 of such tests)."""
    rng = np.random.default_rng([size, round(100 * correlation)])
    verdicts = []
    for _ in range(60):
        found = compared(*(sampled_round(rng, size, correlation) for _ in range(2)))
        rows = {row["label"]: row["verdict"] for row in found["points"][0]["rows"]}
        judged = {verdict for verdict in rows.values() if verdict}
        assert found["verdict"] in judged | {"mixed"} and rows["end-to-end ms p90"] is None
        verdicts.append(found["verdict"])
    assert sum(verdict in ("better", "worse", "mixed") for verdict in verdicts) <= 7


def test_too_few_requests_decide_nothing() -> None:
    """Thirty requests are no reason to say better, however far apart two medians are."""
    rng = np.random.default_rng(0)
    rounds = [sampled_round(rng, 30, 0.5) for _ in range(2)]
    for one, factor in zip(rounds, (1.0, 2.0), strict=True):
        del one.points[0].values["output_tok_s"]
        one.points[0].values = {k: factor * v for k, v in one.points[0].values.items()}
    found = compared(*rounds)
    assert found["verdict"] == row(found, "ttft_ms.p50")["verdict"] == "not enough requests"


def test_token_counts_of_two_tools_are_named() -> None:
    rounds = [published(100, 8), published(100, 8)]
    rounds[1].tool = "aiperf"
    for one, tokens in zip(rounds, (128.0, 124.0), strict=True):
        one.points[0].facts["output_tokens"] = tokens
    warnings = compared(*rounds)["warnings"]
    assert any("128.0 against 124.0 output tokens" in w and "each tool" in w for w in warnings)
    rounds[1].tool = "t"
    assert not compared(*rounds)["warnings"]  # 3 % between two runs of one tool


def test_a_true_difference_is_found(tmp_path: Path) -> None:
    one = read_round(write_result(tmp_path / "one", 1, 100, turns=1))
    two = read_round(write_result(tmp_path / "two", 2, 80, turns=2))
    found = compared(one, two)
    ttft = row(found, "ttft_ms.p50")
    assert found["verdict"] == ttft["verdict"] == "better"
    low, high = ttft["ci95"]
    assert 1 < low < 1.25 < high and ttft["change"] < 0
    assert row(found, "tpot_ms.p50")["verdict"] == "within noise"
    assert found["changed"] == {"turns": [1, 2]}
    for name, version in (("one", "1.0"), ("two", "2.0")):
        facts = {"started_at": name, "software": {"torch": version}, "hardware": {"cpu": "x"}}
        (tmp_path / name / "manifest.json").write_text(json.dumps(facts))
    one, two = read_round(tmp_path / "one"), read_round(tmp_path / "two")
    expected = {"turns": [1, 2], "software.torch": ["1.0", "2.0"]}
    assert compared(one, two)["changed"] == expected
    assert compared(two, one)["verdict"] == "worse"


def test_an_edited_summary_shows(tmp_path: Path) -> None:
    folder = write_result(tmp_path / "one", 1, 100)
    summary = json.loads((folder / "summary.json").read_text())
    summary["points"][0]["ttft_ms"]["p50"] /= 2
    (folder / "summary.json").write_text(json.dumps(summary))
    other = read_round(write_result(tmp_path / "two", 2, 100))
    warnings = compared(read_round(folder), other)["warnings"]
    assert any("its events give" in text and "TTFT ms p50" in text for text in warnings)
    lines = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join(lines[:-5]))
    assert "it is not used" in read_round(folder).notices[0]
    (folder / "events.jsonl").write_text("{")
    with pytest.raises(BenchError, match=r"events\.jsonl: broken events"):
        read_round(folder)


def published(tok_s: float, gpus: int | None, usd: float | None = 3.76) -> ToolResult:
    values = {"output_tok_s": tok_s}
    return ToolResult(
        "x", "t", [ResultPoint("Server", ("scenario", "Server"), values)], {}, gpus, usd
    )


def test_published_speedup_and_price() -> None:
    """2,907 -> 8,064 tok/s/GPU is 2.77x and a 64 % lower price, whatever the systems' sizes."""
    found = compared(published(209_328, 72), published(64_510, 8))
    rate, each = row(found, "output_tok_s"), row(found, "output_tok_s_gpu")
    assert rate["verdict"] is None and rate["speedup"] < 1  # a larger system, no better one
    assert (round(each["baseline"]), round(each["other"])) == (2907, 8064)
    assert round(each["speedup"], 2) == 2.77 and each["verdict"] == found["verdict"] == "better"
    price = row(found, "usd_per_million_output")
    assert round(price["change"], 2) == -0.64 and round(price["speedup"], 2) == 2.77
    same = compared(published(100, 8), published(200, 8))
    assert row(same, "output_tok_s")["verdict"] == "better"
    assert row(same, "output_tok_s_gpu")["verdict"] is None
    interactive = published(250_634, 72)
    compare([interactive, interactive], 0.05)
    assert round(interactive.points[0].values["usd_per_million_output"], 2) == 0.30


@pytest.mark.parametrize(
    ("other", "verdict"), [(104.0, "within noise"), (106.0, "better"), (94.0, "worse")]
)
def test_without_an_interval_the_threshold_decides(other: float, verdict: str) -> None:
    found = compared(published(100, None), published(other, None))
    assert found["verdict"] == verdict and row(found, "output_tok_s")["ci95"] is None
    assert compared(published(100, None), published(other, None), threshold=0.1)["verdict"] == (
        "within noise"
    )


def test_better_here_and_worse_there_is_mixed() -> None:
    one, two = published(100, None), published(150, None)
    one.points[0].values["ttft_ms.p50"] = 10.0
    two.points[0].values["ttft_ms.p50"] = 30.0
    found = compared(one, two)
    assert found["verdict"] == "mixed" and found["headline"]["worse"] == ["TTFT ms p50 0.33x"]


def sweep(*points: tuple[str, float], **facts: float) -> ToolResult:
    found = [
        ResultPoint(f"{kind} {value:g}", (kind, value), {"output_tok_s": 10.0}, facts=facts)
        for kind, value in points
    ]
    return ToolResult("s", "t", found, {})


def test_points_are_matched_by_load() -> None:
    one = sweep(("concurrency", 1), ("concurrency", 4), ("rate", 2))
    two = sweep(("concurrency", 4), ("concurrency", 8), ("rate", 2))
    found = compared(one, two)
    assert [point["load"] for point in found["points"]] == ["concurrency 4", "rate 2"]
    assert found["only_baseline"] == ["concurrency 1"] and found["only_other"] == ["concurrency 8"]
    with pytest.raises(BenchError, match="no load in common: s has concurrency 1, concurrency 4"):
        compared(one, sweep(("concurrency", 16), ("concurrency", 32)))


def test_lengths_that_were_asked_for_are_settings_of_a_run(tmp_path: Path) -> None:
    rounds = []
    for length, seed in ((64, 1), (128, 2)):
        folder = write_result(tmp_path / str(length), 1, 100)
        file = folder / "summary.json"
        settings = {"input-len": length, "seed": seed}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": settings}))
        rounds.append(read_round(folder))
    assert compared(*rounds)["changed"] == {"input-len": [64, 128]}


@pytest.mark.parametrize("difference", ["load", "input_tokens", "output_tokens"])
def test_runs_that_cannot_be_compared_have_no_verdict(difference: str, tmp_path: Path) -> None:
    one, two = (
        read_round(write_result(tmp_path / str(ttft), 1, ttft, gpus=1, price_per_gpu_hour=1.0))
        for ttft in (100, 300)
    )
    assert compared(one, two)["verdict"] in (WORSE, MIXED)
    if difference == "load":
        two.points[0].load, two.points[0].key = "concurrency 8", ("concurrency", 8.0)
    else:
        one.points[0].facts[difference], two.points[0].facts[difference] = 100.0, 106.0
    found = compared(one, two)
    assert found["verdict"] == UNLIKE and not found["headline"] and len(found["warnings"]) == 1
    rows = found["points"][0]["rows"]
    assert rows and not [row for row in rows if row["verdict"]]
    if difference == "input_tokens":  # two tools may count a prompt differently
        two.tool = "aiperf"
        assert compared(one, two)["verdict"] != UNLIKE


def test_the_exit_status_tells_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (str(write_result(tmp_path / str(t), 1, t)) for t in (100, 300))
    for rounds, flags, status in (
        ((fast, slow), (), 0),
        ((fast, slow), ("--fail-on", "worse"), 1),
        ((slow, fast), ("--fail-on", "worse"), 0),
        ((fast, fast), ("--fail-on", "worse"), 0),
    ):
        assert run(["bench", "compare", *rounds, *flags]) == status
        said = capsys.readouterr()
        assert ("error: --fail-on worse: B against A: worse" in said.err) == bool(status)
        assert json.loads(said.out.splitlines()[-1])["benchmark"] == "compare"


def test_weak_comparisons_say_so() -> None:
    one = sweep(("concurrency", 1), output_tokens=64.0)
    two = sweep(("concurrency", 2), output_tokens=128.0)
    two.tool = "other"
    assert compared(one, two)["verdict"] == UNLIKE
    warnings = compared(one, two)["warnings"]
    assert "the loads differ: concurrency 1 against concurrency 2" in warnings
    assert any("concurrency 1: 64.0 against 128.0 output tokens a request" in w for w in warnings)
    assert any("measured by t and by other" in text for text in warnings)


def test_better_by_a_cache_is_in_doubt() -> None:
    one, two = published(100, 8), published(465, 8)
    assert compared(one, two)["verdict"] == "better"
    one.points[0].facts["prefix_hits"], two.points[0].facts["prefix_hits"] = 0.1, 0.91
    found = compared(one, two)
    assert found["verdict"] == "better, in doubt"
    assert found["doubts"] == [f"prefix-cache hits 10% -> 91% at {one.points[0].load}"]
    (notice,) = comparison_page(compare([one, two], 0.05), "footnote").notices
    assert "better, in doubt: prefix-cache hits 10% -> 91%" in notice.title
    two.points[0].facts["prefix_hits"] = 0.15
    assert compared(one, two)["verdict"] == "better"


def test_settings_of_two_tools_are_compared_where_both_have_them() -> None:
    one, two = published(1, None, None), published(1, None, None)
    one.config, two.config = {"model": "a", "x": 1}, {"model": "b", "y": 2}
    assert compared(one, two)["changed"] == {"model": ["a", "b"], "x": [1, None], "y": [None, 2]}
    two.tool = "other"
    assert compared(one, two)["changed"] == {"tool": ["t", "other"], "model": ["a", "b"]}


def test_the_page_needs_nothing_else() -> None:
    one, two = published(100, 8), published(200, 8)
    two.notices = ["<script>alert(1)</script>"]
    page = comparison_page(compare([one, two], 0.05), "footnote")
    text = render(page)
    assert text.count("<script") == 1 and "alert(1)</script>" not in text
    assert "viewport" in text and "prefers-color-scheme: dark" in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "footnote" in text
    assert [section.title for section in page.sections] == ["Rounds", "B against A"]
    assert page.notices == [Notice("good", "B against A: better", page.notices[0].lines)]


@pytest.mark.parametrize("tok_s", [1e-9, 1e12])
def test_a_ratio_without_bounds_is_drawn_at_the_end_of_the_scale(tok_s: float) -> None:
    page = comparison_page(compare([published(100, 8), published(tok_s, 8)], 0.05), "footnote")
    tables = [block for block in page.sections[1].blocks if isinstance(block, Table)]
    (table,) = [each for each in tables if each.rows[0][0] == "metric"]
    drawn = [cell for row in table.rows[1:] for cell in row if isinstance(cell, Whisker)]
    assert drawn and all(cell.reach == pytest.approx(math.log(1000)) for cell in drawn)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_result(tmp_path / "one", 1, 100, gpus=2, price_per_gpu_hour=3.0)
    two = write_result(tmp_path / "two", 2, 80)
    html = tmp_path / "c.html"
    flags = ["--gpus", "2,4", "--price-per-gpu-hour", "3", "--html", str(html)]
    assert run(["bench", "compare", str(one), str(two), *flags]) == 0
    printed = capsys.readouterr().out
    assert "TTFT ms p50" in printed and "within noise" in printed
    report = json.loads(printed.splitlines()[-1])
    assert [entry["gpus"] for entry in report["rounds"]] == [2, 4]
    assert report["comparisons"][0]["changed"]["gpus"] == [2, 4]
    assert html.read_text().startswith("<!doctype html>")
    assert run(["bench", "compare", str(one), str(two), "--json"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "needs two results or more"),
        (["a", "missing"], "missing: no such file or folder"),
        (["a", "a", "--gpus", "1,2,3"], "--gpus needs one number, or one for each of the 2 rounds"),
        (["a", "a", "--gpus", "none"], "--gpus must be numbers of at least 1"),
        (["a", "a", "--html", "x.txt"], "--html x.txt: expected a file that ends in .html"),
        (["a", "a", "--html", "no/x.html"], "there is no folder no"),
        (["a", "text"], "text: is not a JSON object; bench compare reads tokenmill bench"),
        (["a", "unknown"], "unknown: is not a result of a known tool; bench compare reads"),
        (
            ["a", "broken"],
            "broken: looks like a result but is broken: ValidationError Object missing required",
        ),
        (["a", "empty"], "empty: has none of summary.json"),
        (["a", "nothing"], "nothing: the result has no figures"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_result(tmp_path / "a", 1, 100)
    (tmp_path / "empty").mkdir()
    Path("text").write_text("tok/s: 7")
    Path("unknown").write_text('{"a": 1}')
    Path("broken").write_text('{"benchmark": "endpoint"}')
    Path("nothing").write_text('{"benchmark": "endpoint", "points": []}')
    assert run(["bench", "compare", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
