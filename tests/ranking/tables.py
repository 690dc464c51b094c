"""Tables, keys and stores for the tests of embedding stores."""

from multiprocessing.connection import Connection

import torch

from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable, SharedTable
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
        store.update(torch.tensor([0]), torch.zeros(1, store.dim).half())
    except EmbeddingError as error:
        connection.send(str(error))
