"""Blocks in the files of a folder, which all workers of a host may share.

A file is written under a name of its own and then renamed, so that a reader finds all of it or
nothing; what does not agree with its checksum is removed and never served. The bytes of all files
are counted in the file `usage`, under a lock; who opens the folder counts them anew.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.types import ModelLoadError
from tokenmill.sched.cache.tiers import DIGEST_BYTES, HASH_BYTES, WINDOW

Bytes = NDArray[np.uint8]
_HEADER = struct.Struct("<8sQI")  # magic, bytes of KV, checksum of name and KV
_MAGIC = b"TMKV\0\0\0\1"
_NAME_BYTES = DIGEST_BYTES + HASH_BYTES
_STALE_S = 600  # a file under a temporary name that is older belongs to nobody
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_S = 10.0  # how long a full disk is left alone
_ROOM = 16  # when the folder is full, the oldest files leave until a part of so many is free

_log = logging.getLogger(__name__)


class DiskTier:
    """A folder of blocks; holds() is for the engine's thread, the rest for others."""

    def __init__(self, folder: str, max_bytes: int, root: bytes) -> None:
        self._top = Path(folder).expanduser()
        self._folder = self._top / root.hex()
        self.max_bytes = max_bytes
        self._known: set[bytes] = set()
        self._lost: set[bytes] = set()  # that could not be read, until they are written again
        self.changes: deque[tuple[bytes, bool]] = deque()  # (name, whether it is here now)
        self._lock = threading.Lock()  # of this process; the file's lock is for others
        self.num_corrupt = 0  # files that were torn or altered
        self._warned = False
        self._full_until = 0.0  # no room was left on the disk: nothing is written before this time
        try:
            self._open()
        except OSError as error:
            problem = error.strerror or str(error)
            raise ModelLoadError(
                f"--kv-offloading disk={folder}: {problem}; give a folder that can be written, and "
                "a size that fits"
            ) from None

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._top / "usage").open("a"):
            pass
        probe = self._folder / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        with self._usage() as usage:
            files = self._scan()
            usage.set(sum(num_bytes for _, num_bytes, _ in files))
            free = shutil.disk_usage(self._top).free
        if free + usage.value < self.max_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{self.max_bytes / 2**30:.1f} GiB are asked for, but only "
                f"{(free + usage.value) / 2**30:.1f} GiB are free",
            )
        for _, _, path in files:
            if path.parent.parent == self._folder and (name := _name(path)) is not None:
                self._known.add(name)

    # What the engine's thread asks.

    def __contains__(self, name: bytes) -> bool:
        """Whether a block is here, as far as is known; another worker may have written it."""
        if name in self._known:
            return True
        if name not in self._lost and self._path(name).exists():
            self._note(name, here=True)
            return True
        return False

    def __len__(self) -> int:
        return len(self._known)

    def names(self) -> list[bytes]:
        return list(self._known)

    def forget(self, name: bytes) -> None:
        """A block could not be read: it is not looked for again."""
        self._lost.add(name)
        self._note(name, here=False)

    def _note(self, name: bytes, here: bool) -> None:
        if here:
            self._known.add(name)
            self._lost.discard(name)
        else:
            self._known.discard(name)
        self.changes.append((name, here))

    # What other threads do.

    def write(self, name: bytes, pages: list[Bytes]) -> bool:
        """Write a block; False if there is no room."""
        path = self._path(name)
        if path.exists():
            return True
        if time.monotonic() < self._full_until:
            return False
        num_bytes = sum(page.nbytes for page in pages)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            if not self._make_room(num_bytes + _HEADER.size):
                return self._refuse(f"its {self.max_bytes} bytes are less than a block")
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(_HEADER.pack(_MAGIC, num_bytes, _checksum(name, pages)))
                for page in pages:
                    file.write(page.data)
            temporary.rename(path)
            self._note(name, here=True)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            self._count(-num_bytes - _HEADER.size)
            if error.errno in _FULL:
                self._full_until = time.monotonic() + _FULL_S
            return self._refuse(error.strerror or str(error))
        return True

    def _refuse(self, problem: str) -> bool:
        if not self._warned:
            self._warned = True
            _log.warning(
                "--kv-offloading disk=%s: a block was not written: %s; serving goes on",
                self._top,
                problem,
            )
        return False

    def read(self, name: bytes, pages: list[Bytes]) -> bool:
        """Read a block; False if it is gone, torn or altered: then its file is removed."""
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                whole = all(_read_into(file.fileno(), page) for page in pages)
                whole = whole and not file.read(1)
        except OSError:
            return False
        num_bytes = sum(page.nbytes for page in pages)
        if whole and header == _HEADER.pack(_MAGIC, num_bytes, _checksum(name, pages)):
            self._use(path)
            return True
        self.num_corrupt += 1
        _log.warning("%s is torn or altered; it is removed, and its tokens are computed", path)
        self._remove(path)
        return False

    def _use(self, path: Path) -> None:
        """Let a file leave later than those that nobody reads."""
        with suppress(OSError):
            os.utime(path)

    # The bound.

    def _make_room(self, num_bytes: int) -> bool:
        """Count bytes that are about to be written, and remove the oldest files for them."""
        with self._lock, self._usage() as usage:
            if num_bytes > self.max_bytes:
                return False
            if usage.value + num_bytes > self.max_bytes:
                usage.set(self._shrink(self.max_bytes - self.max_bytes // _ROOM - num_bytes))
            usage.set(usage.value + num_bytes)
        return True

    def _shrink(self, target: int) -> int:
        """Remove the least recently used files until the others take no more than `target`."""
        files = self._scan()
        total = sum(num_bytes for _, num_bytes, _ in files)
        for _, num_bytes, path in sorted(files):
            if total <= max(0, target):
                break
            path.unlink(missing_ok=True)
            total -= num_bytes
            if (name := _name(path)) is not None:
                self._note(name, here=False)
        return total

    def _remove(self, path: Path) -> None:
        try:
            num_bytes = path.stat().st_size
            path.unlink()
        except OSError:
            return
        self._count(-num_bytes)

    def _count(self, num_bytes: int) -> None:
        with self._lock, self._usage() as usage:
            usage.set(max(0, usage.value + num_bytes))

    def _scan(self) -> list[tuple[int, int, Path]]:
        """(when it was used, bytes, path) of each file of all models; old temporary ones go."""
        found, now = [], time.time()
        for entry in _files(self._top):
            try:
                stat = entry.stat()
            except OSError:
                continue
            if entry.name.startswith("."):
                if now - stat.st_mtime > _STALE_S:
                    Path(entry.path).unlink(missing_ok=True)
                continue
            found.append((stat.st_mtime_ns, stat.st_size, Path(entry.path)))
        return found

    @contextmanager
    def _usage(self) -> Iterator[_Usage]:
        """The count of bytes, while nobody else changes it."""
        with (self._top / "usage").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield _Usage(file.fileno())

    def _path(self, name: bytes) -> Path:
        text = name.hex()
        return self._folder / text[:2] / text


class _Usage:
    """Eight bytes of a locked file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        data = os.pread(fd, 8, 0)
        self.value = int.from_bytes(data, "little") if len(data) == 8 else 0

    def set(self, value: int) -> None:
        self.value = value
        os.pwrite(self._fd, value.to_bytes(8, "little"), 0)


def _files(top: Path) -> Iterator[os.DirEntry[str]]:
    """The files two folders below: a model's, and of each a part."""
    for model in os.scandir(top):
        if model.is_dir():
            for part in os.scandir(model.path):
                if part.is_dir():
                    yield from os.scandir(part.path)


def _name(path: Path) -> bytes | None:
    """The block that a file holds."""
    try:
        name = bytes.fromhex(path.name)
    except ValueError:
        return None
    return name if name[_NAME_BYTES:] in (b"", WINDOW) and len(name) >= _NAME_BYTES else None


def _checksum(name: bytes, pages: list[Bytes]) -> int:
    checksum = zlib.crc32(name)
    for page in pages:
        checksum = zlib.crc32(page.data, checksum)
    return checksum


def _read_into(fd: int, page: Bytes) -> bool:
    """Fill a page; False if the file ends before that."""
    view, first = memoryview(page.data), 0
    while first < len(view):
        count = os.readv(fd, [view[first:]])
        if not count:
            return False
        first += count
    return True
