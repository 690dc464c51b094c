"""Records -> page, tables and CSV: pure, so the figures can be counted by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from bench.sample_runs import (
    CLIENT_WARNING,
    FACTS,
    HOSTILE,
    NUM_TOKENS,
    endpoint_run,
    mlperf_run,
    mlperf_times,
)
from tokenmill.bench.client.summary import Price
from tokenmill.bench.commands.endpoint import print_points
from tokenmill.bench.mlperf.regions import official_metrics
from tokenmill.bench.report import charts, mlperf_report
from tokenmill.bench.report.endpoint_report import endpoint_page, write_result
from tokenmill.bench.report.page import WEB, render
from tokenmill.bench.report.point_charts import pareto
from tokenmill.bench.report.tables import events_csv, latency_table, points_table, summary_csv
from tokenmill.bench.report.timeline import Windows, counted, in_flight, spread
from tokenmill.bench.results.manifest import verify
from tokenmill.core.metrics import Slo

MAX_PAGE = 1_000_000


def hover(chart: str) -> list[list[Any]]:
    found = re.search(r"data-hover='([^']*)'", chart)
    assert found is not None
    rows: list[list[Any]] = json.loads(unescape(found[1]))
    return rows


def page_text(report: dict[str, Any], records: list[Any]) -> str:
    return render(endpoint_page(report, records, FACTS))


def test_histogram_counts_every_value_once() -> None:
    values = [float(n) for n in range(1, 101)]
    rows = hover(charts.histogram("x", values))
    assert sum(int(texts[0]) for _, _, texts, _ in rows) == 100
    counts = [int(texts[0]) for _, _, texts, _ in rows]
    assert max(counts[1:-1]) - min(counts[1:-1]) <= 1  # even values, even bars
    same = hover(charts.histogram("x", [5.0] * 7))
    assert sum(int(texts[0]) for _, _, texts, _ in same) == 7


def test_cumulative_ends_at_one_and_passes_the_median() -> None:
    rows = hover(charts.cumulative("x", {"share": [1.0, 2.0, 3.0, 4.0]}))
    shares = [float(texts[0].rstrip("%")) for _, _, texts, _ in rows]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 100
    assert shares[len(shares) // 2] == 50


def test_a_long_tail_makes_the_axis_logarithmic() -> None:
    assert "logarithmic" in charts.histogram("x", [1.0] * 50 + [900.0])
    assert "logarithmic" in charts.histogram("x", [0.0] * 5 + [1.0] * 50 + [900.0])
    assert "logarithmic" not in charts.histogram("x", [1.0, 2.0, 3.0])
    axis = charts.Axis("ms", 1.0, 100.0, log=True)
    assert axis.place(10.0) == pytest.approx(0.5) and axis.place(0.0) == 0
    assert [text for _, text in axis.labels()] == ["1", "3", "10", "30", "100"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0.0, "0"), (0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1,234")],
        *[(45_678.0, "45.7k"), (999_600.0, "1M"), (2_500_000.0, "2.5M")],
    ],
)
def test_short(value: float, text: str) -> None:
    assert charts.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.4213, "0.421 ms"),
        (421.3, "421 ms"),
        (999.4, "999 ms"),
        (10_700, "10.7 s"),
        (3e6, "50 min"),
    ],
)
def test_latencies_have_units_that_suit_them(value: float, text: str) -> None:
    assert charts.in_ms(value) == text


def test_windows() -> None:
    windows = Windows(0, 4_000_000_000, 4)
    spans = [(0, 2_000_000_000), (500_000_000, 4_000_000_000)]
    assert in_flight(windows, spans) == [1.5, 2, 1, 1]
    assert spread(windows, spans, [20, 35]) == pytest.approx([15, 20, 10, 10])
    assert counted(windows, [0, 1, 4_000_000_000]) == [2, 0, 0, 1]


def test_page_of_one_point_has_its_figures() -> None:
    slo, price = Slo(ttft_ms=60, tpot_ms=20), Price(8, 3.0)
    report, records = endpoint_run((8,), 90, slo=slo, price=price)
    text, (point,) = page_text(report, records), report["points"]
    for value in (
        charts.short(point["output_tok_s"]),
        charts.short(point["ttft_ms"]["p50"]),
        f"{point['goodput']['good_share']:.1%}",
        f"${point['price']['usd_per_million_output']:,.3f}",
        "No request failed.",
        "No sign that the client was the limit.",
        "limit 60",
        "2026-11-15 10:00:00 UTC",
        "http://127.0.0.1:8000/v1/chat/completions",
    ):
        assert value in text
    for title in ("TTFT distribution", "TPOT, cumulative", "ITL distribution", "Throughput"):
        assert f"<figcaption>{title}" in text


def test_failures_warnings_and_doubts_are_on_top() -> None:
    report, records = endpoint_run((4,), 45, fails=True, warnings=(CLIENT_WARNING,))
    records[0].completion_tokens = None
    report["points"][0]["doubts"] = {"usage_missing": {"count": 1, "first": "no usage"}}
    report["interrupted"] = True
    text = page_text(report, records)
    top = unescape(text[: text.index('<dl class="tiles">')])
    for words in ("5 of 45 requests failed", CLIENT_WARNING, "usage_missing", "Interrupted"):
        assert words in top
    assert "<script>document" not in text and "<img" not in text
    assert HOSTILE in unescape(text)


def test_every_text_is_escaped() -> None:
    report, records = endpoint_run((2,), 12)
    report["model"] = report["url"] = HOSTILE
    report["points"][0]["finish_reasons"] = {HOSTILE: 3}
    text = render(endpoint_page(report, records, FACTS | {"configuration": {HOSTILE: HOSTILE}}))
    assert text.count("<script") == 1 and "<img" not in text


def test_names_in_a_chart_are_escaped() -> None:
    name = 'it\'s <b> & "so"'
    chart = charts.cumulative(name, {name: [1.0, 2.0], "other": [3.0]})
    assert "<b>" not in chart.replace("<b>p", "")
    found = re.search(r"data-series='([^']*)'", chart)
    assert found is not None and json.loads(unescape(found[1]))[0][0] == name


def test_sweep_has_a_frontier() -> None:
    report, records = endpoint_run((1, 4, 16), 48)
    assert "Throughput against interactivity" in page_text(report, records)
    points = report["points"]
    points[1]["output_tok_s"] = points[0]["output_tok_s"] / 2  # beaten by both neighbours
    chart = pareto(points)
    (line,) = re.findall(r'class="line"[^>]* d="M([^"]*)"', chart)
    assert len(line.split("L")) == 2 and len(hover(chart)) == 3


def test_points_of_a_search_are_shown_by_load() -> None:
    text = page_text(*endpoint_run((4, 16, 8), 24))
    loads = re.findall(r"concurrency (\d+)", text[text.index("<table") :])
    assert loads[:3] == ["4", "8", "16"]


def test_percentiles_of_few_requests_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    report, records = endpoint_run((3,), 9)
    text = page_text(report, records)
    caution = "p99 needs 100 values: End to end has 9, TTFT has 9, TPOT has 9"
    assert "Percentiles marked * stand on too few requests" in text and caution in text
    assert "closed loop, concurrency 3" in text
    row = next(row for row in latency_table(report["points"][0]) if row[0] == "TTFT")
    assert [cell.endswith("*") for cell in row] == [False, False, False, True, True, False, False]
    print_points(report["points"])
    shown = capsys.readouterr().out
    assert caution in shown
    enough, records = endpoint_run((3,), 100)
    assert not enough["points"][0]["too_few"] and "too few" not in page_text(enough, records)


def test_a_label_has_one_value_wherever_it_stands() -> None:
    for concurrencies in ((4,), (1, 4)):
        report, records = endpoint_run(concurrencies, 20)
        page = endpoint_page(report, records, FACTS)
        best = max(point["tok_s_user"] for point in report["points"])
        tiles = [tile.value for tile in page.tiles if tile.unit == "tok/s/user"]
        head, *rows = points_table(report["points"])
        assert tiles == [charts.short(best)]
        assert f"{best:,.2f}" in [row[head.index("tok/s/user")] for row in rows]
        for point in report["points"]:
            assert official_metrics(point)["tps_per_user"] == pytest.approx(point["tok_s_user"])


def test_nothing_answered_is_a_page_too() -> None:
    for concurrencies in ((2,), (1, 2)):
        options: dict[str, Any] = {"price": Price(1, 1.0), "slo": Slo(ttft_ms=1)}
        _, records = endpoint_run(concurrencies, 4)
        for record in records:
            record.error, record.first_ns, record.num_outputs = "connect", 0, 0
        report, _ = endpoint_run(concurrencies, 0, **options)
        for point in report["points"]:
            point |= {"num_failed": 4, "errors": {"connect": {"count": 4, "first": "refused"}}}
        assert "100.0%" in page_text(report, records)


def test_answers_that_are_not_streamed_have_no_ttft() -> None:
    report, records = endpoint_run((1, 2), 20, stream=False)
    text = page_text(report, records)
    assert "End to end" in text and "TTFT" not in text and "TPOT" not in text


def test_small_text_has_contrast() -> None:
    """WCAG AA: 4.5 to 1 against the card and the page, and against a notice's own colour."""
    style = (WEB / "report.css").read_text()
    for part in style.split("prefers-color-scheme: dark"):
        colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", part.split("* {")[0]))
        pairs = [(f, b) for f in ("text", "dim", "good", "warn", "bad") for b in ("card", "back")]
        pairs += [(name, f"{name}-back") for name in ("good", "warn", "bad")]
        for front, back in [*pairs, ("tip-text", "tip"), ("text", "note-back")]:
            assert contrast(colors[front], colors[back]) >= 4.5, (front, back)


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_ten_thousand_requests_stay_small() -> None:
    report, records = endpoint_run((64,), 10_000)
    assert len(page_text(report, records)) < MAX_PAGE / 8


def test_a_sweep_of_twenty_points_stays_small() -> None:
    report, records = endpoint_run(tuple(range(1, 40, 2)), 100)
    assert len(page_text(report, records)) < MAX_PAGE


def test_csv_has_the_figures_of_the_summary() -> None:
    report, records = endpoint_run((1, 4), 18, fails=True)
    records[0].finish_reason = "=HYPERLINK(1)"
    rows = list(csv.DictReader(io.StringIO(summary_csv(report["points"]))))
    assert [row["load"] for row in rows] == ["concurrency 1", "concurrency 4"]
    assert float(rows[1]["ttft_ms_p90"]) == pytest.approx(report["points"][1]["ttft_ms"]["p90"])
    events = list(csv.DictReader(io.StringIO(events_csv(report["points"], records, True))))
    assert len(events) == 36 and events[0]["finish_reason"] == "'=HYPERLINK(1)"
    assert float(events[0]["ttft_ms"]) == pytest.approx(
        (records[0].first_ns - records[0].sent_ns) / 1e6, abs=1e-5
    )
    assert events[0]["output_tokens"] == str(NUM_TOKENS)
    failed = events[5]
    assert failed["error"] == "http_500" and failed["ttft_ms"] == failed["e2e_ms"] == ""


def test_a_result_folder_verifies(tmp_path: Path) -> None:
    report, records = endpoint_run((2,), 12)
    write_result(tmp_path, report, records, FACTS)
    assert json.loads((tmp_path / "summary.json").read_text()) == report
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 12
    found = verify(tmp_path)
    assert found["ok"] and found["num_files"] == 5


def test_mlperf_page_says_what_it_is() -> None:
    times = mlperf_times()
    text = render(mlperf_report.mlperf_page(mlperf_run(valid=False), times, FACTS))
    assert "Not a valid submission" in text and ">INVALID<" in text
    assert "p90 TTFT is 612.0 ms, the limit is 500 ms" in text
    assert "122%" in text and "2,432" in text and "limit 500" in text
    good = render(mlperf_report.mlperf_page(mlperf_run(quick=False), times, FACTS))
    assert ">VALID<" in good and "Not a valid submission" not in good and "INVALID" not in good


def test_mlperf_page_of_a_search_and_of_scores() -> None:
    runs = [{"target_qps": 8.0, "result": "INVALID", "reasons": ["slow"]}]
    report = mlperf_run() | {"peak_qps": None, "runs": runs}
    report |= {"accuracy": {"rouge1": 38.0, "gen_num": 9}}
    report |= {"accuracy_gates": {"rouge1": {"value": 38.0, "min": 38.39, "passed": False}}}
    text = render(mlperf_report.mlperf_page(report, [], FACTS))
    assert "No rate was valid." in text and "38.3900" in text


def test_mlperf_times_come_back(tmp_path: Path) -> None:
    times = mlperf_times(5)
    mlperf_report.write_times(tmp_path / "t.csv", times)
    assert mlperf_report.read_times(tmp_path / "t.csv") == times
    assert mlperf_report.read_times(tmp_path / "none.csv") == []
