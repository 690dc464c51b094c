"""Loads that a system is in the middle of: how many requests run, and the highest rate it holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.plan.cluster.cluster import ClusterConfig
from tokenmill.plan.cluster.faults import FaultEvent
from tokenmill.plan.cluster.layout import PREFILL, WorkerLayout, WorkerPlace
from tokenmill.plan.cluster.load import SimulatedLoad
from tokenmill.plan.cluster.rank_work import RankWork
from tokenmill.plan.cluster.report import full_report
from tokenmill.plan.cluster.simulation import Simulation
from tokenmill.plan.predict.lengths import Lengths, demand_of
from tokenmill.plan.predict.steady_state import Limit, tokens_per_step

KV_SHARE = 0.96  # of the cache that requests under way take at the begin
WAITING = 2  # requests of each rank that wait, where all are there at the start
PILOTS = 2
FIRST_STRETCH = 1.2  # of the time per token, before a pilot run was made
PILOT_REQUESTS, SEARCH_REQUESTS = 250, 400
SEARCHES = 6

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked, and within which limits."""

    lengths: Lengths
    num_requests: int
    rate: float | None  # None: all are there at the start
    limit: Limit | None = None
    seed: int = 0


def decoding(config: ClusterConfig) -> list[WorkerPlace]:
    return [place for place in config.layout.workers if place.role != PREFILL]


def num_ranks(config: ClusterConfig) -> int:
    return sum(place.replica.attention_dp for place in decoding(config))


def max_concurrency(config: ClusterConfig, lengths: Lengths) -> int:
    """Requests that run where many wait: as places and the cache allow."""
    held = demand_of(config.spec, lengths).mean_seen / config.spec.num_layers
    total = 0
    for place in decoding(config):
        replica = place.replica
        tokens = config.cost(replica).max_sequences(config.spec.num_layers) * KV_SHARE
        most = config.limits.max_num_seqs * replica.attention_dp
        total += int(min(most, tokens / held))
    return total


def one_rack(config: ClusterConfig) -> tuple[ClusterConfig, float]:
    """The part of a system that lies on its first rack, and its share of all that decodes."""
    own = tuple(place for place in config.layout.workers if place.racks == (0,))
    if config.layout.racks == 1 or not any(place.role != PREFILL for place in own):
        return config, 1.0
    return _part(config, own)


def few_workers(config: ClusterConfig) -> tuple[ClusterConfig, float]:
    """Two workers that decode, or as many as keep the ratio of prefill workers to them."""
    prefill = [place for place in config.layout.workers if place.role == PREFILL]
    decode = decoding(config)
    unit = len(decode) // math.gcd(len(prefill), len(decode)) if prefill else 1
    count = min(len(decode), unit * -(-2 // unit))
    own = decode[:count] + prefill[: len(prefill) * count // len(decode)]
    return _part(config, tuple(replace(place, racks=(0,)) for place in own), decode[0])


def _part(
    config: ClusterConfig, places: tuple[WorkerPlace, ...], like: WorkerPlace | None = None
) -> tuple[ClusterConfig, float]:
    layout = config.layout
    if like is not None and len(like.racks) > 1:
        return config, 1.0
    part = WorkerLayout(layout.gpu, layout.gpus // layout.racks, 1, places)
    reduced = replace(config, layout=part)
    return reduced, num_ranks(reduced) / num_ranks(config)


def simulate(
    config: ClusterConfig, load: SimulatedLoad, faults: tuple[FaultEvent, ...] = ()
) -> Report:
    simulation = Simulation(config, load, faults)
    outcome = simulation.run()
    return full_report(config, simulation, outcome)


def closed_load(config: ClusterConfig, asked: Demand) -> SimulatedLoad:
    """All requests are there: whoever ends is followed by another."""
    running = max_concurrency(config, asked.lengths)
    waiting = WAITING * num_ranks(config)
    pairs = asked.lengths.pairs
    return SimulatedLoad(pairs, asked.num_requests, None, running, waiting, seed=asked.seed)


def open_load(config: ClusterConfig, asked: Demand, rate: float) -> SimulatedLoad:
    """Requests arrive at a rate; as many run as then do in the long run.

    By Little's law as many as arrive in the time of an answer. Pilot runs measure by how much that
    is longer than for even ranks without prompts.
    """
    part, share = few_workers(config)
    pairs, most, stretch = asked.lengths.pairs, max_concurrency(part, asked.lengths), FIRST_STRETCH
    running = _settled(part, asked, rate * share, stretch, most)
    for pilot in range(PILOTS):
        load = SimulatedLoad(pairs, PILOT_REQUESTS, rate * share, running, seed=pilot)
        report = simulate(part, load)
        mean = report["queues"]["running_per_worker"] * len(decoding(part))
        stretch = report["tpot_ms"]["mean"] / 1e3 / _even_tpot_s(part, asked, mean)
        running = _settled(part, asked, rate * share, stretch, most)
    return SimulatedLoad(pairs, asked.num_requests, rate, round(running / share), seed=asked.seed)


def _settled(config: ClusterConfig, asked: Demand, rate: float, stretch: float, most: int) -> int:
    """Requests that run where as many end as arrive."""
    running = 1.0
    for _ in range(100):
        tpot_s = stretch * _even_tpot_s(config, asked, running)
        running = min(most, rate * asked.lengths.mean_output * tpot_s)
    return max(1, round(running))


def _even_tpot_s(config: ClusterConfig, asked: Demand, running: float) -> float:
    """Of a step of even ranks without prompts."""
    place = decoding(config)[0]
    depth, each = place.replica.mtp_depth, running / num_ranks(config)
    seen = demand_of(config.spec, asked.lengths).mean_seen
    rows = round(each * (1 + depth))
    work = RankWork(round(each), rows, round(each * seen), sampled=rows)
    price = config.price(place.replica, len(place.racks))
    seconds = price.price([work] * place.replica.attention_dp).seconds
    return seconds / tokens_per_step(depth, config.acceptance)


def holds(report: Report, limit: Limit) -> bool:
    """Whether the simulated requests kept both limits, at the 99th percentile."""
    ttft, tpot = report["ttft_ms"].get("p99", math.inf), report["tpot_ms"].get("p99", math.inf)
    return bool(ttft <= limit.ttft_s * 1e3 and tpot <= limit.tpot_s * 1e3)


def highest_rate(config: ClusterConfig, asked: Demand, note: Callable[[str], None]) -> float:
    """The highest rate at which the simulated requests keep the limits, tried on few workers."""
    assert asked.limit is not None
    part, share = few_workers(config)
    few = replace(asked, num_requests=SEARCH_REQUESTS)
    closed = simulate(part, closed_load(part, replace(few, num_requests=PILOT_REQUESTS)))
    high = closed["output_tok_s"] / asked.lengths.mean_output
    low = 0.0
    for _ in range(SEARCHES):
        rate = (low + high) / 2
        report = simulate(part, open_load(part, few, rate))
        kept = holds(report, asked.limit)
        low, high = (rate, high) if kept else (low, rate)
        note(
            f"{rate / share:,.1f} requests/s: p99 {report['ttft_ms'].get('p99', math.inf):,.0f} ms "
            f"to the first token, {report['tpot_ms'].get('p99', math.inf):,.1f} ms per token: "
            f"{'within' if kept else 'beyond'} the limits"
        )
    return low / share
