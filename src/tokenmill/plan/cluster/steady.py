"""Loads that a system is in the middle of: how many requests run, and the highest rate it holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.plan.cluster.cluster import ClusterConfig
from tokenmill.plan.cluster.happening import Happening
from tokenmill.plan.cluster.layout import PREFILL, Layout, WorkerPlace
from tokenmill.plan.cluster.load import Load
from tokenmill.plan.cluster.rank_work import RankWork
from tokenmill.plan.cluster.report import full_report
from tokenmill.plan.cluster.simulation import Simulation
from tokenmill.plan.predict.lengths import Lengths, demand_of
from tokenmill.plan.predict.steady_state import Limit

KV_SHARE = 0.96  # of the cache that requests under way take at the begin
WAITING = 2  # requests of each rank that wait, where all are there at the start
PILOTS = 3
PILOT_REQUESTS, SEARCH_REQUESTS = 100, 400
SEARCHES = 7

Report = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Demanded:
    """What is asked, and within which limits."""

    lengths: Lengths
    num_requests: int
    rate: float | None  # None: all are there at the start
    limit: Limit | None = None
    seed: int = 0


def decoding(config: ClusterConfig) -> list[WorkerPlace]:
    return [place for place in config.layout.workers if place.role != PREFILL]


def num_ranks(config: ClusterConfig) -> int:
    """Ranks that decode."""
    return sum(place.replica.attention_dp for place in decoding(config))


def full_house(config: ClusterConfig, lengths: Lengths) -> int:
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
    part = Layout(layout.gpu, layout.gpus // layout.racks, 1, places)
    reduced = replace(config, layout=part)
    return reduced, num_ranks(reduced) / num_ranks(config)


def simulate(config: ClusterConfig, load: Load, happenings: tuple[Happening, ...] = ()) -> Report:
    """One run, and its report."""
    simulation = Simulation(config, load, happenings)
    outcome = simulation.run()
    return full_report(config, simulation, outcome)


def closed_load(config: ClusterConfig, asked: Demanded) -> Load:
    """All requests are there: whoever ends is followed by another."""
    running = full_house(config, asked.lengths)
    waiting = WAITING * num_ranks(config)
    pairs = asked.lengths.pairs
    return Load(pairs, asked.num_requests, None, running, waiting, seed=asked.seed)


def open_load(config: ClusterConfig, asked: Demanded, rate: float) -> Load:
    """Requests arrive at a rate; as many run as then do in the long run.

    By Little's law: as many as arrive in the time of an answer, which pilot runs measure.
    """
    part, share = few_workers(config)
    running = _first_guess(part, asked, rate * share)
    most = full_house(part, asked.lengths)
    for pilot in range(PILOTS):
        load = Load(
            asked.lengths.pairs, PILOT_REQUESTS, rate * share, min(running, most), seed=pilot
        )
        tpot_s = simulate(part, load)["tpot_ms"]["mean"] / 1e3
        running = round(rate * share * asked.lengths.mean_output * tpot_s)
    running = round(min(running, most) / share)
    return Load(asked.lengths.pairs, asked.num_requests, rate, running, seed=asked.seed)


def _first_guess(config: ClusterConfig, asked: Demanded, rate: float) -> int:
    """From the price of a step of even ranks without prompts, by iteration."""
    demand = demand_of(config.spec, asked.lengths)
    place = decoding(config)[0]
    price, ranks = config.price(place.replica, len(place.racks)), num_ranks(config)
    gain = sum(config.acceptance**n for n in range(place.replica.mtp_depth + 1))
    rows, running = place.replica.mtp_depth + 1, 1.0
    for _ in range(50):
        each = running / ranks
        work = RankWork(
            math.ceil(each),
            math.ceil(each * rows),
            round(each * demand.mean_seen),
            sampled=math.ceil(each * rows),
        )
        step_s = price.price([work] * place.replica.attention_dp).seconds / gain
        running = rate * demand.output_tokens * step_s
    return max(1, round(min(running, full_house(config, asked.lengths))))


def holds(report: Report, limit: Limit) -> bool:
    """Whether the simulated requests kept both limits, at the 99th percentile."""
    ttft, tpot = report["ttft_ms"].get("p99", math.inf), report["tpot_ms"].get("p99", math.inf)
    return bool(ttft <= limit.ttft_s * 1e3 and tpot <= limit.tpot_s * 1e3)


def highest_rate(config: ClusterConfig, asked: Demanded, note: Callable[[str], None]) -> float:
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
