"""Where a prompt is computed: with the prefill workers, or where it will decode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DisaggregationRule:
    """From when on a prompt is worth a prefill worker and a transfer."""

    min_tokens: int = 128  # uncached ones
    min_share: float = 0.3  # uncached ones of the whole prompt


@dataclass(frozen=True, slots=True)
class PrefillDecision:
    remote: bool
    reason: str


def place_prefill(
    num_prompt_tokens: int,
    num_cached_tokens: int,
    rule: DisaggregationRule,
    has_prefill_worker: bool = True,
) -> PrefillDecision:
    """Decide for a prompt of which `num_cached_tokens` lie where it will decode.

    A short or mostly cached prompt costs the decode worker less than the way through another one.
    """
    uncached = num_prompt_tokens - num_cached_tokens
    if not has_prefill_worker:
        return PrefillDecision(False, "no prefill worker")
    if uncached < rule.min_tokens:
        return PrefillDecision(False, f"{uncached} uncached tokens, under {rule.min_tokens}")
    if uncached < rule.min_share * num_prompt_tokens:
        share = uncached / num_prompt_tokens
        return PrefillDecision(False, f"{share:.0%} uncached, under {rule.min_share:.0%}")
    return PrefillDecision(True, f"{uncached} of {num_prompt_tokens} tokens uncached")
