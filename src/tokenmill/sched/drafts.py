"""Drafts: which of them a step verifies, which are accepted, and which are verified next."""

from __future__ import annotations

from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.prefix import cache_computed
from tokenmill.sched.sequence import Batch, Item, Sequence, Step
from tokenmill.sched.trackers import NgramIndex


def add_drafts(step: Step, ledger: BlockLedger) -> None:
    """Let sequences of one new token verify their drafts as well, as far as the budget goes."""
    plain: list[Item] = []
    drafted: list[Item] = []
    for seq, num_new in step.singles:
        del seq.draft_ids[step.budget :]
        if seq.draft_ids:
            del seq.draft_ids[ledger.draft_room(seq) :]
        num_drafts = len(seq.draft_ids)
        step.budget -= num_drafts
        (drafted if num_drafts else plain).append((seq, num_new + num_drafts))
    step.singles, step.chunks = plain, drafted + step.chunks


def make_room(needed: int, running: list[Sequence], ledger: BlockLedger) -> None:
    """Drop drafts, those of the last sequence first, until so many blocks are free."""
    for seq in reversed(running):
        if ledger.pool.num_free >= needed:
            return
        if seq.draft_ids:
            seq.draft_ids = []
            ledger.trim(seq)


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


def take_drafts(batch: Batch, draft_ids: list[list[int]], ledger: BlockLedger) -> None:
    """Give running sequences their next drafts, as far as these can be used.

    Blocks that accepted drafts have filled are cached, those that none will reach come back.
    """
    for (seq, _), drafts in zip(batch.items, draft_ids, strict=True):
        if _decodes(seq) and seq.block_ids:
            cache_computed(ledger.pool, seq)
            seq.draft_ids = _usable(seq, drafts)
            ledger.trim(seq)


def look_up(batch: Batch) -> list[list[int]]:
    """Drafts from the tokens of each sequence itself, as many as the batch asks for."""
    drafts: list[list[int]] = []
    for seq, _ in batch.items:
        if _decodes(seq):
            seq.ngrams = seq.ngrams or NgramIndex()
            drafts.append(seq.ngrams.drafts(seq.token_ids, batch.num_to_draft))
        else:
            drafts.append([])
    return drafts


def _decodes(seq: Sequence) -> bool:
    return not seq.finished and seq.num_computed_tokens >= seq.num_tokens - 1


def _usable(seq: Sequence, drafts: list[int]) -> list[int]:
    """Return the drafts that can be accepted: within the length, and before a stop token."""
    within = drafts[: max(0, seq.limit - seq.num_tokens - 1)]
    stop = next((i for i, token in enumerate(within) if token in seq.stop_ids), None)
    return within[:stop]
