"""A replica under a steady load: how fast it steps, and how much it takes within limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.plan.predict.lengths import Lengths, MeanDemand
from tokenmill.plan.predict.queueing import PromptQueue
from tokenmill.plan.predict.step_cost import StepCost, Work

MAX_SEQUENCES = 2048  # that a rank runs at once
CHUNK_TOKENS = 8192  # prompt tokens that a step of a rank takes at most
# Of each draft, where those before it were accepted. TensorRT-LLM measured 2.82 tokens a step with
# three drafts of DeepSeek-R1; an EAGLE-3 head of gpt-oss-120b has 2.41 on MT-Bench
# (arXiv:2605.09992).
ACCEPTANCE = 0.77
FAMILY_ACCEPTANCE = {"gpt_oss": 0.66}
BISECTIONS = 24
FIXED_POINT_STEPS = 500


def tokens_per_step(mtp_depth: int, acceptance: float = ACCEPTANCE) -> float:
    """Tokens that a sequence gains in a step: one, and drafts up to the first wrong one."""
    return sum(acceptance**depth for depth in range(mtp_depth + 1))


def largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest value that holds, or 0 where `low` does not; what holds once, holds below."""
    if holds(high):
        return high
    if not holds(low):
        return 0.0
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class Limit:
    """What the percentile of requests may not exceed."""

    ttft_s: float
    tpot_s: float
    percentile: float = 99.0

    @property
    def sigmas(self) -> float:
        return _normal_quantile(self.percentile / 100)


@dataclass(frozen=True, slots=True)
class Operation:
    requests_per_s: float
    sequences: float
    tpot_s: float  # mean
    tpot_high_s: float  # at the limit's percentile
    ttft_s: float | None  # median; None where all requests are there at the start
    ttft_high_s: float | None
    parts: dict[str, float]  # seconds of a step

    @property
    def bottleneck(self) -> str:
        return max(self.parts, key=self.parts.__getitem__)


