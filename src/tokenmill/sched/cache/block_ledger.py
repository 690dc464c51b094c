"""Who holds blocks of the pool: sequences, with a row in a runner's tables each, and leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.kv import KVNotice
from tokenmill.core.requests import Request
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
        self._keeps_windows = pool.prefix_cache and self._num_groups > 0
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
        self, seq: Sequence, matched: list[int], total: int, alone: bool, start: int | None = None
    ) -> bool:
        """Whether `total` blocks, the matched ones among them, fit beside the running ones.

        Up to block `start` tiers hold what the device has not matched.
        """
        needed = total - len(matched) + self.pool.num_revived(matched)
        if self._num_groups:
            first, beside = self._seen(seq, matched, start)
            num_seen = min(total - first, self._most_seen)
            held = [block_id for block_ids in beside for block_id in block_ids]
            needed += num_seen * self._num_groups - len(held) + self.pool.num_revived(held)
        if not alone:
            needed += self.reserved + self.watermark
        return needed <= self.pool.num_free

    def _seen(
        self, seq: Sequence, matched: list[int], start: int | None
    ) -> tuple[int, list[tuple[int, ...]]]:
        """The first block that sliding layers see after the start, and what is cached from it on.

        Of a sequence that another engine computes: after its prompt, and nothing.
        """
        size = self.pool.block_size
        if seq.remote:
            return self._sliding.first_block(seq.num_tokens, size), []
        end = len(matched) if start is None else start
        first = self._sliding.first_block(end * size, size)
        return first, [self.pool.beside(block_id) for block_id in matched[first:]]

    def reserve(self, num_blocks: int) -> None:
        """Count the blocks that a sequence will need for known tokens after this step."""
        in_a_step = min(num_blocks, self._most_new_blocks)
        self.reserved += num_blocks + in_a_step * self._num_groups

    def occupy(
        self, seq: Sequence, matched: list[int], total: int, start: int | None = None
    ) -> list[tuple[int, ...]]:
        """Give a sequence its first blocks: the matched ones and others up to `total`.

        Returns those of sliding layers that are not cached, block by block.
        """
        pool, absent = self.pool, []
        pool.acquire(matched)
        if groups := self._num_groups:
            first, beside = self._seen(seq, matched, start)
            pool.acquire(block_id for block_ids in beside for block_id in block_ids)
            seq.window_first, seq.window_ids = first, []
            for held in [*beside, *[()] * (total - first - len(beside))]:
                block_ids = held or tuple(pool.allocate(groups))
                seq.window_ids += block_ids
                if not held:
                    absent.append(block_ids)
        seq.block_ids = matched + pool.allocate(total - len(matched))
        seq.capacity = total * pool.block_size
        seq.num_computed_tokens = len(matched) * pool.block_size
        seq.num_inserted_blocks = len(matched)
        seq.parent = pool.identity(matched[-1]) if matched else seq.request.task.cache_salt
        if self._keeps_windows:
            self._find_starts(seq, matched, len(matched) if start is None else start)
        return absent

    def _find_starts(self, seq: Sequence, matched: list[int], start: int) -> None:
        pool, size = self.pool, self.pool.block_size
        most = (seq.num_tokens - 1) // size
        at_point = 0 < start == len(matched) and pool.identity(matched[-1]) in pool.points
        goes_on = not seq.remote and not seq.started and seq.num_found < most
        if goes_on and at_point:
            pool.points.starts(pool.identity(matched[-1]))
        pool.pass_over(matched)
        branches = goes_on and (seq.num_found > start or not at_point)
        seq.branch = seq.num_found if branches else 0
        starts = {seq.branch, *self._ends_of_prompt(seq)}
        seq.starts = sorted(block for block in starts if block >= max(start, 1))

    def _ends_of_prompt(self, seq: Sequence) -> list[int]:
        """The last full block of a prompt, then guesses of where its repetition may end.

        A client that changes its last message starts before that end. From guesses that lie back
        twice as far each, what it computes again is at most twice what it has to, and a window.
        """
        size, back = self.pool.block_size, self._sliding.window
        last = seq.num_prompt_tokens - 1
        found = [last // size]
        while back < last:
            found.append((last - back) // size)
            back *= 2
        return found

    def _keep_window(self, seq: Sequence, end: int) -> None:
        """Keep what sliding layers have of the window before a block at which others may start."""
        window, last = self._window(seq, end), (seq.num_prompt_tokens - 1) // self.pool.block_size
        if window:
            branches = end == seq.branch
            self.pool.keep_inside(window, branches, guess=not branches and end != last)

    def _window(self, seq: Sequence, end: int) -> list[int]:
        size = self.pool.block_size
        first = self._sliding.first_block(end * size, size)
        return self.pool.window(seq.block_ids[first:end], seq.chain[first + 1 : end + 1])

    def _keep_windows(self, seq: Sequence) -> None:
        """Keep what others may need of a sequence that gives its blocks back."""
        end = seq.num_inserted_blocks
        for start in seq.starts:
            if start < end:
                self._keep_window(seq, start)
        seq.starts = []
        window = self._window(seq, end)
        if window:
            self.pool.keep_end(window)

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

    def slide(self, seq: Sequence) -> None:
        """Free the blocks that no token after the last full block sees.

        Where a batch that counts as computed may still write some, what it fails to write must be
        forgotten.
        """
        size, sliding = self.pool.block_size, self._sliding
        first = sliding.first_block(seq.num_computed_tokens // size * size, size)
        count = (first - seq.window_first) * self._num_groups
        if count > 0:
            while seq.starts and sliding.first_block(seq.starts[0] * size, size) < first:
                self._keep_window(seq, seq.starts.pop(0))
            behind = seq.window_ids[:count]
            if self.num_advanced:
                self.behind[seq] = seq.window_first, behind
            self.pool.release(behind)
            del seq.window_ids[:count]
            seq.window_first = first
            self.num_slid += count

    def readers(
        self, items: list[Item], launched: bool, candidates: list[Sequence]
    ) -> list[Sequence]:
        """Return the candidates that hold blocks which these items of a step had to write."""
        groups = self._num_groups
        written: set[int] = set()
        for seq, num_new in items if candidates else []:
            first = (seq.num_computed_tokens - launched * num_new) // self.pool.block_size
            written.update(seq.block_ids[first:])
            parts = [(seq.window_first, seq.window_ids)]
            if seq in self.behind:
                parts.append(self.behind[seq])
            for start, block_ids in parts:
                written.update(block_ids[max(0, first - start) * groups :])
        return [s for s in candidates if not written.isdisjoint(s.block_ids + s.window_ids)]

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
        if self._keeps_windows and seq.block_ids:
            self._keep_windows(seq)
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

    def _retire(self, seq: Sequence) -> None:
        self.release(seq)
        seq.sampler_state = None

    def abandon(self, seq: Sequence) -> None:
        """Keep the blocks of an ended sequence, since a transfer may still write to them."""
        self._abandoned.append(seq)

    def release_abandoned(self, seq: Sequence) -> None:
        """Free what an ended sequence holds, once no transfer writes to it."""
        self._abandoned.remove(seq)
        self._retire(seq)

    def forget(self, seqs: list[Sequence]) -> None:
        """Let nobody find what a failed step was to write of these sequences."""
        for seq in seqs:
            self.pool.forget(seq.block_ids + seq.window_ids)

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


@dataclass(slots=True)
class _Lease:
    hold_ns: int
    block_ids: list[int] = field(default_factory=list)
    window_ids: list[int] = field(default_factory=list)  # of sliding layers, once all is computed
    expires_ns: int | None = None  # None while the prompt is computed


class Leases:
    """Blocks of prompts that were computed for other engines, held until these have read them.

    Each lease has references of its own, so that preemption cannot take what was announced.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._leases: dict[str, _Lease] = {}
        self._notices: list[KVNotice] = []
        self._expired: list[str] = []
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leases

    def open(self, request: Request) -> None:
        if request.task.hold_kv_s is not None:
            self._leases[request.request_id] = _Lease(round(request.task.hold_kv_s * 1e9))

    def announce_computed(self, batch: Batch) -> None:
        """Announce the full blocks that a step has computed for other engines."""
        for seq, _ in batch.items if self._leases else ():
            if seq.request.task.hold_kv_s is not None and not seq.finished:
                num_full = seq.num_computed_tokens // self._pool.block_size
                self._announce(seq.request_id, seq.block_ids[:num_full])

    def hold(self, seq: Sequence, token_id: int, now_ns: int) -> None:
        """Announce all blocks and the first token of a computed prompt, and start the time.

        Of sliding layers those that the first token sees.
        """
        lease, sliding = self._leases[seq.request_id], self._pool.sliding
        first = sliding.first_block(seq.num_computed_tokens, self._pool.block_size)
        lease.window_ids = seq.window_ids[(first - seq.window_first) * sliding.num_groups :]
        self._pool.acquire(lease.window_ids)
        self._announce(seq.request_id, seq.block_ids, token_id)
        lease.expires_ns = now_ns + lease.hold_ns

    def _announce(self, request_id: str, block_ids: list[int], token_id: int | None = None) -> None:
        """Announce that a sequence's first blocks are computed; with the token, that all are.

        Blocks announced before stay as they were, even where a preempted sequence has others now.
        """
        lease = self._leases[request_id]
        first = len(lease.block_ids)
        new = block_ids[first:]
        if new or token_id is not None:
            self._pool.acquire(new)
            lease.block_ids += new
            hold_s, window = lease.hold_ns / 1e9, list(lease.window_ids)
            self._notices.append(
                KVNotice(request_id, first, new, token_id, hold_s, window_ids=window)
            )

    def release(self, request_id: str) -> None:
        """Give the blocks back; unknown ids are ignored."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._pool.release(lease.block_ids)
            self._pool.release(lease.window_ids)

    def abandon(self, request_id: str) -> None:
        """A request has ended: release its blocks unless they are held for another engine."""
        lease = self._leases.get(request_id)
        if lease is not None and lease.expires_ns is None:
            self.release(request_id)

    def expire(self, now_ns: int) -> None:
        for request_id, lease in list(self._leases.items()):
            if lease.expires_ns is not None and lease.expires_ns <= now_ns:
                self.release(request_id)
                self._expired.append(request_id)
                self.num_expired += 1

    def take_notices(self) -> list[KVNotice]:
        notices, self._notices = self._notices, []
        return notices

    def take_expired(self) -> list[str]:
        expired, self._expired = self._expired, []
        return expired
