"""The search for the load that a server takes, on simulated servers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tokenmill.bench.client.saturation import (
    Interrupted,
    Probe,
    SearchGoal,
    find_saturation,
    wilson,
)

NUM_REQUESTS = 200


def server(
    limit: float, knee: float, seed: int = 0, breaks_at: float = 1e9
) -> tuple[Callable[[float], Probe], list[float]]:
    """Nearly all is good up to `limit`; throughput grows up to `knee`; both with noise."""
    rng, asked = random.Random(seed), []

    def measure(load: float) -> Probe:
        asked.append(load)
        chance = 0.998 if load <= limit else max(0.0, 0.99 - (load / limit - 1) / 2)
        num_good = sum(rng.random() < chance for _ in range(NUM_REQUESTS))
        if load >= breaks_at:
            num_good //= 2
        return Probe(load, 100 * min(load, knee) * rng.gauss(1, 0.01), NUM_REQUESTS, num_good)

    return measure, asked


@pytest.mark.parametrize("limit", [1, 2, 3, 20, 37, 100, 700])
def test_limit_is_found(limit: int) -> None:
    for seed in range(20):
        measure, asked = server(limit, 1e9, seed)
        outcome = find_saturation(measure, SearchGoal(0.99, 4))
        assert outcome.found is not None and outcome.above is not None
        # A little above the limit few requests are bad: what noise may hide.
        assert 0.85 * limit <= outcome.found <= max(1.08 * limit, limit), (seed, outcome)
        assert outcome.above - outcome.found <= max(1, 0.05 * outcome.found)
        assert len(asked) <= 20 and outcome.stopped.endswith("is too much")


def test_limit_of_a_rate() -> None:
    measure, asked = server(7.3, 1e9)
    goal = SearchGoal(0.99, 1.0, lowest=0.01, is_whole=False)
    outcome = find_saturation(measure, goal)
    assert outcome.found == pytest.approx(7.3, rel=0.06) and asked[:4] == [1, 2, 4, 8]
    measure, asked = server(0.3, 1e9)
    outcome = find_saturation(measure, goal)
    assert outcome.found == pytest.approx(0.3, rel=0.06) and asked[:3] == [1, 0.5, 0.25]


def test_too_much_from_the_start_and_never_too_much() -> None:
    measure, asked = server(0.5, 1e9)
    outcome = find_saturation(measure, SearchGoal(0.99, 4))
    assert outcome.found is None and outcome.stopped == "even 1 is too much"
    assert set(asked) == {4, 2, 1}
    measure, asked = server(1e9, 1e9)
    outcome = find_saturation(measure, SearchGoal(0.9, 4, highest=100))
    assert outcome.found == 100 and asked == [4, 8, 16, 32, 64, 100]
    assert outcome.stopped == "100 is the highest load allowed, and it is good"


def test_a_chance_failure_is_measured_again() -> None:
    """97 % of 200 says little about 99 %: the load is tried once more, and the sum decides."""
    good = iter([200, 194, 200, 200, 150, 200, 200, 200, 200, 200])
    asked = []

    def measure(load: float) -> Probe:
        asked.append(load)
        return Probe(load, 1.0, 200, next(good, 200 if load < 16 else 0))

    outcome = find_saturation(measure, SearchGoal(0.98, 2, highest=64))
    assert asked[:4] == [2, 4, 4, 8] and outcome.found is not None and outcome.found >= 8
    assert [len(t.probes) for t in outcome.tried.values()][:2] == [1, 2]


@pytest.mark.parametrize("knee", [1, 10, 50, 400])
def test_knee_is_found(knee: int) -> None:
    for seed in range(10):
        measure, asked = server(1e9, knee, seed)
        outcome = find_saturation(measure, SearchGoal(None, 1))
        assert outcome.found is not None and 0.9 * knee <= outcome.found <= 1.2 * knee
        assert outcome.stopped == "two doublings in a row brought no more throughput"
        assert len(asked) <= 16


def test_knee_ends_where_requests_fail() -> None:
    measure, _ = server(1e9, 1e9, breaks_at=100)
    outcome = find_saturation(measure, SearchGoal(None, 1))
    assert outcome.stopped == "at 128 requests fail" and outcome.found == 64
    measure, _ = server(1e9, 1e9, breaks_at=1)
    assert find_saturation(measure, SearchGoal(None, 1)).found is None


def test_interrupt_and_client_are_told() -> None:
    def measure(load: float) -> Probe:
        if load == 8:
            raise Interrupted
        return Probe(load, load, 10, 10, client_limited=load == 4)

    outcome = find_saturation(measure, SearchGoal(0.9, 1))
    assert outcome.found == 4 and outcome.stopped == "interrupted" and outcome.client_limited
    assert outcome.fields()["tried"][-1].client_limited is True
    outcome = find_saturation(measure, SearchGoal(None, 8))
    assert outcome.found is None and outcome.tried == {}


def test_wilson() -> None:
    low, high = wilson(99, 100)
    assert (low, high) == (pytest.approx(0.9455, abs=1e-4), pytest.approx(0.9982, abs=1e-4))
    assert wilson(0, 0) == (0.0, 1.0)
