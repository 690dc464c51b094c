"""A system with and without each technique: what each is predicted to bring, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.plan.cluster.cluster import ClusterConfig, StepLimits
from tokenmill.plan.cluster.layout import PREFILL, Division, place_workers
from tokenmill.plan.cluster.rank_work import RankWork
from tokenmill.plan.cluster.setup import PREFILL_LIMITS
from tokenmill.plan.cluster.steady import (
    Demand,
    closed_load,
    decoding,
    holds,
    num_ranks,
    one_rack,
    open_load,
    simulate,
)
from tokenmill.plan.predict.lengths import demand_of
from tokenmill.plan.predict.step_cost import Replica

STEPS = 24  # of a run that measures a rate
SERVER_REQUESTS = 400
DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique, whether the system has it, and the system with the other choice."""

    name: str
    is_on: bool
    other: ClusterConfig


def rungs_of(config: ClusterConfig, asked: Demand) -> list[Technique]:
    replica = decoding(config)[0].replica
    rungs = [Technique("fusions", config.fused, replace(config, fused=not config.fused))]
    if replica.attention_dp > 1:
        other = replace(config, balance=not config.balance)
        rungs.append(Technique("ADP balance", config.balance, other))
        copies = 0 if config.num_redundant else 32
        rungs.append(Technique("EPLB", bool(copies == 0), replace(config, num_redundant=copies)))
    apart = any(place.role == PREFILL for place in config.layout.workers)
    rungs += _divided(config, asked, replica, apart)
    policy = "kv" if config.router.policy != "kv" else "round-robin"
    other = replace(config, router=replace(config.router, policy=policy))  # type: ignore[arg-type]
    rungs.append(Technique("KV routing", config.router.policy == "kv", other))
    return rungs


def _divided(
    config: ClusterConfig, asked: Demand, replica: Replica, apart: bool
) -> list[Technique]:
    layout, spec = config.layout, config.spec
    rack = layout.gpus // layout.racks
    found: list[Technique] = []

    def system(division: Division) -> ClusterConfig:
        return replace(
            config, layout=place_workers(layout.gpu, layout.gpus, layout.racks, division)
        )

    together = Division(replica, layout.gpus // replica.gpus)
    if apart and rack % replica.gpus == 0:
        found.append(Technique("disaggregation", True, system(together)))
    elif not apart and together.count > 1:
        count = _prefill_count(config, asked, together)
        before = replace(replica, mtp_depth=0)
        division = Division(replica, together.count - count, before, count)
        found.append(Technique("disaggregation", False, system(division)))
    if spec.moe is not None and replica.attention_dp > 1 and not apart:
        size = 8 if replica.gpus == rack else rack
        wide = replace(replica, attention_dp=size)
        if rack % size == 0 and size != replica.gpus:
            is_wide = replica.gpus == rack
            found.append(Technique("WideEP", is_wide, system(Division(wide, layout.gpus // size))))
    if spec.num_mtp_layers and not apart:
        depth = 0 if replica.mtp_depth else DRAFTS
        drafting = system(replace(together, replica=replace(replica, mtp_depth=depth)))
        places, budget = config.limits.max_num_seqs, config.limits.max_num_batched_tokens
        limits = StepLimits(places, budget + places * (depth - replica.mtp_depth))
        found.append(Technique("MTP", bool(replica.mtp_depth), replace(drafting, limits=limits)))
    return found


def _prefill_count(config: ClusterConfig, asked: Demand, together: Division) -> int:
    """Workers that compute all prompts, where the others do nothing but decode."""
    replica, demand = together.replica, demand_of(config.spec, asked.lengths)
    price, ranks = config.price(replica, 1), replica.attention_dp
    tokens = PREFILL_LIMITS.max_num_batched_tokens
    prompts = tokens / demand.input_tokens
    full = RankWork(0, 0, 0, tokens, round(prompts * demand.prefill_seen), round(prompts))
    speed = tokens * ranks / price.price([full] * ranks).seconds
    rate = asked.rate
    if rate is None:
        each = round(0.9 * config.cost(replica).max_sequences(demand.mean_seen) / ranks)
        each = min(each, config.limits.max_num_seqs)
        decode = RankWork(each, each, round(each * demand.mean_seen), sampled=each)
        step_s = price.price([decode] * ranks).seconds
        rate = each * ranks / step_s / demand.output_tokens * together.count
    count = math.ceil(rate * demand.input_tokens / speed)
    return min(max(1, count), together.count - 1)


def measure_ladder(
    config: ClusterConfig, asked: Demand, note: Callable[[str], None]
) -> dict[str, Any]:
    """Every technique on one rack: the system as it is, and with the other choice."""
    part, share = one_rack(config)
    own = replace(asked, rate=asked.rate * share if asked.rate else None)
    base = measure(part, own)
    rows = []
    for rung in rungs_of(part, own):
        other = measure(rung.other, own)
        with_it, without = (base, other) if rung.is_on else (other, base)
        ratio = with_it["output_tok_s"] / without["output_tok_s"]
        if own.rate is not None:
            ratio = without["tpot_ms"]["mean"] / with_it["tpot_ms"]["mean"]
        rows.append(
            {
                "technique": rung.name,
                "used": rung.is_on,
                "with": with_it,
                "without": without,
                "gain": round(ratio, 4),
            }
        )
        note(f"{rung.name}: {ratio:.3f}")
    return {"gpus": part.layout.gpus, "rate": own.rate, "base": base, "rungs": rows}


def measure(config: ClusterConfig, asked: Demand) -> dict[str, Any]:
    """A short run, as the figures that a ladder shows."""
    if asked.rate is None:
        load = closed_load(config, asked)
        count = round(load.num_running * STEPS / asked.lengths.mean_output)
        load = replace(load, num_requests=max(count, 4 * num_ranks(config)))
    else:
        few = replace(asked, num_requests=SERVER_REQUESTS)
        load = open_load(config, few, asked.rate)
    report = simulate(config, load)
    kept = holds(report, asked.limit) if asked.limit and asked.rate else None
    return {
        "output_tok_s": report["output_tok_s"],
        "ttft_ms": {key: report["ttft_ms"].get(key) for key in ("p50", "p99")},
        "tpot_ms": {key: report["tpot_ms"].get(key) for key in ("mean", "p99")},
        "balance": report["balance"]["time"],
        "within_limits": kept,
    }
