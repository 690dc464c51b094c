"""The requests of a simulation: how they arrive, and which are under way when it begins."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.bench.results.mooncake import TraceRequest

Pairs = Sequence[tuple[int, int]]  # (input, output) tokens


class Arriving(NamedTuple):
    after_s: float  # since the begin
    num_prompt: int
    num_output: int
    prompt: list[int] | None = None


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    pairs: Pairs
    num_requests: int  # that are measured
    rate: float | None = None  # requests per second; None: whoever ends is followed by another
    num_running: int = 0  # requests in the middle of their answers when it begins
    num_waiting: int = 0  # requests that wait then
    trace: tuple[TraceRequest, ...] = ()
    trace_block_tokens: int = 512
    seed: int = 0

    @property
    def is_closed(self) -> bool:
        return self.rate is None and not self.trace

    def arrivals(self) -> Iterator[Arriving]:
        """Requests that come by themselves, in order; without end where only as many count."""
        if self.trace:
            for one in self.trace:
                prompt = one.prompt(self.trace_block_tokens)
                yield Arriving(one.arrival_ms / 1e3, len(prompt), one.num_output_tokens, prompt)
        elif self.rate is not None:
            rng, now_s = random.Random(f"arrivals {self.seed}"), 0.0
            while True:
                now_s += rng.expovariate(self.rate)
                yield Arriving(now_s, *rng.choice(self.pairs))

    def followers(self) -> Iterator[Arriving]:
        rng = random.Random(f"followers {self.seed}")
        while True:
            yield Arriving(0.0, *rng.choice(self.pairs))

    def begun(self) -> list[tuple[int, int, int]]:
        """(input, output, tokens that are there) of those under way."""
        return begun(self.pairs, self.num_running, random.Random(f"begun {self.seed}"))


def begun(pairs: Pairs, count: int, rng: random.Random) -> list[tuple[int, int, int]]:
    """Requests in the middle of their answers: (input, output, tokens that are there).

    One meets answers in proportion to their length, and at any of their tokens.
    """
    weights = [output - 1 for _, output in pairs]
    if not any(weights):
        return []
    chosen = rng.choices(pairs, weights, k=count)
    return [(length, output, rng.randrange(output - 1)) for length, output in chosen]
