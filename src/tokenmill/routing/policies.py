"""Router policies: what each worker would cost. The lowest cost wins, ties are drawn at random.

A policy is an entry of POLICIES, and its name is in core/config.RouterPolicy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.routing.prices import Line, Prices, WorkerLoad


@dataclass(slots=True)
class RoutingChoice:
    """A request and the workers that may take it, by slot."""

    num_tokens: int
    now_ms: float
    turn: int  # how many were chosen before
    loads: list[WorkerLoad]
    lines: list[Line]
    prices: Prices
    slots: dict[str, int]
    cached: dict[str, int]  # prompt tokens by worker; those without any are left out
    copy_ms: float  # to compute a token that another worker has, shared by all who use the copy


@dataclass(frozen=True, slots=True)
class Policy:
    costs: Callable[[RoutingChoice], list[float]]
    rule: str  # a sentence without its subject, such as "the lowest cost wins"
    term: str = ""  # the term of Decision.terms that decides
    reason: str = ""  # where no term says it
    knows_blocks: bool = False  # cached blocks count
    counts_load: bool = False  # load counts


def _kv(choice: RoutingChoice) -> list[float]:
    """The cost of router.py, without terms that are equal on all workers."""
    now_ms, num_tokens = choice.now_ms, choice.num_tokens
    costs = [
        (cost if (cost := in_time - now_ms) > (least := late + growth * now_ms) else least)
        + num_tokens * each
        for in_time, late, growth, each in choice.lines
    ]
    prices, slots, loads = choice.prices, choice.slots, choice.loads
    copy_ms, stall = choice.copy_ms, prices.stall * prices.rates.prefill
    for name, num_cached in choice.cached.items():
        slot = slots[name]
        costs[slot] -= num_cached * (copy_ms + stall * loads[slot].num_requests)
    return costs


def _round_robin(choice: RoutingChoice) -> list[float]:
    count = len(choice.loads)
    return [float((slot - choice.turn) % count) for slot in range(count)]


def _least_loaded(choice: RoutingChoice) -> list[float]:
    return [float(load.num_requests) for load in choice.loads]


def _random(choice: RoutingChoice) -> list[float]:
    return [0.0] * len(choice.loads)


POLICIES = {
    "kv": Policy(_kv, "the lowest cost wins", term="cost_ms", knows_blocks=True, counts_load=True),
    "round-robin": Policy(_round_robin, "workers take turns", reason="its turn"),
    "least-loaded": Policy(
        _least_loaded, "the fewest requests win", term="num_requests", counts_load=True
    ),
    "random": Policy(_random, "any worker, at random", reason="drawn at random"),
}
