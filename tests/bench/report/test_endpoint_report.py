"""Records -> page, tables and CSV: pure, so the figures can be counted by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bench.sample_runs import (
    CLIENT_WARNING,
    FACTS,
    HOSTILE,
    NUM_TOKENS,
    endpoint_run,
    mlperf_run,
    mlperf_times,
    page_data,
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
from tokenmill.bench.results.mlperf_reports import GateReport, PeakRun
from tokenmill.bench.results.reports import Occurrence, as_json
from tokenmill.core.metrics import Slo

MAX_PAGE = 1_000_000


def page_text(report: dict[str, Any], records: list[Any]) -> str:
    """The page's data, in which texts stand as they are."""
    text = render(endpoint_page(report, records, FACTS))
    return json.dumps(page_data(text), ensure_ascii=False)


def found_in(data: Any, /, **wanted: Any) -> list[Any]:
    """All objects of a page's data that have these fields."""
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    inner = [found for item in items for found in found_in(item, **wanted)]
    is_one = isinstance(data, dict) and wanted.items() <= data.items()
    return [data, *inner] if is_one else inner


def test_histogram_counts_every_value_once() -> None:
    values = [float(n) for n in range(1, 101)]
    histogram, _ = charts.distribution("x", values)
    counts = [count or 0 for count in histogram.series[0].values]
    assert sum(counts) == 100
    assert max(counts[1:-1]) - min(counts[1:-1]) <= 1  # even values, even bars
    same, _ = charts.distribution("x", [5.0] * 7)
    assert sum(count or 0 for count in same.series[0].values) == 7


