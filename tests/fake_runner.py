"""A model small enough to check: its KV entries are digests of all that they depend on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.core.requests import Request
from tokenmill.core.types import FinishReason, StepResult, TokenLogprobs
from tokenmill.sched.sequence import PENDING, Batch, Sequence

VOCAB = 11
EOS = frozenset({0})


def digests(token_ids: list[int], salt: str) -> list[int]:
    """What the KV cache must hold at each position: it depends on the whole prefix."""
    state = sum(salt.encode())
    out = []
    for token in token_ids:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        out.append(state)
    return out


def next_token(digest: int) -> int:
    return digest * 7919 % 104_729 % VOCAB


def expected(request: Request, max_model_len: int, pool_tokens: int) -> tuple[list[int], object]:
    """Tokens and (finish, stop) reason of a request that runs undisturbed."""
    ids, p = list(request.task.prompt_token_ids), request.task.sampling
    num_output = 0
    while True:
        token = next_token(digests(ids, request.task.cache_salt)[-1])
        ids.append(token)
        num_output += 1
        out = ids[-num_output:]
        if num_output >= p.min_tokens:
            if token in EOS and not p.ignore_eos:
                return out, (FinishReason.STOP, None)
            if token in p.stop_token_ids:
                return out, (FinishReason.STOP, token)
        if num_output == p.max_tokens or len(ids) == max_model_len:
            return out, (FinishReason.LENGTH, None)
        if len(ids) > pool_tokens:
            return out, (FinishReason.LENGTH, "kv_capacity")


@dataclass(eq=False)
class Row:
    """What the device was told about one item when its batch was launched."""

    request: Request
    slot: int
    block_ids: list[int]
    token_ids: list[int]  # up to the step's last one
    begin: int
    samples: bool
    num_drafts: int = 0  # of token_ids, the last ones
    # Of each group of sliding layers: its blocks, some of which are no longer this sequence's.
    sliding: list[list[int]] = field(default_factory=list)
    is_late: bool = False  # it samples nothing after all

    def values(self, group: int = 0) -> list[int]:
        """What a group of layers writes."""
        return [digest + group for digest in digests(self.token_ids, self.request.task.cache_salt)]


@dataclass
class Launched:
    """A batch on its way: it is executed, after all before it, when its result is asked for."""

    runner: FakeRunner
    rows: list[Row]
    lost: list[int] = field(default_factory=list)  # items that read what nobody wrote

    def wait(self) -> StepResult:
        assert self.runner.queue.pop(0) is self, "batches end in the order of their launch"
        return self.runner.execute(self)

    def lose(self) -> None:
        """The step raises: what it was to write is garbage."""
        assert self.runner.queue.pop(0) is self, "batches end in the order of their launch"
        self.runner.ruin(self.rows)


class FakeRunner:
    """Writes the KV of the whole batch, then reads it back as attention would, then samples.

    Like a device it has its own block tables, a row per slot, and knows the newest tokens itself.
    Sliding layers read no more than their window.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tokens_per_step: int = 1,
        max_drafts: int = 0,
        sliding: Sliding = NONE_SLIDE,
        late_share: float = 0.0,
    ) -> None:
        self.sliding, self.late_share = sliding, late_share
        self.sliding_tables: dict[tuple[int, int], list[int]] = {}  # by slot and group
        self.block_size = block_size
        self.max_drafts, self.random = max_drafts, random.Random(0)
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.tokens_per_step = tokens_per_step
        self.tables: dict[int, list[int]] = {}
        self.newest: dict[int, tuple[str, int | None]] = {}  # by slot, of the last batch only
        self.queue: list[Launched] = []

    def run(self, batch: Batch) -> StepResult:
        assert not self.queue, "a batch is under way"
        launched = self.launch(batch)
        result = launched.wait()
        assert not launched.lost, "wrong blocks are read"
        for index, (seq, num_new) in enumerate(batch.items):
            if seq.request.task.sampling.prompt_logprobs is not None:
                result.prompt_logprobs[index] = self._prompt_logprobs(seq, num_new)
        return result

    def launch(self, batch: Batch) -> Launched:
        assert batch.num_tokens == sum(num_new for _, num_new in batch.items)
        singles = [num_new == 1 for _, num_new in batch.items]
        assert singles == sorted(singles, reverse=True), "items with one new token come first"
        assert len({id(seq) for seq, _ in batch.items}) == len(batch.items)
        assert len({seq.slot for seq, _ in batch.items}) == len(batch.items), "a slot has two users"
        for seq, first in batch.grown:
            row = self.tables.setdefault(seq.slot, [])
            assert first <= len(row), "a block table has a hole"
            row[first : len(seq.block_ids)] = seq.block_ids[first:]
            self._note_window(seq, first)
        launched = Launched(self, [self._row(seq, num_new) for seq, num_new in batch.items])
        for index, row in enumerate(launched.rows):
            if row.samples and self.random.random() < self.late_share:
                row.is_late = True
                batch.unsampled.append(index)
        self.queue.append(launched)
        return launched

    def _note_window(self, seq: Sequence, first: int) -> None:
        """A table has a hole only where its sequence begins behind a cached prefix."""
        groups, begin = self.sliding.num_groups, max(first, seq.window_first)
        for group in range(groups):
            table = self.sliding_tables.setdefault((seq.slot, group), [])
            table += [-1] * (begin - len(table))
            table[begin:] = seq.window_ids[group::groups][begin - seq.window_first :]

    def _row(self, seq: Sequence, num_new: int) -> Row:
        begin, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new
        num_drafts = max(0, end - seq.num_tokens)
        assert num_new >= 1 and num_drafts <= len(seq.draft_ids)
        assert end <= seq.capacity and seq.num_tokens + num_drafts < max(seq.max_len, end + 1)
        assert not num_drafts or num_new == 1 + num_drafts
        assert PENDING not in seq.token_ids[: end - 1], "only the newest token may be unknown"
        block_ids = self.tables[seq.slot][: len(seq.block_ids)]
        assert block_ids == seq.block_ids, "the block table was not told of all blocks"
        token_ids = seq.token_ids[:end] + seq.draft_ids[:num_drafts]
        samples = end >= seq.num_tokens
        groups = self.sliding.num_groups
        sliding = [list(self.sliding_tables[seq.slot, group]) for group in range(groups)]
        for group, table in enumerate(sliding):
            assert table[seq.window_first : len(block_ids)] == seq.window_ids[group::groups]
        return Row(seq.request, seq.slot, block_ids, token_ids, begin, samples, num_drafts, sliding)

    def execute(self, launched: Launched) -> StepResult:
        rows = launched.rows
        lost = [row for row in rows if not self._look_up(row)]
        self._write([row for row in rows if row not in lost])
        self.ruin(lost)
        while more := [row for row in rows if row not in lost and not self._reads_well(row)]:
            lost += more
            self.ruin(lost)
        self.newest = {}
        tokens = [self._sample(row, row in lost) for row in rows]
        launched.lost = [index for index, row in enumerate(rows) if row in lost]
        result = StepResult(tokens)
        if self.max_drafts:
            result.draft_ids = [self._guess(row, t) for row, t in zip(rows, tokens, strict=True)]
        if any(row.request.task.sampling.logprobs is not None for row in rows):
            result.logprobs = [[TokenLogprobs([t], [-float(t)], 1) for t in ts] for ts in tokens]
        return result

    def ruin(self, rows: list[Row]) -> None:
        """Leave garbage where these were to write."""
        for row in rows:
            for position in range(row.begin, len(row.token_ids)):
                for group in range(self.sliding.pages_per_block):
                    self.kv[self._place(row, position, group)] = None
        self.newest = {row.slot: (row.request.request_id, None) for row in rows}

    def _look_up(self, row: Row) -> bool:
        """Replace a PENDING token by what the batch before sampled; False: that is garbage."""
        if row.token_ids[-1] != PENDING:
            return True
        request_id, token = self.newest[row.slot]
        assert request_id == row.request.request_id, "the slot's newest token is of another request"
        if token is not None:
            row.token_ids[-1] = token
        return token is not None

    def _place(self, row: Row, position: int, group: int = 0) -> int:
        table = row.sliding[group - 1] if group else row.block_ids
        block = table[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def _write(self, rows: list[Row]) -> None:
        written: set[int] = set()
        for row in rows:
            for group in range(self.sliding.pages_per_block):
                values = row.values(group)
                for position in range(row.begin, len(values)):
                    place = self._place(row, position, group)
                    assert place not in written, "two sequences write one slot"
                    written.add(place)
                    self.kv[place] = values[position]

    def _reads_well(self, row: Row) -> bool:
        return all(
            self.kv[self._place(row, position, group)] == value
            for group in range(self.sliding.pages_per_block)
            for position, value in enumerate(row.values(group))
            if not group or position > row.begin - self.sliding.window
        )

    def _sample(self, row: Row, lost: bool) -> list[int]:
        if not row.samples or row.is_late:
            return []
        request_id, ids = row.request.request_id, list(row.token_ids)
        if lost:
            self.newest[row.slot] = request_id, None
            return [VOCAB]
        drafts = ids[len(ids) - row.num_drafts :]
        del ids[len(ids) - row.num_drafts :]
        num_known = len(ids)
        for _ in range(self.tokens_per_step):
            ids.append(next_token(digests(ids, row.request.task.cache_salt)[-1]))
        for draft in drafts:
            if ids[-1] != draft:
                break
            ids.append(next_token(digests(ids, row.request.task.cache_salt)[-1]))
        self.newest[row.slot] = request_id, ids[-1]
        return ids[num_known:]

    def _guess(self, row: Row, tokens: list[int]) -> list[int]:
        """Drafts of what comes after the sampled tokens, most of them right."""
        ids = row.token_ids[: len(row.token_ids) - row.num_drafts] + tokens
        drafts: list[int] = []
        for _ in range(self.random.randint(0, self.max_drafts) if tokens else 0):
            right = next_token(digests(ids + drafts, row.request.task.cache_salt)[-1])
            drafts.append(right if self.random.random() < 0.7 else self.random.randrange(VOCAB))
        return drafts

    def _prompt_logprobs(self, seq: Sequence, num_new: int) -> list[TokenLogprobs]:
        first = seq.num_computed_tokens + 1
        last = min(first + num_new, seq.num_prompt_tokens)
        return [TokenLogprobs([seq.token_ids[p]], [-float(p)], 1) for p in range(first, last)]
