"""What sequences hold: blocks of the pool, and a row in the tables that a runner keeps."""

from __future__ import annotations

from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.sequence import Batch, Item, Sequence


def lookahead(seq: Sequence) -> int:
    """The most tokens that a step with these drafts and one like it may add."""
    return min(2 * len(seq.draft_ids) + 1, seq.max_len - seq.num_tokens) if seq.draft_ids else 0


class BlockLedger:
    """Gives and takes blocks and rows; what a batch in flight may use comes back after it.

    Where layers slide, a sequence holds their blocks from the first one on that its next token
    sees; `most_new` is how many new tokens a step has of one sequence at most.
    """

    def __init__(self, pool: BlockPool, most_new: int) -> None:
        self.pool, self._sliding, self._num_groups = pool, pool.sliding, pool.sliding.num_groups
        self._most_seen = pool.sliding.most_blocks(most_new, pool.block_size)
        self._most_new_blocks = -(-most_new // pool.block_size) + 1
        self.num_slots = 0
        self.reserved = 0  # blocks that admitted sequences lack for tokens they already know
        self.num_in_flight = 0  # batches between launch() and collect()
        self.num_advanced = 0  # of these, batches that are counted as computed
        self.num_launched = 0
        self.num_slid = 0  # blocks that slide() has freed
        self.dropped: list[int] = []  # blocks of sequences preempted while a batch is in flight
        # (index of the first, blocks) that slid behind the window while a batch is in flight
        self.behind: dict[Sequence, tuple[int, list[int]]] = {}
        self.watermark = pool.num_blocks // 100  # left free by admission for the running to grow
        self._free_slots: list[int] = []
        self._grown: list[Item] = []  # of the batch being chosen
        # (num_launched at its end, sequence): ended in flight; its blocks come back with that one.
        self._deferred: list[tuple[int, Sequence]] = []
        self._abandoned: list[Sequence] = []  # ended, but a transfer may still write to its blocks

    def fits(
        self,
        seq: Sequence,
        matched: list[int],
        total: int,
        alone: bool,
        stored_end: int | None = None,
    ) -> bool:
        """Whether `total` blocks, the matched ones among them, fit beside the running ones.

        Up to `stored_end` tiers hold what the device has not matched.
        """
        needed = total - len(matched) + self.pool.num_revived(matched)
        if self._num_groups:
            first, beside = self._seen(seq, matched, stored_end)
            num_seen = min(total - first, self._most_seen)
            needed += num_seen * self._num_groups - len(beside)
            needed += self.pool.num_revived(beside)
        if not alone:
            needed += self.reserved + self.watermark
        return needed <= self.pool.num_free

    def _seen(
        self, seq: Sequence, matched: list[int], stored_end: int | None = None
    ) -> tuple[int, list[int]]:
        """The first block that sliding layers see after the matched ones, and what is cached of it.

        Of a sequence that another engine computes: after its prompt, and nothing.
        """
        size = self.pool.block_size
        if seq.remote:
            return self._sliding.first_block(seq.num_tokens, size), []
        end = len(matched) if stored_end is None else stored_end
        first = self._sliding.first_block(end * size, size)
        return first, [b for block_id in matched[first:] for b in self.pool.beside(block_id)]

    def reserve(self, num_blocks: int) -> None:
        """Count the blocks that a sequence will need for known tokens after this step."""
        in_a_step = min(num_blocks, self._most_new_blocks)
        self.reserved += num_blocks + in_a_step * self._num_groups

    def occupy(self, seq: Sequence, matched: list[int], total: int) -> None:
        """Give a sequence its first blocks: the matched ones and others up to `total`."""
        pool = self.pool
        pool.acquire(matched)
        if groups := self._num_groups:
            first, beside = self._seen(seq, matched)
            pool.acquire(beside)
            num_more = (total - first) * groups - len(beside)
            seq.window_first, seq.window_ids = first, beside + pool.allocate(num_more)
        seq.block_ids = matched + pool.allocate(total - len(matched))
        self._begin(seq, matched)

    def occupy_stored(
        self, seq: Sequence, matched: list[int], end: int
    ) -> list[tuple[int, list[int]]]:
        """Give a sequence `end` blocks; returns those of sliding layers that are to be loaded.

        They are (index, blocks) of what the next token sees and the device does not cache.
        """
        pool, groups, absent = self.pool, self._num_groups, []
        pool.acquire(matched)
        if groups:
            first, beside = self._seen(seq, matched, end)
            pool.acquire(beside)
            seq.window_first, seq.window_ids = first, []
            for index in range(first, end):
                ids = list(pool.beside(matched[index])) if index < len(matched) else []
                if not ids:
                    ids = pool.allocate(groups)
                    absent.append((index, ids))
                seq.window_ids += ids
        seq.block_ids = matched + pool.allocate(end - len(matched))
        self._begin(seq, matched)
        return absent

    def _begin(self, seq: Sequence, matched: list[int]) -> None:
        size = self.pool.block_size
        seq.capacity = len(seq.block_ids) * size
        seq.num_computed_tokens = len(matched) * size
        seq.num_inserted_blocks = len(matched)
        seq.parent = self.pool.identity(matched[-1]) if matched else seq.request.cache_salt

    def take_slot(self, seq: Sequence) -> None:
        """Give a sequence a row, and tell the runner of all its blocks."""
        if not self._free_slots:
            self._free_slots.append(self.num_slots)
            self.num_slots += 1
        seq.slot = self._free_slots.pop()
        self._grown.append((seq, 0))

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Give a running sequence blocks for more tokens; num_needed() must be free."""
        self._grown.append((seq, len(seq.block_ids)))
        seq.block_ids += self.pool.allocate(num_blocks)
        if groups := self._num_groups:
            seq.window_ids += self.pool.allocate(num_blocks * groups)
        seq.capacity = len(seq.block_ids) * self.pool.block_size

    def num_needed(self, num_blocks: int) -> int:
        """Blocks of the pool that grow() takes."""
        return num_blocks * self._sliding.pages_per_block

    def slide(self, seq: Sequence, in_flight: bool) -> None:
        """Free the blocks that no token after the computed ones sees.

        Where a batch in flight may still write some, what it fails to write must be forgotten.
        """
        first = self._sliding.first_block(seq.num_computed_tokens, self.pool.block_size)
        count = (first - seq.window_first) * self._num_groups
        if count > 0:
            behind = seq.window_ids[:count]
            if in_flight:
                self.behind[seq] = seq.window_first, behind
            self.pool.release(behind)
            del seq.window_ids[:count]
            seq.window_first = first
            self.num_slid += count

    def window_parts(self, seq: Sequence) -> list[tuple[int, list[int]]]:
        """(index of the first, blocks of sliding layers) that it holds or that slid behind."""
        behind = self.behind.get(seq)
        held = seq.window_first, seq.window_ids
        return [held] if behind is None else [behind, held]

    def draft_room(self, seq: Sequence) -> int:
        """Return how many drafts fit; allocates blocks for them if no other sequence needs these.

        The step after this one may already be under way when this one's tokens are known, so its
        drafts get their room now.
        """
        num_tokens, num_spare = len(seq.token_ids), self.pool.num_free - self.reserved
        for room in (lookahead(seq), len(seq.draft_ids)):
            needed = -(-(num_tokens + room) // self.pool.block_size) - len(seq.block_ids)
            if 0 < self.num_needed(needed) <= num_spare - self.watermark:
                self.grow(seq, needed)
                break
        return seq.capacity - num_tokens

    def trim(self, seq: Sequence) -> None:
        """Take back the blocks that neither known tokens nor drafts have a use for."""
        num_blocks = -(-(seq.num_tokens + lookahead(seq)) // self.pool.block_size)
        if num_blocks < len(seq.block_ids):
            self.pool.release(seq.block_ids[num_blocks:])
            del seq.block_ids[num_blocks:]
            seq.capacity = num_blocks * self.pool.block_size
            kept = (num_blocks - seq.window_first) * self._num_groups
            self.pool.release(seq.window_ids[kept:])
            del seq.window_ids[kept:]

    def release(self, seq: Sequence) -> None:
        """Free the blocks and the row of a sequence at once."""
        self.pool.release(seq.block_ids)
        self.pool.release(seq.window_ids)
        seq.block_ids, seq.window_ids, seq.window_first = [], [], 0
        seq.capacity = 0
        if seq.slot >= 0:
            self._free_slots.append(seq.slot)
            seq.slot = -1

    def drop(self, seq: Sequence) -> None:
        """Free what a preempted sequence holds; a batch in flight may still use it."""
        if self.num_in_flight:
            self.dropped += seq.block_ids + seq.window_ids
        self.release(seq)

    def retire(self, seq: Sequence) -> None:
        """Free what an ended sequence holds, once no batch in flight uses it."""
        if seq.block_ids and self.num_in_flight:
            self._deferred.append((self.num_launched, seq))
        else:
            self._retire(seq)

    def abandon(self, seq: Sequence) -> None:
        """Keep the blocks of an ended sequence, since a transfer may still write to them."""
        self._abandoned.append(seq)

    def release_abandoned(self, seq: Sequence) -> None:
        """Free what an ended sequence holds, once no transfer writes to it."""
        self._abandoned.remove(seq)
        self._retire(seq)

    def _retire(self, seq: Sequence) -> None:
        self.release(seq)
        seq.state = None

    def launch(self) -> list[Item]:
        """Count the chosen batch as in flight; returns the blocks that are new to the runner."""
        self.num_in_flight += 1
        self.num_launched += 1
        grown, self._grown = self._grown, []
        return grown

    def collect(self, batch: Batch) -> None:
        """Count a batch as over, and free the blocks of requests that ended while it ran."""
        self.num_in_flight -= bool(batch.items)
        self.num_advanced -= bool(batch.samples)
        self.dropped, self.behind = [], {}
        if self._deferred:
            num_collected = self.num_launched - self.num_in_flight
            for number, seq in self._deferred:
                if number <= num_collected:
                    self._retire(seq)
            self._deferred = [entry for entry in self._deferred if entry[0] > num_collected]

    def tell_again(self, batch: Batch) -> None:
        """Tell the runner again of blocks that it may not have learnt of, since this batch failed.

        Only received ones can be among them: the others get blocks for the batch they are in.
        """
        self._grown += [(seq, 0) for seq, _ in batch.grown if seq.slot >= 0 and not seq.finished]

    def check_integrity(
        self, running: list[Sequence], receiving: list[Sequence], leased: list[list[int]]
    ) -> None:
        """Raise AssertionError where sequences, rows and the block pool disagree."""
        size = self.pool.block_size
        assert self.num_in_flight or not self._deferred
        for seq in running:
            assert seq.block_ids, f"running {seq.request_id!r} holds no blocks"
            assert seq.capacity == len(seq.block_ids) * size
            self._check_window(seq)
            assert seq.num_computed_tokens <= seq.capacity
            assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_len
            if self.pool.prefix_cache:
                inserted = seq.num_inserted_blocks
                assert seq.num_computed_tokens // size <= inserted <= len(seq.block_ids)
        holders = running + [seq for _, seq in self._deferred]
        assert all(seq.block_ids for seq in holders), "an ended sequence gave its blocks back early"
        slots = [seq.slot for seq in holders] + self._free_slots
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or held twice"
        assert all(seq.slot == -1 for seq in receiving + self._abandoned)
        holders += receiving + self._abandoned
        self.pool.check_integrity([seq.block_ids + seq.window_ids for seq in holders] + leased)

    def _check_window(self, seq: Sequence) -> None:
        """The blocks of sliding layers go from one that the next token sees to the last."""
        sliding, size = self._sliding, self.pool.block_size
        num_held = len(seq.block_ids) - seq.window_first
        assert len(seq.window_ids) == num_held * self._num_groups, "blocks of a window are lost"
        assert seq.window_first <= sliding.first_block(seq.num_computed_tokens, size)
