"""A prediction of one benchmark on one system, with its interval and what it rests on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.benchmarks import DRAFTS, ROUNDS, Benchmark
from tokenmill.plan.predict.catalog import find_model
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.search import Plan, SearchSpace, System, search
from tokenmill.plan.predict.steady_state import Limit
from tokenmill.plan.predict.step_cost import Efficiency, Replica

ONE_NODE = 8  # GPUs; submissions on one node computed prompts and answers on the same GPUs
MILLI = 1e-3


@dataclass(frozen=True, slots=True)
class Question:
    """A benchmark in a scenario on so many GPUs of a kind, with the software of a round."""

    benchmark: Benchmark
    scenario: str
    gpu: Accelerator
    gpus: int
    round: str

    @property
    def limit(self) -> Limit | None:
        limits = self.benchmark.limit(self.scenario)
        return Limit(limits.ttft_ms * MILLI, limits.tpot_ms * MILLI) if limits else None

    def choice(self) -> SearchSpace:
        """What a submission of the round would choose among."""
        round = ROUNDS.get(self.round, ROUNDS["v6.0"])  # ours can do what that round's can
        drafts = (self.benchmark.name, self.scenario) in round.drafts
        return SearchSpace(
            mtp_depths=(0, DRAFTS) if drafts else (0,),
            disaggregates=round.disaggregates and self.gpus > ONE_NODE,
        )


def answer(
    question: Question, efficiency: Efficiency, choice: SearchSpace | None = None
) -> Plan | None:
    """The best configuration, and what it does; None where the limits hold in none."""
    benchmark = question.benchmark
    spec = find_model(benchmark.model)
    system = System(spec, question.gpu, question.gpus, benchmark.lengths, efficiency)
    return search(system, choice or question.choice(), question.limit)


def predicted_tokens_per_s(question: Question, efficiency: Efficiency) -> float:
    """Of the system; 0 where the limits hold in no configuration."""
    plan = answer(question, efficiency)
    return plan.requests_per_s * question.benchmark.lengths.mean_output if plan else 0.0


def predict(question: Question, fit: Fit, choice: SearchSpace | None = None) -> dict[str, Any]:
    plan = answer(question, fit.efficiency, choice)
    limit, name = question.limit, question.benchmark.name
    if plan is None:
        assert limit is not None
        raise PlanError(
            f"--scenario {question.scenario}: no configuration of {question.gpus} x "
            f"{question.gpu.name} holds {limit.ttft_s / MILLI:g} ms to the first token and "
            f"{limit.tpot_s / MILLI:g} ms per token of {name}; {_nearest(question, fit)}"
        )
    tokens = plan.requests_per_s * question.benchmark.lengths.mean_output
    return {
        "plan": "predict",
        "benchmark": name,
        "scenario": question.scenario,
        "round": question.round,
        "efficiencies_of": fit.name,
        "gpu": question.gpu.key,
        "gpus": question.gpus,
        "output_tok_s": round(tokens, 1),
        "samples_s": round(plan.requests_per_s, 3),
        "tok_s_per_gpu": round(tokens / question.gpus, 1),
        **latencies(plan, limit),
        "interval": interval(tokens, fit),
        "configuration": configuration(plan),
        "bottleneck": plan.operation.bottleneck,
        "step_ms": {name: round(s / MILLI, 2) for name, s in plan.operation.parts.items()},
        "fitted_on": list(fit.fitted_on),
        "efficiencies": {name: round(v, 4) for name, v in asdict(fit.efficiency).items()},
    }


def _nearest(question: Question, fit: Fit) -> str:
    """The least multiple of the limits that some configuration holds."""
    limit = question.limit
    assert limit is not None
    benchmark = question.benchmark
    spec = find_model(benchmark.model)
    system = System(spec, question.gpu, question.gpus, benchmark.lengths, fit.efficiency)
    return nearest_limit(system, question.choice(), limit)


def nearest_limit(system: System, choice: SearchSpace, limit: Limit) -> str:
    for factor in (1.25, 1.5, 2, 3, 5, 10, 20, 50, 100):
        wider = Limit(limit.ttft_s * factor, limit.tpot_s * factor, limit.percentile)
        if search(system, choice, wider) is not None:
            return f"{factor:g} times these limits can be held"
    return "nor 100 times these limits"


def latencies(plan: Plan, limit: Limit | None) -> dict[str, Any]:
    """Milliseconds; Offline has no first token to wait for."""
    operation = plan.operation
    high = f"p{limit.percentile:g}" if limit else "p99"
    ttft: dict[str, float] | None = None
    if operation.ttft_s is not None and operation.ttft_high_s is not None:
        ttft = {"p50": _ms(operation.ttft_s), high: _ms(operation.ttft_high_s)}
    return {
        "ttft_ms": ttft,
        "tpot_ms": {"mean": _ms(operation.tpot_s), high: _ms(operation.tpot_high_s)},
    }


def interval(value: float, fit: Fit) -> list[float]:
    """What 90 % of the rows that nothing was fitted on stayed within, about this value."""
    return [round(value * math.exp(sign * fit.error), 1) for sign in (-1, 1)]


def configuration(plan: Plan) -> dict[str, Any]:
    found = {"replicas": plan.replicas, **_replica(plan.replica)}
    found["sequences_per_gpu"] = round(plan.operation.sequences / plan.replica.gpus, 1)
    if plan.prefill is not None:
        found["prefill"] = {"replicas": plan.prefill_replicas, **_replica(plan.prefill)}
    return found


def _replica(replica: Replica) -> dict[str, Any]:
    return {
        "gpus": replica.gpus,
        "precision": replica.precision.name,
        "kv": replica.precision.kv,
        "tp": replica.tensor_parallel,
        "attention_dp": replica.attention_dp,
        "ep": replica.expert_parallel,
        "mtp": replica.mtp_depth,
    }


def _ms(seconds: float) -> float:
    return round(seconds / MILLI, 2)
