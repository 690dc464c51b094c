"""Which configurations of a system there are, and the one that does most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.hardware import GIGA, Accelerator, PlanError
from tokenmill.plan.predict.catalog import Precision, precisions_of
from tokenmill.plan.predict.lengths import Lengths, MeanDemand, demand_of
from tokenmill.plan.predict.queueing import PromptQueue
from tokenmill.plan.predict.steady_state import (
    ACCEPTANCE,
    FAMILY_ACCEPTANCE,
    MAX_SEQUENCES,
    Limit,
    Operation,
    Station,
    largest,
)
from tokenmill.plan.predict.step_cost import MEMORY_SHARE, Efficiency, Replica, StepCost

MAX_RANKS = 16  # of a replica: more were in no published configuration
MAX_TENSOR_PARALLEL = 8
LEAST_SEQUENCES = 4  # that a replica must hold to count as fitting


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What of a configuration is given; None is searched for."""

    precision: str | None = None
    tensor_parallel: int | None = None
    attention_dp: int | None = None
    mtp_depths: tuple[int, ...] = (0,)
    disaggregates: bool = False  # prefill and decode apart may be tried
    max_sequences: int = MAX_SEQUENCES  # of a rank
    acceptance: float | None = None  # of a draft; None: as measured of the family

    def acceptance_of(self, spec: ModelSpec) -> float:
        measured = FAMILY_ACCEPTANCE.get(spec.family, ACCEPTANCE)
        return measured if self.acceptance is None else self.acceptance

    def allows(self, replica: Replica) -> bool:
        return self.tensor_parallel in (None, replica.tensor_parallel) and self.attention_dp in (
            None,
            replica.attention_dp,
        )


@dataclass(frozen=True, slots=True)
class System:
    spec: ModelSpec
    gpu: Accelerator
    gpus: int
    lengths: Lengths
    efficiency: Efficiency
    cached: float = 0.0  # share of prompt tokens that a prefix cache has

    @property
    def demand(self) -> MeanDemand:
        return demand_of(self.spec, self.lengths).without_cached(self.cached)

    def station(self, cost: StepCost, choice: SearchSpace, prefills: bool = True) -> Station:
        lengths = self.lengths.uncached(self.cached) if self.cached else self.lengths
        acceptance = choice.acceptance_of(self.spec)
        return Station(cost, self.demand, lengths, prefills, acceptance, choice.max_sequences)


@dataclass(frozen=True, slots=True)
class Plan:
    replica: Replica
    replicas: int  # that decode; all of them where nothing is disaggregated
    prefill: Replica | None
    prefill_replicas: int
    operation: Operation  # of one replica that decodes
    requests_per_s: float  # of the system

    @property
    def gpus(self) -> int:
        prefill = self.prefill.gpus * self.prefill_replicas if self.prefill else 0
        return self.replica.gpus * self.replicas + prefill


def best_precision(spec: ModelSpec, gpu: Accelerator) -> str:
    """The narrowest that the GPU computes in; gpt-oss comes in MXFP4."""
    if spec.family == "gpt_oss":
        return "mxfp4"
    return next(name for name in ("fp4", "fp8", "int8", "bf16") if name in gpu.flops)


def search(system: System, choice: SearchSpace, limit: Limit | None) -> Plan | None:
    """The configuration with most requests per second; None where the limits hold in none."""
    precision = choice.precision or best_precision(system.spec, system.gpu)
    types = precisions_of(system.spec, precision)
    plans: list[Plan] = []
    for depth in choice.mtp_depths:
        candidates = replicas_of(system, types, depth, choice)
        costs = fitting(system, candidates)
        if limit is None:
            plans += _offline(system, costs, choice)
        else:
            plans += _aggregated(system, costs, choice, limit)
            if choice.disaggregates:
                plans += _disaggregated(system, costs, choice, limit)
    return max(plans, key=lambda plan: plan.requests_per_s, default=None)


def replicas_of(
    system: System, precision: Precision, mtp_depth: int, choice: SearchSpace
) -> list[Replica]:
    """Powers of two within a domain: tensor parallel, or attention data parallel with experts."""
    found, size = [], 1
    given = max(choice.tensor_parallel or 1, choice.attention_dp or 1)
    most = min(system.gpus, system.gpu.domain_gpus, max(MAX_RANKS, given))
    while size <= most:
        if size <= max(MAX_TENSOR_PARALLEL, choice.tensor_parallel or 1):
            found.append(Replica(precision, tensor_parallel=size, mtp_depth=mtp_depth))
        if system.spec.moe and size > 1:
            found.append(Replica(precision, attention_dp=size, mtp_depth=mtp_depth))
        size *= 2
    allowed = [replica for replica in found if choice.allows(replica)]
    if not allowed:
        raise PlanError(
            f"--tp {choice.tensor_parallel or 1} with attention on {choice.attention_dp or 1} "
            f"ranks: there is no such configuration on {system.gpus} x {system.gpu.name}; "
            "give powers of two up to --gpus, and --attention-dp for models with experts alone"
        )
    return allowed


