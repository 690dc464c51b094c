from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.bench.results.intervals import summarize_with_intervals
from tokenmill.core.metrics import (
    PERCENTS,
    RequestTimes,
    Slo,
    min_values,
    percentile,
    summarize,
    tok_s_user,
    too_few_for,
)

MS = 1_000_000


def test_request_times_by_hand() -> None:
    times = RequestTimes(arrival_ns=100 * MS)
    assert times.ttft_ms is None and times.tpot_ms is None and times.e2e_ms is None
    assert times.record(150 * MS, 1) is None
    assert times.tpot_ms is None
    assert times.record(160 * MS, 1) == 10.0
    assert times.record(190 * MS, 3) == 30.0
    assert times.ttft_ms == 50.0
    assert times.tpot_ms == 40.0 / 4
    assert times.e2e_ms == 90.0
    assert times.num_tokens == 5


def test_tokens_of_the_first_output_have_no_tpot() -> None:
    times = RequestTimes(arrival_ns=MS)
    times.record(11 * MS, 4)
    assert times.tpot_ms is None
    times.record(21 * MS, 2)
    assert times.tpot_ms == 5.0


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200),
    st.floats(0.0, 100.0),
)
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(
        float(np.percentile(values, percent)), rel=1e-9, abs=1e-6
    )


@pytest.mark.parametrize("percent", [-0.1, 100.1, float("nan")])
def test_percentile_refuses(percent: float) -> None:
    with pytest.raises(ValueError, match="percent must be"):
        percentile([1.0], percent)


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)


def test_summarize_skips_what_does_not_exist() -> None:
    assert summarize([None, None]) == {}
    summary = summarize([1.0, None, 3.0])
    assert summary["mean"] == 2.0 and summary["p50"] == 2.0 and summary["max"] == 3.0


def test_summary_with_intervals() -> None:
    summary = summarize_with_intervals([None, *[2.0] * 50])
    assert summary["ci95"] == {name: [2.0, 2.0] for name in ("mean", "p50", "p90")}
    assert "ci95" not in summarize_with_intervals([1.0]) and summarize_with_intervals([]) == {}


def test_slo_by_hand() -> None:
    times = RequestTimes(0, first_ns=100 * MS, last_ns=300 * MS, num_first_tokens=1, num_tokens=11)
    assert Slo().met_by(times)
    assert Slo(ttft_ms=100, tpot_ms=20, e2e_ms=300).met_by(times)
    assert not Slo(ttft_ms=99).met_by(times)
    assert not Slo(tpot_ms=19).met_by(times)
    assert not Slo(e2e_ms=299).met_by(times)
    assert Slo(tpot_ms=1).met_by(RequestTimes(0, 100 * MS, 100 * MS, 1, 1))
    assert not Slo(tpot_ms=1).met_by(RequestTimes(0))


def test_a_percentile_needs_a_value_beyond_it() -> None:
    assert {name: min_values(p) for name, p in PERCENTS.items()} == {
        "p50": 2,
        "p90": 10,
        "p99": 100,
    }
    found = {n: too_few_for(n) for n in (1, 9, 10, 99, 100)}
    assert found == {1: ["p50", "p90", "p99"], 9: ["p90", "p99"], 10: ["p99"], 99: ["p99"], 100: []}


def test_speed_of_a_user() -> None:
    assert tok_s_user({"mean": 5.0, "p50": 8.0, "p90": 20.0}) == 50.0
    assert tok_s_user({}) is None
