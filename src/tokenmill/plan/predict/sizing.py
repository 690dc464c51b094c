"""How many GPUs a demand needs: the cheapest systems within limits, and what they cost."""

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
    Plan,
    SearchSpace,
    System,
    fitting,
    prefill_rate,
    replicas_of,
)
from tokenmill.plan.predict.steady_state import Limit, Station
from tokenmill.plan.predict.step_cost import StepCost

MILLION, HOUR_S = 1e6, 3600
MAX_GPUS = 4096
PREFILL_COUNTS = 512


@dataclass(frozen=True, slots=True)
class Traffic:
    rate: float  # requests per second
    limit: Limit
    price_per_gpu_hour: float


@dataclass(frozen=True, slots=True)
class Size:
    plan: Plan
    most: float  # requests per second that it takes within the limits
    precision: str

    @property
    def gpus(self) -> int:
        return self.plan.gpus


def cheapest(system: System, choice: SearchSpace, traffic: Traffic) -> list[Size]:
    """Systems that hold the limits, fewest GPUs first; `system.gpus` is the most there may be."""
    sizes: list[Size] = []
    names = [choice.precision] if choice.precision else _precisions(system)
    refused: PlanError | None = None
    fits = False
    for name in names:
        types = precisions_of(system.spec, name)
        for depth in choice.mtp_depths:
            one = replace(system, gpus=min(system.gpus, system.gpu.domain_gpus))
            try:
                costs = fitting(one, replicas_of(one, types, depth, choice))
            except PlanError as error:
                refused = refused or error
                continue
            fits = True
            stations = [system.station(cost, choice) for cost in costs]
            for station in stations:
                sizes += _aggregated(station, traffic, system, name)
                if choice.disaggregates:
                    sizes += _disaggregated(station, stations, traffic, system, choice, name)
    if not sizes:
        raise _too_tight(system, choice, traffic) if fits or refused is None else refused
    sizes = [size for size in sizes if size.gpus <= system.gpus] or [min(sizes, key=_order)]
    return sorted(sizes, key=_order)


def _order(size: Size) -> tuple[int, float]:
    return size.gpus, size.plan.operation.tpot_s


def _precisions(system: System) -> list[str]:
    if system.spec.family == "gpt_oss":
        return ["mxfp4"]
    return [name for name in ("fp4", "fp8", "int8", "bf16") if name in system.gpu.flops]


def _too_tight(system: System, choice: SearchSpace, traffic: Traffic) -> PlanError:
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
    choice: SearchSpace,
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
        max_rate = count * prefill_rate(prefill.lengths, speed, limit, count) * load
        if max_rate >= traffic.rate:
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
    yield Size(plan, min(max_rate, left * most.requests_per_s * load), precision)


def prices(system: System, traffic: Traffic, size: Size, choice: SearchSpace) -> dict[str, float]:
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


def describe(system: System, choice: SearchSpace, traffic: Traffic, size: Size) -> dict[str, Any]:
    plan, mean = size.plan, system.lengths.mean_output
    return {
        "gpus": size.gpus,
        "workers": plan.replicas + plan.prefill_replicas,
        "prefill_to_decode": f"{plan.prefill_replicas}:{plan.replicas}" if plan.prefill else None,
        "batch": round(plan.operation.sequences, 1),
        "configuration": configuration(plan),
        "output_tok_s": round(traffic.rate * mean, 1),
        "tok_s_per_gpu": round(traffic.rate * mean / size.gpus, 1),
        "tok_s_per_user": round(1 / plan.operation.tpot_s, 1),
        **latencies(plan, traffic.limit),
        "max_rate": round(size.most, 3),
        "headroom": round(size.most / traffic.rate - 1, 4),
        "bottleneck": plan.operation.bottleneck,
        "within_gpus": size.gpus <= system.gpus,
        **prices(system, traffic, size, choice),
    }
