"""How long requests are: a distribution of (input, output) pairs and what it costs a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from tokenmill.bench.results.mooncake import TraceRequest
from tokenmill.core.specs.spec import ModelSpec

REPRESENTATIVES = 512
QUANTILES = 20  # of the prompts, where waiting is added to them
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread over [0, 1) whatever their number


@dataclass(frozen=True)
class Lengths:
    """Requests that stand for all: equally likely pairs of input and output tokens."""

    name: str
    pairs: tuple[tuple[int, int], ...]

    @cached_property
    def mean_input(self) -> float:
        return sum(i for i, _ in self.pairs) / len(self.pairs)

    @cached_property
    def mean_output(self) -> float:
        return sum(o for _, o in self.pairs) / len(self.pairs)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        return tuple(sorted(i for i, _ in self.pairs))

    @cached_property
    def input_quantiles(self) -> tuple[int, ...]:
        count = min(QUANTILES, len(self.inputs))
        return tuple(self.inputs[int((n + 0.5) * len(self.inputs) / count)] for n in range(count))

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        return tuple(sorted(o for _, o in self.pairs))

    @cached_property
    def input_spread(self) -> float:
        mean = self.mean_input
        return sum((i - mean) ** 2 for i, _ in self.pairs) / len(self.pairs) / mean**2

    def scaled(self, factor: float) -> Lengths:
        """The same requests with contexts so many times as long."""
        pairs = tuple((max(1, round(i * factor)), max(1, round(o * factor))) for i, o in self.pairs)
        return Lengths(f"{self.name} x {factor:g}", pairs)

    def uncached(self, share: float) -> Lengths:
        """The prompts without what a prefix cache has of them."""
        pairs = tuple((max(1, round(i * (1 - share))), o) for i, o in self.pairs)
        return Lengths(f"{self.name}, {share:.0%} cached", pairs)


def represent(name: str, pairs: Sequence[tuple[int, int]], limit: int = REPRESENTATIVES) -> Lengths:
    """At most `limit` pairs, each the middle of a stratum of equally many by output length."""
    ordered = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    if len(ordered) <= limit:
        return Lengths(name, tuple(ordered))
    size = len(ordered) / limit
    return Lengths(name, tuple(_middle(ordered, n * size, (n + 1) * size) for n in range(limit)))


def _middle(ordered: list[tuple[int, int]], begin: float, end: float) -> tuple[int, int]:
    """The mean pair of a stratum; inputs inside it keep their order, so one of them stands in."""
    stratum = ordered[int(begin) : max(int(begin) + 1, int(end))]
    output = round(sum(o for _, o in stratum) / len(stratum))
    inputs = sorted(i for i, _ in stratum)
    return inputs[int((begin * _GOLDEN) % 1 * len(inputs))], output


def exponential_outputs(inputs: Sequence[int], mean: float, cap: int) -> list[tuple[int, int]]:
    """Pairs with exponentially distributed outputs, where only the mean and a cap are known."""
    pairs = []
    for number, length in enumerate(inputs):
        quantile = (number * _GOLDEN) % 1
        output = min(cap, max(1, round(-mean * math.log(1 - quantile))))
        pairs.append((length, output))
    return pairs


def from_trace(
    name: str, trace: Sequence[TraceRequest], block_tokens: int
) -> tuple[Lengths, float, float]:
    """Lengths, requests per second, and the share of prompt tokens that an endless cache has."""
    pairs = [(one.num_prompt_tokens, one.num_output_tokens) for one in trace]
    seconds = (trace[-1].arrival_ms - trace[0].arrival_ms) / 1e3
    rate = len(trace) / seconds if seconds > 0 else float(len(trace))
    known: set[int] = set()
    hits = 0
    for one in trace:
        for hash_id in one.hash_ids:
            if hash_id not in known:
                break
            hits += block_tokens
        known.update(one.hash_ids)
    total = sum(length for length, _ in pairs)
    return represent(name, pairs), rate, min(0.99, hits / total)


@dataclass(frozen=True, slots=True)
class MeanDemand:
    """What the mean request asks of a model, summed over its own length and the layers."""

    input_tokens: float
    output_tokens: float
    prefill_seen: float  # positions that prompt tokens attend to, over all layers
    decode_seen: float  # positions that decoded tokens attend to

    def without_cached(self, share: float) -> MeanDemand:
        """Where a prefix cache has this share of every prompt: the rest still attends to it."""
        return replace(
            self,
            input_tokens=self.input_tokens * (1 - share),
            prefill_seen=self.prefill_seen * (1 - share**2),
        )

    @property
    def mean_seen(self) -> float:
        """Positions over all layers that one decoded token attends to."""
        return self.decode_seen / self.output_tokens


@cache
def demand_of(spec: ModelSpec, lengths: Lengths) -> MeanDemand:
    """Means over the distribution: attention is quadratic, so the mean length would not do."""
    prefill = decode = 0.0
    for input_len, output_len in lengths.pairs:
        at_first = spec.attended_positions(input_len)
        prefill += at_first
        decode += spec.attended_positions(input_len + output_len) - at_first
    count = len(lengths.pairs)
    return MeanDemand(lengths.mean_input, lengths.mean_output, prefill / count, decode / count)
