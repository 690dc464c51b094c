"""Video jobs on disk: a server that stops or is killed loses no finished video and no job.

Of each job there is a record (ID.json) and, once it is completed, its video (ID.mp4) and a picture
of it (ID.png). A file is written under another name, flushed to the disk and renamed, the record
last: whatever a crash leaves behind is either whole or not there. A record is removed first, and
one that this version cannot read is kept as ID.json.damaged beside its video.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from tokenmill.api.errors import ApiError
from tokenmill.api.videos.video_record import VideoError, VideoRecord
from tokenmill.core.types import TokenmillError

MAX_RECORDS = 10_000  # finished ones; each is held in memory, too
_NAME = re.compile(r"(video_[0-9a-f]{32})\.(json|mp4|png)(\.tmp)?")
_MAKE_ROOM = "free space on the disk of --video-dir, or delete videos"

_log = logging.getLogger(__name__)
T = TypeVar("T")


class StoreError(TokenmillError):
    """The folder of the jobs cannot be used; the message says why."""


class VideoStore:
    """The jobs of one server, oldest first. One thread of its own writes files, in order."""

    def __init__(self, folder: Path, max_bytes: int, max_records: int = MAX_RECORDS) -> None:
        self.folder, self._max_bytes, self._max_records = folder, max_bytes, max_records
        self._lock = _locked(folder)
        self._records, self._pins = _load(folder), Counter[str]()
        self._unpinned_last: set[str] = set()  # deleted ones whose files are still being sent
        finished = [record.id for record in self._records.values() if record.is_finished]
        self._sizes = {name: _size(folder, name) for name in finished}  # of all files of each
        self._writer = ThreadPoolExecutor(1, "video-store")
        _remove_all(folder, self._take_surplus())

    def close(self) -> None:
        """Finish what is being written, and let another server have the folder."""
        self._writer.shutdown()
        os.close(self._lock)

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes.values())

    def __iter__(self) -> Iterator[VideoRecord]:
        return iter(self._records.values())

    def __contains__(self, video_id: str) -> bool:
        return video_id in self._records

    def get_or_none(self, video_id: str) -> VideoRecord | None:
        return self._records.get(video_id)

    def get(self, video_id: str, owner: str) -> VideoRecord:
        """The job of this owner; 404 where there is none."""
        record = self._records.get(video_id)
        if record is None or record.owner != owner:
            message = f"video_id: there is no video {video_id[:100]!r}"
            raise ApiError(404, message, "video_id", "video_not_found")
        return record

    def path(self, record: VideoRecord, kind: str = "mp4") -> Path:
        return self.folder / f"{record.id}.{kind}"

    async def add(self, record: VideoRecord) -> None:
        """Keep a new job; StoreError where it cannot be written."""
        self._records[record.id] = record
        try:
            await self._write(lambda: _write_record(self.folder, record))
        except OSError as error:
            self._records.pop(record.id, None)
            raise StoreError(_unstored("the job", error)) from None

    async def complete(
        self, record: VideoRecord, video: bytes, picture: bytes, seconds: dict[str, float]
    ) -> VideoRecord:
        """Keep the video of a job; one that cannot be written fails the job."""
        done = msgspec.structs.replace(
            record,
            status="completed",
            completed_ns=time.time_ns(),
            num_bytes=len(video),
            seconds_of_parts=seconds,
        )

        def write() -> int:
            try:
                _write_file(self.path(record, "png"), picture)
                _write_file(self.path(record), video)
                return len(picture) + len(video) + _write_record(self.folder, done)
            except OSError:
                _unlink(self.path(record, kind) for kind in ("mp4", "png"))
                raise

        try:
            size = await self._write(write)
        except OSError as error:
            problem = VideoError(code="storage_failed", message=_unstored("the video", error))
            return await self.fail(record, problem)
        return await self._finish(done, size)

    async def fail(self, record: VideoRecord, error: VideoError) -> VideoRecord:
        done = msgspec.structs.replace(
            record, status="failed", completed_ns=time.time_ns(), error=error
        )
        size = 0
        with contextlib.suppress(OSError):  # on a full disk it runs again after a restart
            size = await self._write(lambda: _write_record(self.folder, done))
        return await self._finish(done, size)

    async def delete(self, video_id: str) -> None:
        """Forget a job and its files; one that is gone already stays away.

        Files that are being sent go when they have been sent, or with the next start.
        """
        self._forget(video_id)
        remove = _remove
        if video_id in self._pins:
            self._unpinned_last.add(video_id)
            remove = _remove_record
        try:
            await self._write(lambda: remove(self.folder, video_id))
        except OSError as error:
            problem = f"the files of {video_id} cannot be removed: {error.strerror or error}"
            raise StoreError(problem) from None

    @contextlib.contextmanager
    def pinned(self, video_id: str) -> Iterator[None]:
        """This video has its files while the block runs, even if it is deleted meanwhile."""
        self._pins[video_id] += 1
        try:
            yield
        finally:
            self._pins -= Counter([video_id])
            if video_id in self._unpinned_last and video_id not in self._pins:
                self._unpinned_last.remove(video_id)
                self._writer.submit(_remove_all, self.folder, [video_id])

    async def _finish(self, done: VideoRecord, size: int) -> VideoRecord:
        gone = [done.id]  # deleted meanwhile
        if done.id in self._records:
            self._records[done.id], self._sizes[done.id] = done, size
            gone = self._take_surplus(done.id)
        if gone:
            await self._write(lambda: _remove_all(self.folder, gone))
        return done

    def _forget(self, video_id: str) -> None:
        self._records.pop(video_id, None)
        self._sizes.pop(video_id, None)

    def _take_surplus(self, kept: str = "") -> list[str]:
        """Forget the jobs that have to make room; the files of these are to be removed."""
        gone = self._surplus({kept, *self._pins})
        for name in gone:
            _log.info(f"video storage is full (--video-storage): {name} is removed")
            self._forget(name)
        return gone

    def _surplus(self, kept: set[str]) -> list[str]:
        """The oldest finished jobs beyond the limits, first those of owners over an equal share."""
        finished = [self._records[name] for name in self._sizes]
        num_bytes, num_records = Counter[str](), Counter(record.owner for record in finished)
        for record in finished:
            num_bytes[record.owner] += self._sizes[record.id]
        usage = ((num_bytes, self._max_bytes), (num_records, self._max_records))
        num_owners, gone = max(1, len(num_records)), []
        finished.sort(key=lambda record: record.completed_ns or 0)
        for share in (1 / num_owners, 0.0):
            for record in finished:
                if record.id in kept:
                    continue
                if any(n.total() > most and n[record.owner] > share * most for n, most in usage):
                    gone.append(record.id)
                    kept.add(record.id)
                    num_bytes[record.owner] -= self._sizes[record.id]
                    num_records[record.owner] -= 1
        return gone

    async def _write(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)


def _unstored(what: str, error: OSError) -> str:
    return f"{what} cannot be stored: {error.strerror or error}; {_MAKE_ROOM}"


def _locked(folder: Path) -> int:
    """Make the folder and hold it; StoreError where another server has it."""
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in missing:
            _sync(path.parent)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"--video-dir {folder}: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        problem = "another server keeps its videos there; give each its own folder"
        raise StoreError(f"--video-dir {folder}: {problem}") from None
    return lock


def _load(folder: Path) -> dict[str, VideoRecord]:
    """All records that can be read, oldest first; what a crash left half written is removed."""
    try:
        paths = [path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name)]
        records = [r for path in paths if path.suffix == ".json" and (r := _read(path)) is not None]
        _unlink(path for path in paths if path.suffix == ".tmp" or not _has_record(path))
    except OSError as error:
        path = error.filename or folder
        raise StoreError(f"--video-dir: {path}: {error.strerror or error}") from None
    return {r.id: r for r in sorted(records, key=lambda record: record.created_ns)}


def _has_record(path: Path) -> bool:
    return any(path.with_suffix(end).exists() for end in (".json", ".json.damaged"))


def _read(path: Path) -> VideoRecord | None:
    """The record of a file; None for one that cannot be read, or whose waiting call is gone."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=VideoRecord)
        if f"{record.id}.json" != path.name:
            raise ValueError(f"it is of {record.id}")
    except ValueError as error:  # msgspec's are ValueErrors, too
        damaged = path.with_name(path.name + ".damaged")
        os.replace(path, damaged)
        _log.warning(f"{damaged}: this version cannot read the record, and keeps it so ({error})")
        return None
    if record.is_waited_for and not record.is_finished:
        path.unlink()
        return None
    if record.status == "completed" and not _is_whole(path.with_suffix(".mp4"), record):
        _log.warning(f"{path}: its video is damaged; it is made again from its seed")
        unfinished = {"status": "queued", "completed_ns": None, "num_bytes": 0}
        return msgspec.structs.replace(record, **unfinished)
    return record


