"""A table on disk: its rows at a checkpoint, and the log of the updates since.

An update is acknowledged when its record is on disk. A checkpoint first starts a new log, then
writes the rows while updates go on, and counts once table.json names it. Opening reads the rows
and applies the logs from that one on. Records hold whole rows, so that applying one twice, or to a
row of which the checkpoint saw one half, gives the same row.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tokenmill.ranking.stores.store import EmbeddingError, TableSpec, type_name
from tokenmill.ranking.stores.table_files import open_rows, row_bytes, write_rows

DESCRIPTION = "table.json"
MAGIC = 0x544D454D42454431  # of a record
HEAD = np.dtype([("magic", "<u8"), ("count", "<u8"), ("crc", "<u4"), ("head_crc", "<u4")])
OWNER = "open.json"  # which process has the table in its memory, while one does
KINDS = {type_name(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


class TableInUseError(EmbeddingError):
    """Another process may append to the folder."""


class TableFolder:
    """The folder of one table, open for appending by one process."""

    def __init__(self, path: Path, spec: TableSpec, number: int) -> None:
        self.path, self.spec = path, spec
        self._number = number  # of the newest log
        self._lock = _locked(path)
        (path / OWNER).unlink(missing_ok=True)  # of a process that was killed
        try:
            self._log = self._open_log()  # a file descriptor
        except EmbeddingError:
            os.close(self._lock)
            raise

    @classmethod
    def create(cls, path: Path | str, table: torch.Tensor) -> TableFolder:
        path = Path(path)
        spec = TableSpec(table.shape[0], table.shape[1], table.dtype)
        if (path / DESCRIPTION).exists():
            raise EmbeddingError(f"{path} already holds a table: name another folder")
        path.mkdir(parents=True, exist_ok=True)
        with disk_errors(path):
            try:
                write_rows(_rows_path(path, 0), table)
                _describe(path, spec, 0)
            except OSError:
                _rows_path(path, 0).unlink(missing_ok=True)
                raise
        return cls(path, spec, 0)

    @classmethod
    def open(cls, path: Path | str, spec: TableSpec | None = None) -> TableFolder:
        """The folder of a table; `spec` is what the caller expects it to hold."""
        path = Path(path)
        found, first = read_description(path)
        if spec is not None and spec != found:
            raise EmbeddingError(f"{path} holds a table of {found}, and {spec} was asked for")
        open_rows(_rows_path(path, first)).check(found)
        return cls(path, found, max(_log_numbers(path), default=first))

    def read_into(self, table: torch.Tensor) -> None:
        """The rows of the checkpoint, and all updates since."""
        _, first = read_description(self.path)
        for start, rows in open_rows(_rows_path(self.path, first)).pieces():
            table[start : start + len(rows)] = rows
        for number in _log_numbers(self.path):
            if number >= first:
                for ids, rows in read_log(_log_path(self.path, number), self.spec):
                    table[ids] = rows

    def append(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Put a record of distinct ids on disk."""
        start = os.lseek(self._log, 0, os.SEEK_END)
        try:
            with disk_errors(self.path):
                for part in _record(ids, rows):
                    _write_all(self._log, part)
                os.fdatasync(self._log)
        except EmbeddingError:
            os.ftruncate(self._log, start)  # half a record would hide those after it
            raise

    def begin_checkpoint(self) -> TableCheckpoint:
        """Start a new log; the caller sees to it that no update is under way."""
        before = self._log
        self._number += 1
        try:
            self._log = self._open_log()
        except EmbeddingError:
            self._number -= 1
            raise
        os.close(before)
        return TableCheckpoint(self.path, self.spec, self._number)

    def tell_owner(self, where: dict[str, int]) -> None:
        """Let other processes read where the table lies in memory."""
        unfinished = self.path / f"{OWNER}.unfinished"
        with disk_errors(self.path):
            unfinished.write_text(json.dumps(where), encoding="utf-8")
            unfinished.rename(self.path / OWNER)

    def close(self) -> None:
        (self.path / OWNER).unlink(missing_ok=True)
        os.close(self._log)
        os.close(self._lock)

    def _open_log(self) -> int:
        """The newest log, without the record that a crash cut off."""
        path = _log_path(self.path, self._number)
        with disk_errors(self.path):
            size = sum(size for size, _ in _records(path, self.spec))
            log = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(log, size)
            _sync_folder(self.path)
        return log


@dataclass(frozen=True, slots=True)
class TableCheckpoint:
    """A checkpoint that has its log, and no rows yet."""

    path: Path
    spec: TableSpec
    number: int

    def write(self, table: torch.Tensor) -> None:
        """Write the rows, make this the checkpoint to open, and remove what came before."""
        rows = _rows_path(self.path, self.number)
        unfinished = rows.with_suffix(".unfinished")
        with disk_errors(self.path):
            try:
                write_rows(unfinished, table)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            unfinished.rename(rows)
            _describe(self.path, self.spec, self.number)
        for old in (*self.path.glob("rows-*"), *self.path.glob("updates-*")):
            if _number_of(old) < self.number:
                old.unlink()


