"""Do prefill and decode workers keep up with each other: a pure judgement of how busy they are."""

from __future__ import annotations

from dataclasses import dataclass

FULL, IDLE = 0.8, 0.5  # busy shares


@dataclass(frozen=True, slots=True)
class RateMatch:
    """How busy the two sides are, which one waits for the other, and what would fit."""

    prefill_busy: float
    decode_busy: float
    starving: str  # "prefill", "decode" or "": the side without enough to do
    fitting_prefill: int  # of as many workers as there are
    fitting_decode: int


def match_rates(prefill: list[float], decode: list[float]) -> RateMatch:
    """Judge by the share of the time in which each worker had something to compute.

    Work is a side's busy shares added up; the workers that there are would be divided alike. A
    decode worker counts as busy with a single stream, so that the ratio means most under load.
    """
    work = sum(prefill), sum(decode)
    prefill_busy, decode_busy = (sum(s) / len(s) if s else 0.0 for s in (prefill, decode))
    starving = ""
    if prefill_busy >= FULL and decode_busy < IDLE:
        starving = "decode"
    elif decode_busy >= FULL and prefill_busy < IDLE:
        starving = "prefill"
    total = len(prefill) + len(decode)
    fitting = len(prefill)
    if sum(work) > 0:
        fitting = min(max(round(total * work[0] / sum(work)), 1), max(total - 1, 1))
    return RateMatch(
        round(prefill_busy, 3), round(decode_busy, 3), starving, fitting, total - fitting
    )
