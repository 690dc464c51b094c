"""A rank that is not the first: the process that tokenmill.engine.ranks.group starts.

python -m tokenmill.engine.ranks.rank_process ADDRESS
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from tokenmill.core.config import Setup
from tokenmill.core.types import GrammarVocab, RanksLostError, TokenmillError
from tokenmill.engine.build import Part, load_part, make_engine, make_rebalancer, part_graphs
from tokenmill.engine.ranks.group import Inbox, call, join
from tokenmill.engine.ranks.leader import OwnEngine
from tokenmill.engine.ranks.rank_messages import (
    Failed,
    KVReachable,
    NumBlocks,
    Order,
    Place,
    send,
)
from tokenmill.engine.ranks.rank_models import RANK_GONE, Follower, OwnModel, all_or_none
from tokenmill.engine.ranks.shared_kv import RankReader
from tokenmill.kv.connectors import KVLink
from tokenmill.parallel import Ranks


def main(address: str) -> None:
    """Join rank 0, load a part of the model, and compute until rank 0 is gone."""
    connection = call(address)
    inbox = Inbox(connection, address)
    ranks = join(inbox.next_of(Place))
    order = inbox.next_of(Order)
    setup = order.setup

    def agree(num_blocks: int) -> int:
        send(connection, NumBlocks(num_blocks))
        return inbox.next_of(NumBlocks).count

    try:
        part = load_part(setup, ranks, agree)
    except TokenmillError as error:
        send(connection, Failed(str(error)))
        inbox.next()  # until rank 0 ends
        return
    try:
        with all_or_none():
            if setup.parallel.attention_dp:
                _run_own(setup, part, ranks, order.vocab, connection, inbox)
            else:
                _follow(setup, part, ranks, connection, inbox)
    except RanksLostError as error:
        if str(error) != RANK_GONE:
            raise
        sys.exit(1)  # what happened is for the one to tell that is gone


def _follow(
    setup: Setup, part: Part, ranks: Ranks, connection: Connection, inbox: Inbox
) -> NoReturn:
    """Compute this rank's part of what rank 0 does."""
    rebalancer = make_rebalancer(setup, part, ranks)
    reader = open_reader(setup, part, connection)
    graphs = part_graphs(setup, part)
    follower = Follower(part.network, part.mtp, part.kv_cache, ranks, rebalancer, reader, graphs)
    while True:
        follower.follow(inbox.next())


def _run_own(
    setup: Setup,
    part: Part,
    ranks: Ranks,
    vocab: GrammarVocab | None,
    connection: Connection,
    inbox: Inbox,
) -> NoReturn:
    """Run requests of this rank's own, a step whenever rank 0 starts a round."""
    model = OwnModel(part.network)
    engine, _ = make_engine(setup, part, model, vocab)
    own = OwnEngine(engine, model, make_rebalancer(setup, part, ranks))
    if engine.kv is not None:
        send(connection, KVReachable(engine.kv.address))
    while True:
        send(connection, own.answer(inbox.next()))


def open_reader(setup: Setup, part: Part, connection: Connection) -> RankReader | None:
    """Return what moves this rank's part of the KV blocks, if the engine moves KV."""
    if not isinstance(part.link, KVLink):
        return None
    block_size = setup.cache.block_size
    assert block_size is not None
    connectors, address = part.link.reach(
        part.kv_cache, part.cached, setup.cache.dtype, block_size, part.num_blocks
    )
    return RankReader(connectors, address, connection)


if __name__ == "__main__":
    main(sys.argv[1])
