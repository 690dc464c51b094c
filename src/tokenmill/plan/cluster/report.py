"""The figures of a simulation: queues, balance of ranks, network, and what happened."""

from __future__ import annotations

from typing import Any

from tokenmill.core.metrics import percentile
from tokenmill.plan.cluster.cluster import ClusterConfig, expert_factor
from tokenmill.plan.cluster.layout import PREFILL, WorkerPlace
from tokenmill.plan.cluster.requests import SimulationOutcome
from tokenmill.plan.cluster.simulation import START_NS, Simulation
from tokenmill.plan.cluster.worker import Worker

PREDICTION = (
    "predicted: batches, places and routes are those of the real classes, the time of a step and "
    "of a transfer is a formula with fitted efficiencies"
)


def full_report(
    config: ClusterConfig, simulation: Simulation, outcome: SimulationOutcome
) -> dict[str, Any]:
    workers = list(simulation.workers.values())
    return {
        **outcome.report(workers, config.layout.gpus),
        "queues": _queues(workers),
        "balance": _balance(config, workers),
        "network": _network(simulation, workers),
        "events": [
            {"after_s": round((at - START_NS) / 1e9, 3), "event": kind, "worker": name, key: count}
            for at, kind, name, count in outcome.happened
            for key in ["migrated" if kind == "failed" else "held"]
        ],
    }


def _queues(workers: list[Worker]) -> dict[str, Any]:
    tallies = [worker.tally for worker in workers]
    decoding = [worker.tally for worker in workers if worker.role != PREFILL]
    busy_s = sum(tally.busy_s for tally in tallies)
    decoding_s = sum(tally.busy_s for tally in decoding)
    return {
        "running_per_worker": round(sum(t.num_running for t in decoding) / decoding_s, 1),
        "waiting_per_worker": round(sum(t.num_waiting for t in tallies) / busy_s, 2),
        "most_waiting_at_a_worker": max(t.most_waiting for t in tallies),
    }


def _balance(config: ClusterConfig, workers: list[Worker]) -> dict[str, Any]:
    tallies = [worker.tally for worker in workers]
    busy_s, num_steps = sum(t.busy_s for t in tallies), sum(t.num_steps for t in tallies)
    computed = [
        rank.num_computed * len(worker.ranks) / max(1, sum(r.num_computed for r in worker.ranks))
        for worker in workers
        for rank in worker.ranks
    ]
    found: dict[str, Any] = {
        "tokens": round(sum(t.balance for t in tallies) / busy_s, 4),
        "time": round(sum(t.even_s for t in tallies) / busy_s, 4),
        "held_steps": round(sum(t.num_held for t in tallies) / num_steps, 4),
        "rank_share": {
            "min": round(min(computed), 4),
            "p50": round(percentile(computed, 50), 4),
            "max": round(max(computed), 4),
        },
        "fitted_time": config.efficiency.balance,
    }
    replica, moe = workers[0].place.replica, config.spec.moe
    if moe is not None and replica.attention_dp > 1:
        factor = expert_factor(replica.gpus, moe.num_experts, moe.top_k, config.num_redundant)
        found["experts"] = round(factor, 4)
    return found


def _network(simulation: Simulation, workers: list[Worker]) -> dict[str, Any]:
    busy_s = sum(worker.tally.busy_s for worker in workers)
    inside_s = sum(worker.tally.inside_s for worker in workers)
    between_s = sum(worker.tally.between_s for worker in workers)
    num_steps = sum(worker.tally.num_steps for worker in workers)
    return {
        "inside_racks": {
            "exchange_ms_per_step": round(1e3 * inside_s / num_steps, 3),
            "share_of_steps": round(inside_s / busy_s, 4),
            "kv": simulation.network.inside.report(),
        },
        "between_racks": {
            "exchange_ms_per_step": round(1e3 * between_s / num_steps, 3),
            "share_of_steps": round(between_s / busy_s, 4),
            "kv": simulation.network.between.report(),
        },
    }


def describe_workers(places: tuple[WorkerPlace, ...]) -> list[dict[str, Any]]:
    kinds: dict[tuple[str, Any], list[WorkerPlace]] = {}
    for place in places:
        kinds.setdefault((place.role, place.replica), []).append(place)
    return [
        {
            "workers": len(own),
            "role": role,
            "gpus": replica.gpus,
            "tp": replica.tensor_parallel,
            "attention_dp": replica.attention_dp,
            "ep": replica.expert_parallel,
            "mtp": replica.mtp_depth,
            "precision": replica.precision.name,
            "kv": replica.precision.kv,
            "racks_of_a_worker": len(own[0].racks),
        }
        for (role, replica), own in kinds.items()
    ]
