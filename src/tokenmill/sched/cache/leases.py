"""Blocks of prompts that were computed for another engine, held until it has read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.kv import KVNotice
from tokenmill.core.types import Request
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.sequence import Batch, Sequence


@dataclass(slots=True)
class _Lease:
    hold_ns: int
    block_ids: list[int] = field(default_factory=list)
    window_ids: list[int] = field(default_factory=list)  # of sliding layers, once all is computed
    expires_ns: int | None = None  # None while the prompt is computed


class Leases:
    """Each lease has references of its own, so that preemption cannot take what was announced."""

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

    @property
    def block_tables(self) -> list[list[int]]:
        return [lease.block_ids + lease.window_ids for lease in self._leases.values()]

    def open(self, request: Request) -> None:
        """Open a lease for a request that asks for one with hold_kv_s."""
        if request.hold_kv_s is not None:
            self._leases[request.request_id] = _Lease(round(request.hold_kv_s * 1e9))

    def announce_computed(self, batch: Batch) -> None:
        """Announce the full blocks that a step has computed for other engines."""
        for seq, _ in batch.items if self._leases else ():
            if seq.request.hold_kv_s is not None and not seq.finished:
                num_full = seq.num_computed_tokens // self._pool.block_size
                self._announce(seq.request_id, seq.block_ids[:num_full])

    def hold(self, seq: Sequence, token_id: int, now_ns: int) -> None:
        """Announce all blocks and the first token of a computed prompt, and start the time.

        Of sliding layers those that the first token sees.
        """
        lease = self._leases[seq.request_id]
        lease.window_ids = self._seen(seq)
        self._pool.acquire(lease.window_ids)
        self._announce(seq.request_id, seq.block_ids, token_id)
        lease.expires_ns = now_ns + lease.hold_ns

    def _seen(self, seq: Sequence) -> list[int]:
        sliding, size = self._pool.sliding, self._pool.block_size
        first = sliding.first_block(seq.num_computed_tokens, size) - seq.window_first
        return seq.window_ids[first * sliding.num_groups :]

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
            hold_s = lease.hold_ns / 1e9
            window = list(lease.window_ids)
            notice = KVNotice(request_id, first, new, token_id, hold_s, window_ids=window)
            self._notices.append(notice)

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
        """Release the blocks of leases that have run out."""
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