class Station:
    """A replica that computes prompts beside decoding ones, or only one of the two."""

    def __init__(
        self,
        cost: StepCost,
        demand: MeanDemand,
        lengths: Lengths,
        prefills: bool = True,
        acceptance: float = ACCEPTANCE,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self.cost, self.demand, self.lengths, self.prefills = cost, demand, lengths, prefills
        depth = cost.replica.mtp_depth
        self.gain, self._rows = tokens_per_step(depth, acceptance), depth + 1
        most = max_sequences * cost.replica.attention_dp
        self.max_sequences = min(float(most), cost.max_sequences(demand.mean_seen))

    def work(self, sequences: float, prompts: float) -> Work:
        """A step with so many decoding sequences and so many mean prompts."""
        demand = self.demand
        return Work(
            sequences=sequences,
            rows=sequences * self._rows,
            decode_seen=sequences * demand.mean_seen,
            prefill_tokens=prompts * demand.input_tokens,
            prefill_seen=prompts * demand.prefill_seen,
            sampled=sequences * self._rows + prompts,
        )

    def steady(self, sequences: float, requests_per_s: float, step_s: float) -> Work:
        """The mean step at a rate: prompts come as often as requests."""
        return self.work(sequences, requests_per_s * step_s * self.prefills)

    def offline(self, concurrency: float = math.inf) -> Operation:
        """As many sequences as fit or as there are users, and a prompt for each that ends."""
        sequences = min(self.max_sequences, concurrency)
        ends = sequences * self.gain / self.demand.output_tokens  # in a step
        work = self.work(sequences, ends * self.prefills)
        parts = self.cost.parts(work)
        step_s = sum(parts.values())
        tpot_s = step_s / self.gain
        return Operation(ends / step_s, sequences, tpot_s, tpot_s, None, None, parts)

    def rate_at(self, tpot_s: float) -> float:
        """Requests per second at which the mean time per token is this; 0: none."""
        step_s, demand = tpot_s * self.gain, self.demand

        def within(rate: float) -> bool:
            sequences = rate * demand.output_tokens * tpot_s
            if sequences > self.max_sequences:
                return False
            return self.cost.step_s(self.steady(sequences, rate, step_s)) <= step_s

        return largest(within, 1e-6, 1e6)

    def spread(self, rate: float, tpot_s: float, pooled: int) -> float:
        """Standard deviation of a request's time per token.

        Sequences come and go as in a queue that shares its server: their variance is their number
        over the share of time that a step takes at no load. Prompts that arrive while a request
        decodes are a Poisson number of stalls.
        """
        demand, step_s = self.demand, tpot_s * self.gain
        sequences = rate * demand.output_tokens * tpot_s
        more = 1.0 + 0.01 * sequences
        base = self.cost.step_s(self.steady(sequences, rate, step_s))
        slope = self.cost.step_s(self.steady(sequences + more, rate, step_s)) - base
        slope /= more
        empty = max(0.05 * step_s, self.cost.step_s(self.work(1.0, 0.0)))
        variance = slope**2 * sequences * step_s / empty / pooled
        if self.prefills:
            prompts = rate * step_s
            stall = self.cost.step_s(self.work(sequences, prompts + 1)) - base
            arrivals = rate * tpot_s / demand.output_tokens
            variance += arrivals * stall**2 * (1 + self.lengths.input_spread) / pooled
        return math.sqrt(variance) / self.gain

    def prefill_tokens_per_s(self, sequences: float) -> float:
        """Prompt tokens per second while some wait: steps are full then."""
        ranks = self.cost.replica.attention_dp
        prompts = max(1.0, CHUNK_TOKENS * ranks / self.demand.input_tokens)
        step_s = self.cost.step_s(self.work(sequences, prompts))
        return prompts * self.demand.input_tokens / step_s

    def operate(self, rate: float, tpot_s: float, limit: Limit, pooled: int) -> Operation:
        """Latencies at a rate whose mean time per token is known."""
        step_s = tpot_s * self.gain
        sequences = rate * self.demand.output_tokens * tpot_s
        high = tpot_s + limit.sigmas * self.spread(rate, tpot_s, pooled)
        queue = self.queue(rate, sequences, pooled)
        first = [step_s + queue.percentile_s(share) for share in (0.5, limit.percentile / 100)]
        parts = self.cost.parts(self.steady(sequences, rate, step_s))
        return Operation(rate, sequences, tpot_s, high, first[0], first[1], parts)

    def at_rate(self, rate: float, limit: Limit, pooled: int) -> Operation | None:
        """Latencies at a rate; None where it is more than the replica can do."""
        tpot_s = self.cost.step_s(self.work(1.0, 0.0)) / self.gain
        for _ in range(FIXED_POINT_STEPS):
            sequences = rate * self.demand.output_tokens * tpot_s
            if sequences > self.max_sequences:
                return None
            work = self.steady(sequences, rate, tpot_s * self.gain)
            before, tpot_s = tpot_s, self.cost.step_s(work) / self.gain
            if tpot_s <= before * 1.0001:
                return self.operate(rate, tpot_s, limit, pooled)
        return None

    def queue(self, rate: float, sequences: float, pooled: int) -> PromptQueue:
        """The prompts that wait beside so many decoding sequences."""
        return PromptQueue(self.lengths, rate, self.prefill_tokens_per_s(sequences), pooled)

    def within(self, limit: Limit, pooled: int) -> Operation | None:
        """The highest rate that holds the limits; None: not one request at a time does.

        `pooled` replicas share their requests, so that each sees the fluctuation of all.
        """

        def holds(tpot_s: float) -> bool:
            rate = self.rate_at(tpot_s)
            if not rate:
                return True  # too fast for any rate: the limits are not the reason
            sequences = rate * self.demand.output_tokens * tpot_s
            if sequences + sigmas * math.sqrt(sequences / pooled) > self.max_sequences:
                return False
            if tpot_s + sigmas * self.spread(rate, tpot_s, pooled) > limit.tpot_s:
                return False
            left_s = limit.ttft_s - tpot_s * self.gain
            late = self.prefills and self.queue(rate, sequences, pooled).late(left_s)
            return late <= 1 - limit.percentile / 100

        sigmas = limit.sigmas
        tpot_s = largest(holds, limit.tpot_s / 100, limit.tpot_s)
        rate = self.rate_at(tpot_s) if tpot_s else 0.0
        return self.operate(rate, tpot_s, limit, pooled) if rate else None


def _normal_quantile(share: float) -> float:
    """By bisection of the error function, which the standard library has."""
    low, high = -8.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        below = 0.5 * (1 + math.erf(middle / math.sqrt(2))) < share
        low, high = (middle, high) if below else (low, middle)
    return low
