"""How long a prompt waits: a queue of Poisson arrivals before several servers (M/G/c)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenmill.plan.predict.lengths import Lengths

BISECTIONS = 24
HOPELESS_S = 1e6


def waiting_probability(servers: int, utilization: float) -> float:
    """Erlang's C: the share of arrivals that find every server busy."""
    if utilization >= 1:
        return 1.0
    offered, blocked = servers * utilization, 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - utilization * (1 - blocked))


def wait_tail_s(servers: int, utilization: float, service_s: float, spread: float) -> float:
    """The mean wait of those that wait; `spread` is the squared variation of the service."""
    return service_s * (1 + spread) / 2 / (servers * (1 - utilization))


@dataclass(frozen=True, slots=True)
class PromptQueue:
    """Prompts that wait for `servers` servers and are then computed at `tokens_per_s`."""

    lengths: Lengths
    rate: float  # of one server
    tokens_per_s: float
    servers: int

    @property
    def utilization(self) -> float:
        return self.rate * self.lengths.mean_input / self.tokens_per_s

    def late(self, limit_s: float) -> float:
        """The share of requests whose first token comes later than this."""
        if self.utilization >= 1:
            return 1.0
        waiting = waiting_probability(self.servers, self.utilization)
        service_s = self.lengths.mean_input / self.tokens_per_s
        spread = self.lengths.input_spread
        tail_s = wait_tail_s(self.servers, self.utilization, service_s, spread)
        share = 0.0
        for length in self.lengths.input_quantiles:
            left_s = limit_s - length / self.tokens_per_s
            share += 1.0 if left_s < 0 else waiting * math.exp(-left_s / tail_s)
        return share / len(self.lengths.input_quantiles)

    def percentile_s(self, share: float) -> float:
        """Seconds in which `share` of the requests have their first token."""
        low, high = 0.0, self.lengths.inputs[-1] / self.tokens_per_s
        while self.late(high) > 1 - share:
            if high > HOPELESS_S:
                return math.inf
            low, high = high, 2 * high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.late(middle) > 1 - share else (low, middle)
        return high
