"""The report page in headless Chromium: from a file, alone, at both widths and in both schemes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from bench.sample_runs import (
    CLIENT_WARNING,
    FACTS,
    HOSTILE,
    endpoint_run,
    mlperf_run,
    mlperf_times,
)
from pages import DARK, LIGHT, Opened, open_browser
from tokenmill.bench.client.summary import Price
from tokenmill.bench.report.endpoint_report import endpoint_page
from tokenmill.bench.report.mlperf_report import mlperf_page
from tokenmill.bench.report.page import (
    Bar,
    PagePart,
    ReportPage,
    Section,
    Table,
    Text,
    Whisker,
    render,
)
from tokenmill.bench.results.reports import ServerReport
from tokenmill.core.metrics import Slo

SERVER = ServerReport(
    num_readings=3,
    num_readings_during=2,
    num_requests=60,
    num_output_tokens=123_456,
    num_prompt_tokens=None,
    num_preemptions=None,
    peak_running=16,
    peak_waiting=3,
    peak_kv_cache_usage=0.5,
    prefix_hit_rate=0.1,
    acceptance_length=2.2,
    acceptance_positions=[0.9, 0.8, 0.7],
    ttft_mean_ms=12_345.6,
    queue_mean_ms=None,
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """URLs of the pages by what they show."""
    slo, price = Slo(ttft_ms=60, tpot_ms=20), Price(8, 3.0)
    single = endpoint_run((8,), 90, slo=slo, price=price)
    sweep = endpoint_run((1, 4, 16), 60, fails=True, warnings=(CLIENT_WARNING,))
    full = endpoint_run((1, 4, 16, 256), 60, slo=slo, price=price)
    for point in full[0].points:
        point.server = SERVER
    texts = {
        "single": render(endpoint_page(*single, FACTS)),
        "sweep": render(endpoint_page(*sweep, FACTS)),
        "full": render(endpoint_page(*full, FACTS)),
        "mlperf": render(mlperf_page(mlperf_run(valid=False), mlperf_times(), FACTS)),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["single", "sweep", "mlperf"])
def test_page_stands_alone_and_fits(
    browser: Browser, pages: dict[str, str], name: str, width: int, scheme: str
) -> None:
    with Opened(browser, pages[name], width, scheme) as opened:
        page = opened.page
        for details in page.locator("details").all():
            details.evaluate("element => element.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": LIGHT, "dark": DARK}[scheme]
        assert page.locator(".plot svg path.line, .plot svg path.bars").count() >= 6
        heights = page.eval_on_selector_all(".area", "all => all.map(e => e.clientHeight)")
        assert min(heights) > 100
        assert opened.said == [] and opened.asked == [pages[name]]


@pytest.mark.parametrize("name", ["single", "full", "mlperf"])
def test_no_table_is_cut_off_on_a_laptop(
    browser: Browser, pages: dict[str, str], name: str
) -> None:
    with Opened(browser, pages[name], 1440) as opened:
        for details in opened.page.locator("details").all():
            details.evaluate("element => element.open = true")
        cut = "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
        assert opened.page.eval_on_selector_all(".table", cut) == []


def test_pointer_and_keys_show_values(browser: Browser, pages: dict[str, str]) -> None:
    with Opened(browser, pages["single"], 1280) as opened:
        plot = opened.page.locator(".plot").first
        tip = plot.locator(".tip")
        assert not tip.is_visible()
        plot.locator(".area").hover()
        assert tip.is_visible() and re.search(r"to [\d.]+ ms\s*requests\s*\d+", tip.inner_text())
        opened.page.mouse.move(0, 0)
        assert not tip.is_visible()
        plot.focus()
        opened.page.keyboard.press("Home")
        first = tip.inner_text()
        opened.page.keyboard.press("ArrowRight")
        assert tip.is_visible() and tip.inner_text() != first
        opened.page.keyboard.press("Escape")
        assert not tip.is_visible() and opened.said == []


def test_a_tap_shows_values_inside_a_phone(browser: Browser, pages: dict[str, str]) -> None:
    with Opened(browser, pages["sweep"], 390) as opened:
        for plot in opened.page.locator(".charts").first.locator(".plot").all():
            plot.locator(".area").click()
            box = plot.locator(".tip").bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_texts_of_a_server_stay_texts(browser: Browser, pages: dict[str, str]) -> None:
    with Opened(browser, pages["sweep"], 1280) as opened:
        assert opened.page.title() == "sample-8b"
        assert opened.page.locator(".notice.bad").inner_text().endswith(HOSTILE)
        assert (
            opened.page.locator("script").count() == 1 and opened.page.locator("img").count() == 0
        )
        assert CLIENT_WARNING in opened.page.locator(".notice.warn").inner_text()


def test_a_foreign_script_does_not_run(browser: Browser, tmp_path: Path) -> None:
    text = render(endpoint_page(*endpoint_run((2,), 12), FACTS))
    path = tmp_path / "foreign.html"
    path.write_text(text.replace("<body>", "<body><script>document.title = 'owned'</script>"))
    with Opened(browser, path.as_uri(), 1280) as opened:
        assert opened.page.title() == "sample-8b"
        assert any("Content Security Policy" in line for line in opened.said)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        *[("short(0)", "0"), ("short(0.01234)", "0.0123"), ("short(12.34)", "12.3")],
        *[("short(1234.5)", "1,235"), ("short(45678)", "45.7k"), ("short(999600)", "1M")],
        *[("inMs(0.4213)", "0.421 ms"), ("inMs(999.4)", "999 ms"), ("inMs(10700)", "10.7 s")],
        *[("inMs(3e6)", "50 min"), ("SHOW.share(0.1234)", "12.3%"), ("ticks(0, 87)[1]", 20)],
        ("place(LOG, 10)", 0.5),
        ("place(LOG, 0)", 0),
        ("labels(LOG).map(([, text]) => text)", ["1", "3", "10", "30", "100"]),
        ("labels(LONG).map(([, text]) => text)", ["0 ms", "1 s", "2 s", "3 s"]),
        ("axisName(LONG)", "time"),
        ("shapes(STEPS, STEPS.series[0])[0][2]", "M0 60.0V60.0H500.0V180.0H1000.0V300"),
        ("marks(NEAR)[1]", 2),
        ("clearNames(DOTS)", ["a", "", "c"]),
    ],
)
def test_what_the_script_computes(
    browser: Browser, pages: dict[str, str], call: str, result: Any
) -> None:
    """Formats, ticks, and shapes of charts whose places are known."""
    line = {"shape": "steps", "values": [8, 4], "bounds": [], "color": "red", "quiet": False}
    ten = {"label": "x", "low": 0, "high": 10, "log": False, "ticks": []}
    named = {
        "LOG": {"label": "ms", "low": 1, "high": 100, "log": True, "ticks": []},
        "LONG": {"label": "ms", "low": 0, "high": 3000, "log": False, "ticks": []},
        "STEPS": {"x": ten, "y": ten, "xs": [5, 10], "series": [line]},
        "NEAR": {"x": ten, "marks": [{"label": "p", "value": v, "limit": False} for v in (5, 6)]},
        "DOTS": {
            **{"x": ten, "y": ten, "xs": [1, 1.2, 9], "names": ["a", "b", "c"]},
            "series": [line | {"values": [1, 1.1, 9]}],
        },
    }
    with Opened(browser, pages["single"], 1280) as opened:
        code = f"(({{ {', '.join(named)} }}) => {call})"
        assert opened.page.evaluate(code, named) == result


def test_whiskers_and_bars_are_drawn(browser: Browser, tmp_path: Path) -> None:
    rows: list[list[str | PagePart]] = [["metric", "", "speed-up"]]
    rows.append(["TTFT", Bar(0.5, "7"), Whisker(2.0, [1.5, 3.0], 1.1, "good")])
    rows.append(["gone", Text("no", "bad"), Whisker(0.0, [], 6.91, "note")])
    table = Section("Rows", [Table("rows", rows)])
    path = tmp_path / "rows.html"
    path.write_text(render(ReportPage("t", "k", [], [], [table])), encoding="utf-8")
    with Opened(browser, path.as_uri(), 1280) as opened:
        page = opened.page
        box = page.locator(".whisker svg").first.bounding_box()
        assert box is not None and (box["width"], box["height"]) == (160, 18)
        values = page.eval_on_selector_all(".whisker .value", "all => all.map(e => e.getBBox().x)")
        assert all(0 < x < 160 for x in values) and values[0] > 80 > values[1]
        assert page.locator(".whisker .range").first.get_attribute("d")
        widths = page.eval_on_selector_all(".bar i", "all => all.map(e => e.offsetWidth)")
        assert widths[0] > 20 and page.locator("td .bad").inner_text() == "no"
        assert opened.said == []
