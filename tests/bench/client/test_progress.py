"""The view of a run while it runs."""

from __future__ import annotations

import random

import pytest

from tokenmill import console
from tokenmill.bench.client import live_progress as progress
from tokenmill.bench.client.live_progress import PointGoal, plain_line, view_lines, watching
from tokenmill.bench.client.progress import (
    NUM_COUNTERS,
    OPEN,
    Progress,
    bucket_of,
    observe,
    percentile_of,
)
from tokenmill.core.metrics import RequestTimes, percentile


def test_histograms_hold_percentiles_to_a_few_percent() -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(4, 1) for _ in range(4000)]
    counters = [[0] * NUM_COUNTERS for _ in range(2)]
    for index, value in enumerate(values):
        ns = round(value * 1e6)
        observe(counters[index % 2], RequestTimes(5, 5 + ns, 5 + ns + 40_000_000, 1, 5))
    counters[1][OPEN] = 3
    now = Progress.read(2.0, counters)
    for percent in (50, 99):
        assert percentile_of(now.ttft, percent) == pytest.approx(
            percentile(values, percent), rel=0.05
        )
        assert percentile_of(now.tpot, percent) == pytest.approx(10, rel=0.05)
    assert now.num_open == 3 and sum(now.ttft) == 4000


def test_buckets_are_bounded() -> None:
    assert bucket_of(0.0) == 0 and bucket_of(1e12) == bucket_of(1e11)
    assert percentile_of([0, 0], 50) is None
    counters = [0] * NUM_COUNTERS
    observe(counters, RequestTimes(5))  # no output: no latency
    assert not any(counters)


def moment(seconds: float, done: int, tokens: int) -> Progress:
    counters = [0] * NUM_COUNTERS
    for _ in range(done):
        observe(counters, RequestTimes(0, 50_000_000, 250_000_000, 1, 11))
    counters[:4] = [done, 1, tokens, 16]
    return Progress.read(seconds, [counters])


def test_view() -> None:
    lines = view_lines(PointGoal("concurrency 16", 400), moment(5, 50, 500), moment(10, 99, 1500))
    assert lines[0].startswith("concurrency 16  10.0 s  ━━━━━━━━╌")
    assert lines[0].endswith("25%, about 30 s left")
    assert lines[1] == "99 of 400 done, 1 failed, 16 in flight"
    assert lines[2] == "9.8 req/s, 200 tok/s"
    assert lines[3] == "TTFT p50 50 ms  p99 50 ms   TPOT p50 20 ms  p99 20 ms"
    early = view_lines(PointGoal("trace"), Progress(0.0), Progress(0.0))
    assert early[0] == "trace  0.0 s" and early[3] == "TTFT p50 -  p99 -   TPOT p50 -  p99 -"


def test_goal_goes_by_the_nearer_bound() -> None:
    goal = PointGoal("x", 1000, 20.0)
    assert goal.share_done(moment(10, 99, 0)) == 0.5
    assert goal.share_done(moment(10, 899, 0)) == 0.9
    assert goal.share_done(moment(30, 0, 0)) == 1.0
    assert PointGoal("x", None, 20.0).seconds_left(Progress(5.0)) == 15


def test_plain_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with watching(PointGoal("x", 10)) as watch:
        for seconds in (1.0, 5.0, 6.0, 10.5):
            watch(moment(seconds, round(seconds), 0))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == ["5.0 s", "10.5 s"]
    assert lines[0] == plain_line(Progress(0.0), moment(5.0, 5, 0))


def test_live_view_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=100)
    monkeypatch.setattr(console, "err", terminal)
    with watching(PointGoal("concurrency 4", 100)) as watch:
        watch(moment(1.0, 10, 100))
        watch(moment(9.0, 50, 500))
    assert "50 of 100 done" in written.getvalue() and progress.WINDOW_S > 0
    assert "about" in written.getvalue()
