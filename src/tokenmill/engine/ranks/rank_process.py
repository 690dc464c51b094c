"""A rank that is not the first: the process that tokenmill.engine.ranks.group starts.

python -m tokenmill.engine.ranks.rank_process ADDRESS
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import NoReturn

from tokenmill.core.config import Setup
from tokenmill.core.kv import parse_tiers
from tokenmill.core.types import RanksLostError, TokenmillError
from tokenmill.engine.build import (
    capture_graphs,
    make_engine,
    make_rebalancer,
    make_runner,
    prepare_runner,
)
from tokenmill.engine.load import LoadedPart, load_part
from tokenmill.engine.ranks.group import Inbox, call, join
from tokenmill.engine.ranks.leader import OwnEngine
from tokenmill.engine.ranks.rank_messages import (
    EngineOrder,
    GroupPlace,
    KVReachable,
    LoadFailed,
    NumBlocks,
    send,
)
from tokenmill.engine.ranks.shared_kv import RankAnswers, RankReader
from tokenmill.engine.ranks.shared_tiers import RankTiers
from tokenmill.engine.ranks.step_leader import StepFollower
from tokenmill.kv.connectors import KVLink
from tokenmill.parallel import RANK_GONE, Ranks, all_or_none


def main(address: str) -> None:
    """Join rank 0, load a part of the model, and compute until rank 0 is gone."""
    connection = call(address)
    inbox = Inbox(connection, address)
    ranks = join(inbox.next_of(GroupPlace))
    order = inbox.next_of(EngineOrder)

    def agree(num_blocks: int) -> int:
        send(NumBlocks(num_blocks), connection)
        return inbox.next_of(NumBlocks).count

    try:
        part = load_part(order.setup, ranks, agree)
    except TokenmillError as error:
        send(LoadFailed(str(error)), connection)
        inbox.next()  # until rank 0 ends
        return
    try:
        with all_or_none():
            if order.setup.parallel.attention_dp:
                _run_own(order, part, ranks, connection, inbox)
            else:
                _follow(order.setup, part, ranks, connection, inbox)
    except RanksLostError as error:
        if str(error) != RANK_GONE:
            raise
        sys.exit(1)  # what happened is for the one to tell that is gone


def _follow(
    setup: Setup, part: LoadedPart, ranks: Ranks, connection: Connection, inbox: Inbox
) -> NoReturn:
    """Run the steps of rank 0."""
    answers, runner = RankAnswers(connection), make_runner(setup, part)
    reader, tiers = open_reader(setup, part, connection, answers), None
    if setup.cache.offloading is not None:
        sizes = parse_tiers(setup.cache.offloading)
        tiers = RankTiers(part.kv_cache, sizes, part.network.layout, answers)
    follower = StepFollower(
        runner, make_rebalancer(setup, part, ranks), lambda: capture_graphs(setup, part, runner)
    )
    while True:
        message = inbox.next()
        if not any(mover is not None and mover.do(message) for mover in (reader, tiers)):
            follower.do(message)


def _run_own(
    order: EngineOrder, part: LoadedPart, ranks: Ranks, connection: Connection, inbox: Inbox
) -> NoReturn:
    """Run requests of this rank's own, a step whenever rank 0 starts a round."""
    setup, runner = order.setup, make_runner(order.setup, part)
    prepare_runner(setup, part, runner)
    engine = make_engine(setup, part, runner, order.vocab)
    own = OwnEngine(engine, runner, make_rebalancer(setup, part, ranks))
    if engine.kv is not None:
        send(KVReachable(engine.kv.address), connection)
    while True:
        send(own.answer(inbox.next()), connection)


def open_reader(
    setup: Setup, part: LoadedPart, connection: Connection, answers: RankAnswers
) -> RankReader | None:
    """What moves this rank's part of the KV blocks, if the engine moves KV; rank 0 hears where."""
    if not isinstance(part.link, KVLink):
        return None
    block_size = setup.cache.block_size
    assert block_size is not None
    connectors, address = part.link.reach(
        part.kv_cache, part.cached, setup.cache.dtype, block_size, part.num_blocks
    )
    send(KVReachable(address), connection)
    return RankReader(connectors, answers)


if __name__ == "__main__":
    main(sys.argv[1])
