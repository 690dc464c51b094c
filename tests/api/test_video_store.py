"""The store of video jobs: what is left of it when the server ends at any moment."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.video_app import in_loop
from tokenmill.api.videos import video_store
from tokenmill.api.videos.video_record import VideoRecord, new_record
from tokenmill.api.videos.video_store import StoreError, VideoStore
from tokenmill.core.video import VideoParams

PARAMS = VideoParams(size=(32, 16), num_frames=5, seed=7, negative_token_ids=(1, 2))


def record(**more: Any) -> VideoRecord:
    fields = {"prompt": "fox", "prompt_token_ids": [5, 6], "params": PARAMS}
    return new_record("me", "wan", fields | more)


def opened(folder: Path, max_bytes: int = 1000, **limits: Any) -> Any:
    return closing(VideoStore(folder, max_bytes, **limits))


async def complete(store: VideoStore, size: int = 10) -> VideoRecord:
    made = record()
    await store.add(made)
    await store.complete(made, b"v" * size, b"png", {"denoise": 1.5})
    return made


class Crash(BaseException):
    """The power is cut."""


@pytest.fixture
def syscalls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Calls that write, counted; `left` says how many are done before the crash."""
    state = {"left": 10**6, "done": 0}

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if state["left"] == 0:
                raise Crash
            state["left"] -= 1
            state["done"] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(video_store.os, name, call)

    for name in ("open", "fsync", "replace"):
        counted(name)
    yield state


def test_a_crash_at_any_moment_leaves_a_whole_job_or_none(
    tmp_path: Path, syscalls: dict[str, int]
) -> None:
    async def life(folder: Path, left: int) -> tuple[str, str]:
        """Add and complete a job, and crash after so many calls; what had returned by then."""
        with opened(folder) as store:
            made, reached = record(), "nothing"
            syscalls["left"] = left
            try:
                await store.add(made)
                reached = "queued"
                await store.complete(made, b"video", b"png", {})
                reached = "completed"
            except Crash:
                pass
            finally:
                syscalls["left"] = 10**6
            return made.id, reached

    _, reached = asyncio.run(life(tmp_path / "whole", 10**6))
    assert reached == "completed"
    seen = set()
    for left in range(40):
        folder = tmp_path / str(left)
        name, reached = asyncio.run(life(folder, left))
        with opened(folder) as store:
            found = {r.id: r.status for r in store}
            files = {path.name for path in folder.iterdir()} - {"lock"}
            status = found.get(name, "nothing")
            seen.add((reached, status))
            # What the caller was told holds; what it was not told may or may not have happened.
            assert status in {"nothing": ("nothing", "queued")}.get(reached, (reached, "completed"))
            if status == "completed":
                assert store.path(store.record(name)).read_bytes() == b"video"
            assert not [file for file in files if file.endswith(".tmp")]
            assert status != "nothing" or not files
    assert {reached for reached, _ in seen} == {"nothing", "queued", "completed"}


@in_loop
async def test_what_is_torn_is_never_served(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        done, cut, torn, lost = [await complete(store) for _ in range(4)]
        waiting, waited_for = record(), record(is_waited_for=True)
        await store.add(waiting)
        await store.add(waited_for)
    whole = (tmp_path / f"{torn.id}.json").read_bytes()
    (tmp_path / f"{torn.id}.json").write_bytes(whole[:-9])
    (tmp_path / f"{cut.id}.mp4").write_bytes(b"v" * 9)
    (tmp_path / f"{lost.id}.mp4").unlink()
    (tmp_path / f"{done.id}.mp4.tmp").write_bytes(b"half")
    (tmp_path / f"video_{'0' * 32}.mp4").write_bytes(b"of no job")
    (tmp_path / "notes.txt").write_text("of the user")
    with opened(tmp_path) as store:
        found = {r.id: r for r in store}
        assert list(found) == [done.id, cut.id, lost.id, waiting.id]
        statuses = [r.status for r in found.values()]
        assert statuses == ["completed", "queued", "queued", "queued"]  # made again from the seed
        assert found[cut.id].params == PARAMS and found[cut.id].request() == cut.request()
        assert found[waiting.id] == waiting
        names = {path.name for path in tmp_path.iterdir()}
        assert "notes.txt" in names
        assert not any(torn.id in name or waited_for.id in name for name in names)
        assert not any(name.endswith(".tmp") or "0" * 32 in name for name in names)


@in_loop
async def test_the_oldest_finished_videos_make_room(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=100) as store:
        waiting = record()
        await store.add(waiting)
        first, second, third = [await complete(store, 40) for _ in range(3)]
        assert [r.id for r in store] == [waiting.id, second.id, third.id]
        assert store.num_bytes == 80 and not list(tmp_path.glob(f"{first.id}*"))
        large = await complete(store, 150)  # stays until another one is finished
        assert [r.id for r in store] == [waiting.id, large.id]
    with opened(tmp_path, max_bytes=100) as store:
        assert [r.id for r in store] == [waiting.id]
    with opened(tmp_path, max_records=2) as store:
        for _ in range(3):
            await complete(store)
        assert len([r for r in store if r.is_finished]) == 2


@in_loop
async def test_a_full_disk_fails_the_job_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        made = record()
        await store.add(made)
        write = video_store._write_file

        def full(path: Path, data: bytes) -> None:
            if path.suffix == ".mp4":
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, data)

        monkeypatch.setattr(video_store, "_write_file", full)
        await store.complete(made, b"video", b"png", {})
        ended = store.record(made.id)
        assert ended.status == "failed" and ended.error is not None
        assert "No space left on device" in ended.error.message
        monkeypatch.setattr(video_store, "_write_record", lambda *_: full(Path("x.mp4"), b""))
        with pytest.raises(StoreError, match="No space left"):
            await store.add(record())
        assert [r.id for r in store] == [made.id]


@in_loop
async def test_a_job_that_is_deleted_while_its_video_is_written_stays_away(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        made = record()
        await store.add(made)
        await asyncio.gather(store.complete(made, b"video", b"png", {}), store.delete(made.id))
        assert list(store) == [] and {p.name for p in tmp_path.iterdir()} == {"lock"}


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with (
        opened(folder),
        pytest.raises(StoreError, match=r"--video-dir .*another server keeps its videos there"),
    ):
        VideoStore(folder, 1)
    with opened(folder):
        assert folder.stat().st_mode & 0o077 == 0  # prompts and videos are private
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="--video-dir"):
        VideoStore(tmp_path / "file", 1)


def test_records_of_later_versions_have_what_they_need() -> None:
    """A record on disk names each field: those that have a default may be added later."""
    fields = msgspec.structs.fields(VideoRecord)
    required = {f.name for f in fields if f.required}
    assert required == {
        *("id", "owner", "created_ns", "model", "prompt", "prompt_token_ids", "params")
    }
