"""A cluster as it is simulated: its workers, and the routers and rules in front of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache

from tokenmill.core.config import PoolConfig, RouterConfig, SchedulerConfig
from tokenmill.core.kv_groups import plan_groups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.cluster.layout import PREFILL, WorkerLayout, WorkerPlace
from tokenmill.plan.cluster.rank import SimulatedRank
from tokenmill.plan.cluster.rank_work import Positions
from tokenmill.plan.cluster.step_price import StepPrice
from tokenmill.plan.cluster.worker import Worker
from tokenmill.plan.hardware import GIGA, PlanError
from tokenmill.plan.predict.step_cost import Efficiency, Replica, StepCost
from tokenmill.routing.attention_dp import ContextBalancer, ContextPolicy, NeverHold
from tokenmill.routing.disaggregation import DisaggregationRule
from tokenmill.routing.eplb_study import ExpertShape, Skew, study
from tokenmill.sched.cache.blocks import BlockPool

FITTED_RANKS = 8  # of the replicas whose runs the efficiencies were fitted on
SKEW: Skew = "lognormal"  # of the experts' popularity
EPLB_TOKENS = 16_384  # of the window that a placement is chosen by


@dataclass(frozen=True, slots=True)
class StepLimits:
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A system with everything that can be switched on and off."""

    spec: ModelSpec
    layout: WorkerLayout
    efficiency: Efficiency
    limits: StepLimits
    prefill_limits: StepLimits
    max_model_len: int
    block_size: int = 64
    prefix_cache: bool = False
    acceptance: float = 0.75
    timeout_iters: int = 6
    batching_wait_iters: int = 2
    balance: bool = True  # prompts wait until every rank has one
    num_redundant: int = 32  # copies of experts; 0: each lies where it was first
    fused: bool = True
    router: RouterConfig = field(default_factory=RouterConfig)
    rule: DisaggregationRule = field(default_factory=DisaggregationRule)
    pool: PoolConfig = field(default_factory=PoolConfig)
    start_s: float = 120.0
    skips: bool = True
    seed: int = 0

    def router_config(self) -> RouterConfig:
        blocks = max(1, self.num_blocks(self.layout.workers[0].replica))
        return replace(self.router, block_size=self.block_size, approximate_blocks=blocks)

    def cost(self, replica: Replica) -> StepCost:
        """The fitted cost; a replica that is larger than a rack exchanges over the network."""
        rack = self.layout.gpus // self.layout.racks
        gpu = replace(self.layout.gpu, domain_gpus=rack)
        return StepCost(self.spec, gpu, replica, self.efficiency)

    def num_blocks(self, replica: Replica) -> int:
        positions = self.cost(replica).max_sequences(1.0) / replica.attention_dp
        page_layers = plan_groups(self.spec.layer_windows).page_layers
        return int(positions / (page_layers * self.block_size))

    def price(self, replica: Replica, num_racks: int) -> StepPrice:
        factor = 1.0
        if replica.attention_dp > 1 and self.spec.moe is not None:
            moe = self.spec.moe
            factor = expert_factor(replica.gpus, moe.num_experts, moe.top_k, self.num_redundant)
        return StepPrice(self.cost(replica), factor, self.fused, num_racks)

    def make_worker(self, place: WorkerPlace) -> Worker:
        replica = place.replica
        limits = self.prefill_limits if place.role == PREFILL else self.limits
        policy: ContextPolicy = NeverHold()
        if self.balance and replica.attention_dp > 1 and place.role != PREFILL:
            policy = ContextBalancer(
                limits.max_num_seqs, self.timeout_iters, self.batching_wait_iters
            )
        ranks = [self._rank(replica, limits, place, n) for n in range(replica.attention_dp)]
        price = self.price(replica, len(place.racks))
        return Worker(place, ranks, price, policy, limits.max_num_seqs)

    def _rank(
        self, replica: Replica, limits: StepLimits, place: WorkerPlace, number: int
    ) -> SimulatedRank:
        sliding = plan_groups(self.spec.layer_windows).sliding
        pool = BlockPool(self.num_blocks(replica), self.block_size, self.prefix_cache, sliding)
        config = SchedulerConfig(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_waiting=1 << 30,
            max_model_len=self.max_model_len,
        )
        mtp = (0 if place.role == PREFILL else replica.mtp_depth), self.acceptance
        rng = random.Random(f"{self.seed} {place.name} {number}")
        skips = self.skips and not mtp[0] and not self.prefix_cache and not sliding.num_groups
        return SimulatedRank(config, pool, Positions(self.spec), mtp, rng, skips)


@cache
def expert_factor(num_ranks: int, num_experts: int, top_k: int, num_redundant: int) -> float:
    """How much longer routed experts take than where efficiencies were fitted, by their placement.

    The busiest rank over the mean, as placed by EPLB or as they lay first, over the same of
    balanced experts on as many ranks as the fitted runs had.
    """
    fitted = _imbalance(FITTED_RANKS, num_experts, top_k, 32)["balanced"]
    own = _imbalance(num_ranks, num_experts, top_k, num_redundant or 32)
    return max(1.0, own["balanced" if num_redundant else "before"] / fitted)


@cache
def _imbalance(
    num_ranks: int, num_experts: int, top_k: int, num_redundant: int
) -> dict[str, float]:
    shape = ExpertShape(
        num_ranks,
        num_redundant,
        num_experts,
        num_layers=4,
        tokens=EPLB_TOKENS,
        top_k=top_k,
        ranks_per_node=num_ranks,
    )
    found = study(SKEW, shape)
    return {name: float(found[name]) for name in ("before", "balanced")}  # type: ignore[arg-type]


def check_fits(config: ClusterConfig, longest: int) -> None:
    """An error where the weights, or one request, do not fit on a worker."""
    for replica in {place.replica for place in config.layout.workers}:
        cost, gpu = config.cost(replica), config.layout.gpu
        blocks = config.num_blocks(replica) if cost.kv_bytes > 0 else 0
        missing = -cost.kv_bytes / GIGA
        if cost.kv_bytes <= 0:
            by = f"the weights are {missing:,.0f} GB a GPU too large"
        elif blocks * config.block_size < longest:
            by = f"its cache holds {blocks * config.block_size:,} tokens, and one has {longest:,}"
        else:
            continue
        flag = "ep" if replica.attention_dp > 1 else "tp"
        raise PlanError(
            f"--{flag} {replica.gpus}: {by} for {gpu.name}; "
            f"use --{flag} {2 * replica.gpus}, or a narrower --precision"
        )
