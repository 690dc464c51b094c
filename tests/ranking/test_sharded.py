"""A table over ranks of gloo equals the table in one piece, and errors are everyone's."""

from pathlib import Path

import pytest
import torch

from light_processes import light_processes
from ranking.tables import host_table, random_table, run_shard
from tokenmill.parallel import ONE, Ranks
from tokenmill.ranking.stores.sharded import ShardedTable, shard_rows
from tokenmill.ranking.stores.store import EmbeddingError


def test_ranks_share_a_table(tmp_path: Path) -> None:
    context, size = light_processes(), 3
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=run_shard, args=(str(tmp_path / "meet"), rank, size, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for rank, (ours, _) in enumerate(pipes):
        told = [ours.recv() if ours.poll(60) else None for _ in range(11)]
        assert told[:8] == [True] * 8
        message = "id 61 is not in the table" if rank == 1 else "rank 1 was called with wrong"
        assert all(message in text for text in told[8:10])
        assert told[10] == (280 if rank == 0 else 320)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0


def test_one_rank_is_the_table_itself() -> None:
    table = random_table(20, 4)
    store = ShardedTable(ONE, host_table(table), 20)
    ids = torch.tensor([3, 19, 3])
    assert torch.equal(store.lookup(ids), table[ids])
    store.update(ids, torch.ones(3, 4).half())
    assert (store.lookup(ids) == 1).all()


def test_shards_have_the_rows_that_are_theirs() -> None:
    assert [shard_rows(11, Ranks(rank, 4)) for rank in range(4)] == [3, 3, 3, 2]
    with pytest.raises(EmbeddingError, match="rank 3 of 4 has 2 rows of a table of 11, and its"):
        ShardedTable(Ranks(3, 4), host_table(random_table(3, 4)), 11)
