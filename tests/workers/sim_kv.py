"""KV of a simulated worker: each slot holds its token, so that whoever decodes can check it.

It moves by the real transfer and the real shared memory; reads may be made to fail or to last.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence as Items
from concurrent.futures import Future
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.kv import KVAddress, KVGeometry, KVWay
from tokenmill.kv.shared_memory import SharedMemoryConnector, SharedPages, host_identity
from tokenmill.kv.transfer import KVTransfer, Run, TransferError
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Sequence

SLOW_S = 2.0


class FlakyConnector(SharedMemoryConnector):
    """Some reads fail, some take long."""

    fault_rate = 0.0
    dice = random.Random(0)

    def read(self, engine_id: str, runs: list[Run]) -> Future[None]:
        dice = self.dice.random()
        if dice > self.fault_rate:
            return super().read(engine_id, runs)
        outcome: Future[None] = Future()
        if dice < self.fault_rate / 2:
            outcome.set_exception(TransferError("the wire is cut"))
        else:
            threading.Timer(SLOW_S, self._late, [engine_id, runs, outcome]).start()
        return outcome

    def _late(self, engine_id: str, runs: list[Run], outcome: Future[None]) -> None:
        if engine_id in self._peers:
            super().read(engine_id, runs).result()
            outcome.set_result(None)
        else:
            outcome.set_exception(TransferError("the peer is gone"))


class SimCache:
    """One number per slot: the token whose KV it is, and 1, so that nothing is 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.engine_id = uuid4().hex[:12]
        self.pages = SharedPages(self.engine_id)
        self.slots = self.pages.zeros((num_blocks, block_size), np.float32)

    def compute(self, items: Items[tuple[Sequence, int]]) -> None:
        """Write the KV of a batch, then check all that its sequences read.

        One may read what another one of the batch writes, as in a layer of a model.
        """
        flat = self.slots.reshape(-1)
        for seq, num_new in items:
            end = seq.num_computed_tokens + num_new
            slots = self._slots(seq, end)[seq.num_computed_tokens :]
            flat[slots] = np.array(seq.token_ids[seq.num_computed_tokens : end]) + 1
        for seq, num_new in items:
            end = seq.num_computed_tokens + num_new
            found = flat[self._slots(seq, end)]
            wrong = np.flatnonzero(found != np.array(seq.token_ids[:end]) + 1)
            assert not wrong.size, f"KV of {seq.request_id} at {wrong[0]} is not that of its token"

    def _slots(self, seq: Sequence, end: int) -> NDArray[np.int64]:
        """The slots of the first tokens of a sequence."""
        size = self.slots.shape[1]
        blocks = np.array(seq.block_ids[: -(-end // size)])
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:end]

    def transfer(self, scheduler: Scheduler, fault_rate: float) -> KVTransfer:
        connector = FlakyConnector(self.pages, [self.slots])
        connector.fault_rate = fault_rate
        num_blocks, size = self.slots.shape
        shape = KVGeometry("sim", "", "none", "tokens", 1, 1, 1, size, (4 * size,))
        way = KVWay(connector.name, connector.regions, connector.endpoint)
        address = KVAddress(self.engine_id, host_identity(), shape, num_blocks, (way,))
        return KVTransfer(scheduler, [connector], address)
