"""A table in the host's memory, which other processes can map and a GPU can read where it lies."""

from __future__ import annotations

import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.ranking.stores.store import (
    HOST,
    EmbeddingError,
    StoreStats,
    TableSpec,
    check_ids,
    check_rows,
    last_of_each,
)
from tokenmill.ranking.stores.table_folder import (
    TableFolder,
    TableInUseError,
    read_description,
    read_owner,
)

STRIPES = 2**16  # version counters; a row's is that of its id modulo this
PATIENCE_S = 10.0  # that a reader waits for a version to become even
OPENING_S = 600.0  # that a process waits for another one that reads the same folder
PAUSE_S = 0.1
PORTABLE_AND_MAPPED = 3  # flags of cudaHostRegister
HEADER_BYTES = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True, slots=True)
class SharedTable:
    """Where a table lies, for processes of the same host and user."""

    pid: int
    fd: int
    inode: int  # of the memory: a number of a process may be given again
    spec: TableSpec


class HostTable:
    """A table [rows, dim] in shared pages, and with a folder on disk a log of its updates.

    A version counter is odd while rows of its stripe are written. A reader that saw an odd one, or
    another one after its copy than before, reads again: no lookup returns half a row. One process
    updates; those that attach read.
    """

    def __init__(
        self, pages: _Pages, folder: TableFolder | None = None, shared: SharedTable | None = None
    ) -> None:
        self.spec, self.shared = pages.spec, shared
        self.table, self._generation, self._versions = pages.views()
        self._pages, self._folder = pages, folder
        self._lock = threading.Lock()  # of writers
        self._num_lookups = self._num_updates = 0
        self._pinned = False

    @classmethod
    def create(cls, spec: TableSpec) -> HostTable:
        """A table of zeros that lives as long as its processes."""
        pages = _Pages.create(spec)
        shared = SharedTable(os.getpid(), pages.fd, os.fstat(pages.fd).st_ino, spec)
        return cls(pages, shared=shared)

    @classmethod
    def open(cls, folder: TableFolder) -> HostTable:
        """A table from its folder, with every update that was acknowledged."""
        table = cls.create(folder.spec)
        try:
            folder.read_into(table.table)
        except BaseException:
            table.close()
            raise
        table._folder, shared = folder, table.shared
        if shared is not None:
            folder.tell_owner({"pid": shared.pid, "fd": shared.fd, "inode": shared.inode})
        return table

    @classmethod
    def open_or_attach(cls, path: Path, spec: TableSpec | None = None) -> HostTable:
        """A folder's table; the first process of a host reads it, and others map its memory."""
        deadline, unreachable = time.monotonic() + OPENING_S, None
        while True:
            try:
                return cls.open(TableFolder.open(path, spec))
            except TableInUseError:
                if time.monotonic() > deadline:
                    raise
            if (owner := read_owner(path)) is not None:
                try:
                    return cls.attach(SharedTable(**owner, spec=read_description(path)[0]))
                except EmbeddingError:
                    if owner == unreachable:  # for a while: it has not just ended
                        raise
                    unreachable = owner
            time.sleep(PAUSE_S)

    @classmethod
    def attach(cls, shared: SharedTable) -> HostTable:
        return cls(_Pages.attach(shared))

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def generation(self) -> int:
        """Counts the updates, by whatever process: a cache over the table compares it."""
        return int(self._generation[0])

    @property
    def mapped(self) -> torch.Tensor | None:
        """The table where a GPU may read it by itself: pinned, and written by this process."""
        return self.table if self._pinned else None

    def pin(self) -> None:
        """Let the GPU read the pages; only the process that updates may order both."""
        if self.shared is None or self._pinned:
            return
        code = torch.cuda.cudart().cudaHostRegister(
            self.table.data_ptr(), self.table.nbytes, PORTABLE_AND_MAPPED
        )
        if int(code) != 0:
            raise EmbeddingError(
                f"the host's memory for a table of {self.spec} cannot be pinned (CUDA error "
                f"{int(code)}): raise the limit of locked memory (ulimit -l), or take fewer rows"
            )
        self._pinned = True

    def lookup(self, ids: torch.Tensor, check: bool = True) -> torch.Tensor:
        """table[ids] on the host, whatever is written meanwhile."""
        ids = ids.cpu()
        check_ids(ids, self.spec.num_rows, check)
        self._num_lookups += len(ids)
        out = torch.empty(len(ids), self.spec.dim, dtype=self.spec.dtype)
        places = torch.arange(len(ids))
        patience = _Patience()
        while len(places):
            stripes = (ids[places] % STRIPES).numpy()
            before = self._versions[stripes]
            if len(places) == len(ids):
                torch.index_select(self.table, 0, ids, out=out)
            else:
                out[places] = self.table.index_select(0, ids[places])
            after = self._versions[stripes]
            again = (before != after) | (before % 2 != 0)
            if not again.any():
                break
            places = places[torch.from_numpy(again)]
            patience.wait()
        return out

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows; with a folder they are on disk when this returns."""
        if self.shared is None:
            raise EmbeddingError(
                "this process attached to the table and may only read it: update it where it "
                "was made"
            )
        check_rows(ids, rows, self.spec)
        ids, rows = last_of_each(ids, rows)
        stripes = np.unique((ids % STRIPES).numpy())
        with self._lock:
            if self._folder is not None:
                self._folder.append(ids, rows)
            self._versions[stripes] += 1
            self.table.index_copy_(0, ids, rows)
            self._versions[stripes] += 1
            self._generation[0] += 1
            self._num_updates += len(ids)

    def checkpoint(self) -> None:
        """Write the table to its folder and start its log anew; updates may go on meanwhile."""
        if self._folder is None:
            raise EmbeddingError("the table has no folder to write a checkpoint to")
        with self._lock:
            checkpoint = self._folder.begin_checkpoint()
        checkpoint.write(self.table)

    def stats(self) -> StoreStats:
        keys = self._num_lookups
        return StoreStats(
            num_lookups=keys,
            num_hits=keys,
            bytes_by_tier={HOST: keys * self.spec.row_bytes},
            keys_by_tier={HOST: keys},
            num_updates=self._num_updates,
        )

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.table.data_ptr())
            self._pinned = False
        if self._folder is not None:
            self._folder.close()
        if self.shared is not None:
            self._pages.close()


class _Pages:
    """Shared memory without a name: a counter of updates, version counters, and the table."""

    def __init__(self, spec: TableSpec, fd: int) -> None:
        self.spec, self.fd = spec, fd
        self._memory = mmap.mmap(fd, self.size_of(spec))

    @classmethod
    def create(cls, spec: TableSpec) -> _Pages:
        need, have = cls.size_of(spec), available_bytes()
        if need > have:
            raise EmbeddingError(
                f"a host table of {spec} needs {need / 2**30:.1f} GiB of memory and "
                f"{have / 2**30:.1f} GiB are available: take fewer rows"
            )
        fd = os.memfd_create("tokenmill-embeddings")
        os.ftruncate(fd, need)
        return cls(spec, fd)

    @classmethod
    def attach(cls, shared: SharedTable) -> _Pages:
        path = f"/proc/{shared.pid}/fd/{shared.fd}"
        try:
            fd = os.open(path, os.O_RDWR)  # torch has no tensors that are read only
        except OSError as error:
            raise EmbeddingError(
                f"the table of process {shared.pid} cannot be opened: {error.strerror} (it needs "
                "the same host and user)"
            ) from error
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (shared.inode, cls.size_of(shared.spec)):
                raise EmbeddingError(f"the table of process {shared.pid} is not {shared.spec}")
            return cls(shared.spec, fd)
        finally:
            os.close(fd)

    @staticmethod
    def size_of(spec: TableSpec) -> int:
        return HEADER_BYTES + 4 * STRIPES + spec.num_bytes

    def views(self) -> tuple[torch.Tensor, NDArray[np.int64], NDArray[np.uint32]]:
        """The table, the counter of updates [1], and the version counters."""
        generation = np.frombuffer(self._memory, np.int64, 1)
        versions = np.frombuffer(self._memory, np.uint32, STRIPES, HEADER_BYTES)
        start, count = HEADER_BYTES + 4 * STRIPES, self.spec.num_rows * self.spec.dim
        flat = torch.frombuffer(self._memory, dtype=self.spec.dtype, count=count, offset=start)
        return flat.view(self.spec.num_rows, self.spec.dim), generation, versions

    def close(self) -> None:
        os.close(self.fd)


class _Patience:
    """Waits a little longer each time, and not for ever."""

    def __init__(self) -> None:
        self._deadline, self._pause_s = time.monotonic() + PATIENCE_S, 1e-6

    def wait(self) -> None:
        if time.monotonic() > self._deadline:
            raise EmbeddingError(
                f"rows were being written for {PATIENCE_S:.0f} s: the process that updates the "
                "table has died or hangs; open the table anew from its folder"
            )
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, 1e-3)


def available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