def read_description(path: Path) -> tuple[TableSpec, int]:
    """What table.json says: the table's shape, and the number of its checkpoint."""
    file = path / DESCRIPTION
    if not file.is_file():
        raise EmbeddingError(f"{path} is not a table: it has no {DESCRIPTION}")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        spec = TableSpec(int(fields["num_rows"]), int(fields["dim"]), KINDS[fields["dtype"]])
        return spec, int(fields["checkpoint"])
    except (ValueError, KeyError, TypeError) as error:
        raise EmbeddingError(f"{file} cannot be read: {error!r}") from error


def read_owner(path: Path) -> dict[str, int] | None:
    """Where the process that has the table open keeps it; None before it has read the rows."""
    try:
        found: dict[str, int] = json.loads((path / OWNER).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return None


def read_log(path: Path, spec: TableSpec) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for _, (ids, rows) in _records(path, spec):
        yield ids, rows


Record = tuple[torch.Tensor, torch.Tensor]


def _records(path: Path, spec: TableSpec) -> Iterator[tuple[int, Record]]:
    """The size of each whole record, its ids and its rows; the last one may be cut off."""
    if not path.exists():
        return
    end = path.stat().st_size
    with path.open("rb") as file:
        while len(first := file.read(HEAD.itemsize)) == HEAD.itemsize:
            start = file.tell() - HEAD.itemsize
            if (size := _record_bytes(first, spec)) is None:
                _check_last(path, start)
                return
            if start + size > end:
                return
            file.seek(start)
            data = bytearray(file.read(size))
            head = np.frombuffer(data, HEAD, 1)[0]
            if zlib.crc32(memoryview(data)[HEAD.itemsize :]) != head["crc"]:
                if start + size == end:
                    return
                raise _damaged(path, start)
            yield size, _parse(data, int(head["count"]), spec)


def _check_last(path: Path, start: int) -> None:
    """A crash spoils the last record alone: an error where another one follows this head."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
        if log.find(MAGIC.to_bytes(8, "little"), start + 1) >= 0:
            raise _damaged(path, start)


def _damaged(path: Path, start: int) -> EmbeddingError:
    return EmbeddingError(
        f"{path} is damaged at byte {start}: an update before the last one has a wrong checksum; "
        "restore the folder from a copy"
    )


def _record_bytes(head: bytes, spec: TableSpec) -> int | None:
    """The size of the record that starts with `head`; None where it is no head."""
    fields = np.frombuffer(head, HEAD, 1)[0]
    if fields["magic"] != MAGIC or zlib.crc32(head[:-4]) != fields["head_crc"]:
        return None
    return HEAD.itemsize + int(fields["count"]) * (8 + spec.row_bytes)


def _record(ids: torch.Tensor, rows: torch.Tensor) -> tuple[memoryview, ...]:
    """The parts of a record as they follow each other on disk."""
    numbers, values = row_bytes(ids), row_bytes(rows)
    head = np.zeros(1, HEAD)
    head["magic"], head["count"] = MAGIC, len(ids)
    head["crc"] = zlib.crc32(values, zlib.crc32(numbers))
    head["head_crc"] = zlib.crc32(head.tobytes()[:-4])
    return memoryview(head.tobytes()), numbers, values


def _parse(data: bytearray, count: int, spec: TableSpec) -> Record:
    ids = torch.frombuffer(data, dtype=torch.int64, count=count, offset=HEAD.itemsize)
    start = HEAD.itemsize + 8 * count
    rows = torch.frombuffer(data, dtype=spec.dtype, count=count * spec.dim, offset=start)
    return ids, rows.view(count, spec.dim)


def _describe(path: Path, spec: TableSpec, number: int) -> None:
    fields = {"num_rows": spec.num_rows, "dim": spec.dim, "dtype": type_name(spec.dtype)}
    unfinished = path / f"{DESCRIPTION}.unfinished"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({**fields, "checkpoint": number}, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path / DESCRIPTION)
    _sync_folder(path)


def _rows_path(path: Path, number: int) -> Path:
    return path / f"rows-{number}.safetensors"


def _log_path(path: Path, number: int) -> Path:
    return path / f"updates-{number}.log"


def _log_numbers(path: Path) -> list[int]:
    return sorted(_number_of(file) for file in path.glob("updates-*.log"))


def _number_of(file: Path) -> int:
    return int(file.stem.rpartition("-")[2])


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _locked(path: Path) -> int:
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise TableInUseError(
            f"another process has the table {path} open: attach to it there, or close it first"
        ) from error
    return lock


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Errors of the disk as ones that name the folder."""
    try:
        yield
    except OSError as error:
        raise EmbeddingError(
            f"the table {path} cannot be written: {error.strerror}; nothing of this update or "
            "checkpoint was acknowledged. Make space on that disk and try again"
        ) from error
