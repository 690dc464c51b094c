"""Drafts of a sequence: which of them count, and which are worth verifying."""

from __future__ import annotations

from tokenmill.sched.sequence import Sequence


def verified(
    seq: Sequence, tokens: list[int], drafted: list[int], accepted: list[int]
) -> list[int]:
    """Count the accepted drafts, all tokens but the last, as computed, and no others.

    `drafted` and `accepted` are counts by position. Returns no tokens where their number is wrong.
    """
    num_drafts, num_accepted = seq.num_computed_tokens - len(seq.token_ids), len(tokens) - 1
    if not 0 <= num_accepted <= num_drafts:
        return []
    seq.num_computed_tokens -= num_drafts - num_accepted
    missing = [0] * (num_drafts - len(drafted))
    drafted += missing
    accepted += missing
    for position in range(num_drafts):
        drafted[position] += 1
        accepted[position] += position < num_accepted
    return tokens


def usable(seq: Sequence, drafts: list[int]) -> list[int]:
    """The drafts that can come true: within the sequence's length, and before what stops it."""
    within = drafts[: max(0, seq.max_len - seq.num_tokens - 1)]
    stop = next((i for i, token in enumerate(within) if token in seq.stop_ids), None)
    return within[:stop]
