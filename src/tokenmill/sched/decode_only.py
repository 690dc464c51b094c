"""Steps that only decode, so that a simulation need not choose each of them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.sequence import Sequence


class DecodeOnlyRun(NamedTuple):
    """The next steps, as far as each of them gives every running sequence one token."""

    num_steps: int  # in which nobody begins, ends or is preempted
    num_running: int
    num_tokens: int  # of all running sequences before the first of these steps
    block_size: int
    grown: list[int]  # by step, modulo the block size: blocks that it takes
    num_late: int  # sequences that are counted in grown[0] but have room in the first step

    def num_blocks(self, num_steps: int) -> int:
        if not num_steps:
            return 0
        rounds, rest = divmod(num_steps, self.block_size)
        return rounds * self.num_running + sum(self.grown[:rest]) - self.num_late


def look_ahead(
    running: Items[Sequence], size: int, num_free: int, most: int
) -> DecodeOnlyRun | None:
    """At most so many steps, with so many free blocks; None: the next one does more than decode."""
    grown, num_late, num_tokens, ending = [0] * size, 0, 0, most + 1
    for seq in running:
        known = len(seq.token_ids)
        if known - seq.num_computed_tokens != 1:
            return None
        num_tokens += known
        ending = min(ending, seq.limit - known)
        lacks = seq.capacity - known + 1  # the first step in which it has no room
        if lacks > size:
            return None
        grown[lacks % size] += 1
        num_late += lacks == size
    run = DecodeOnlyRun(ending - 1, len(running), num_tokens, size, grown, num_late)
    num_steps = run.num_steps
    while num_steps > 0 and run.num_blocks(num_steps) > num_free:
        num_steps //= 2
    return run._replace(num_steps=num_steps) if num_steps > 0 else None


def skip_decode_steps(running: Items[Sequence], ledger: BlockLedger, tokens: list[int]) -> None:
    """Give each sequence these tokens, one a step, and the blocks that it needs for them."""
    size, count = ledger.pool.block_size, len(tokens)
    for seq in running:
        seq.token_ids.extend(tokens)
        seq.num_computed_tokens += count
        lacking = -(-seq.num_computed_tokens // size) - len(seq.block_ids)
        if lacking > 0:
            ledger.grow(seq, lacking)
    ledger.num_launched += count
