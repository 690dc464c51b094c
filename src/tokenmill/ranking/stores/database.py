"""A table beyond the host's memory: rows in an LMDB file, read ahead of their lookup.

LMDB's transactions are what makes an update durable once it is acknowledged and whole for every
reader. Rows that were never written are zeros.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.ranking.stores.store import (
    DISK,
    HOST,
    EmbeddingError,
    StoreStats,
    TableSpec,
    check_ids,
    check_rows,
    last_of_each,
    type_name,
)
from tokenmill.ranking.stores.table_files import RowFile, row_bytes
from tokenmill.ranking.stores.table_folder import KINDS

FILE = "data.mdb"  # LMDB's own name
ABOUT = b"about"
PAGE_BYTES = 4096
SPARE_BYTES = 2**26
MAX_INLINE_BYTES = 2038  # a row and its key; longer ones have pages of their own
READ_THREADS = 4
PIECE_ROWS = 1024  # that one thread reads at once
MAX_READERS = 1024


@dataclass(slots=True)
class _Piece:
    """Rows that are being read; those updated meanwhile are stale."""

    ids: list[int]
    stale: set[int] = field(default_factory=set)
    done: Future[None] = field(default_factory=Future)


class DatabaseTable:
    """A table in a folder of LMDB's, and up to `staged_rows` of its rows in memory.

    `prefetch` reads rows in threads and waits while `staged_rows` of them are being read: that is
    the back-pressure on who asks too fast. A lookup takes staged rows, waits for those under way,
    and reads the others.
    """

    def __init__(
        self, path: Path | str, spec: TableSpec | None = None, staged_rows: int = 2**16
    ) -> None:
        self.path = Path(path)
        if not (self.path / FILE).is_file():
            raise EmbeddingError(f"{self.path} is not a database of rows: it has no {FILE}")
        self._lmdb, self._env = _open(self.path, None)
        try:
            self.spec = _read_about(self.path, self._env)
            if spec is not None and spec != self.spec:
                raise EmbeddingError(
                    f"{self.path} holds a table of {self.spec}, and {spec} was asked for"
                )
        except EmbeddingError:
            self._env.close()
            raise
        self._env.set_mapsize(_map_bytes(self.spec))
        self._rows = self._env.open_db(b"rows", create=False)
        self._threads = ThreadPoolExecutor(READ_THREADS, "embedding-read")
        self._room = threading.Condition()  # guards what follows
        self._staged: OrderedDict[int, bytes] = OrderedDict()
        self._pending: dict[int, _Piece] = {}
        self._staged_rows = staged_rows
        self._seen = self.generation
        self._keys = {HOST: 0, DISK: 0}
        self._num_lookups = self._num_updates = 0

    @classmethod
    def create(cls, path: Path | str, spec: TableSpec, rows: RowFile | None = None) -> None:
        """A new folder with a table of zeros, or with the rows of a file."""
        path = Path(path)
        if (path / FILE).exists():
            raise EmbeddingError(f"{path} already holds a table: name another folder")
        path.mkdir(parents=True, exist_ok=True)
        if rows is not None:  # zeros take no space
            _check_space(path, disk_bytes(spec))
        try:
            _create(path, spec, rows)
        except BaseException:
            for name in (FILE, "lock.mdb"):
                (path / name).unlink(missing_ok=True)
            raise

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def generation(self) -> int:
        """The number of the last transaction, by whatever process."""
        return int(self._env.info()["last_txnid"])

    @property
    def mapped(self) -> torch.Tensor | None:
        return None

    @property
    def memory_bytes(self) -> int:
        """Of the rows that are staged at most; pages of the file are the system's to drop."""
        return self._staged_rows * self.spec.row_bytes

    def lookup(self, ids: torch.Tensor, check: bool = True) -> torch.Tensor:
        """The rows of ids, each distinct one read once."""
        ids = ids.cpu()
        check_ids(ids, self.spec.num_rows, check)
        distinct, inverse = np.unique(ids.numpy(), return_inverse=True)
        wanted: list[int] = distinct.tolist()
        staged = self._take_staged(wanted)
        rest = [key for key in wanted if key not in staged]
        values = staged | dict(zip(rest, self._read(rest), strict=True))
        flat = np.frombuffer(b"".join(map(values.__getitem__, wanted)), np.uint8)
        out = torch.empty(len(ids), self.spec.dim, dtype=self.spec.dtype)
        if len(ids):
            rows = flat.reshape(len(wanted), self.spec.row_bytes)
            np.take(rows, inverse, axis=0, out=out.view(torch.uint8).numpy())
        near = np.array([key in staged for key in wanted], bool)[inverse].sum()
        self._count(len(ids), int(near))
        return out

    def prefetch(self, ids: torch.Tensor, timeout_s: float | None = None) -> bool:
        """Read rows ahead; False where no room came up in time, and some were not asked for."""
        check_ids(ids, self.spec.num_rows)
        wanted: list[int] = torch.unique(ids.cpu()).tolist()
        for start in range(0, len(wanted), PIECE_ROWS):
            if not self._begin(wanted[start : start + PIECE_ROWS], timeout_s):
                return False
        return True

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows; they are on disk when this returns."""
        check_rows(ids, rows, self.spec)
        ids, rows = last_of_each(ids, rows)
        with _errors(self._lmdb, self.path), self._env.begin(write=True, db=self._rows) as txn:
            txn.cursor().putmulti(_items(ids.numpy(), rows))
        self._forget(ids.tolist())
        self._num_updates += len(ids)

    def checkpoint(self, path: Path | str) -> None:
        """A copy of the whole table in a new folder, as it is now; updates may go on meanwhile."""
        path = Path(path)
        if (path / FILE).exists():
            raise EmbeddingError(f"{path} already holds a table: name another folder")
        path.mkdir(parents=True, exist_ok=True)
        with _errors(self._lmdb, path):
            self._env.copy(str(path), compact=True)

    def stats(self) -> StoreStats:
        keys = dict(self._keys)
        return StoreStats(
            num_lookups=self._num_lookups,
            num_hits=keys[HOST],
            bytes_by_tier={tier: count * self.spec.row_bytes for tier, count in keys.items()},
            keys_by_tier=keys,
            num_updates=self._num_updates,
        )

    def close(self) -> None:
        self._threads.shutdown()
        self._env.close()

    def _count(self, num_keys: int, num_staged: int) -> None:
        with self._room:
            self._num_lookups += num_keys
            self._keys[HOST] += num_staged
            self._keys[DISK] += num_keys - num_staged

    def _read(self, wanted: list[int]) -> list[bytes]:
        keys = _key_bytes(np.array(wanted, np.int64))
        with _errors(self._lmdb, self.path), self._env.begin(db=self._rows) as txn:
            found = txn.cursor().getmulti(keys)
        if len(found) == len(keys):
            return [value for _, value in found]
        known, zeros = dict(found), bytes(self.spec.row_bytes)
        return [known.get(key, zeros) for key in keys]

    def _begin(self, wanted: list[int], timeout_s: float | None) -> bool:
        """Give a piece to the threads once there is room for it."""
        with self._room:
            self._drop_stale()
            missing = [key for key in wanted if key not in self._staged]
            missing = [key for key in missing if key not in self._pending]
            missing = missing[: self._staged_rows]
            fits = len(missing)
            if not self._room.wait_for(
                lambda: len(self._pending) + fits <= self._staged_rows, timeout_s
            ):
                return False
            if missing:
                piece = _Piece(missing)
                self._pending |= dict.fromkeys(missing, piece)
                self._threads.submit(self._stage, piece)
        return True

    def _stage(self, piece: _Piece) -> None:
        """In a thread: read a piece, and keep what was not updated meanwhile."""
        try:
            values = dict(zip(piece.ids, self._read(piece.ids), strict=True))
        except EmbeddingError:
            values = {}  # a lookup reads them again, and reports what is wrong
        with self._room:
            fresh = {key: value for key, value in values.items() if key not in piece.stale}
            self._staged.update(fresh)
            while len(self._staged) > self._staged_rows:
                self._staged.popitem(last=False)
            for key in piece.ids:
                self._pending.pop(key, None)
            self._room.notify_all()
        piece.done.set_result(None)

    def _take_staged(self, wanted: list[int]) -> dict[int, bytes]:
        """Rows in memory, after those under way have come."""
        with self._room:
            self._drop_stale()
            under_way = {id(p): p.done for p in map(self._pending.get, wanted) if p is not None}
        wait(under_way.values())
        with self._room:
            return {key: self._staged[key] for key in wanted if key in self._staged}

    def _forget(self, ids: Iterable[int]) -> None:
        """After an update of this process: what was read before is old."""
        with self._room:
            for key in ids:
                self._staged.pop(key, None)
                if (piece := self._pending.get(key)) is not None:
                    piece.stale.add(key)
            now = self.generation
            if now != self._seen + 1:  # another process has written, too
                self._drop_all()
            self._seen = now

    def _drop_stale(self) -> None:
        if (now := self.generation) != self._seen:
            self._drop_all()
            self._seen = now

    def _drop_all(self) -> None:
        self._staged.clear()
        for key, piece in self._pending.items():
            piece.stale.add(key)


def disk_bytes(spec: TableSpec) -> int:
    """What a full table takes on disk: whole rows in a page, or whole pages for a row."""
    entry = spec.row_bytes + 8 + 8 + 2  # row, key, the entry's head and its place in the page
    if entry > MAX_INLINE_BYTES:
        pages = spec.num_rows * -(-(spec.row_bytes + 16) // PAGE_BYTES)
        return (pages + spec.num_rows // 100 + 16) * PAGE_BYTES
    return (spec.num_rows // ((PAGE_BYTES - 16) // entry) * 101 // 100 + 16) * PAGE_BYTES


def _map_bytes(spec: TableSpec) -> int:
    """Addresses for the file: a transaction writes new pages before it frees the old ones."""
    return (2 * disk_bytes(spec) + SPARE_BYTES) // PAGE_BYTES * PAGE_BYTES


def _open(path: Path, spec: TableSpec | None) -> tuple[Any, Any]:
    """LMDB and its environment; with a spec, a new one."""
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise EmbeddingError(
            "a table in a database needs LMDB: pip install 'tokenmill[embeddings]'"
        ) from error
    size = _map_bytes(spec) if spec is not None else 0
    with _errors(lmdb, path):
        env = lmdb.open(
            str(path), size, max_dbs=2, readahead=False, max_readers=MAX_READERS, max_spare_txns=8
        )
    return lmdb, env


def _create(path: Path, spec: TableSpec, rows: RowFile | None) -> None:
    lmdb, env = _open(path, spec)
    try:
        with _errors(lmdb, path):
            database = env.open_db(b"rows")
            for start, piece in rows.pieces() if rows is not None else ():
                with env.begin(write=True, db=database) as txn:
                    ids = np.arange(start, start + len(piece))
                    txn.cursor().putmulti(_items(ids, piece.to(spec.dtype)), append=True)
            about = {"num_rows": spec.num_rows, "dim": spec.dim, "dtype": type_name(spec.dtype)}
            with env.begin(write=True, db=env.open_db(ABOUT)) as txn:
                txn.put(ABOUT, json.dumps(about).encode())
    finally:
        env.close()


def _read_about(path: Path, env: Any) -> TableSpec:
    """What create wrote last, so that a table without it was not loaded to its end."""
    with env.begin() as txn:
        names = [bytes(key) for key, _ in txn.cursor()]
    if ABOUT not in names:
        raise EmbeddingError(f"{path} is not a whole table: create it again")
    with env.begin(db=env.open_db(ABOUT, create=False)) as txn:
        about = json.loads(bytes(txn.get(ABOUT)))
    return TableSpec(about["num_rows"], about["dim"], KINDS[about["dtype"]])


def _check_space(path: Path, need: int) -> None:
    free = shutil.disk_usage(path).free
    if need > free:
        raise EmbeddingError(
            f"{path} has {free / 2**30:.1f} GiB of free disk space, and the table needs "
            f"{need / 2**30:.1f} GiB: name a folder on a larger disk"
        )


def _key_bytes(ids: NDArray[np.int64]) -> list[bytes]:
    """Keys that sort as their numbers do."""
    data = ids.astype(">u8").tobytes()
    return [data[start : start + 8] for start in range(0, len(data), 8)]


def _items(ids: NDArray[np.int64], rows: torch.Tensor) -> Iterator[tuple[bytes, memoryview]]:
    values, size = row_bytes(rows), rows.shape[1] * rows.element_size()
    for place, key in enumerate(_key_bytes(ids)):
        yield key, values[place * size : (place + 1) * size]


@contextmanager
def _errors(lmdb: Any, path: Path) -> Iterator[None]:
    """LMDB's errors as ones that name the folder."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise EmbeddingError(
            f"the table {path} cannot be read or written: {error}; what was acknowledged is kept"
        ) from error
