"""Plans when requests are sent: times of an open loop, slots of a closed one. Reads no clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenmill.bench.workload import BenchError

Arrival = Literal["poisson", "constant", "burst", "trace"]


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """One point: a fixed concurrency, or arrivals that do not wait for answers."""

    concurrency: int | None = None  # closed loop; None: open
    rate: float | None = None  # mean arrivals per second; None: all at once
    arrival: Arrival = "poisson"
    burst_size: int = 1
    ramp_s: float = 0.0  # rate or concurrency grows linearly from nothing for so long
    num_sessions: int | None = None
    duration_s: float | None = None  # nothing is sent later
    pass_size: int | None = None  # a closed loop ends with a whole pass over so many sessions
    offsets_s: tuple[float, ...] = ()  # arrivals of a trace
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_sessions is None and self.duration_s is None:
            raise BenchError(
                "a load needs a number of requests or a duration: give --num-requests or --duration"
            )
        unbounded = self.num_sessions is None and self.arrival != "trace"
        if self.concurrency is None and self.rate is None and unbounded:
            raise BenchError("requests that arrive at once need a number: give --num-requests")

    @property
    def is_open(self) -> bool:
        return self.concurrency is None

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        if self.arrival == "trace":
            return "trace"
        burst = f" by {self.burst_size}" if self.arrival == "burst" and self.rate else ""
        return f"{self.arrival}{burst} {self.rate:g}/s" if self.rate else "burst"


def as_run(config: Mapping[str, Any], slots: Sequence[int | None]) -> dict[str, Any]:
    """The settings of a run without those that had no effect, such as arrivals in a closed loop."""
    if not slots or None in slots:
        return dict(config)
    held = {name: v for name, v in config.items() if name not in ("arrival", "burst_size")}
    return {"load": f"closed loop, concurrency {', '.join(map(str, slots))}"} | held


def planned_times(load: ClientLoad) -> Iterator[tuple[int, float]]:
    """(session, seconds after the start) of every arrival of an open loop, in order."""
    times = iter(load.offsets_s) if load.arrival == "trace" else _arrivals(load)
    end_s = math.inf if load.duration_s is None else load.duration_s
    bounded = itertools.islice(times, load.num_sessions)
    return enumerate(itertools.takewhile(lambda t: t < end_s, bounded))


def slot_delays(load: ClientLoad) -> list[float]:
    """Seconds after the start at which each slot of a closed loop begins."""
    slots = load.concurrency or 0
    return [load.ramp_s * index / slots for index in range(slots)]


def _arrivals(load: ClientLoad) -> Iterator[float]:
    if load.rate is None:
        return itertools.repeat(0.0)
    counts: Iterator[float]
    if load.arrival == "burst":
        size = load.burst_size
        counts = (size * (index // size) for index in itertools.count())
    elif load.arrival == "constant":
        counts = itertools.count()
    else:
        counts = _unit_poisson(random.Random(f"arrivals/{load.seed}"))
    return (_time_of(count, load.rate, load.ramp_s) for count in counts)


def _unit_poisson(rng: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process with one arrival per unit."""
    return itertools.accumulate(rng.expovariate(1.0) for _ in itertools.count())


def _time_of(count: float, rate: float, ramp_s: float) -> float:
    """When `count` arrivals are due: the inverse of the integral of a rate that ramps up."""
    in_ramp = rate * ramp_s / 2
    if count < in_ramp:
        return math.sqrt(2 * ramp_s * count / rate)
    return count / rate + ramp_s / 2


def shard_slots(concurrency: int, shard: int, num_shards: int) -> range:
    return range(shard, concurrency, num_shards)