def test_cumulative_ends_at_one_and_passes_the_median() -> None:
    (series,) = charts.cumulative("x", {"share": [1.0, 2.0, 3.0, 4.0]}).series
    shares = [share or 0.0 for share in series.values]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert shares[len(shares) // 2] == 0.5


def test_a_long_tail_makes_the_axis_logarithmic() -> None:
    assert charts.distribution("x", [1.0] * 50 + [900.0])[0].x.log
    assert charts.distribution("x", [0.0] * 5 + [1.0] * 50 + [900.0])[0].x.log
    assert not charts.distribution("x", [1.0, 2.0, 3.0])[0].x.log


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
    text, (point,) = page_text(report, records), report.points
    for value in (
        charts.short(point.output_tok_s),
        charts.short(point.ttft_ms["p50"]),
        f"{point.goodput.good_share:.1%}",
        f"${point.price.usd_per_million_output:,.3f}",
        "No request failed.",
        "No sign that the client was the limit.",
        "2026-11-15 10:00:00 UTC",
        "http://127.0.0.1:8000/v1/chat/completions",
    ):
        assert value in text
    data = json.loads(text)
    for title in ("TTFT distribution", "TPOT, cumulative", "ITL distribution", "Throughput"):
        assert found_in(data, title=title)
    assert found_in(data, label="limit", value=60, limit=True)


def test_failures_warnings_and_doubts_are_on_top() -> None:
    report, records = endpoint_run((4,), 45, fails=True, warnings=(CLIENT_WARNING,))
    records[0].completion_tokens = None
    report.points[0].doubts = {"usage_missing": Occurrence(first="no usage")}
    report.interrupted = True
    text = render(endpoint_page(report, records, FACTS))
    top = str(page_data(text)["notices"])
    for words in ("5 of 45 requests failed", CLIENT_WARNING, "usage_missing", "Interrupted"):
        assert words in top
    assert "<script>document" not in text and "<img" not in text
    assert found_in(page_data(text), lines=[f"5 × http_500: {HOSTILE}"])


def test_every_text_is_escaped() -> None:
    report, records = endpoint_run((2,), 12)
    report.model = report.url = HOSTILE
    report.points[0].finish_reasons = {HOSTILE: 3}
    text = render(endpoint_page(report, records, replace(FACTS, configuration={HOSTILE: HOSTILE})))
    assert text.count("<script") == 1 and "<img" not in text


def test_sweep_has_a_frontier() -> None:
    report, records = endpoint_run((1, 4, 16), 48)
    assert "Throughput against interactivity" in page_text(report, records)
    points = report.points
    points[1].output_tok_s = points[0].output_tok_s / 2  # beaten by both neighbours
    chart = pareto(points)
    dots, frontier = chart.series
    known = [value for value in frontier.values if value is not None]
    assert len(known) == 2 and len(dots.values) == len(chart.xs) == 3


def test_points_of_a_search_are_shown_by_load() -> None:
    data = json.loads(page_text(*endpoint_run((4, 16, 8), 24)))
    (table,) = found_in(data, label="Points of the sweep")
    loads = [row[0] for row in table["rows"][1:]]
    assert loads == ["concurrency 4", "concurrency 8", "concurrency 16"]


def test_percentiles_of_few_requests_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    report, records = endpoint_run((3,), 9)
    text = page_text(report, records)
    caution = "p99 needs 100 values: End to end has 9, TTFT has 9, TPOT has 9"
    assert "Percentiles marked * stand on too few requests" in text and caution in text
    assert "closed loop, concurrency 3" in text
    row = next(row for row in latency_table(report.points[0]) if row[0] == "TTFT")
    assert [cell.endswith("*") for cell in row] == [False, False, False, True, True, False, False]
    print_points(report.points)
    shown = capsys.readouterr().out
    assert caution in shown
    enough, records = endpoint_run((3,), 100)
    assert not enough.points[0].too_few and "too few" not in page_text(enough, records)


def test_a_label_has_one_value_wherever_it_stands() -> None:
    for concurrencies in ((4,), (1, 4)):
        report, records = endpoint_run(concurrencies, 20)
        page = endpoint_page(report, records, FACTS)
        best = max(point.tok_s_user for point in report.points)
        tiles = [tile.value for tile in page.tiles if tile.unit == "tok/s/user"]
        head, *rows = points_table(report.points)
        assert tiles == [charts.short(best)]
        assert f"{best:,.2f}" in [row[head.index("tok/s/user")] for row in rows]
        for point in report.points:
            assert official_metrics(point)["tps_per_user"] == pytest.approx(point.tok_s_user)


def test_nothing_answered_is_a_page_too() -> None:
    for concurrencies in ((2,), (1, 2)):
        options: dict[str, Any] = {"price": Price(1, 1.0), "slo": Slo(ttft_ms=1)}
        _, records = endpoint_run(concurrencies, 4)
        for record in records:
            record.error, record.first_ns, record.num_outputs = "connect", 0, 0
        report, _ = endpoint_run(concurrencies, 0, **options)
        for point in report.points:
            point.num_failed = 4
            point.errors = {"connect": Occurrence(count=4, first="refused")}
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
    assert len(render(endpoint_page(report, records, FACTS))) < MAX_PAGE / 8


def test_a_sweep_of_twenty_points_stays_small() -> None:
    report, records = endpoint_run(tuple(range(1, 40, 2)), 100)
    assert len(render(endpoint_page(report, records, FACTS))) < MAX_PAGE


def test_csv_has_the_figures_of_the_summary() -> None:
    report, records = endpoint_run((1, 4), 18, fails=True)
    records[0].finish_reason = "=HYPERLINK(1)"
    rows = list(csv.DictReader(io.StringIO(summary_csv(report.points))))
    assert [row["load"] for row in rows] == ["concurrency 1", "concurrency 4"]
    assert float(rows[1]["ttft_ms_p90"]) == pytest.approx(report.points[1].ttft_ms["p90"])
    events = list(csv.DictReader(io.StringIO(events_csv(report.points, records, True))))
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
    assert json.loads((tmp_path / "summary.json").read_text()) == as_json(report)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 12
    found = verify(tmp_path)
    assert found.ok and found.num_files == 5


def test_mlperf_page_says_what_it_is() -> None:
    times = mlperf_times()
    data = page_data(render(mlperf_report.mlperf_page(mlperf_run(valid=False), times, FACTS)))
    text = json.dumps(data)
    assert "Not a valid submission" in text
    assert data["verdict"] == ["bad", "QUICK, not within the rules"]
    assert "p90 TTFT is 612.0 ms, the limit is 500 ms" in text
    assert "122%" in text and "2,432" in text
    assert found_in(data, label="limit", value=500, limit=True)
    good = page_data(render(mlperf_report.mlperf_page(mlperf_run(quick=False), times, FACTS)))
    assert good["verdict"] == ["good", "VALID"]
    assert "Not a valid submission" not in str(good) and "INVALID" not in str(good)


def test_mlperf_page_of_a_search_and_of_scores() -> None:
    report = mlperf_run()
    report.peak_qps, report.runs = None, [PeakRun(8.0, "INVALID", ["slow"])]
    report.accuracy = {"rouge1": 38.0, "gen_num": 9}
    report.accuracy_gates = {"rouge1": GateReport(38.0, 38.39, False)}
    text = render(mlperf_report.mlperf_page(report, [], FACTS))
    assert "No rate was valid." in text and "38.3900" in text


def test_mlperf_times_come_back(tmp_path: Path) -> None:
    times = mlperf_times(5)
    mlperf_report.write_times(tmp_path / "t.csv", times)
    assert mlperf_report.read_times(tmp_path / "t.csv") == times
    assert mlperf_report.read_times(tmp_path / "none.csv") == []
