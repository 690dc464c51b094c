"""The connector over memory that is mapped: how long it stays so, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from kv.host_ipc import HostIpcConnector, HostMemory
from tokenmill.core.kv import KVAddress, KVGeometry
from tokenmill.kv.connectors import KVLink
from tokenmill.kv.cuda_ipc import CudaIpcConnector
from tokenmill.kv.cuda_memory import block_pairs
from tokenmill.kv.shared_memory import SharedPages
from tokenmill.kv.transfer import Run, TransferError

SIZES = (48, 33)  # bytes of a block of keys and of values
NUM_BLOCKS = 8


class Side:
    """A cache of bytes, its connector, and its address."""

    def __init__(self, name: str) -> None:
        pages = SharedPages(name)
        shapes = [(NUM_BLOCKS, size) for size in SIZES]
        self.tensors = [torch.from_numpy(pages.zeros(shape, np.uint8)) for shape in shapes]
        self.memory = HostMemory(pages)
        self.connector = HostIpcConnector(self.tensors, self.memory)
        link = KVLink(name, (), None, "w")
        geometry = KVGeometry("m", "w", "fp32", "bytes", 1, 1, 1, 1, SIZES)
        with mock.patch.object(HostIpcConnector, "over", return_value=self.connector):
            _, self.address = replace(link, connectors=("cuda-ipc",)).offer(
                self.tensors, geometry, NUM_BLOCKS
            )


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    with mock.patch.dict("tokenmill.kv.connectors.CONNECTORS", {"cuda-ipc": HostIpcConnector}):
        source, target = Side("source"), Side("target")
    for region, tensor in enumerate(source.tensors):
        tensor.copy_(100 * region + torch.arange(NUM_BLOCKS)[:, None])
    yield source, target
    for side in (target, source):
        side.connector.close()


def connect(target: Side, peer: KVAddress) -> None:
    target.connector.connect(peer, peer.ways[0])


def test_blocks_go_where_runs_say(sides: tuple[Side, Side]) -> None:
    source, target = sides
    connect(target, source.address)
    target.connector.read("source", [(5, 0, 2), (1, 7, 1)]).result()
    for region, tensor in enumerate(target.tensors):
        first = 100 * region
        assert tensor[:, 0].tolist() == [first + 5, first + 6, 0, 0, 0, 0, 0, first + 1]
        assert torch.equal(tensor[:, 0], tensor[:, -1])


def test_an_allocation_is_mapped_once_and_until_the_last_read_has_ended(
    sides: tuple[Side, Side],
) -> None:
    source, target = sides
    go_on, copier = threading.Event(), target.memory.copier
    unmapped: Future[None] = Future()

    def slow(*caches: list[torch.Tensor]) -> Callable[[list[Run]], None]:
        copy = copier(*caches)
        return lambda runs: (go_on.wait(), copy(runs))[1]

    with mock.patch.object(target.memory, "copier", slow):
        connect(target, source.address)
    assert len(target.memory.mapped) == 1  # of keys and values together
    read = target.connector.read("source", [(3, 2, 1)])
    target.connector.disconnect("source")
    target.connector._thread.submit(unmapped.set_result, None)
    assert target.memory.mapped and not unmapped.done()
    go_on.set()
    read.result()
    unmapped.result()
    assert target.tensors[0][2, 0] == 3 and not target.memory.mapped


def test_a_peer_that_is_gone_or_cannot_be_mapped(sides: tuple[Side, Side]) -> None:
    source, target = sides
    way = source.address.ways[0]
    gone = replace(way, endpoint=way.endpoint[:64] + b"0:0".ljust(64))
    with pytest.raises(TransferError, match="cannot be mapped"):
        target.connector.connect(source.address, gone)
    assert not target.memory.mapped, "what was mapped before the fault is left behind"
    with pytest.raises(KeyError):
        target.connector.read("source", [])


def test_without_a_gpu_it_is_not_offered() -> None:
    assert CudaIpcConnector.installed() == torch.cuda.is_available()


def test_pairs_are_the_blocks_of_runs_one_by_one() -> None:
    runs = [(5, 0, 3), (1, 7, 1), (9, 9, 2)]
    assert block_pairs(runs).tolist() == [[5, 6, 7, 1, 9, 10], [0, 1, 2, 7, 9, 10]]
    assert block_pairs([]).shape == (2, 0)
