"""A batch as tensors: what the host knows of a step, sent to the device in one copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from tokenmill.core.specs.vision import VisionSpec
from tokenmill.engine.images import TokenPositions
from tokenmill.engine.staging import ALIGN, Staging
from tokenmill.kernels.attention import (
    AttentionBatch,
    QueryTiles,
    place_tokens,
    plan_tiles,
)
from tokenmill.kernels.drafts import place_drafts
from tokenmill.kernels.pages import Pages, plan_pages
from tokenmill.sched.sequence import Batch, Item, Sequence, num_drafts

Slots = tuple[torch.Tensor, ...]  # [tokens] each: by full layers' blocks, then each sliding group's
Even = tuple[torch.Tensor, tuple[QueryTiles, ...]]


class BlockTables:
    """Block ids of running sequences on the device; row `slot` is a sequence's own.

    The last row belongs to nobody: rows that pad a CUDA graph use it and the cache's last block.
    Each group of sliding layers has a table of its own. There a row keeps blocks that are behind
    the window and belong to others by now: what is read of them is masked.
    """

    def __init__(
        self, num_rows: int, width: int, pad_block: int, device: torch.device, num_sliding: int = 0
    ) -> None:
        self.device, self._num_sliding = device, num_sliding
        width += -width % ALIGN if num_sliding else 0  # every table begins where kernels expect it
        shape = (1 + num_sliding, num_rows + 1, width)
        self._all = torch.zeros(shape, dtype=torch.int32, device=device)
        self._all[:, num_rows] = pad_block
        self.tensor, *self.sliding = self._all.unbind()
        self.pad_row, self.pad_block = num_rows, pad_block

    def update(self, grown: list[Item], staging: Staging) -> None:
        """Write the blocks that a step has given to sequences."""
        width = self.tensor.shape[1]
        where: list[int] = []
        blocks: list[int] = []
        for seq, first in grown:
            if seq.block_ids:  # else it was preempted again
                start = seq.slot * width
                where += range(start + first, start + len(seq.block_ids))
                blocks += seq.block_ids[first:]
                for group in range(self._num_sliding):
                    start += self.tensor.numel()
                    begin = max(first, seq.window_first)
                    new = seq.window_ids[(begin - seq.window_first) * self._num_sliding + group :]
                    new = new[:: self._num_sliding]
                    where += range(start + begin, start + begin + len(new))
                    blocks += new
        if blocks:
            index, values = staging.send([np.array(where), np.array(blocks)])
            self._all.view(-1).index_copy_(0, index.long(), values)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One step's tensors; the last four are about the items that sample."""

    token_ids: torch.Tensor  # [tokens]
    attention: AttentionBatch
    ready: list[int]  # their indices in the batch
    num_drafts: list[int]  # [ready]
    ends: torch.Tensor  # [ready + drafts]: the rows that sample, a sequence's side by side
    slots: torch.Tensor  # [ready]


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """What drafting needs to know of a step."""

    next_ids: torch.Tensor  # [tokens]: the token after each; any where it is yet to be sampled
    places: torch.Tensor  # [ready, k + 1]: where the sampled tokens of an item lie among all
    drafts: torch.Tensor  # [ready, k]
    num_drafts: torch.Tensor  # [ready]
    firsts: torch.Tensor  # [ready]: the first row that samples
    capacities: torch.Tensor  # [ready]: tokens that the blocks hold