def _is_whole(path: Path, record: VideoRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.num_bytes


def _size(folder: Path, video_id: str) -> int:
    paths = (folder / f"{video_id}.{kind}" for kind in ("json", "mp4", "png"))
    return sum(path.stat().st_size for path in paths if path.exists())


def _write_record(folder: Path, record: VideoRecord) -> int:
    """Write a record; how many bytes it has."""
    data = msgspec.json.encode(record)
    _write_file(folder / f"{record.id}.json", data)
    return len(data)


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, whatever happens."""
    target = path.with_name(path.name + ".tmp")
    try:
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(target, path)
    except BaseException:
        _unlink([target])
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path, video_id: str) -> None:
    """Remove a job for good: its record first, since files without one are removed at a start."""
    _remove_record(folder, video_id)
    _unlink(folder / f"{video_id}.{kind}" for kind in ("mp4", "png"))


def _remove_record(folder: Path, video_id: str) -> None:
    _unlink([folder / f"{video_id}.json"])
    _sync(folder)


def _remove_all(folder: Path, video_ids: Iterable[str]) -> None:
    """Remove jobs; one whose files stay is there again after a restart."""
    for video_id in video_ids:
        try:
            _remove(folder, video_id)
        except OSError as error:
            _log.warning(f"{folder}: {video_id} cannot be removed: {error.strerror or error}")


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
