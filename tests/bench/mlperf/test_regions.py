"""MLPerf Endpoints: regions, points and the curve."""

from __future__ import annotations

import pytest

from tokenmill.bench.mlperf.regions import (
    choose_points,
    compute_regions,
    min_duration_s,
    official_metrics,
    pareto_front,
)
from tokenmill.bench.results.reports import PointReport
from tokenmill.bench.workload import BenchError

# (C_max, C_min) -> the last concurrency of low and of medium, as the rules' reference has them.
CHECKED = {(256, 1): (7, 41), (1024, 16): (26, 117), (64, 1): (5, 17), (33, 1): (4, 11)}


@pytest.mark.parametrize(("given", "ends"), CHECKED.items())
def test_regions(given: tuple[int, int], ends: tuple[int, int]) -> None:
    regions = compute_regions(*given)
    c_max, c_min = given
    assert (regions.low_end, regions.med_end) == ends
    assert regions.bounds["low_concurrency"] == (c_min + 1, ends[0])
    assert regions.bounds["med_concurrency"] == (ends[0] + 1, ends[1])
    assert regions.bounds["high_concurrency"] == (ends[1] + 1, c_max)
    assert regions.region_of(c_min) == "low_latency" and regions.region_of(c_max + 1) == "margin"
    assert regions.region_of(2 * c_max) is None


@pytest.mark.parametrize("c_max", [33, 64, 100, 256, 1000, 4096])
@pytest.mark.parametrize("c_min", [1, 4, 16])
@pytest.mark.parametrize("count", [7, 12])
def test_points_cover_every_region(c_max: int, c_min: int, count: int) -> None:
    points = choose_points(c_max, c_min, count)
    regions = compute_regions(c_max, c_min)
    assert len(points) == count and points == sorted(set(points))
    assert points[0] == c_min and points[-1] == c_max
    found = {regions.region_of(point) for point in points}
    assert found == set(regions.bounds) - {"margin"}


def test_points_of_256() -> None:
    assert choose_points(256) == [1, 2, 4, 8, 18, 68, 256]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((32, 1, 7), "must be above 32"),
        ((256, 33, 7), "must be 1 to 32"),
        ((33, 32, 7), "leaves no point for med_concurrency"),
        ((36, 30, 9), "there are only"),
    ],
)
def test_bad_points(given: tuple[int, int, int], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        choose_points(*given)


def test_durations_and_official_metrics() -> None:
    assert (min_duration_s(1), min_duration_s(32), min_duration_s(33)) == (600, 600, 1200)
    point = PointReport(load="x", num_completed=1)
    point.output_tok_s, point.tpot_ms, point.ttft_ms = 900.0, {"p90": 20.0}, {"p90": 75.0}
    found = official_metrics(point)
    assert found["tps_per_user"] == 50 and found["system_tps"] == 900
    assert found["ttft_p90_ms"] == 75
    nothing = official_metrics(PointReport(load="x", num_completed=0))
    assert nothing["tps_per_user"] is None


def test_front_is_what_nothing_beats() -> None:
    front = pareto_front([(10, 100), (5, 300), (8, 90), (5, 200), (2, 300)])
    assert front == [(5, 300), (10, 100)]
    assert pareto_front([]) == []
