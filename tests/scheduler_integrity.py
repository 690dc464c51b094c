"""What must hold of a scheduler between any two calls: AssertionError says what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tokenmill.kv.tiers.host_tier import HostTier
from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.start_points import SHARE, StartPoints
from tokenmill.sched.queues import Queues
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Sequence as Seq
from tokenmill.sched.sequence import Status


def check_scheduler(scheduler: Scheduler) -> None:
    """Queues, sequences, rows and the block pool agree."""
    queues = scheduler._queues
    _check_queues(queues)
    running = [seq for seq in queues.running if not seq.finished]
    leased = [lease.block_ids + lease.window_ids for lease in scheduler.leases._leases.values()]
    _check_ledger(scheduler._ledger, running, list(queues.outside.values()), leased)


def _check_queues(queues: Queues) -> None:
    running = [seq for seq in queues.running if not seq.finished]
    waiting, outside = queues.waiting(), list(queues.outside.values())
    assert sorted(running, key=lambda seq: seq.key) == running, "running ones are out of order"
    assert len(queues.running) - len(running) == queues._num_ended_running
    num_waiting = queues.num_waiting
    assert len(waiting) == num_waiting, f"{len(waiting)} wait, not {num_waiting}"
    queued = [*running, *waiting, *outside]
    assert {seq.request_id for seq in queued} == set(queues._by_id)
    assert len(queued) == len(queues), "a sequence is queued twice"
    assert not any(seq.block_ids or seq.num_computed_tokens for seq in waiting)
    assert {seq.status for seq in running} <= {Status.RUNNING}
    assert {seq.status for seq in waiting} <= {Status.WAITING}
    assert {seq.status for seq in outside} <= {Status.RECEIVING, Status.LOADING}


def _check_ledger(
    ledger: BlockLedger, running: list[Seq], outside: list[Seq], leased: list[list[int]]
) -> None:
    size = ledger.pool.block_size
    assert ledger.num_in_flight or not ledger._deferred
    for seq in running:
        assert seq.block_ids, f"running {seq.request_id!r} holds no blocks"
        assert seq.capacity == len(seq.block_ids) * size
        _check_window(ledger.pool, seq)
        assert seq.num_computed_tokens <= seq.capacity
        assert seq.num_computed_tokens <= seq.num_tokens <= seq.max_len
        if ledger.pool.prefix_cache:
            inserted = seq.num_inserted_blocks
            assert seq.num_computed_tokens // size <= inserted <= len(seq.block_ids)
    holders = running + [seq for _, seq in ledger._deferred]
    assert all(seq.block_ids for seq in holders), "an ended sequence gave its blocks back early"
    slots = [seq.slot for seq in holders] + ledger._free_slots
    assert sorted(slots) == list(range(ledger.num_slots)), "a slot is lost or held twice"
    assert all(seq.slot == -1 for seq in outside + ledger._abandoned)
    holders += outside + ledger._abandoned
    check_pool(ledger.pool, [seq.block_ids + seq.window_ids for seq in holders] + leased)


def _check_window(pool: BlockPool, seq: Seq) -> None:
    """The blocks of sliding layers go from one that the next token sees to the last."""
    num_held = len(seq.block_ids) - seq.window_first
    assert len(seq.window_ids) == num_held * pool.sliding.num_groups, "blocks of a window are lost"
    assert seq.window_first <= pool.sliding.first_block(seq.num_computed_tokens, pool.block_size)


def check_pool(pool: BlockPool, block_tables: Iterable[Sequence[int]] | None = None) -> None:
    """Ref-counts, free lists and hash map agree.

    With the block tables of all holders, their references are counted as well.
    """
    _check_free_lists(pool)
    _check_hash_map(pool)
    if block_tables is not None:
        _check_references(pool, block_tables)


def _check_free_lists(pool: BlockPool) -> None:
    free = [*pool._plain, *pool._evictable]
    assert len(free) == len(set(free)), f"a block is free twice: {sorted(free)}"
    unreferenced = {b for b, refs in enumerate(pool._refs) if refs == 0}
    assert set(free) == unreferenced, f"free {set(free)} but unreferenced {unreferenced}"
    assert min(pool._refs) >= 0, f"negative reference count: {pool._refs}"
    for block_id in pool._plain:
        assert pool._tokens[block_id] is None, f"plain block {block_id} is cached"
    for block_id in pool._evictable:
        assert pool._tokens[block_id] is not None, f"evictable block {block_id} is not cached"


def _check_hash_map(pool: BlockPool) -> None:
    cached = [b for b, tokens in enumerate(pool._tokens) if tokens]
    assert sorted(pool._by_hash.values()) == cached, "hash map and cached blocks disagree"
    identities = [pool._identities[b] for b in cached]
    assert len(identities) == len(set(identities)), "two cached blocks share an identity"
    for block_hash, block_id in pool._by_hash.items():
        tokens = pool._tokens[block_id]
        assert pool._hashes[block_id] == block_hash, f"block {block_id} sits under a wrong hash"
        assert tokens is not None and len(tokens) == pool.block_size, f"block {block_id} is cut"
        parent = pool._parents[block_id]
        assert isinstance(parent, str) or parent < pool._identities[block_id], "parent is newer"
    _check_beside(pool, set(identities))


def _check_beside(pool: BlockPool, identities: set[int]) -> None:
    sliding = [b for b, tokens in enumerate(pool._tokens) if tokens == ()]
    beside = [b for blocks in pool._beside.values() for b in blocks]
    assert sorted(beside) == sliding, "cached blocks of sliding layers are lost or kept twice"
    assert pool._beside.keys() <= identities, "blocks stand beside one that is not cached"
    check_points(pool.points, set(pool._beside))
    kept = pool.points.num_inside_blocks * pool.sliding.num_groups
    assert kept * SHARE <= pool.num_blocks, f"{kept} blocks are kept inside"
    for identity, blocks in pool._beside.items():
        held = any(pool._refs[b] for b in blocks)
        assert held or pool.points.keeps(identity), "a window is kept for nothing"
        assert len(blocks) == pool.sliding.num_groups, f"{blocks} are not one of each group"
        assert all(pool._identities[b] == identity for b in blocks), "an identity is wrong"


def _check_references(pool: BlockPool, block_tables: Iterable[Sequence[int]]) -> None:
    counts: Counter[int] = Counter()
    for table in block_tables:
        assert len(table) == len(set(table)), f"a block table names a block twice: {table}"
        counts.update(table)
    for block_id, refs in enumerate(pool._refs):
        held = counts[block_id]
        assert held == refs, f"block {block_id} has {refs} references, {held} tables hold it"


def check_points(points: StartPoints, beside: set[int]) -> None:
    """Start points and the blocks with pages beside them agree."""
    windows = points._ends | points._inside
    assert not points._ends.keys() & points._inside.keys(), "a point is an end and is inside"
    ranked = [*points._stale[0], *points._stale[1], *points._order]
    assert sorted(ranked) == sorted(points._inside), "a point has no rank, or two"
    covered = {(block, point) for point, window in windows.items() for block in window}
    assert covered == {(b, p) for b, covers in points._covers.items() for p in covers}
    assert points._covers.keys() <= beside, "a window that is kept has lost a block"
    ends = {block for window in points._ends.values() for block in window}
    assert points.num_inside_blocks == len(points._covers.keys() - ends), "blocks are miscounted"
    assert points.num_inside_blocks <= points._most, "points inside keep too many blocks"


def check_host_tier(tier: HostTier) -> None:
    """No slot is lost or held twice; nothing must be claimed."""
    held = [slot for slots in tier._held.values() for slot in slots]
    assert sorted(held + tier._free) == list(range(tier.num_slots))
    pinned = sum(len(tier._held[name]) for name in tier._pins)
    assert tier._num_kept == pinned, f"{tier._num_kept} slots are kept, {pinned} pinned"
