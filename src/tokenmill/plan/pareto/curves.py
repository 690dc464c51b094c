"""Throughput and price of a GPU at each interactivity that is held: one curve for a precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.benchmarks import DRAFTS, ROUNDS, Benchmark
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.lengths import Lengths
from tokenmill.plan.predict.prediction import ONE_NODE, configuration, nearest_limit
from tokenmill.plan.predict.search import Plan, SearchSpace, System, best_precision, search
from tokenmill.plan.predict.steady_state import Limit

OFFLINE = 0.0  # tokens/s per user where no limit holds
MILLION, HOUR_S = 1e6, 3600
NARROW = ("fp4", "fp8", "int8", "bf16")  # the narrowest first


@dataclass(frozen=True, slots=True)
class ParetoCase:
    """What is asked of every GPU: a model, its requests, and whose software."""

    model: str
    lengths: Lengths
    fit: Fit
    round: str
    benchmark: Benchmark | None  # None: a model with lengths of the user's own
    ttft_s: float | None  # None: that of the benchmark's scenarios
    percentile: float
    acceptance: float | None

    def scenario(self, per_user: float) -> str:
        """By whose rules a limit per token is held: Interactive's at its own limit and below."""
        if per_user == OFFLINE:
            return "Offline"
        limits = self.benchmark.limits if self.benchmark else {}
        fast = limits.get("Interactive")
        return "Interactive" if fast and per_user >= 1e3 / fast.tpot_ms - 1e-6 else "Server"

    def limit(self, per_user: float) -> Limit | None:
        """What a request may take so that its user has so many tokens per second."""
        if per_user == OFFLINE:
            return None
        ttft_s = self.ttft_s
        if ttft_s is None:
            assert self.benchmark is not None
            ttft_s = self.benchmark.limits[self.scenario(per_user)].ttft_ms / 1e3
        return Limit(ttft_s, 1 / per_user, self.percentile)

    def choice(self, gpus: int, precision: str, has_drafts: bool) -> SearchSpace:
        """What the software of the round chooses among; where it drafts at all, it may anywhere."""
        known = ROUNDS.get(self.round)
        drafts, apart = has_drafts, True
        if self.benchmark is not None and known is not None:
            drafts = self.benchmark.name in {name for name, _ in known.drafts}
            apart = known.disaggregates and gpus > ONE_NODE
        depths = (0, DRAFTS) if drafts else (0,)
        return SearchSpace(
            precision=precision,
            mtp_depths=depths,
            disaggregates=apart,
            acceptance=self.acceptance,
        )


@dataclass(frozen=True, slots=True)
class CurvePoint:
    per_user: float  # tokens/s that the percentile of users has at least; 0: no limit
    limit: Limit | None
    per_gpu: float  # output tokens/s
    interval: tuple[float, float]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Curve:
    """A GPU in one precision; a point is None where no configuration holds the limit."""

    gpu: Accelerator
    gpus: int
    precision: str
    price: float  # dollars per GPU and hour
    points: tuple[CurvePoint | None, ...]

    @property
    def name(self) -> str:
        return f"{self.gpus} x {self.gpu.key} {self.precision}"

    def usd_per_million(self, per_gpu: float) -> float:
        """Of output tokens, the whole cost divided by their number."""
        return self.price / HOUR_S / per_gpu * MILLION


def precisions_for(system: System, given: Sequence[str]) -> list[str]:
    """Those given that the GPU computes in; else the narrowest one, and fp8 beside it."""
    if system.spec.family == "gpt_oss":
        return ["mxfp4"] if not given or {"fp4", "mxfp4"} & set(given) else []
    wanted = given or (best_precision(system.spec, system.gpu), "fp8")
    return [name for name in NARROW if name in system.gpu.flops and name in wanted]


def draw_curve(
    case: ParetoCase, system: System, precision: str, price: float, xs: Sequence[float]
) -> Curve:
    """Predict every point; PlanError where the model does not fit, or nothing holds any limit."""
    choice = case.choice(system.gpus, precision, system.spec.num_mtp_layers > 0)
    points = tuple(_point(case, system, choice, x) for x in xs)
    if not any(points[xs.index(OFFLINE) + 1 :]):
        raise _too_fast(case, system, choice, xs)
    return Curve(system.gpu, system.gpus, precision, price, points)


def _point(
    case: ParetoCase, system: System, choice: SearchSpace, per_user: float
) -> CurvePoint | None:
    limit = case.limit(per_user)
    plan = search(system, choice, limit)
    if plan is None:
        return None
    per_gpu = plan.requests_per_s * system.lengths.mean_output / system.gpus
    low, high = (per_gpu * math.exp(sign * case.fit.error) for sign in (-1, 1))
    return CurvePoint(per_user, limit, per_gpu, (low, high), plan)


def _too_fast(
    case: ParetoCase, system: System, choice: SearchSpace, xs: Sequence[float]
) -> PlanError:
    slowest = min(x for x in xs if x != OFFLINE)
    limit = case.limit(slowest)
    assert limit is not None
    return PlanError(
        f"--interactivity {slowest:g}: no configuration of {system.gpus} x {system.gpu.name} gives "
        f"so many tokens/s to {case.percentile:g} % of the users and the first token in "
        f"{limit.ttft_s * 1e3:g} ms; {nearest_limit(system, choice, limit)}"
    )


def point_report(curve: Curve, point: CurvePoint) -> dict[str, Any]:
    low, high = point.interval
    return {
        "tok_s_per_user": round(point.per_user, 2) or None,
        "ttft_limit_ms": _ms(point.limit.ttft_s) if point.limit else None,
        "tpot_limit_ms": _ms(point.limit.tpot_s) if point.limit else None,
        "tok_s_per_gpu": round(point.per_gpu, 1),
        "tok_s_per_gpu_interval": [round(low, 1), round(high, 1)],
        "usd_per_million_output": round(curve.usd_per_million(point.per_gpu), 4),
        "usd_per_million_output_interval": [
            round(curve.usd_per_million(bound), 4) for bound in (high, low)
        ],
        "configuration": configuration(point.plan),
    }


def _ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 3) if seconds < math.inf else None
