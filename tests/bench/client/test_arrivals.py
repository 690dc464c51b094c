"""Planned times and slots, without a clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tokenmill.bench.client.arrivals import (
    ClientLoad,
    as_run,
    planned_times,
    shard_slots,
    slot_delays,
)
from tokenmill.bench.client.load_run import choose_processes
from tokenmill.bench.workload import BenchError


def times(load: ClientLoad) -> list[float]:
    planned = list(planned_times(load))
    assert [index for index, _ in planned] == list(range(len(planned)))
    return [time for _, time in planned]


def test_constant_rate_by_hand() -> None:
    load = ClientLoad(rate=4.0, arrival="constant", num_sessions=5)
    assert times(load) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_duration_bounds_it_too() -> None:
    assert times(ClientLoad(rate=4.0, arrival="constant", duration_s=0.7)) == [0.0, 0.25, 0.5]
    both = ClientLoad(rate=4.0, arrival="constant", duration_s=100.0, num_sessions=2)
    assert times(both) == [0.0, 0.25]


def test_bursts_keep_the_mean_rate() -> None:
    load = ClientLoad(rate=2.0, arrival="burst", burst_size=3, num_sessions=7)
    assert times(load) == [0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 3.0]
    assert times(ClientLoad(arrival="burst", num_sessions=3)) == [0.0] * 3


def test_poisson_has_its_rate_and_its_spread() -> None:
    load = ClientLoad(rate=10.0, num_sessions=20_000, seed=3)
    planned = times(load)
    assert planned == times(load) and planned != times(ClientLoad(rate=10.0, num_sessions=20_000))
    gaps = [b - a for a, b in pairwise(planned)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.03)
    assert variance == pytest.approx(0.01, rel=0.1)


def test_ramp_by_hand() -> None:
    """8 s from 0 to 4 per second: 16 arrivals, half of the full rate's."""
    planned = times(ClientLoad(rate=4.0, arrival="constant", ramp_s=8.0, duration_s=10.0))
    assert planned[4] == pytest.approx(4.0)  # 4 t^2 / 16 = 4
    assert planned[16] == pytest.approx(8.0)
    assert planned[17] == pytest.approx(8.25)
    assert len(planned) == 24


def test_slots_ramp_too() -> None:
    assert slot_delays(ClientLoad(concurrency=4, num_sessions=1)) == [0.0] * 4
    assert slot_delays(ClientLoad(concurrency=4, num_sessions=1, ramp_s=2.0)) == [
        0.0,
        0.5,
        1.0,
        1.5,
    ]


def test_trace_times_are_its_own() -> None:
    load = ClientLoad(arrival="trace", offsets_s=(0.0, 0.2, 5.0), duration_s=4.0)
    assert times(load) == [0.0, 0.2]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_shards_are_all_slots_once(num_shards: int) -> None:
    shards = [shard_slots(7, shard, num_shards) for shard in range(num_shards)]
    assert sorted(slot for shard in shards for slot in shard) == list(range(7))


def test_a_load_has_an_end() -> None:
    with pytest.raises(BenchError, match="number of requests or a duration"):
        ClientLoad(concurrency=1)
    with pytest.raises(BenchError, match="--num-requests"):
        ClientLoad(arrival="burst", duration_s=1.0)


def test_processes_as_the_load_asks() -> None:
    assert choose_processes(ClientLoad(concurrency=64, num_sessions=1), 64) == 1
    assert choose_processes(ClientLoad(concurrency=2048, num_sessions=1), 64) == 4
    assert choose_processes(ClientLoad(rate=10_000.0, num_sessions=1), 64) == 5
    assert choose_processes(ClientLoad(concurrency=2048, num_sessions=1), 2) == 1


def test_a_closed_loop_has_no_arrivals() -> None:
    config = {"arrival": "poisson", "burst_size": 1, "rate": ()}
    closed = as_run(config, [1, 4])
    assert closed == {"load": "closed loop, concurrency 1, 4", "rate": ()}
    assert as_run(config, [None]) == config
