"""Video jobs on disk: a server that stops or is killed loses no finished video and no job.

Of each job there is a record (ID.json) and, once it is completed, its video (ID.mp4) and a picture
of it (ID.png). A file is written under another name, flushed to the disk and renamed, the record
last: whatever a crash leaves behind is either whole or not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from tokenmill.api.errors import ApiError
from tokenmill.api.videos.video_record import VideoError, VideoRecord
from tokenmill.core.types import TokenmillError

MAX_RECORDS = 10_000  # finished ones; each is held in memory, too
_NAME = re.compile(r"(video_[0-9a-f]{32})\.(json|mp4|png)(\.tmp)?")

_log = logging.getLogger(__name__)
T = TypeVar("T")


class StoreError(TokenmillError):
    """The folder of the jobs cannot be used; the message says why."""


class VideoStore:
    """The jobs of one server, oldest first. One thread of its own writes files, in order."""

    def __init__(self, folder: Path, max_bytes: int, max_records: int = MAX_RECORDS) -> None:
        self.folder, self._max_bytes, self._max_records = folder, max_bytes, max_records
        self._lock = _locked(folder)
        self._records = {record.id: record for record in _load(folder)}
        self._writer = ThreadPoolExecutor(1, "video-store")
        for name in self._surplus():
            _remove(folder, self._records.pop(name).id)

    def close(self) -> None:
        """Finish what is being written, and let another server have the folder."""
        self._writer.shutdown()
        os.close(self._lock)

    @property
    def num_bytes(self) -> int:
        """Of all finished videos."""
        return sum(record.num_bytes for record in self._records.values())

    def __iter__(self) -> Iterator[VideoRecord]:
        return iter(self._records.values())

    def __contains__(self, video_id: str) -> bool:
        return video_id in self._records

    def record(self, video_id: str) -> VideoRecord:
        """A job that is there."""
        return self._records[video_id]

    def get(self, video_id: str, owner: str) -> VideoRecord:
        """The job of this owner; 404 where there is none."""
        record = self._records.get(video_id)
        if record is None or record.owner != owner:
            message = f"video_id: there is no video {video_id[:100]!r}"
            raise ApiError(404, message, "video_id", "video_not_found")
        return record

    def path(self, record: VideoRecord, kind: str = "mp4") -> Path:
        """A file of a job."""
        return self.folder / f"{record.id}.{kind}"

    async def add(self, record: VideoRecord) -> None:
        """Keep a new job; StoreError where it cannot be written."""
        self._records[record.id] = record
        try:
            await self._write(lambda: _write_record(self.folder, record))
        except OSError as error:
            self._records.pop(record.id, None)
            raise StoreError(f"the job cannot be stored: {error.strerror or error}") from None

    async def complete(
        self, record: VideoRecord, video: bytes, picture: bytes, seconds: dict[str, float]
    ) -> None:
        """Keep the video of a job; one that cannot be written fails the job."""
        done = msgspec.structs.replace(
            record,
            status="completed",
            completed_ns=time.time_ns(),
            num_bytes=len(video),
            seconds_of_parts=seconds,
        )

        def write() -> None:
            _write_file(self.path(record, "png"), picture)
            _write_file(self.path(record), video)
            _write_record(self.folder, done)

        try:
            await self._write(write)
        except OSError as error:
            why = f"the video cannot be stored: {error.strerror or error}"
            await self.fail(record, VideoError(code="storage_failed", message=why))
            return
        await self._finish(done)

    async def fail(self, record: VideoRecord, error: VideoError) -> None:
        """Keep why a job has no video."""
        done = msgspec.structs.replace(
            record, status="failed", completed_ns=time.time_ns(), error=error
        )
        with contextlib.suppress(OSError):  # on a full disk it runs again after a restart
            await self._write(lambda: _write_record(self.folder, done))
        await self._finish(done)

    async def delete(self, video_id: str) -> None:
        """Forget a job and its files."""
        del self._records[video_id]
        await self._write(lambda: _remove(self.folder, video_id))

    async def _finish(self, done: VideoRecord) -> None:
        if done.id not in self._records:  # deleted meanwhile
            await self._write(lambda: _remove(self.folder, done.id))
            return
        self._records[done.id] = done
        for name in self._surplus(done.id):
            _log.info(f"video storage is full (--video-storage): {name} is removed")
            await self.delete(name)

    def _surplus(self, kept: str = "") -> list[str]:
        """The oldest finished jobs beyond the limits; the one that has just ended stays."""
        finished = [r for r in self._records.values() if r.is_finished and r.id != kept]
        finished.sort(key=lambda record: record.completed_ns or 0)
        num_bytes, count, gone = self.num_bytes, len(finished) + bool(kept), []
        for record in finished:
            if num_bytes <= self._max_bytes and count <= self._max_records:
                break
            num_bytes, count = num_bytes - record.num_bytes, count - 1
            gone.append(record.id)
        return gone

    async def _write(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)


def _locked(folder: Path) -> int:
    """Make the folder and hold it; StoreError where another server has it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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


def _load(folder: Path) -> list[VideoRecord]:
    """All whole records, oldest first; torn ones and files without a record are removed."""
    records = [r for path in sorted(folder.glob("video_*.json")) if (r := _read(path)) is not None]
    known = {record.id for record in records}
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found and (found[3] or found[1] not in known):
            path.unlink(missing_ok=True)
    return sorted(records, key=lambda record: record.created_ns)


def _read(path: Path) -> VideoRecord | None:
    """The record of a file; None for one that is torn, or whose waiting call is gone."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=VideoRecord)
        if f"{record.id}.json" != path.name or not _NAME.fullmatch(path.name):
            raise ValueError(record.id)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        _log.warning(f"{path}: the record is damaged and dropped ({error})")
        return None
    if record.is_waited_for and not record.is_finished:
        return None
    if record.status == "completed" and not _is_whole(path.with_suffix(".mp4"), record):
        _log.warning(f"{path}: its video is damaged; it is made again from its seed")
        unfinished = {"status": "queued", "completed_ns": None, "num_bytes": 0}
        return msgspec.structs.replace(record, **unfinished)
    return record


def _is_whole(path: Path, record: VideoRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.num_bytes


def _write_record(folder: Path, record: VideoRecord) -> None:
    _write_file(folder / f"{record.id}.json", msgspec.json.encode(record))


def _write_file(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, whatever happens."""
    target = path.with_name(path.name + ".tmp")
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(target, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _remove(folder: Path, video_id: str) -> None:
    for kind in ("json", "mp4", "png"):
        (folder / f"{video_id}.{kind}").unlink(missing_ok=True)
