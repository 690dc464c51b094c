"""What a worker has to do, and what one more request costs there, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.core.config import RouterConfig
from tokenmill.core.kv import DISK, HOST
from tokenmill.routing.kv_index import KVIndex
from tokenmill.routing.step_rates import StepRates
from tokenmill.sched.cache.blocks import U64

OPENING = 0.125  # weight of the first prompt's fixed cost: a later prompt may pay it anyway
LATE = 0.25  # an overdue step is expected to last this share of its elapsed time more


class WorkerLoad(NamedTuple):
    """Open requests of a worker, and the step that it runs."""

    queued_tokens: int = 0  # uncached and not computed yet
    kv_tokens: int = 0  # of KV blocks; shared ones count twice
    num_requests: int = 0
    num_pending: int = 0  # of these, without a first token
    step_began_ms: float = 0.0
    step_tokens: int = 0  # of queued_tokens, those it computes
    step_pending: int = 0  # of num_pending, those it computes

    @property
    def num_waiting(self) -> int:
        return max(self.num_pending - self.step_pending, 0)


IDLE = WorkerLoad()
# A worker's cost as a function of time and tokens: that of a prompt without tokens at time 0 if
# the step there is in time, and if it is late; how the latter grows with time; that of each token.
Line = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Prices:
    """Weighted milliseconds per unit of a request's cost."""

    rates: StepRates
    uncached: float  # a prompt token that is not cached
    request: float  # by request there: both decode
    kv: float  # by token of KV that one of both has
    stall: float  # by millisecond in which those there get no token
    opening: float  # by request there: a step without prompts gets its first one

    @classmethod
    def of(
        cls, rates: StepRates, num_output_tokens: float, config: RouterConfig, alone: float
    ) -> Prices:
        """Two requests share half of an answer's steps: one of them came before.

        `alone` is the share of prompts that have a step for themselves.
        """
        steps = config.decode_weight * num_output_tokens / 2
        uncached = config.prefill_weight * rates.prefill
        request, kv = 2 * steps * rates.sequence, steps * rates.kv
        stall = config.decode_weight
        return cls(rates, uncached, request, kv, stall, OPENING * stall * alone * rates.mixed)

    def step_ms(self, load: WorkerLoad) -> float:
        """How long the step that runs on a worker should take."""
        rates = self.rates
        decode = rates.sequence * load.num_requests + rates.kv * load.kv_tokens
        prefill = rates.prefill * load.step_tokens + (rates.mixed if load.step_pending else 0.0)
        return rates.base + decode + prefill

    def queue_ms(self, load: WorkerLoad) -> float:
        return self.rates.prefill * max(load.queued_tokens - load.step_tokens, 0)

    def decode_ms(self, load: WorkerLoad, num_tokens: int) -> float:
        count = load.num_requests
        return self.request * count + self.kv * (load.kv_tokens + count * num_tokens)

    def opening_ms(self, load: WorkerLoad) -> float:
        """What a step takes once for all of its prompts, if this one is the first."""
        return 0.0 if load.num_waiting else self.opening * load.num_requests

    def terms(
        self, load: WorkerLoad, now_ms: float, num_tokens: int, uncached: int, paid: float
    ) -> dict[str, float]:
        """The cost on one worker and what it consists of; of uncached tokens some are `paid`."""
        ran_ms = now_ms - load.step_began_ms
        wait = max(self.step_ms(load) - ran_ms, LATE * ran_ms)
        stall = self.stall * load.num_requests * self.rates.prefill * uncached
        terms = {
            "wait_ms": wait if load.num_requests else 0.0,
            "queue_ms": self.queue_ms(load),
            "prefill_ms": self.uncached * paid,
            "stall_ms": stall + self.opening_ms(load),
            "decode_ms": self.decode_ms(load, num_tokens),
        }
        return terms | {"cost_ms": sum(terms.values())}

    def line(self, load: WorkerLoad) -> Line:
        """terms() of a prompt, but for its tokens and the time."""
        count, began_ms = load.num_requests, load.step_began_ms
        rest = self.queue_ms(load) + self.decode_ms(load, 0) + self.opening_ms(load)
        if not count:
            return rest, rest, 0.0, 0.0
        by_token = count * (self.stall * self.rates.prefill + self.kv)
        in_time = rest + self.step_ms(load) + began_ms
        return in_time, rest - LATE * began_ms, LATE, by_token


UNKNOWN = {HOST: 0.1, DISK: 0.3}  # share of computing, until a worker has measured its tier


def tier_price(tier: str, token_ms: dict[str, float], computed_ms: float) -> float:
    """A share of what computing a token takes; no more than all of it.

    `token_ms` is what a worker has measured by tier, `computed_ms` what its steps have shown.
    """
    if tier not in token_ms:
        return UNKNOWN[tier]
    return min(1.0, token_ms[tier] / computed_ms) if computed_ms > 0 else 1.0


def cached_tokens(
    index: KVIndex, chain: U64, num_tokens: int, size: int, price: Callable[[str, str], float]
) -> dict[str, int]:
    """Prompt tokens that each worker has cached, as far as is known; one is always computed.

    Tokens in a tier behind the device count as far as they are cheaper than computed ones: `price`
    is that of a worker and a tier.
    """
    most = (num_tokens - 1) // size * size
    cached = {name: min(depth * size, most) for name, depth in index.overlaps(chain).items()}
    reached = cached.copy()
    for tier, found in index.tier_overlaps(chain):
        for name, depth in found.items():
            more = min(depth * size, most) - reached.get(name, 0)
            if more > 0:
                cached[name] = cached.get(name, 0) + round(more * (1.0 - price(name, tier)))
                reached[name] = reached.get(name, 0) + more
    return cached
