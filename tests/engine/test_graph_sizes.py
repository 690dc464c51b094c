"""Which CUDA graphs there are: sizes, padding, the order of capture, its limits and its report."""

import logging
import math

import pytest

from tokenmill.engine.graphs.capture import (
    DRIVER_BYTES,
    CaptureJob,
    CaptureLimits,
    CaptureReport,
    Memory,
    capture_all,
    jobs_for,
    taken,
)
from tokenmill.engine.graphs.graph_sizes import (
    capture_order,
    graph_for,
    graph_sizes,
    most_padding,
    without_graph,
)

LIMITS = (1, 2, 3, 7, 8, 9, 16, 17, 64, 100, 256, 257, 640, 1000, 1024)


@pytest.mark.parametrize("limit", LIMITS)
def test_no_batch_is_padded_by_more_than_an_eighth(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == limit
    for count in range(1, limit + 1):
        size = graph_for(sizes, count)
        assert size is not None and count <= size <= 1.125 * count
    assert graph_for(sizes, limit + 1) is None
    assert most_padding(sizes) <= 0.125 and without_graph(sizes, limit) == []


def test_there_are_few_of_them() -> None:
    assert len(graph_sizes(1024)) <= 64 and len(graph_sizes(256)) <= 48


@pytest.mark.parametrize("limit", LIMITS)
def test_all_are_captured_and_the_largest_gives_its_memory_to_the_others(limit: int) -> None:
    order = capture_order(graph_sizes(limit))
    assert order[0] == limit and sorted(order) == graph_sizes(limit)


def test_wherever_capture_ends_the_sizes_are_spread() -> None:
    order = capture_order(graph_sizes(1024))
    assert order[:6] == [1024, 1, 2, 4, 8, 16]
    gaps = []
    for end in (1, 11, 20, 40, 64):
        captured = sorted(order[:end])
        gaps.append(len([n for n in range(1, 1025) if graph_for(captured, n) is None]))
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] == 0
    halves = sorted(order[:20])  # 2^n and 1.5 * 2^n
    assert without_graph(halves, 1024) == [] and most_padding(halves) < 0.5


@pytest.mark.parametrize(("count", "size"), [(976, 976), (700, 976), (651, 976), (650, None)])
def test_a_batch_runs_without_a_graph_rather_than_padded_by_a_half(
    count: int, size: int | None
) -> None:
    assert graph_for([976, 1024], count) == size


def test_ranges_without_a_graph() -> None:
    assert without_graph([4, 16], 20) == [range(1, 3), range(5, 11), range(17, 21)]


class Clock:
    """Each graph takes a second and 100 bytes."""

    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture(self, size: int) -> None:
        self.captured.append(size)

    def now(self) -> float:
        return float(len(self.captured))

    def memory(self) -> Memory:
        held = 100 * len(self.captured)
        return Memory(10_000 - held, held)


@pytest.mark.parametrize(
    ("limits", "count", "flag"),
    [
        (CaptureLimits(math.inf, 10_000), 64, None),
        (CaptureLimits(19.5, 10_000), 20, "the limit of 19.5 s"),
        (CaptureLimits(math.inf, 1_950), 20, "the limit of 1.8"),
        (CaptureLimits(0, 0), 1, "the limit of 0 s"),
    ],
)
def test_limits_end_the_capture(limits: CaptureLimits, count: int, flag: str | None) -> None:
    clock, sizes, seen = Clock(), graph_sizes(1024), []
    report = capture_all(
        jobs_for(sizes, clock.capture), limits, lambda *p: seen.append(p), clock.now, clock.memory
    )
    assert clock.captured == capture_order(sizes)[:count] and seen[-1] == (count, 64)
    assert (report.captured, report.planned) == (count, 64)
    assert (report.seconds, report.memory_bytes) == (count, 100 * count)
    assert report.cut_by is None if flag is None else (report.cut_by or "").startswith(flag)


def test_what_other_processes_take_is_not_counted() -> None:
    """Nor does it hide what is taken here, where they free memory meanwhile."""
    before = Memory(100 * DRIVER_BYTES, DRIVER_BYTES)
    held = 4 * DRIVER_BYTES
    alone = Memory(before.free - held - 3000, before.held + held)
    assert taken(before, alone, 1) == held + 3000
    beside_start = alone._replace(free=alone.free - 90 * DRIVER_BYTES)
    assert taken(before, beside_start, 2) == held + 2 * DRIVER_BYTES
    beside_end = alone._replace(free=alone.free + 90 * DRIVER_BYTES)
    assert taken(before, beside_end, 2) == held


def test_kinds_of_graphs_take_turns() -> None:
    clock = Clock()
    decode = jobs_for([1, 2, 4], clock.capture)
    prompts = [
        CaptureJob(place, lambda place=place: clock.capture(100 + place)) for place in (0, 1)
    ]
    capture_all(decode + prompts, CaptureLimits(2.5, 10_000), None, clock.now, clock.memory)
    assert clock.captured == [4, 100, 1]


def test_the_user_hears_of_batches_that_are_padded_or_have_no_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    report = CaptureReport(64, 3, 30.5, 2**29, decode_sizes=[1, 16, 1024], max_size=1024)
    assert report.warnings() == []
    report.cut_by = "the limit of 30 s"
    (cut,) = report.warnings()
    assert "3 of 64" in cut and "the limit of 30 s" in cut
    assert "up to 50%" in cut and "2-10, 17-682" in cut
    with caplog.at_level(logging.WARNING):
        for rows in (16, 12, 300, 301):
            report.count(rows, graph_for(report.decode_sizes, rows))
    assert [r.message for r in caplog.records] == [
        "a decode step of 300 requests runs without a CUDA graph"
    ]
    found = report.as_json()
    assert found["decode_steps"] == 2 and found["decode_steps_without_graph"] == 2
    assert found["padding"] == round(4 / 28, 4) and len(found["warnings"]) == 2
