"""Records to figures, by hand; the audit's verdicts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.audit import warnings
from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.client.summary import Price, parse_slo, summarize_point
from tokenmill.bench.results.reports import AuditReport, PointReport, as_json
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import Slo

MS = 1_000_000
LOAD = ClientLoad(concurrency=2, num_sessions=10)


def summarized(*args: Any, **options: Any) -> dict[str, Any]:
    return as_json(summarize_point(*args, **options))


def record(sent_ms: int, ttft_ms: int, gap_ms: int, tokens: int, **more: Any) -> LoadRecord:
    """A whole answer with one token per output."""
    first_ns = (sent_ms + ttft_ms) * MS
    values: dict[str, Any] = {
        "sent_ns": sent_ms * MS,
        "first_ns": first_ns,
        "last_ns": first_ns + gap_ms * (tokens - 1) * MS,
        "end_ns": first_ns + gap_ms * tokens * MS,
        "gaps_ns": [gap_ms * MS] * (tokens - 1),
        "num_outputs": tokens,
        "num_bytes": 5 * tokens,
        "prompt_tokens": 10,
        "completion_tokens": tokens,
        "total_tokens": tokens + 10,
        "status": 200,
        "finish_reason": "length",
    }
    return LoadRecord(0, 0, (sent_ms - 1) * MS, **(values | more))


def test_a_point_by_hand() -> None:
    """Two answers of 11 and 21 tokens within 2 s, one failure, one unfinished."""
    records = [
        record(1000, 100, 10, 11),
        record(1000, 1600, 20, 21),
        LoadRecord(2, 0, 0, sent_ns=1000 * MS, error="http_500", detail="no"),
        LoadRecord(3, 0, 0, sent_ns=1000 * MS, error="cancelled"),
    ]
    slo, price = Slo(ttft_ms=500, tpot_ms=50), Price(2, 3.0)
    point = summarized(LOAD, records, slo=slo, price=price)
    assert (point["num_completed"], point["num_failed"], point["num_unfinished"]) == (2, 1, 1)
    assert point["seconds"] == 2.0
    assert (point["request_s"], point["output_tok_s"], point["total_tok_s"]) == (1.0, 16.0, 26.0)
    assert point["ttft_ms"]["mean"] == 850.0 and point["tpot_ms"]["mean"] == 15.0
    assert point["tok_s_user"] == pytest.approx(1000 / 19, abs=1e-4)  # p90 of 10 and 20 ms
    assert point["too_few"]["ttft_ms"] == {"num_values": 2, "percentiles": ["p90", "p99"]}
    assert point["itl_ms"]["max"] == 20.0 and point["e2e_ms"]["max"] == 2000.0
    good = point["goodput"]
    assert (good["num_good"], good["request_s"], good["output_tok_s"]) == (1, 0.5, 5.5)
    assert good["good_share"] == pytest.approx(1 / 3, abs=1e-4)
    # 6 dollars an hour at 16 x 3600 tokens
    assert point["price"]["usd_per_million_output"] == pytest.approx(6 / 57_600 * 1e6, abs=1e-4)
    assert point["price"]["usd_per_million_total"] == pytest.approx(6 / 93_600 * 1e6, abs=1e-4)
    assert point["price"]["usd_per_million_good_output"] == pytest.approx(303.0303, abs=1e-4)


def test_published_price() -> None:
    """250,634 tok/s on 72 GPUs at $3.76 is $0.30 per million."""
    one = record(0, 1000, 0, 250_634, gaps_ns=[], first_ns=0, last_ns=1000 * MS)
    point = summarized(LOAD, [one], price=Price(72, 3.76))
    assert point["output_tok_s"] == 250_634
    assert round(point["price"]["usd_per_million_output"], 2) == 0.30


def test_open_loads_also_count_from_the_schedule() -> None:
    load = ClientLoad(rate=1.0, num_sessions=1)
    point = summarized(load, [record(1000, 100, 10, 5)])
    assert point["ttft_ms"]["p50"] == 100.0 and point["ttft_from_schedule_ms"]["p50"] == 101.0
    assert "ttft_from_schedule_ms" not in summarized(LOAD, [record(1000, 100, 10, 5)])


def test_several_tokens_in_an_output() -> None:
    """12 tokens in 3 outputs 40 ms apart: 8 tokens in 80 ms."""
    one = record(0, 10, 40, 3, completion_tokens=12, total_tokens=22)
    point = summarized(LOAD, [one])
    assert point["tpot_ms"]["p50"] == 10.0 and point["itl_ms"]["p50"] == 40.0
    assert point["tokens_per_output"] == 4.0
    assert point["tpot_n1_ms"]["p50"] == pytest.approx(80 / 11, abs=1e-4)  # LoadGen's rule


def test_one_token_an_output_has_one_tpot() -> None:
    point = summarized(LOAD, [record(0, 10, 40, 3), record(0, 10, 7, 9)])
    assert point["tpot_ms"] | point["tpot_n1_ms"] == point["tpot_ms"]


def usage(outputs: int, tokens: int, size: int, **more: Any) -> LoadRecord:
    counts = {"completion_tokens": tokens, "total_tokens": tokens + 10, "num_bytes": size}
    return record(0, 10, 5, outputs, **counts, **more)


@pytest.mark.parametrize(
    ("records", "count"),
    [
        ([usage(32, 64, 160), usage(31, 62, 150), usage(31, 63, 160)], 3),  # double
        ([usage(32, 64, 160, counted_tokens=64)], 0),  # a tokenizer says that it is not
        ([usage(32, 33, 160), usage(32, 31 + 2, 160)], 0),
        ([usage(20, 50, 200), usage(30, 66, 260), usage(25, 50, 200)], 0),  # drafts: never even
        ([usage(20, 50, 60), usage(30, 66, 90)], 2),  # hardly a byte for a token
        ([usage(1, 2, 9), usage(3, 6, 30)], 0),  # too short to tell
    ],
)
def test_a_usage_that_counts_double_is_doubted(records: list[LoadRecord], count: int) -> None:
    doubts = summarized(LOAD, records)["doubts"]
    assert doubts.get("tokens_per_output", {"count": 0})["count"] == count


def test_streams_that_pause_or_do_not_end_are_doubted() -> None:
    records = [
        record(0, 10, 10, 5, gaps_ns=[10 * MS, 5001 * MS, 10 * MS, 10 * MS]),
        record(0, 10, 10, 5, saw_done=False),
        record(0, 10, 10, 5, finish_reason=None),
        record(0, 9000, 10, 5),  # slow to begin, which is TTFT's matter
    ]
    doubts = summarized(LOAD, records)["doubts"]
    counts = {name: entry["count"] for name, entry in doubts.items()}
    assert counts == {"stalled": 1, "no_done": 1, "no_finish_reason": 1}
    assert doubts["stalled"]["first"] == "the stream paused for 5.0 s between two outputs"
    assert "stalled" not in summarized(LOAD, records, stall_s=6)["doubts"]


def test_nothing_at_all() -> None:
    point = summarized(LOAD, [], slo=Slo(ttft_ms=1), price=Price(1, 1.0))
    assert point["request_s"] == 0.0 and point["price"]["usd_per_million_output"] is None
    assert point["goodput"]["good_share"] == 0.0


@pytest.mark.parametrize(
    "texts", [["ttft:500 tpot:50"], ["ttft:500,tpot:50"], ["ttft:500", "tpot:50"]]
)
def test_slo_texts(texts: list[str]) -> None:
    assert parse_slo(texts) == Slo(ttft_ms=500, tpot_ms=50)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:3", "ttft:-1", "tpot:nan", "e2e:0"])
def test_bad_slo_texts(text: str) -> None:
    with pytest.raises(BenchError, match="--goodput takes NAME:MS"):
        parse_slo([text])
    assert parse_slo([]) is None


def audit_of(**changes: Any) -> AuditReport:
    floor = {"request_s": 1000.0, "outputs_s": 10_000.0, "latency_ms": {"p50": 0.1}}
    report = {"lag_ms": {"p99": 1.0}, "cpu_share": 0.2, "max_stall_ms": 5.0, "floor": floor}
    counts = {"num_processes": 1, "num_stalls": 0, "scheduled": True}
    return msgspec.convert(report | counts | changes, AuditReport)


def point_of(**changes: Any) -> PointReport:
    point = {"request_s": 50.0, "outputs_s": 500.0, "ttft_ms": {"p50": 50.0}, "e2e_ms": {}}
    return msgspec.convert(point | {"load": "x", "num_completed": 1} | changes, PointReport)


@pytest.mark.parametrize(
    ("report", "point", "text"),
    [
        (audit_of(cpu_share=0.95), point_of(), "busy 95% of the time"),
        (audit_of(lag_ms={"p99": 30.0}), point_of(), "left 30.0 ms or more after their time"),
        (audit_of(max_stall_ms=400.0), point_of(), "stood still for 400 ms"),
        (audit_of(), point_of(request_s=600.0), "600 requests/s came"),
        (audit_of(), point_of(outputs_s=6000.0), "6,000 outputs/s came"),
        (audit_of(), point_of(ttft_ms={"p50": 0.5}), "the client's own part is 0.10 ms"),
    ],
)
def test_each_sign_of_a_slow_client(report: AuditReport, point: PointReport, text: str) -> None:
    (found,) = warnings(report, point)
    assert text in found


def test_no_warning_without_cause() -> None:
    assert warnings(audit_of(), point_of()) == []
    assert warnings(audit_of(floor=None), point_of(request_s=1e6)) == []
    at_once = audit_of(scheduled=False, lag_ms={"p99": 30.0})  # slots that begin together
    assert warnings(at_once, point_of()) == []
