"""Blocks in the files of a folder, which all workers of a host may share.

All lies in `tokenmill-kv` below the folder that is given, which is for this user alone: whoever
writes there could put words into prompts, and whoever reads there could learn them. Only files
whose names blocks can have are ever counted or removed: what else is in the folder is not ours.

A file is written under a name of its own and then renamed, so that a reader finds all of it or
nothing; what does not agree with its checksum is removed and never served. The bytes of all files
are counted in the file `usage`, whose lock is held while a file comes or goes, and is waited for
ten seconds at most; who opens the folder counts them anew. A file has its size before it is
written, so that bytes on their way count, too.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import struct
import tempfile
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
_TOP = "tokenmill-kv"
_FOLDER = re.compile("/[0-9a-f]{32}/[0-9a-f]{2}")  # a model's, and in it a part of its blocks
_BLOCK = re.compile(f"[0-9a-f]{{{2 * (DIGEST_BYTES + HASH_BYTES)}}}({WINDOW.hex()})?")
_TEMPORARY = re.compile(rf"\.{_BLOCK.pattern}\.[0-9]+\.[0-9]+")  # a process and its thread
_STALE_S = 600  # a file under a temporary name that is older belongs to nobody
_PAUSE = (errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
_PAUSE_S = 10.0  # how long a disk that is full, or whose lock does not come free, is left alone
_LOCK_S = 10.0  # how long the lock of others is waited for
_ROOM = 16  # when the folder is full, the oldest files leave until a part of so many is free

_log = logging.getLogger(__name__)


class DiskTier:
    """A folder of blocks; read() and write() are for threads beside the engine's."""

    def __init__(self, folder: str, max_bytes: int, root: bytes) -> None:
        self._top = Path(folder).expanduser() / _TOP
        self._folder = self._top / root.hex()
        self.max_bytes = max_bytes
        self._known: set[bytes] = set()
        self._lost: set[bytes] = set()  # that could not be read, until they are written again
        self.changes: deque[tuple[bytes, bool]] = deque()  # (name, whether it is here now)
        self._lock = threading.Lock()  # of this process; the file's lock is for others
        self.num_corrupt = 0  # files that were torn or altered
        self._warned = False
        self._paused_until = 0.0  # nothing is written before this time
        try:
            self._open()
        except OSError as error:
            problem = error.strerror or str(error)
            raise ModelLoadError(
                f"--kv-offloading disk={folder}: {problem}; give a folder that can be written, and "
                "a size that fits"
            ) from None

    def _open(self) -> None:
        self._top.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._top, self._folder):
            _own_folder(folder)
        os.close(os.open(self._top / "usage", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        probe = self._folder / f".probe-{os.getpid()}"
        os.close(_create(probe))
        probe.unlink()
        with self._usage() as usage:
            files, total = self._scan()
            usage.set(total)
            free = shutil.disk_usage(self._top).free
        if free + usage.value < self.max_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{self.max_bytes / 2**30:.1f} GiB are asked for, but only "
                f"{(free + usage.value) / 2**30:.1f} GiB are free",
            )
        for _, _, path in files:
            if self._is_own(path):
                self._known.add(bytes.fromhex(path.name))

    # What the engine's thread asks.

    def __contains__(self, name: bytes) -> bool:
        """Whether a block is here, as far as is known; another worker may have written it."""
        if name in self._known:
            return True
        return name not in self._lost and self._found(name)

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

    def _found(self, name: bytes) -> bool:
        """Whether a block has a file, which is noted; the last note of a removed one says so."""
        path = self._path(name)
        if not os.path.exists(path):
            return False
        self._note(name, here=True)
        if os.path.exists(path):
            return True
        self._note(name, here=False)  # a writer removed it, and noted that first
        return False

    # What other threads do.

    def write(self, name: bytes, pages: list[Bytes]) -> bool:
        """Write a block; False if there is no room."""
        path = self._path(name)
        if self._found(name):
            return True
        if time.monotonic() < self._paused_until:
            return False
        num_bytes = sum(page.nbytes for page in pages)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._reserve(temporary, num_bytes + _HEADER.size)
            with temporary.open("r+b") as file:
                file.write(_HEADER.pack(_MAGIC, num_bytes, _checksum(name, pages)))
                for page in pages:
                    file.write(page.data)
            self._finish(temporary, path, name)
        except OSError as error:
            self._remove(temporary)
            if error.errno in _PAUSE:
                self._paused_until = time.monotonic() + _PAUSE_S
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

    def measure_rate(self, num_bytes: int) -> float | None:
        """Bytes per second at which one thread reads and checks a file; None if it cannot."""
        page = np.zeros(min(num_bytes, self.max_bytes), np.uint8)
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:  # it has no name
                file.write(page.data)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of memory
                os.lseek(file.fileno(), 0, os.SEEK_SET)
                begin = time.perf_counter()
                whole = _read_into(file.fileno(), page)
                zlib.crc32(page.data)
                seconds = time.perf_counter() - begin
        except OSError:
            return None
        return page.nbytes / max(seconds, 1e-9) if whole else None

    def _use(self, path: Path) -> None:
        """Let a file leave later than those that nobody reads."""
        with suppress(OSError):
            os.utime(path)

    # The bound.

    def _reserve(self, temporary: Path, num_bytes: int) -> None:
        """Make a file for bytes that are about to be written, in place of the oldest files."""
        with self._lock, self._usage() as usage:
            if num_bytes <= self.max_bytes < usage.value + num_bytes:
                usage.set(self._shrink(self.max_bytes - self.max_bytes // _ROOM - num_bytes))
            if usage.value + num_bytes > self.max_bytes:
                raise OSError(errno.ENOSPC, f"{self.max_bytes} bytes have no room for it")
            with open(_create(temporary), "wb") as file:
                file.truncate(num_bytes)
            usage.set(usage.value + num_bytes)

    def _finish(self, temporary: Path, path: Path, name: bytes) -> None:
        """Give a file its name; another worker may have written the same block meanwhile."""
        with self._lock, self._usage() as usage:
            replaced = path.stat().st_size if path.exists() else 0
            temporary.rename(path)
            usage.set(max(0, usage.value - replaced))
            self._note(name, here=True)  # before another writer may remove it, and note that

    def _shrink(self, target: int) -> int:
        """Remove the least recently used files until all take no more than `target`."""
        files, total = self._scan()
        for _, num_bytes, path in sorted(files):
            if total <= max(0, target):
                break
            with suppress(OSError):
                path.unlink(missing_ok=True)
                total -= num_bytes
                if self._is_own(path):
                    self._note(bytes.fromhex(path.name), here=False)
        return total

    def _remove(self, path: Path) -> None:
        with suppress(OSError), self._lock, self._usage() as usage:
            num_bytes = path.stat().st_size
            path.unlink()
            usage.set(max(0, usage.value - num_bytes))

    def _scan(self) -> tuple[list[tuple[int, int, Path]], int]:
        """(when it was used, bytes, path) of each block of all models, and the bytes of all files.

        Files that are being written count; those that nobody writes any more are removed.
        """
        found, total, now = [], 0, time.time()
        for path in _files(self._top):
            with suppress(OSError):
                facts = path.stat()
                if _BLOCK.fullmatch(path.name):
                    found.append((facts.st_mtime_ns, facts.st_size, path))
                elif now - facts.st_mtime > _STALE_S:
                    path.unlink()
                    continue
                total += facts.st_size
        return found, total

    @contextmanager
    def _usage(self) -> Iterator[_Usage]:
        """The count of bytes, while nobody else changes it."""
        with (self._top / "usage").open("r+b") as file:
            _lock(file.fileno())
            yield _Usage(file.fileno())

    def _is_own(self, path: Path) -> bool:
        """Whether a block is of this engine's model."""
        return path.parent.parent == self._folder

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


def _own_folder(folder: Path) -> None:
    """Make a folder that this user alone can read and write, or find it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"{folder} is a link, or belongs to another user")
    folder.chmod(0o700)


def _create(path: Path) -> int:
    """An empty file that this user alone can read."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)


def _lock(fd: int) -> None:
    """Wait for the lock of a file, which a process that was stopped may hold."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, f"another process held the lock for {_LOCK_S:g} s")
        time.sleep(0.005)


def _files(top: Path) -> Iterator[Path]:
    """Blocks, and what is being written; nothing that has another name, or lies behind a link."""
    for folder, _, names in os.walk(top):
        if _FOLDER.fullmatch(folder[len(str(top)) :]):
            for name in names:
                if _BLOCK.fullmatch(name) or _TEMPORARY.fullmatch(name):
                    yield Path(folder, name)


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
