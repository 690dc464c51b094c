"""The figures of an endpoint run as rows: for the terminal, for the page, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.client.summary import num_tokens, times_of
from tokenmill.bench.results.reports import (
    ABSENT,
    LatencyName,
    OccurrenceName,
    PointReport,
    as_json,
)
from tokenmill.core.metrics import PERCENTS, USER_PERCENTILE, min_values

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute
LEFT_OUT = ("errors", "doubts", "finish_reasons", "warnings", "too_few")
LATENCIES: tuple[LatencyName, ...] = (
    *("ttft_ms", "ttft_from_schedule_ms", "tpot_ms", "tpot_n1_ms", "itl_ms", "e2e_ms"),
)
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "End to end"}
LABELS |= {"ttft_from_schedule": "TTFT from schedule", "tpot_n1": "TPOT (n-1)"}
FEW = "*"  # beside a percentile of too few values


def points_table(points: Sequence[PointReport]) -> list[list[str]]:
    columns: dict[str, Callable[[PointReport], str]] = {
        "load": lambda p: str(p.load),
        "answered": lambda p: f"{p.num_completed:,}",
        "failed": lambda p: f"{p.num_failed:,}",
        "requests/s": lambda p: f"{p.request_s:,.2f}",
        "output tok/s": lambda p: f"{p.output_tok_s:,.1f}",
        "total tok/s": lambda p: f"{p.total_tok_s:,.1f}",
        "tok/s/user": lambda p: _marked(p, "tpot_ms", USER_PERCENTILE, cell(p.tok_s_user or None)),
    }
    if any(point.num_image_tokens for point in points):
        columns["image tokens"] = lambda p: f"{p.num_image_tokens or 0:,}"
    if any(point.goodput for point in points):
        columns["good share"] = lambda p: f"{p.goodput.good_share:.1%}"
        columns["good requests/s"] = lambda p: f"{p.goodput.request_s:,.2f}"
    if any(point.price for point in points):
        columns["$/M output"] = lambda p: cell(p.price.usd_per_million_output, 3)
        columns["$/M total"] = lambda p: cell(p.price.usd_per_million_total, 3)
    streamed = any(point.ttft_ms is not ABSENT for point in points)
    latencies: tuple[LatencyName, ...] = ("ttft_ms", "tpot_ms") if streamed else ("e2e_ms",)
    for key in latencies if len(points) > 1 else ():
        for percent in ("p50", "p99"):
            columns[f"{label_of(key)} {percent} (ms)"] = _latency_column(key, percent)
    return [list(columns), *([show(point) for show in columns.values()] for point in points)]


def curve_table(points: Sequence[PointReport]) -> list[list[str]]:
    """A row per point of a campaign, in the words of MLPerf Endpoints."""
    columns: dict[str, Callable[[PointReport], str]] = {
        "concurrency": lambda p: str(p.concurrency),
        "region": lambda p: str(p.region),
        "answered": lambda p: f"{p.num_completed:,}",
        "failed": lambda p: f"{p.num_failed:,}",
        "seconds": lambda p: cell(p.seconds, 1),
        "system_tps (tok/s)": lambda p: cell(p.system_tps, 1),
        "tps_per_user (tok/s)": lambda p: cell(p.tps_per_user),
        "ttft_p90_ms": lambda p: cell(p.ttft_p90_ms),
        "on the curve": lambda p: "yes" if p.on_front else "no",
    }
    if any(point.price for point in points):
        columns["$/M output"] = lambda p: cell(p.price.usd_per_million_output, 3)
    return [list(columns), *([show(point) for show in columns.values()] for point in points)]


def label_of(key: str) -> str:
    return LABELS[key.removesuffix("_ms")]


def _latency_column(key: LatencyName, percent: str) -> Callable[[PointReport], str]:
    def shown(point: PointReport) -> str:
        return _marked(point, key, percent, cell((getattr(point, key) or {}).get(percent)))

    return shown


def _marked(point: PointReport, key: str, name: str, text: str) -> str:
    return text + FEW if is_thin(point, key, name) else text


def is_thin(point: PointReport, key: str, name: str) -> bool:
    """True for a percentile of too few values."""
    base = key.replace("_from_schedule", "").replace("_n1", "")
    few = point.too_few.get(base)
    return few is not None and name in few.percentiles


def cautions(points: Sequence[PointReport]) -> list[str]:
    """A sentence per percentile that stands on too few values at some point."""
    least: dict[str, dict[str, int]] = {}  # of a percentile, by latency
    for point in points:
        for key, few in point.too_few.items():
            for name in few.percentiles:
                counts = least.setdefault(name, {})
                counts[key] = min(few.num_values, counts.get(key, few.num_values))
    return [
        f"{name} needs {min_values(PERCENTS[name])} values: "
        + ", ".join(f"{label_of(key)} has {count}" for key, count in least[name].items())
        for name in PERCENTS
        if name in least
    ]


def latency_table(point: PointReport) -> list[list[str]]:
    names = ("mean", "p50", "p90", "p99", "max")
    rows = [["latency (ms)", *names, "95 % of p50"]]
    coalesced = point.tokens_per_output > 1
    for key in LATENCIES:
        if (summary := getattr(point, key)) and (coalesced or key != "tpot_n1_ms"):
            low, high = summary.get("ci95", {}).get("p50", (None, None))
            bounds = "-" if low is None else f"{low:,.2f} to {high:,.2f}"
            cells = [_marked(point, key, name, cell(summary[name])) for name in names]
            rows.append([label_of(key), *cells, bounds])
    return rows


def server_table(points: Sequence[PointReport]) -> list[list[str]]:
    """What the server says of itself, a row per point; what it never says has no column."""
    columns = {
        "requests": ("num_requests", ",.0f"),
        "output tokens": ("num_output_tokens", ",.0f"),
        "most running": ("peak_running", ",.0f"),
        "most waiting": ("peak_waiting", ",.0f"),
        "most of KV cache": ("peak_kv_cache_usage", ".0%"),
        "prefix hits": ("prefix_hit_rate", ".0%"),
        "tokens per step with drafts": ("acceptance_length", ".2f"),
        "accepted drafts": ("acceptance_positions", ".0%"),
        "server's mean TTFT (ms)": ("ttft_mean_ms", ",.2f"),
    }
    told = [(point.load, point.server) for point in points if point.server]
    known = {
        label: (key, form)
        for label, (key, form) in columns.items()
        if any(getattr(server, key) not in (None, []) for _, server in told)
    }
    rows = [["the server says", *known]]
    for load, server in told:
        rows.append([load, *(_shown(getattr(server, key), form) for key, form in known.values())])
    return rows


def _shown(value: float | list[float] | None, form: str) -> str:
    """A figure, several side by side, or a dash."""
    figures = value if isinstance(value, list) else [] if value is None else [value]
    return " ".join(format(figure, form) for figure in figures) or "-"


def cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def audit_line(points: Sequence[PointReport]) -> str:
    audits = [point.audit for point in points]
    lag = max((a.lag_ms.get("p99", 0.0) for a in audits), default=0.0)
    cpu, stall = max(a.cpu_share for a in audits), max(a.max_stall_ms for a in audits)
    line = (
        f"client: {audits[-1].num_processes} process(es), {cpu:.0%} of a core at most; 99 % of "
        f"requests left within {lag:.2f} ms of their time; longest stall {stall:.0f} ms"
    )
    alone = audits[-1].floor
    if alone is None:
        return line
    own = alone.latency_ms.get("p50", 0.0)
    return f"{line}; alone it does {alone.request_s:,.0f} req/s and adds {own:.2f} ms"


def error_table(points: Sequence[PointReport], key: OccurrenceName) -> list[list[str]]:
    """A row per class of `errors` or of `doubts`, with what the first one said."""
    rows = [["load", "class", "first message", "count"]]
    for point in points:
        for name, entry in getattr(point, key).items():
            rows.append([point.load, name, entry.first, f"{entry.count:,}"])
    return rows


def summary_csv(points: Sequence[PointReport]) -> str:
    """A line per point: every figure, under the names of summary.json joined by underscores."""
    rows = [dict(_flat(as_json(point))) for point in points]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return _csv(columns, ([row.get(name) for name in columns] for row in rows))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}_")
        elif isinstance(value, list):
            yield from zip((f"{prefix}{name}_low", f"{prefix}{name}_high"), value, strict=False)
        else:
            yield prefix + name, value


EVENT_COLUMNS = (
    *("point", "load", "session", "turn", "planned_s", "sent_s", "ttft_ms", "tpot_ms", "e2e_ms"),
    *("num_outputs", "prompt_tokens", "output_tokens", "status", "finish_reason", "error"),
    "retried",
)


def events_csv(points: Sequence[PointReport], records: Sequence[LoadRecord], stream: bool) -> str:
    """A line per request; seconds count from the first one planned at its point."""
    begins: dict[int, int] = {}
    for record in records:
        planned_ns = min(record.planned_ns, begins.get(record.point, record.planned_ns))
        begins[record.point] = planned_ns
    lines = (_event(points[r.point].load, r, begins[r.point], stream) for r in records)
    return _csv(EVENT_COLUMNS, lines)


def _event(load: str, record: LoadRecord, begin_ns: int, stream: bool) -> list[Any]:
    times = times_of(record, stream)
    whole = record.error is None
    return [
        *(record.point, load, record.session, record.turn),
        (record.planned_ns - begin_ns) / 1e9,
        (record.sent_ns - begin_ns) / 1e9 if record.sent_ns else None,
        times.ttft_ms if whole and stream else None,
        times.tpot_ms if whole and stream else None,
        times.e2e_ms if whole else None,
        *(record.num_outputs, record.prompt_tokens, num_tokens(record, stream), record.status),
        *(record.finish_reason, record.error, record.retried),
    ]


def _csv(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6f}"
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return value
