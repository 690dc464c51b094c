"""How many GPUs a demand needs: the cheapest systems within limits, and what happens to them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.plan.hardware import PlanError
from tokenmill.plan.predict.catalog import precisions_of
from tokenmill.plan.predict.prediction import MILLI, configuration, latencies, nearest_limit
from tokenmill.plan.predict.queueing import PromptQueue
from tokenmill.plan.predict.search import (
    Choice,
    Plan,
    System,
    fitting,
    prefill_rate,
    replicas_of,
    search,
)
from tokenmill.plan.predict.steady_state import Limit, Station
from tokenmill.plan.predict.step_cost import StepCost

MILLION, HOUR_S = 1e6, 3600
MAX_GPUS = 4096
PREFILL_COUNTS = 512


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is asked for."""

    rate: float  # requests per second
    limit: Limit
    price_per_gpu_hour: float


@dataclass(frozen=True, slots=True)
class Size:
    """A system that bears the traffic."""

    plan: Plan
    most: float  # requests per second that it bears within the limits
    precision: str

    @property
    def gpus(self) -> int:
        return self.plan.gpus


def cheapest(system: System, choice: Choice, traffic: Traffic) -> list[Size]:
    """Systems that hold the limits, fewest GPUs first; `system.gpus` is the most there may be."""
    sizes: list[Size] = []
    names = [choice.precision] if choice.precision else _precisions(system)
    refused: PlanError | None = None
    for name in names:
        types = precisions_of(system.spec, name)
        for depth in choice.mtp_depths:
            one = replace(system, gpus=min(system.gpus, system.gpu.domain_gpus))
            try:
                costs = fitting(one, replicas_of(one, types, depth, choice))
            except PlanError as error:
                refused = refused or error
                continue
            stations = [system.station(cost, choice) for cost in costs]
            for station in stations:
                sizes += _aggregated(station, traffic, system, name)
                if choice.disaggregates:
                    sizes += _disaggregated(station, stations, traffic, system, choice, name)
    if not sizes:
        raise refused or _too_tight(system, choice, traffic)
    sizes = [size for size in sizes if size.gpus <= system.gpus] or [min(sizes, key=_order)]
    return sorted(sizes, key=_order)


def _order(size: Size) -> tuple[int, float]:
    return size.gpus, size.plan.operation.tpot_s


def _precisions(system: System) -> list[str]:
    if system.spec.family == "gpt_oss":
        return ["mxfp4"]
    return [name for name in ("fp4", "fp8", "bf16") if name in system.gpu.flops]


def _too_tight(system: System, choice: Choice, traffic: Traffic) -> PlanError:
    limit = traffic.limit
    one = replace(system, gpus=min(system.gpus, system.gpu.domain_gpus))
    return PlanError(
        f"--ttft {limit.ttft_s / MILLI:g} --tpot {limit.tpot_s / MILLI:g}: no configuration of "
        f"{system.gpu.name} holds these for {limit.percentile:g} % of the requests; "
        f"{nearest_limit(one, choice, limit)}"
    )


def _aggregated(
    station: Station, traffic: Traffic, system: System, precision: str
) -> Iterator[Size]:
    most = station.within(traffic.limit, pooled=1)
    if most is None:
        return
    each = most.requests_per_s * system.efficiency.load
    count = math.ceil(traffic.rate / each)
    operation = station.at_rate(traffic.rate / count, traffic.limit, pooled=1) or most
    plan = Plan(station.cost.replica, count, None, 0, operation, traffic.rate)
    yield Size(plan, each * count, precision)


def _disaggregated(
    station: Station,
    stations: list[Station],
    traffic: Traffic,
    system: System,
    choice: Choice,
    precision: str,
) -> Iterator[Size]:
    limit, load = traffic.limit, system.efficiency.load
    decode = system.station(station.cost, choice, prefills=False)
    most = decode.within(Limit(math.inf, limit.tpot_s, limit.percentile), pooled=1)
    if most is None:
        return
    left = math.ceil(traffic.rate / (most.requests_per_s * load))
    prefill = min(stations, key=lambda one: one.cost.replica.gpus / one.prefill_tokens_per_s(0))
    speed = prefill.prefill_tokens_per_s(0)
    for count in range(1, PREFILL_COUNTS):
        bears = count * prefill_rate(prefill.lengths, speed, limit, count) * load
        if bears >= traffic.rate:
            break
    else:
        return
    operation = decode.at_rate(traffic.rate / left, limit, left) or most
    queue = PromptQueue(prefill.lengths, traffic.rate / count, speed, count)
    step_s = operation.tpot_s * decode.gain
    first = [step_s + queue.percentile_s(share) for share in (0.5, limit.percentile / 100)]
    operation = replace(operation, ttft_s=first[0], ttft_high_s=first[1])
    before = prefill.cost.replica
    plan = Plan(station.cost.replica, left, before, count, operation, traffic.rate)
    yield Size(plan, min(bears, left * most.requests_per_s * load), precision)


def what_if(system: System, choice: Choice, traffic: Traffic, size: Size) -> dict[str, Any]:
    """The same system when something goes wrong: what it still bears, and what it would take."""
    node = system.gpu.node_gpus
    fixed = pinned(choice, size)
    cases = {
        "one node lost": (system, max(0, size.gpus - max(node, size.plan.replica.gpus))),
        "half the cache hits": (replace(system, cached=system.cached / 2), size.gpus),
        "twice the context": (replace(system, lengths=system.lengths.scaled(2)), size.gpus),
    }
    return {name: _case(one, left, fixed, traffic) for name, (one, left) in cases.items()}


