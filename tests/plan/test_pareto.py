"""plan pareto as a user runs it: the figures, the CSV, and the page in Chromium."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from pages import DARK, LIGHT, Opened, open_browser
from tokenmill.__main__ import run

LLAMA = ("--benchmark", "llama3.1-8b", "--gpu", "h200,b200", "--interactivity", "10,20,50")


def words(folder: Path, *more: str) -> list[str]:
    files = ("--html", str(folder / "p.html"), "--csv", str(folder / "p.csv"))
    return ["plan", "pareto", *more, *files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pareto")
    assert run(words(found, *LLAMA)) == 0
    return found


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_points_are_predictions_within_their_intervals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(words(tmp_path, *LLAMA, "--json")) == 0
    report = last_line(capsys)
    assert report["prediction"] and report["efficiencies_of"] == "v6.0"
    kinds = [(curve["gpu"], curve["precision"]) for curve in report["curves"]]
    assert kinds == [("h200", "fp8"), ("b200", "fp4"), ("b200", "fp8")]
    for curve in report["curves"]:
        points = curve["points"]
        # Offline, the three asked for, and the limits of Server and Interactive.
        users = [point["tok_s_per_user"] for point in points]
        assert users == [None, 10.0, 20.0, 33.33, 50.0]
        assert [point["ttft_limit_ms"] for point in points] == [None, 2000, 2000, 500, 500]
        rates = [point["tok_s_per_gpu"] for point in points]
        assert rates == sorted(rates, reverse=True)
        for point in points:
            low, high = point["tok_s_per_gpu_interval"]
            assert low < point["tok_s_per_gpu"] < high
            usd = curve["price_per_gpu_hour"] * 1e6 / 3600 / point["tok_s_per_gpu"]
            assert point["usd_per_million_output"] == pytest.approx(usd, abs=1e-4)
            cheap, dear = point["usd_per_million_output_interval"]
            assert cheap < point["usd_per_million_output"] < dear
    published = {(row["gpu"], row["scenario"]): row for row in report["published"]}
    assert {("b200", "Offline"), ("b200", "Interactive")} <= published.keys()
    assert all(row["round"] == "v6.0" for row in published.values())


def test_a_point_at_a_scenarios_limit_is_what_predict_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(words(tmp_path, *LLAMA)) == 0
    points = last_line(capsys)["curves"][0]["points"]
    predict = ["plan", "predict", "--benchmark", "llama3.1-8b", "--gpu", "h200", "--gpus", "8"]
    for scenario, point in (("Offline", points[0]), ("Interactive", points[3])):
        assert run([*predict, "--scenario", scenario]) == 0
        assert last_line(capsys)["tok_s_per_gpu"] == point["tok_s_per_gpu"]


def test_the_table_has_every_point(folder: Path) -> None:
    with (folder / "p.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    predicted = [row for row in rows if row["kind"] == "predicted"]
    assert len(predicted) == 3 * 5
    for row in predicted:
        low, value, high = (float(row[f"tok_s_per_gpu{end}"]) for end in ("_low", "", "_high"))
        assert low < value < high and float(row["usd_per_million_output"]) > 0
    published = [row for row in rows if row["kind"] == "published"]
    assert published and all(row["source"].startswith("MLPerf v6.0, ") for row in published)


def test_a_model_with_lengths_of_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = ("--model", "qwen3-30b-a3b", "--lengths", "uniform:100-1024", "--gpu", "h200,mi300x")
    more = ("--precision", "fp8,bf16", "--round", "tokenmill", "--interactivity", "20,50")
    assert run(words(tmp_path, *own, *more, "--gpus", "1")) == 0
    report = last_line(capsys)
    assert len(report["curves"]) == 4 and report["published"] == []
    assert report["efficiencies_of"] == "tokenmill" and report["benchmark"] is None


def test_what_cannot_be_drawn_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ("--benchmark", "deepseek-r1", "--gpu", "h100,gb300", "--gpus", "8")
    assert run(words(tmp_path, *more, "--precision", "fp8", "--interactivity", "20")) == 0
    report = last_line(capsys)
    assert [curve["gpu"] for curve in report["curves"]] == ["gb300"]
    assert re.search(r"h100 fp8: .* too large; use", report["left_out"][0])
    assert "Left out" in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gpu", "h200,b100"], "--gpu b100: not known; known are h100"),
        (["--precision", "fp4", "--gpu", "h200"], "h200: does not compute llama3.1-8b in fp4"),
        (["--precision", "int3"], "--precision int3: expected some of bf16"),
        (["--interactivity", "9000"], r"--interactivity 9000: no configuration of .* times these"),
        (["--lengths", "llama3.1-8b"], "--lengths and --output-len need --model"),
        (["--round", "v4.0"], "--round v4.0: no efficiencies"),
        (["--csv", "p.txt"], "--csv p.txt: expected a file that ends in .csv"),
        (["--html", "/nowhere/p.html"], "--html /nowhere/p.html: there is no folder"),
    ],
)
def test_wrong_input_says_what_would_work(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--model", "llama3.1-8b", "--lengths", "llama3.1-8b"]
    alone = ["--benchmark", "llama3.1-8b"] if "--lengths" in more else given
    files = [] if {"--csv", "--html"} & set(more) else words(tmp_path)[2:]
    gpu = [] if "--gpu" in more else ["--gpu", "h200"]
    assert run(["plan", "pareto", *alone, *gpu, *more, *files]) != 0
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(message, text), text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_the_page_stands_alone_and_fits(
    browser: Browser, folder: Path, width: int, scheme: str
) -> None:
    url = (folder / "p.html").as_uri()
    with Opened(browser, url, width, scheme) as opened:
        page = opened.page
        for details in page.locator("details").all():
            details.evaluate("element => element.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": LIGHT, "dark": DARK}[scheme]
        assert "This page is a prediction" in page.locator(".notice").first.inner_text()
        # Two charts, three curves in each, with an interval each, and published dots.
        assert page.locator(".plot svg path.line").count() == 6
        assert page.locator(".plot svg path.band").count() == 6
        assert page.locator(".plot .dot:not(.pin)").count() >= 4
        assert opened.said == [] and opened.asked == [url]


def test_the_pointer_shows_a_prediction_with_its_interval(browser: Browser, folder: Path) -> None:
    with Opened(browser, (folder / "p.html").as_uri(), 1280) as opened:
        plot = opened.page.locator(".plot").first
        plot.focus()
        opened.page.keyboard.press("Home")
        text = plot.locator(".tip").inner_text()
        assert text.startswith("Offline: no limit per user")
        assert re.search(r"8 x h200 fp8\s*[\d.,k]+ \([\d.,k]+ to [\d.,k]+\)", text), text
        assert re.search(r"b200 published\s*[\d.,k]+", text), text