class InputBuilder:
    """Makes Inputs; the block tables and the newest token of every sequence stay on the device."""

    def __init__(
        self,
        block_size: int,
        heads: tuple[int, int],
        num_slots: int,
        max_len: int,
        pad_block: int,
        device: torch.device,
        num_sliding: int = 0,
        vision: VisionSpec | None = None,
        full_tiles: bool = False,
        most_pages: int = 0,
    ) -> None:
        """No position is `max_len` or beyond, of rows that pad a shape neither.

        full_tiles and most_pages: what kernels/attention.py and kernels/pages.py say of the cache.
        """
        num_heads, self.kv_heads = heads
        self.block_size, self.group = block_size, num_heads // self.kv_heads
        self.device, self.full_tiles, self.most_pages = device, full_tiles, most_pages
        self.max_len = max_len
        self.staging = Staging(device)
        width = -(-max_len // block_size)
        self.tables = BlockTables(num_slots, width, pad_block, device, num_sliding)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._even: dict[tuple[int, int], Even] = {}
        # Of a model that takes images: what is added to positions behind a sequence's last one.
        self._merge = 0 if vision is None else vision.merge_size
        self._shifts = torch.zeros_like(self.last_tokens)

    def grow(self, grown: list[Item]) -> None:
        """Note on the device what blocks a step has given to sequences."""
        self.tables.update(grown, self.staging)
        new = [seq for seq, first in grown if not first] if self._merge else []
        if new:
            shifts = [
                TokenPositions(seq.request.task.images, self._merge).last_shift for seq in new
            ]
            slots = np.array([seq.slot for seq in new])
            where, values = self.staging.send([slots, np.array(shifts)])
            self._shifts.index_copy_(0, where.long(), values)

    def turned(self, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What tokens behind all images are rotated by, equally many of each sequence."""
        if not self._merge:
            return positions
        by_sequence = positions.view(rows.shape[0], -1)
        return (by_sequence + self._shifts[rows.long(), None]).view(-1)

    def build(self, batch: Batch, size: int | None = None) -> Inputs:
        """Flatten the items' new tokens and say where each stands in the cache.

        What is missing to a `size` of tokens is one more sequence, of the tables' last row.
        """
        items = batch.items
        lens = np.array([n for _, n in items], np.int64)
        contexts = np.array([seq.num_computed_tokens for seq, _ in items], np.int64)
        rows = np.array([seq.slot for seq, _ in items], np.int64)
        token_ids = _token_ids(items)
        if padding := 0 if size is None else size - len(token_ids):
            added = (lens, padding), (contexts, 0), (rows, self.tables.pad_row)
            lens, contexts, rows = (np.append(array, last) for array, last in added)
            token_ids = np.append(token_ids, np.zeros(padding, np.int64))
        starts = np.concatenate([[0], np.cumsum(lens)])
        owners = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(starts[-1]) - starts[owners] + contexts[owners]
        beyond = [num_drafts(item) for item in items]
        ready = [i for i, count in enumerate(beyond) if count >= 0]
        ends = np.array(
            [row for i in ready for row in range(starts[i + 1] - beyond[i] - 1, starts[i + 1])],
            np.int64,
        )
        on_gpu = self.device.type == "cuda"
        plans = plan_tiles(lens, self.group, self.kv_heads, on_gpu, contexts, self.full_tiles)
        tiles = [array for plan in plans for array in (plan.seqs, plan.starts)]
        pages = plan_pages(plans, lens, contexts, rows, self.block_size, self.most_pages)
        sent = self.staging.send(
            [
                token_ids,
                positions,
                rows[owners],
                starts,
                contexts,
                rows,
                ends,
                rows[ready],
                *tiles,
                *(pages or ()),
                *self._turned_known(items, starts, positions),
            ]
        )
        turned = sent.pop() if self._merge else sent[1]
        staged, places, token_rows, query_starts, context_lens, table_rows, lasts, slots = sent[:8]
        ids, cache_slots = self.place_known(staged, places, token_rows)
        tiled, paged = sent[8 : 8 + len(tiles)], sent[8 + len(tiles) :]
        planned = tuple(
            QueryTiles(seqs, first, plan.tokens, plan.splits, plan.rows)
            for plan, seqs, first in zip(plans, tiled[::2], tiled[1::2], strict=True)
        )
        attention = self.attention(
            turned, cache_slots, query_starts, context_lens, table_rows, planned,
            Pages(*paged) if paged else None,
        )  # fmt: skip
        return Inputs(self.ids(ids), attention, ready, [beyond[i] for i in ready], lasts, slots)

    def _turned_known(
        self, items: list[Item], starts: np.ndarray, positions: np.ndarray
    ) -> list[np.ndarray]:
        """What the tokens of a step are rotated by, where a model takes images; else nothing."""
        if not self._merge:
            return []
        turned = positions.copy()
        for index, (seq, _) in enumerate(items):
            if seq.request.task.images:
                own = turned[starts[index] : starts[index + 1]]
                TokenPositions(seq.request.task.images, self._merge).shift(own)
        return [turned]

    def build_drafts(self, batch: Batch, inputs: Inputs) -> DraftInputs:
        """The rest of a step whose tokens the MTP module sees, too."""
        next_ids: list[int] = []
        for seq, num_new in batch.items:
            first = seq.num_computed_tokens + 1
            known = seq.token_ids[first : first + num_new]
            next_ids += known + [0] * (num_new - len(known))
        next_ids += [0] * (inputs.token_ids.shape[0] - len(next_ids))  # of what pads the step
        count, most = len(inputs.ready), max(inputs.num_drafts, default=0)
        places, drafts = np.zeros((count, most + 1), np.int64), np.zeros((count, most), np.int64)
        firsts = np.cumsum([0, *(n + 1 for n in inputs.num_drafts)])
        for row, (index, num) in enumerate(zip(inputs.ready, inputs.num_drafts, strict=True)):
            places[row] = firsts[row] + np.minimum(np.arange(most + 1), num)
            drafts[row, :num] = batch.items[index][0].draft_ids[:num]
        capacities = [batch.items[index][0].capacity for index in inputs.ready]
        sent = self.staging.send(
            [
                np.array(next_ids),
                places.ravel(),
                drafts.ravel(),
                np.array(inputs.num_drafts, np.int64),
                np.array(capacities, np.int64),
            ]
        )
        rows = sent[1].view(count, most + 1).long()
        return DraftInputs(
            next_ids=sent[0],
            places=rows,
            drafts=sent[2].view(count, most),
            num_drafts=sent[3],
            firsts=inputs.ends.long()[rows[:, 0]],
            capacities=sent[4],
        )

    def ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids.long() if self.device.type == "cpu" else token_ids

    def even(self, count: int, width: int) -> Even:
        """Query starts and tiles of `count` sequences with `width` tokens each; made once."""
        if (count, width) not in self._even:
            lens, device = np.full(count, width, np.int64), self.device
            plans = plan_tiles(lens, self.group, self.kv_heads, device.type == "cuda")
            starts = torch.arange(0, count * width + 1, width, dtype=torch.int32, device=device)
            self._even[count, width] = starts, tuple(QueryTiles.of(p, device) for p in plans)
        return self._even[count, width]

    def place_known(
        self, staged: torch.Tensor, positions: torch.Tensor, token_rows: torch.Tensor
    ) -> tuple[torch.Tensor, Slots]:
        """Token ids, and cache slots by each table, of tokens at these positions of these rows."""
        placed = [
            place_tokens(staged, positions, token_rows, table, self.last_tokens, self.block_size)
            for table in (self.tables.tensor, *self.tables.sliding)
        ]
        return placed[0][0], tuple(slots for _, slots in placed)

    def attention(
        self,
        positions: torch.Tensor,
        cache_slots: Slots,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        rows: torch.Tensor,
        tiles: tuple[QueryTiles, ...],
        pages: Pages | None = None,
    ) -> AttentionBatch:
        """A batch of sequences whose table rows these are; slots by each table."""
        tables = [self.tables.tensor, *self.tables.sliding]
        if self.device.type == "cpu":  # the compiled kernels read row i for sequence i, and int64
            tables = [table[rows.long()] for table in tables]
            rows = torch.arange(len(rows), dtype=torch.int32)
            positions = positions.long()
            cache_slots = tuple(slots.long() for slots in cache_slots)
        full, *sliding = (
            AttentionBatch(
                positions=positions,
                slots=slots,
                query_starts=query_starts,
                context_lens=context_lens,
                block_tables=table,
                table_rows=rows,
                tiles=tiles,
                pages=pages,
            )
            for slots, table in zip(cache_slots, tables, strict=True)
        )
        return replace(full, sliding=tuple(sliding)) if sliding else full

    def place(
        self,
        base: torch.Tensor,
        rows: torch.Tensor,
        capacities: torch.Tensor,
        offset: int,
        width: int = 1,
    ) -> tuple[torch.Tensor, Slots]:
        """Positions, and cache slots by each table, of `width` tokens of each sequence.

        They begin at base + offset.
        """
        tables = self.tables
        placed = [
            place_drafts(
                base, rows, capacities, table, offset, width, self.block_size, self.max_len,
                tables.pad_block,
            )
            for table in (tables.tensor, *tables.sliding)
        ]  # fmt: skip
        return placed[0][0], tuple(slots for _, slots in placed)


def newest_token(seq: Sequence) -> int:
    """The id of the last token, or -1 - slot while only the device knows it."""
    token = seq.token_ids[-1]
    return token if token >= 0 else -1 - seq.slot


def _token_ids(items: list[Item]) -> np.ndarray:
    ids: list[int] = []
    for seq, n in items:
        if n == 1 and seq.num_computed_tokens + 1 == len(seq.token_ids):
            ids.append(newest_token(seq))
        else:
            first = seq.num_computed_tokens
            ids += seq.token_ids[first : first + n]
            ids += seq.draft_ids[: max(0, first + n - len(seq.token_ids))]
    return np.array(ids)
