"""Tables, keys and stores for the tests of embedding stores."""

import itertools
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from light_processes import light_processes
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable, SharedTable
from tokenmill.ranking.stores.opening import open_table
from tokenmill.ranking.stores.store import EmbeddingError, TableSpec


def random_table(num_rows: int, dim: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    source = torch.Generator().manual_seed(num_rows + dim)
    return torch.randn(num_rows, dim, generator=source).to(dtype)


def host_table(table: torch.Tensor) -> HostTable:
    store = HostTable.create(TableSpec(*table.shape, table.dtype))
    store.table.copy_(table)
    return store


def cached_table(table: torch.Tensor, num_slots: int = 16) -> CachedTable:
    return CachedTable(host_table(table), num_slots, "cpu")


def read_shared(shared: SharedTable, connection: Connection) -> None:
    """A cache over the attached table answers until it is asked for nothing."""
    store = CachedTable(HostTable.attach(shared), 16, "cpu")
    while (keys := connection.recv()) is not None:
        connection.send(store.lookup(torch.tensor(keys)).tolist())
    try:
        store.update(torch.tensor([0]), torch.zeros(1, store.spec.dim).half())
    except EmbeddingError as error:
        connection.send(str(error))


def acknowledged_before_the_kill(path: Path, wanted: int) -> int:
    """Run a writer, kill it after `wanted` updates, and return the last one it acknowledged."""
    context = light_processes()
    ours, theirs = context.Pipe()
    writer = context.Process(target=write_for_ever, args=(str(path), theirs))
    writer.start()
    theirs.close()
    told = 0
    while told < wanted:
        told = ours.recv()
    os.kill(writer.pid, signal.SIGKILL)
    try:
        while True:
            told = ours.recv()
    except EOFError:
        writer.join()
        return told


def write_for_ever(path: str, connection: Connection) -> None:
    """Rows 0 to 7 hold the number of their update."""
    store = open_table(path, "cpu")
    assert isinstance(store, HostTable)
    for number in itertools.count(int(store.lookup(torch.tensor([0]))[0, 0]) + 1):
        store.update(torch.arange(8), torch.full((8, store.spec.dim), float(number)))
        connection.send(number)
        if number % 10 == 0:
            store.checkpoint()
