"""Requests whose prompt another engine computes: they hold blocks until their KV is in them."""

from __future__ import annotations

from tokenmill.core.types import End, EngineStats, FinishReason
from tokenmill.sched import stops
from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.prefix import cache_blocks
from tokenmill.sched.endings import Endings
from tokenmill.sched.request_queues import RequestQueues
from tokenmill.sched.sequence import Sequence


class Receiving:
    """What a KV transfer and the scheduler tell each other.

    Admission starts a sequence on its blocks; take_started() tells the transfer, which fills them
    outside the batch and calls received(), or lose(). Blocks of a sequence that ends meanwhile are
    kept until the transfer calls release().
    """

    def __init__(
        self,
        queues: RequestQueues,
        ledger: BlockLedger,
        endings: Endings,
        counters: EngineStats,
        max_model_len: int,
    ) -> None:
        self._queues, self._ledger, self._endings = queues, ledger, endings
        self._counters, self._max_model_len = counters, max_model_len
        self._started: list[Sequence] = []  # that take_started() has not told

    def __len__(self) -> int:
        return len(self._queues.receiving)

    def sequences(self) -> list[Sequence]:
        return list(self._queues.receiving.values())

    def start(self, seq: Sequence) -> None:
        """Note a sequence that has the blocks which another engine is to fill."""
        self._queues.receiving[seq.request_id] = seq
        self._started.append(seq)

    def take_started(self) -> list[Sequence]:
        """Return the sequences that have got blocks for their KV, each once.

        A batch in flight may still write to these blocks until its result is collected.
        """
        started, self._started = self._started, []
        return started

    def received(self, seq: Sequence, token_id: int) -> None:
        """Run a sequence: the KV of its prompt is in its blocks, and its first token is known."""
        pool, first = self._ledger.pool, seq.num_inserted_blocks
        del self._queues.receiving[seq.request_id]
        seq.remote = False
        seq.num_computed_tokens = seq.num_tokens
        if pool.prefix_cache:
            cache_blocks(pool, [(seq, seq.num_tokens)])
        num_blocks = -(-seq.num_tokens // pool.block_size)
        num_seen = (num_blocks - seq.window_first) * pool.sliding.num_groups
        self._counters.num_kv_blocks_received += num_blocks - first + num_seen
        seq.token_ids.append(token_id)
        self._ledger.take_slot(seq)
        self._queues.run(seq)
        self._endings.meter.takes(seq, 1)
        if seq.num_tokens >= seq.max_len:
            reason = stops.length_reason(seq, self._max_model_len)
            self._endings.end_between_steps(seq, End(FinishReason.LENGTH, reason))

    def lose(self, request_id: str, stop_reason: str, message: str) -> None:
        """End a request whose KV will not come; unknown ids are ignored."""
        seq = self._queues.get(request_id)
        if seq is not None:
            end = End(FinishReason.ERROR, stop_reason, message)
            self._endings.end_between_steps(seq, end)

    def release(self, seq: Sequence) -> None:
        """Free the blocks of an ended sequence: no transfer writes to them any more."""
        self._ledger.release_abandoned(seq)
