"""From what is asked of a system to its workers: given, or searched for as `plan predict` does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tokenmill.core.config import RouterConfig
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.cluster.cluster import ClusterConfig, StepLimits, check_fits
from tokenmill.plan.cluster.layout import (
    Division,
    WorkerLayout,
    check_racks,
    check_replica,
    place_workers,
)
from tokenmill.plan.cluster.steady import max_concurrency, num_ranks
from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.catalog import precisions_of
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.lengths import Lengths
from tokenmill.plan.predict.prediction import nearest_limit
from tokenmill.plan.predict.search import SearchSpace, System, best_precision, search
from tokenmill.plan.predict.steady_state import MAX_SEQUENCES, Limit
from tokenmill.plan.predict.step_cost import Replica

STEP_TOKENS = 4096  # of prompts at least, beside all that decode
SLACK = 1.5  # of prompts, over what comes in the mean
PREFILL_LIMITS = StepLimits(128, 12_288)  # those of the prefill workers of v6.0's submissions


@dataclass(frozen=True, slots=True)
class Asked:
    spec: ModelSpec
    lengths: Lengths
    gpu: Accelerator
    gpus: int
    racks: int
    fit: Fit
    limit: Limit | None
    choice: SearchSpace
    longest: int  # tokens of the longest request
    prefill: int = 0  # workers
    decode: int = 0
    prefill_ep: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 64
    prefix_cache: bool = False
    timeout_iters: int = 6
    batching_wait_iters: int = 2
    balance: bool = True
    num_redundant: int = 32
    router: RouterConfig = field(default_factory=RouterConfig)
    start_s: float = 120.0
    seed: int = 0


def build(asked: Asked) -> ClusterConfig:
    """The cluster; wrong input is an error that says what would work."""
    rack_gpus = check_racks(asked.gpu, asked.gpus, asked.racks)
    division = _given(asked, rack_gpus) or _searched(asked, rack_gpus)
    layout = place_workers(asked.gpu, asked.gpus, asked.racks, division)
    config = _config(asked, layout)
    check_fits(config, asked.longest)
    if asked.max_num_batched_tokens is not None:
        return config
    budget = config.limits.max_num_batched_tokens + _prompt_tokens(config, asked.lengths)
    return replace(config, limits=replace(config.limits, max_num_batched_tokens=budget))


def _prompt_tokens(config: ClusterConfig, lengths: Lengths) -> int:
    """Tokens of prompts in a step of a rank with which they keep up while they are held."""
    each = max_concurrency(config, lengths) / num_ranks(config)
    per_step = each * lengths.mean_input / lengths.mean_output
    num_steps = 1 + config.batching_wait_iters * config.balance
    return max(STEP_TOKENS, math.ceil(SLACK * num_steps * per_step))


def _config(asked: Asked, layout: WorkerLayout) -> ClusterConfig:
    places = asked.choice.max_sequences
    depth = max(place.replica.mtp_depth for place in layout.workers)
    budget = asked.max_num_batched_tokens or places * (1 + depth)
    return ClusterConfig(
        asked.spec,
        layout,
        asked.fit.efficiency,
        StepLimits(places, budget),
        PREFILL_LIMITS,
        max_model_len=asked.longest + 1,
        block_size=asked.block_size,
        prefix_cache=asked.prefix_cache,
        acceptance=asked.choice.acceptance_of(asked.spec),
        timeout_iters=asked.timeout_iters,
        batching_wait_iters=asked.batching_wait_iters,
        balance=asked.balance,
        num_redundant=asked.num_redundant,
        router=asked.router,
        start_s=asked.start_s,
        seed=asked.seed,
    )


def _given(asked: Asked, rack_gpus: int) -> Division | None:
    """The division that flags give; None: it has to be searched for."""
    choice = asked.choice
    if choice.tensor_parallel is None and choice.attention_dp is None:
        if asked.prefill or asked.decode:
            raise PlanError("--prefill and --decode need --tp N, or --ep N with --attention-dp")
        return None
    name = choice.precision or best_precision(asked.spec, asked.gpu)
    replica = Replica(
        precisions_of(asked.spec, name),
        choice.tensor_parallel or 1,
        choice.attention_dp or 1,
        max(choice.mtp_depths),
    )
    _check_kind(asked, replica)
    if not asked.prefill and not asked.decode:
        check_replica(replica, rack_gpus, asked.racks, _flag(replica))
        return Division(replica, asked.gpus // replica.gpus)
    if not asked.prefill or not asked.decode:
        lacking, there = ("decode", "prefill") if asked.prefill else ("prefill", "decode")
        raise PlanError(f"--{there} needs --{lacking}: prefill workers only compute prompts")
    size = asked.prefill_ep or replica.gpus
    before = replace(replica, tensor_parallel=1, attention_dp=size, mtp_depth=0)
    if asked.prefill_ep is None or not asked.spec.moe:
        before = replace(replica, mtp_depth=0)
    return Division(replica, asked.decode, before, asked.prefill)


def _flag(replica: Replica) -> str:
    return "--ep" if replica.attention_dp > 1 else "--tp"


def _check_kind(asked: Asked, replica: Replica) -> None:
    if replica.attention_dp > 1 and asked.spec.moe is None:
        raise PlanError("--attention-dp: the model has no experts to share; use --tp")
    if replica.mtp_depth and not asked.spec.num_mtp_layers:
        raise PlanError(
            f"--mtp {replica.mtp_depth}: the model has no layer that drafts; use --mtp 0"
        )


def _searched(asked: Asked, rack_gpus: int) -> Division:
    system = System(asked.spec, asked.gpu, rack_gpus, asked.lengths, asked.fit.efficiency)
    plan = search(system, asked.choice, asked.limit)
    if plan is None:
        assert asked.limit is not None
        raise PlanError(
            f"--gpus {asked.gpus}: no configuration of {rack_gpus} x {asked.gpu.name} holds "
            f"{asked.limit.ttft_s * 1e3:g} ms to the first token and "
            f"{asked.limit.tpot_s * 1e3:g} ms per token; "
            f"{nearest_limit(system, asked.choice, asked.limit)}"
        )
    found = Division(plan.replica, plan.replicas, plan.prefill, plan.prefill_replicas)
    return found.times(asked.racks)


def places_of(given: int | None) -> int:
    return given or MAX_SEQUENCES
