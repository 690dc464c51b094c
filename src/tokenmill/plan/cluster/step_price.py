"""What a step of ranks takes: the fitted cost of plan/predict, with the ranks as they are.

A rank does attention, dense layers and its part of the exchange for its own tokens, so the fullest
one decides; the fitted share for uneven ranks is left out, since the ranks here are uneven by
themselves. Routed experts take what all tokens together ask for, times how uneven they lie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.plan.cluster.rank_work import RankWork, total_work
from tokenmill.plan.predict.step_cost import MICRO, StepCost

EXPERTS, EXCHANGE, LAUNCHES, ACTIVATIONS = (
    "routed experts",
    "exchange",
    "launches",
    "activations",
)
# Without fusions: each norm, gate and rounding reads and writes on its own, and the choice of
# experts is 18 operations of 252 us in place of two of 15 us, as TensorRT-LLM measured.
UNFUSED_ACTIVATIONS, UNFUSED_CHOICE_US = 2.0, 252 - 15


@dataclass(frozen=True, slots=True)
class Priced:
    seconds: float
    even_s: float  # had every rank the mean work
    inside_s: float  # exchange over the links of a rack, on the fullest rank
    between_s: float  # and over the network between racks


class StepPrice:
    def __init__(
        self, cost: StepCost, expert_factor: float = 1.0, fused: bool = True, num_racks: int = 1
    ) -> None:
        """`cost` has its fitted balance still; `num_racks` is over how many the replica lies."""
        efficiency = replace(cost.efficiency, balance=1.0)
        self.cost = StepCost(cost.spec, cost.gpu, cost.replica, efficiency)
        self._expert_factor, self._fused, self._num_racks = expert_factor, fused, num_racks
        moe, gpu = cost.spec.moe, cost.gpu
        num_sparse = sum(moe.layers) if moe else 0
        self._choice_s = 0.0 if fused else num_sparse * UNFUSED_CHOICE_US * MICRO
        self._latency_s = num_sparse * efficiency.exchange_us * MICRO * (num_racks > 1)
        self._link_share = gpu.network_bytes_per_s / gpu.link_bytes_per_s

    def price(self, ranks: list[RankWork]) -> Priced:
        total, count = total_work(ranks), len(ranks)
        together = self.cost.parts(total.times(1.0))
        shared = self._expert_factor * together[EXPERTS] + together[LAUNCHES] + self._choice_s
        even = self._own(together)
        if count == 1:
            return Priced(even[0] + shared, even[0] + shared, even[1], even[2])
        own = max(self._own(self.cost.parts(work.times(count))) for work in ranks)
        return Priced(own[0] + shared, even[0] + shared, own[1], own[2])

    def _own(self, parts: dict[str, float]) -> tuple[float, float, float]:
        """Seconds of what a rank does alone, and of the exchange inside and between racks."""
        inside_s, between_s = self._exchange(parts[EXCHANGE])
        own = sum(s for name, s in parts.items() if name not in (EXPERTS, EXCHANGE, LAUNCHES))
        if not self._fused:
            own += (UNFUSED_ACTIVATIONS - 1) * parts[ACTIVATIONS]
        return own + max(inside_s, between_s), inside_s, between_s

    def _exchange(self, exchange_s: float) -> tuple[float, float]:
        """The cost has all at the network's rate where a replica lies over several racks."""
        if self._num_racks == 1:
            return exchange_s, 0.0
        moved_s, share = exchange_s - self._latency_s, 1 / self._num_racks
        inside_s = moved_s * share * self._link_share + self._latency_s
        return inside_s, moved_s * (1 - share) + self._latency_s
