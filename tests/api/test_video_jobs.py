"""The jobs of a video server when ends, deletions and the server's own end meet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.video_app import WAIT_S, FakePool, in_loop
from tokenmill.api.errors import ApiError
from tokenmill.api.videos import video_jobs
from tokenmill.api.videos.video_jobs import VideoJobs
from tokenmill.api.videos.video_metrics import VideoMetrics
from tokenmill.api.videos.video_record import VideoRecord, new_record
from tokenmill.api.videos.video_store import VideoStore
from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import FinishReason
from tokenmill.core.video import VideoParams

PARAMS = VideoParams(size=(32, 16), num_frames=5, negative_token_ids=(1, 2))


def record(owner: str = "me", **more: Any) -> VideoRecord:
    fields = {"prompt": "fox", "prompt_token_ids": [5, 6], "params": PARAMS}
    return new_record(owner, "wan", fields | more)


@contextmanager
def opened(
    folder: Path, num_ready: int = 2, max_bytes: int = 10**6, **limits: Any
) -> Iterator[tuple[VideoJobs, FakePool]]:
    store, pool = VideoStore(folder, max_bytes), FakePool(num_ready)
    try:
        yield VideoJobs(pool, store, VideoMetrics("wan"), 16, **limits), pool
    finally:
        store.close()


async def created(jobs: VideoJobs, count: int = 1) -> list[VideoRecord]:
    records = [record() for _ in range(count)]
    for made in records:
        await jobs.create(made)
    return records


async def ended(jobs: VideoJobs, made: VideoRecord) -> VideoRecord:
    async with asyncio.timeout(WAIT_S):
        return await jobs.wait(made)


@in_loop
async def test_jobs_that_end_at_once_make_room_and_end(tmp_path: Path) -> None:
    with opened(tmp_path, num_ready=4, max_bytes=63_000) as (jobs, pool):
        *old, large, small = await created(jobs, 4)
        for made in old:
            pool.done(made.id, b"v" * 25_000)
            await ended(jobs, made)
        pool.done(large.id, b"v" * 40_000)  # both old ones have to go
        pool.done(small.id, b"v" * 20_000)  # by now the second one alone
        assert [(await ended(jobs, made)).status for made in (large, small)] == ["completed"] * 2
        assert [r.id for r in jobs.store] == [large.id, small.id]


@in_loop
async def test_a_job_whose_end_cannot_be_kept_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as (jobs, pool):
        odd, lost = await created(jobs, 2)
        end = RequestOutput(odd.id, [], finish_reason=FinishReason.STOP)
        pool.open.pop(odd.id).put(0, end)  # without a video
        failed = await ended(jobs, odd)
        assert failed.error is not None and "the job ended: stop" in failed.error.message

        async def fault(*_: object) -> None:
            raise RuntimeError("a fault")

        monkeypatch.setattr(jobs.store, "complete", fault)
        pool.done(lost.id)
        with pytest.raises(ApiError) as told:
            await ended(jobs, lost)
        assert told.value.status == 500
        assert await created(jobs, 16)  # no place is lost


@in_loop
async def test_jobs_that_came_before_the_old_ones_are_sent_once(tmp_path: Path) -> None:
    with opened(tmp_path) as (jobs, pool):
        (made,) = await created(jobs)
        assert await jobs.resume("wan") == 1
        assert list(pool.open) == [made.id]
        pool.done(made.id)
        assert (await ended(jobs, made)).status == "completed"


@in_loop
async def test_a_job_may_be_deleted_while_it_is_taken(tmp_path: Path) -> None:
    with opened(tmp_path) as (jobs, pool):
        made = record()
        create = asyncio.create_task(jobs.create(made))
        while made.id not in jobs.store:
            await asyncio.sleep(0)
        await jobs.delete(made)
        with pytest.raises(ApiError) as told:
            await create
        assert told.value.status == 404
        (other,) = await created(jobs)
        assert list(pool.open) == [other.id]


@in_loop
async def test_the_worker_of_a_deleted_job_is_free_before_its_files_are_gone(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, num_ready=1) as (jobs, pool):
        first, second = await created(jobs, 2)
        deleted = asyncio.create_task(jobs.delete(first))
        await asyncio.sleep(0)
        assert pool.aborted == [first.id] and list(pool.open) == [second.id]
        await deleted


@in_loop
async def test_sending_goes_on_after_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_jobs, "TICK_S", 0.001)
    with opened(tmp_path, num_ready=0) as (jobs, pool):
        (made,) = await created(jobs)
        running = asyncio.create_task(jobs.run())
        send = jobs._send
        faults = iter([RuntimeError("a fault")])

        def once() -> None:
            for fault in faults:
                raise fault
            send()

        monkeypatch.setattr(jobs, "_send", once)
        pool.num_ready = 1
        async with asyncio.timeout(WAIT_S):
            while made.id not in pool.open:
                await asyncio.sleep(0.001)
        running.cancel()


@in_loop
async def test_a_server_that_closes_takes_no_job(tmp_path: Path) -> None:
    with opened(tmp_path) as (jobs, _):
        late = record(is_waited_for=True)
        create = asyncio.create_task(jobs.create(late))  # it comes first, and ends with the server
        await asyncio.sleep(0)
        await jobs.close()
        await create
        for call in (ended(jobs, late), jobs.create(record())):
            with pytest.raises(ApiError) as told:
                await call
            assert (told.value.status, told.value.code) == (503, "shutdown")