def fitting(system: System, replicas: Iterable[Replica]) -> list[StepCost]:
    """Those whose weights and a few sequences fit."""
    costs = [StepCost(system.spec, system.gpu, each, system.efficiency) for each in replicas]
    seen = system.demand.mean_seen
    fit = [cost for cost in costs if cost.max_sequences(seen) >= LEAST_SEQUENCES]
    if not fit:
        raise _too_large(system, costs)
    return fit


def _too_large(system: System, costs: list[StepCost]) -> PlanError:
    """By how much the best candidate misses, and from how many GPUs on it would fit."""
    best = max(costs, key=lambda cost: cost.kv_bytes * cost.replica.gpus)
    room = system.gpu.memory_bytes * MEMORY_SHARE
    missing = (
        LEAST_SEQUENCES / best.max_sequences(system.demand.mean_seen)
        if (best.kv_bytes > 0)
        else math.inf
    )
    needed = best.weight_bytes * best.replica.gpus
    enough = _enough(system, best)
    by = (
        f"weights of {needed / GIGA:,.0f} GB are {-best.kv_bytes / GIGA:,.0f} GB a GPU too large"
        if best.kv_bytes < 0
        else f"the cache is {missing:,.1f} times too small for {LEAST_SEQUENCES} requests"
    )
    hint = f"--gpus {enough}" if enough else "a narrower --precision, or a larger GPU"
    return PlanError(
        f"--gpus {system.gpus}: {best.replica.precision.name} on {best.replica.gpus} x "
        f"{system.gpu.name} with {room / GIGA:,.0f} GB each: {by}; use {hint}"
    )


def _enough(system: System, best: StepCost) -> int | None:
    """The least power of two of GPUs on which some replica fits."""
    size = 2 * best.replica.gpus
    while size <= system.gpu.domain_gpus:
        for more in (
            replace(best.replica, tensor_parallel=size, attention_dp=1),
            replace(best.replica, tensor_parallel=1, attention_dp=size),
        ):
            cost = StepCost(system.spec, system.gpu, more, system.efficiency)
            if cost.max_sequences(system.demand.mean_seen) >= LEAST_SEQUENCES:
                return size
        size *= 2
    return None


def _offline(system: System, costs: list[StepCost], choice: SearchSpace) -> Iterator[Plan]:
    for cost in costs:
        count = system.gpus // cost.replica.gpus
        operation = system.station(cost, choice).offline()
        rate = operation.requests_per_s * count
        yield Plan(cost.replica, count, None, 0, operation, rate)


def _aggregated(
    system: System, costs: list[StepCost], choice: SearchSpace, limit: Limit
) -> Iterator[Plan]:
    """Every replica computes its own prompts; each has a queue of its own."""
    for cost in costs:
        count, station = system.gpus // cost.replica.gpus, system.station(cost, choice)
        most = station.within(limit, pooled=1)
        if most is None:
            continue
        rate = most.requests_per_s * system.efficiency.load
        operation = station.at_rate(rate, limit, pooled=1) or most
        yield Plan(cost.replica, count, None, 0, operation, rate * count)


def _disaggregated(
    system: System, costs: list[StepCost], choice: SearchSpace, limit: Limit
) -> Iterator[Plan]:
    """Prefill apart: each side by its own limit, GPUs divided so that neither waits."""
    prefill = min(
        (system.station(cost, choice) for cost in costs),
        key=lambda station: station.cost.replica.gpus / station.prefill_tokens_per_s(0),
    )
    for cost in costs:
        if cost.replica.gpus + prefill.cost.replica.gpus > system.gpus:
            continue
        decode = system.station(cost, choice, prefills=False)
        pooled = max(1, system.gpus // (2 * cost.replica.gpus))
        most = decode.within(Limit(math.inf, limit.tpot_s, limit.percentile), pooled)
        if most is not None:
            yield _divide(system, prefill, decode, most, limit)


def _divide(
    system: System, prefill: Station, decode: Station, most: Operation, limit: Limit
) -> Plan:
    """Give prefill as many replicas as the decoding rest needs."""
    before, after = prefill.cost.replica, decode.cost.replica
    speed = prefill.prefill_tokens_per_s(0)
    best = (0.0, 1, 1)
    for count in range(1, (system.gpus - after.gpus) // before.gpus + 1):
        left = (system.gpus - count * before.gpus) // after.gpus
        max_rate = count * prefill_rate(prefill.lengths, speed, limit, count)
        best = max(best, (min(max_rate, left * most.requests_per_s), count, left))
    rate, count, left = best[0] * system.efficiency.load, best[1], best[2]
    operation = decode.at_rate(rate / left, limit, left) or most
    queue = PromptQueue(prefill.lengths, rate / count, speed, count)
    step_s = operation.tpot_s * decode.gain
    first = [step_s + queue.percentile_s(share) for share in (0.5, limit.percentile / 100)]
    operation = replace(operation, ttft_s=first[0], ttft_high_s=first[1])
    return Plan(after, left, before, count, operation, rate)


def prefill_rate(lengths: Lengths, speed: float, limit: Limit, count: int) -> float:
    """Requests per second of one of `count` prefill replicas that hold the time to first token."""
    full = speed / lengths.mean_input

    def holds(rate: float) -> bool:
        queue = PromptQueue(lengths, rate, speed, count)
        return queue.late(limit.ttft_s) <= 1 - limit.percentile / 100

    return largest(holds, full / 1000, full * 0.999)
