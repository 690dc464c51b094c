"""The store of video jobs: what is left of it when the server ends at any moment."""

from __future__ import annotations

import asyncio
import errno
import os
import re
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


def record(owner: str = "me", **more: Any) -> VideoRecord:
    fields = {"prompt": "fox", "prompt_token_ids": [5, 6], "params": PARAMS}
    return new_record(owner, "wan", fields | more)


def opened(folder: Path, max_bytes: int = 10**6, **limits: Any) -> Any:
    return closing(VideoStore(folder, max_bytes, **limits))


async def complete(store: VideoStore, size: int = 10, owner: str = "me") -> VideoRecord:
    made = record(owner)
    await store.add(made)
    await store.complete(made, b"v" * size, b"png", {"denoise": 1.5})
    return made


# What is found after a crash, by what the caller had been told by then.
AFTER = {
    "nothing": ("nothing", "queued"),
    "queued": ("queued", "completed"),
    "completed": ("completed", "nothing"),
    "deleted": ("nothing",),
}


class Crash(BaseException):
    """The power is cut."""


@pytest.fixture
def syscalls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Calls that write are counted; `left` says how many are done before the crash."""
    state = {"left": 10**6}

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if state["left"] == 0:
                raise Crash
            state["left"] -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(video_store.os, name, call)

    for name in ("open", "fsync", "replace", "unlink"):
        counted(name)
    yield state


@in_loop
async def test_each_file_is_on_the_disk_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves follows from this order: data, name, then what builds on it."""
    done: list[tuple[str, str]] = []

    def noted(name: str) -> None:
        real = getattr(os, name)

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if name == "fsync" else target
            done.append((name, Path(path).name.replace(made.id, "ID")))
            return real(target, *args, **kwargs)

        monkeypatch.setattr(video_store.os, name, call)

    def written(kind: str) -> list[tuple[str, str]]:
        name = f"ID.{kind}.tmp"
        return [("fsync", name), ("replace", name), ("fsync", "store")]

    made = record()
    for name in ("fsync", "replace", "unlink"):
        noted(name)
    with opened(tmp_path / "new" / "store") as store:
        assert done == [("fsync", "new"), ("fsync", tmp_path.name)]  # the folders themselves
        done.clear()
        await store.add(made)
        assert done == written("json")
        done.clear()
        await store.complete(made, b"video", b"png", {})
        assert done == [*written("png"), *written("mp4"), *written("json")]
        done.clear()
        await store.delete(made.id)
        removed = [("unlink", f"ID.{kind}") for kind in ("json", "mp4", "png")]
        assert done == [removed[0], ("fsync", "store"), *removed[1:]]


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
                await store.delete(made.id)
                reached = "deleted"
            except Crash:
                pass
            finally:
                syscalls["left"] = 10**6
            return made.id, reached

    _, reached = asyncio.run(life(tmp_path / "whole", 10**6))
    assert reached == "deleted"
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
            assert status in AFTER[reached]
            if status == "completed":
                assert store.path(next(r for r in store if r.id == name)).read_bytes() == b"video"
            assert not [file for file in files if file.endswith(".tmp")]
            assert status != "nothing" or not files
    assert {reached for reached, _ in seen} == set(AFTER)


@in_loop
async def test_what_is_damaged_is_never_served_nor_thrown_away(tmp_path: Path) -> None:
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
        kept = {f"{torn.id}.{kind}" for kind in ("json.damaged", "mp4", "png")}
        assert {name for name in names if torn.id in name} == kept
        assert not any(waited_for.id in name for name in names)
        assert not any(name.endswith(".tmp") or "0" * 32 in name for name in names)


@in_loop
async def test_a_record_of_another_version_is_kept_with_its_video(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        made = await complete(store)
    path = tmp_path / f"{made.id}.json"
    later = path.read_bytes().replace(b'"completed"', b'"archived"')
    path.write_bytes(later)
    for _ in range(2):  # nor does the next start remove it
        with opened(tmp_path) as store:
            assert list(store) == []
        assert path.with_suffix(".mp4").is_file() and path.with_suffix(".png").is_file()
        assert (tmp_path / f"{made.id}.json.damaged").read_bytes() == later
    path.mkdir()  # any other fault of the disk
    with pytest.raises(StoreError, match=rf"--video-dir.*{made.id}\.json: Is a directory"):
        VideoStore(tmp_path, 1)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("video_*"))


@in_loop
async def test_the_oldest_finished_videos_make_room(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=100_000) as store:
        first, second, third = [await complete(store, 40_000) for _ in range(3)]
        assert [r.id for r in store] == [second.id, third.id]
        assert store.num_bytes == size_of(tmp_path) > 80_000  # with records and pictures
        assert not list(tmp_path.glob(f"{first.id}*"))
        waiting = record()
        await store.add(waiting)
        with store.pinned(second.id):  # it is being sent
            fourth = await complete(store, 40_000)
            assert [r.id for r in store] == [second.id, waiting.id, fourth.id]
        large = await complete(store, 150_000)  # stays until another one is finished
        assert [r.id for r in store] == [waiting.id, large.id]
    with opened(tmp_path, max_bytes=100_000) as store:
        assert [r.id for r in store] == [waiting.id]
    with opened(tmp_path, max_records=2) as store:
        for _ in range(3):
            await complete(store)
        assert len([r for r in store if r.is_finished]) == 2


@in_loop
async def test_an_owner_with_many_videos_pushes_out_its_own(tmp_path: Path) -> None:
    for limits in ({"max_bytes": 100_000}, {"max_records": 4}):
        folder = tmp_path / next(iter(limits))
        with opened(folder, **limits) as store:
            first = await complete(store, 20_000, "one")
            many = [await complete(store, 20_000, "two") for _ in range(8)]
            found = [r.id for r in store]
            assert found == [first.id, *(r.id for r in many[1 - len(found) :])]
            await complete(store, 20_000, "one")
            assert first.id in store and many[-1].id in store


@in_loop
async def test_a_full_disk_fails_the_job_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        made = record()
        await store.add(made)
        sync, full = os.fsync, ".mp4"

        def fsync(descriptor: int) -> None:
            if full in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        monkeypatch.setattr(video_store.os, "fsync", fsync)
        await store.complete(made, b"video", b"png", {})
        (ended,) = [record for record in store if record.id == made.id]
        assert ended.status == "failed" and ended.error is not None
        says = r"No space left on device; free space .* --video-dir, or delete videos"
        assert re.search(says, ended.error.message)
        full = ".json"
        with pytest.raises(StoreError, match=says):
            await store.add(record())
        assert [r.id for r in store] == [made.id]
        assert {path.name for path in tmp_path.iterdir()} == {"lock", f"{made.id}.json"}


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
