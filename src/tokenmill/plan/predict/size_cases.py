"""What becomes of a sized system when something goes wrong, and which limit it meets first."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.plan.hardware import PlanError
from tokenmill.plan.predict.search import SearchSpace, System, search
from tokenmill.plan.predict.sizing import MAX_GPUS, Size, Traffic, cheapest
from tokenmill.plan.predict.steady_state import Limit


@dataclass(frozen=True, slots=True)
class SizeCase:
    """The system under other circumstances, of which `lost` GPUs are gone."""

    system: System
    lost: int = 0
    note: str = ""


def what_if(system: System, choice: SearchSpace, traffic: Traffic, size: Size) -> dict[str, Any]:
    """For each case, the rate that the configuration still takes, and the GPUs that would do."""
    lost = min(size.gpus, max(system.gpu.node_gpus, size.plan.replica.gpus))
    hits = "" if system.cached else "no cache hits were assumed: --cache-hits, or a --trace"
    cases = {
        "one node lost": SizeCase(system, lost, f"{lost} GPUs are gone"),
        "half the cache hits": SizeCase(replace(system, cached=system.cached / 2), note=hits),
        "twice the context": SizeCase(replace(system, lengths=system.lengths.scaled(2))),
    }
    fixed = pinned(choice, size)
    return {name: _outcome(case, size.gpus, fixed, traffic) for name, case in cases.items()}


def pinned(choice: SearchSpace, size: Size) -> SearchSpace:
    replica = size.plan.replica
    return replace(
        choice,
        precision=size.precision,
        tensor_parallel=replica.tensor_parallel,
        attention_dp=replica.attention_dp,
        mtp_depths=(replica.mtp_depth,),
        disaggregates=size.plan.prefill is not None,
    )


def _outcome(case: SizeCase, gpus: int, choice: SearchSpace, traffic: Traffic) -> dict[str, Any]:
    left = gpus - case.lost
    outcome: dict[str, Any] = {"gpus": left, "max_rate": 0.0, "holds": False, "needs_gpus": None}
    if case.note:
        outcome["note"] = case.note
    try:
        plan = search(replace(case.system, gpus=left), choice, traffic.limit) if left else None
        needed = cheapest(replace(case.system, gpus=MAX_GPUS), choice, traffic)[0].gpus
    except PlanError as error:
        return outcome | {"why": str(error)}
    max_rate = plan.requests_per_s if plan else 0.0
    enough = max(gpus, needed + case.lost) if case.lost else needed
    return outcome | {
        "max_rate": round(max_rate, 3),
        "holds": max_rate >= traffic.rate,
        "needs_gpus": enough,
        "needs_usd_per_hour": round(enough * traffic.price_per_gpu_hour, 2),
    }


def case_words(case: dict[str, Any]) -> str:
    note = f" ({case['note']})" if "note" in case else ""
    if case.get("why"):
        return f"takes no requests{note}: {case['why']}"
    verdict = "that holds"
    if not case["holds"]:
        price = f"${case['needs_usd_per_hour']:,.2f} an hour"
        verdict = f"not enough; {case['needs_gpus']} GPUs would hold ({price})"
    return f"{case['gpus']} GPUs take {case['max_rate']:g} requests/s: {verdict}{note}"


def while_starting(size: Size, traffic: Traffic, start_s: float) -> dict[str, Any]:
    """What waits while one of the workers is not there yet: the kind that is missed most."""
    plan = size.plan
    counts = {"decode" if plan.prefill else "": plan.replicas}
    if plan.prefill:
        counts["prefill"] = plan.prefill_replicas
    kind = min(counts, key=counts.__getitem__)
    others = counts[kind] - 1
    left = size.most * others / (others + 1)
    behind = max(0.0, traffic.rate - left)
    backlog = behind * start_s
    spare = size.most - traffic.rate
    clears_s = backlog / spare if spare > 0 else math.inf
    return {
        "start_s": start_s,
        "max_rate": round(left, 3),
        "backlog": round(backlog, 1),
        "clears_s": round(clears_s, 1) if clears_s < math.inf else None,
        "words": _starting_words(
            f"{kind} workers".strip(), others, left, start_s, backlog, clears_s
        ),
    }


def _starting_words(
    kind: str, others: int, left: float, start_s: float, backlog: float, clears_s: float
) -> str:
    rest = f"the other {others} {kind} take {left:.3g} requests/s" if others else "none is left"
    if not backlog:
        return f"{rest}, so nobody waits"
    cleared = (
        f"which takes {clears_s:,.0f} s more to clear"
        if clears_s < math.inf
        else "and they are never cleared: there is no headroom"
    )
    return f"{rest}; after {start_s:g} s {backlog:,.0f} requests wait, {cleared}"


def breaks_first(system: System, choice: SearchSpace, traffic: Traffic, size: Size) -> str:
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
    return best if rates[best] > size.most * 1.02 else "throughput: looser limits would not help"


def within(system: System, choice: SearchSpace, traffic: Traffic) -> float:
    """Requests per second that as many GPUs as there may be take within the limits."""
    try:
        plan = search(system, choice, traffic.limit)
    except PlanError:
        return 0.0
    return plan.requests_per_s if plan else 0.0