def pinned(choice: Choice, size: Size) -> Choice:
    """The configuration of a size, given."""
    replica = size.plan.replica
    return replace(
        choice,
        precision=size.precision,
        tensor_parallel=replica.tensor_parallel,
        attention_dp=replica.attention_dp,
        mtp_depths=(replica.mtp_depth,),
        disaggregates=size.plan.prefill is not None,
    )


def _case(system: System, gpus: int, choice: Choice, traffic: Traffic) -> dict[str, Any]:
    try:
        plan = search(replace(system, gpus=gpus), choice, traffic.limit) if gpus else None
        needed = cheapest(replace(system, gpus=MAX_GPUS), choice, traffic)[0].gpus
    except PlanError as error:
        return {"gpus": gpus, "bears": 0.0, "holds": False, "needs_gpus": None, "why": str(error)}
    bears = plan.requests_per_s if plan else 0.0
    return {
        "gpus": gpus,
        "bears": round(bears, 3),
        "holds": bears >= traffic.rate,
        "needs_gpus": needed,
    }


def while_starting(size: Size, traffic: Traffic, start_s: float) -> dict[str, Any]:
    """What waits while one of the workers is not there yet."""
    workers = size.plan.replicas
    left = size.most * (workers - 1) / workers
    behind = max(0.0, traffic.rate - left)
    backlog = behind * start_s
    spare = size.most - traffic.rate
    clears_s = backlog / spare if spare > 0 else math.inf
    words = (
        f"the other {workers - 1} bear {left:.3g} requests/s, so nobody waits"
        if not behind
        else f"the other {workers - 1} bear {left:.3g} requests/s; after {start_s:g} s "
        f"{backlog:,.0f} requests wait, which takes {clears_s:,.0f} s more to clear"
    )
    return {
        "start_s": start_s,
        "bears": round(left, 3),
        "backlog": round(backlog, 1),
        "clears_s": round(clears_s, 1) if clears_s < math.inf else None,
        "words": words,
    }


def breaks_first(system: System, choice: Choice, traffic: Traffic, size: Size) -> str:
    """Which limit a higher rate meets: the one whose doubling allows most."""
    fixed, limit = pinned(choice, size), traffic.limit
    one = replace(system, gpus=size.gpus)
    wider = {
        "time to first token": Limit(limit.ttft_s * 2, limit.tpot_s, limit.percentile),
        "time per output token": Limit(limit.ttft_s, limit.tpot_s * 2, limit.percentile),
    }
    rates = {}
    for name, relaxed in wider.items():
        plan = search(one, fixed, relaxed)
        rates[name] = plan.requests_per_s if plan else 0.0
    best = max(rates, key=rates.__getitem__)
    return best if rates[best] > size.most * 1.02 else "throughput: no limit helps"


def prices(system: System, traffic: Traffic, size: Size, choice: Choice) -> dict[str, float]:
    """Dollars per million tokens at this rate: time is split by what a step without it saves."""
    plan, demand = size.plan, system.demand
    cost = StepCost(system.spec, system.gpu, plan.replica, system.efficiency)
    station = system.station(cost, choice)
    step_s = plan.operation.tpot_s * station.gain
    prompts = traffic.rate / plan.replicas * step_s
    whole = cost.parts(station.work(plan.operation.sequences, prompts))
    alone = cost.parts(station.work(plan.operation.sequences, 0.0))
    share = 1 - sum(alone.values()) / sum(whole.values())
    if plan.prefill is not None:
        share = plan.prefill.gpus * plan.prefill_replicas / plan.gpus
    attention = whole["prefill attention"] / max(1e-12, sum(whole.values()) - sum(alone.values()))
    per_request = traffic.price_per_gpu_hour * size.gpus / HOUR_S / traffic.rate
    each = per_request * share / demand.input_tokens * MILLION
    return {
        "usd_per_hour": round(traffic.price_per_gpu_hour * size.gpus, 2),
        "usd_per_million_input": round(each, 4),
        "usd_per_million_cached": round(each * min(1.0, attention), 4),
        "usd_per_million_output": round(
            per_request * (1 - share) / demand.output_tokens * MILLION, 4
        ),
        "usd_per_million_output_all_costs": round(per_request / demand.output_tokens * MILLION, 4),
    }


def describe(system: System, choice: Choice, traffic: Traffic, size: Size) -> dict[str, Any]:
    """One size as the report has it."""
    plan, mean = size.plan, system.lengths.mean_output
    return {
        "gpus": size.gpus,
        "workers": plan.replicas + plan.prefill_replicas,
        "configuration": configuration(plan),
        "output_tok_s": round(traffic.rate * mean, 1),
        "tok_s_per_gpu": round(traffic.rate * mean / size.gpus, 1),
        "tok_s_per_user": round(1 / plan.operation.tpot_s, 1),
        **latencies(plan, traffic.limit),
        "bears": round(size.most, 3),
        "headroom": round(size.most / traffic.rate - 1, 4),
        "bottleneck": plan.operation.bottleneck,
        "within_gpus": size.gpus <= system.gpus,
        **prices(system, traffic, size, choice),
    }
