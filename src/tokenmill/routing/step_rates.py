"""What a step of a worker costs, fitted to the steps that it ran.

step ms = base + mixed, if it computes prompts
        + prefill  * prompt tokens computed
        + sequence * requests that decode
        + kv       * tokens of KV in use
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

NUM_RATES = 5
NUM_SUMS = NUM_RATES * (NUM_RATES + 3) // 2
MEMORY = 1.0 - 1 / 4096  # weight of the steps so far when another one is added
MAX_BASE_TOKENS = 1000  # upper bound of an empty step, in prompt tokens
PRIOR_WEIGHT = 1e-4  # of the prior, against one step's error


@dataclass(frozen=True, slots=True)
class StepRates:
    """Milliseconds by what a step does; the defaults hold until steps were measured.

    Decisions depend on the ratios alone. To decode a token takes the arithmetic of a prompt token,
    and to read one token of KV some hundredth of that, on any machine.
    """

    base: float = 10.0
    mixed: float = 1.0
    prefill: float = 0.05
    sequence: float = 0.05
    kv: float = 0.0002


PRIOR = StepRates()


class StepSums:
    """Sums over steps from which rates are fitted; those of several workers may be added."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = [0.0] * NUM_SUMS

    def add(self, num_prefill: int, num_decodes: int, num_kv_tokens: int, time_ms: float) -> None:
        """A step was run; errors count relative to its time, so that long ones do not rule."""
        if time_ms <= 0.0:
            return
        weight = 1.0 / time_ms
        mixed = weight if num_prefill else 0.0
        row = (weight, mixed, num_prefill * weight, num_decodes * weight, num_kv_tokens * weight)
        products = [a * b for i, a in enumerate(row) for b in row[i:]]
        values = self.values
        self.values = [MEMORY * v + x for v, x in zip(values, (*products, *row), strict=True)]


def fit_rates(sums: Sequence[float]) -> StepRates:
    """The rates, none negative, that explain the steps best; the prior's where none were run."""
    prior = astuple(PRIOR)
    matrix = [[0.0] * NUM_RATES for _ in prior]
    upper = iter(sums)
    for i in range(NUM_RATES):
        for j in range(i, NUM_RATES):
            matrix[i][j] = matrix[j][i] = next(upper)
    right = list(upper)
    for i, rate in enumerate(prior):
        matrix[i][i] += PRIOR_WEIGHT / rate**2
        right[i] += PRIOR_WEIGHT / rate
    kept = list(range(NUM_RATES))
    while True:
        rates = _solve([[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept])
        if min(rates) >= 0.0:
            break
        del kept[rates.index(min(rates))]
    found = dict(zip(kept, rates, strict=True))
    base, mixed, prefill, sequence, kv = (found.get(i, 0.0) for i in range(NUM_RATES))
    return StepRates(base, mixed, max(prefill, base / MAX_BASE_TOKENS), sequence, kv)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    size = len(right)
    scales = [matrix[i][i] ** -0.5 for i in range(size)]
    rows = [
        [matrix[i][j] * scales[i] * scales[j] for j in range(size)] + [right[i] * scales[i]]
        for i in range(size)
    ]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return [value * scale for value, scale in zip(found, scales, strict=True)]
