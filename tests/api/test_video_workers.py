"""Videos by worker processes, of which some are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from api.video_app import TOKEN, WAIT_S, VideoApp, in_loop, video_app
from tokenmill.__main__ import run
from tokenmill.core.config import PoolConfig
from tokenmill.workers.pool import WorkerPool

WORKER = [sys.executable, str(Path(__file__).with_name("seeded_videos.py"))]


@asynccontextmanager
async def served(folder: Path, workers: int) -> AsyncIterator[VideoApp]:
    """A server whose videos end when folder / SEED is there."""

    async def spawn(address: str) -> asyncio.subprocess.Process:
        argv = [*WORKER, "--address", address, "--may-end", str(folder)]
        null = asyncio.subprocess.DEVNULL
        return await asyncio.create_subprocess_exec(*argv, stderr=null)

    config = PoolConfig(workers=workers, backoff_s=0.01, heartbeat_s=60.0)
    pool = WorkerPool(spawn, config, max_per_worker=1)
    await pool.start()
    try:
        async with video_app(folder / "videos", pool=pool) as app:
            yield app
    finally:
        await pool.close()


async def worker_of(app: VideoApp, video_id: str) -> int:
    """The process that makes a video."""
    async with asyncio.timeout(WAIT_S):
        while True:
            path = f"/v1/videos/{video_id}/content?variant=thumbnail"
            answer = await app.call("GET", path)
            if answer.status == 200:
                return int(answer.body)
            await asyncio.sleep(0.01)


async def content(app: VideoApp, video_id: str) -> bytes:
    await app.until(lambda: app.record(video_id).is_finished)
    answer = await app.call("GET", f"/v1/videos/{video_id}/content")
    assert answer.status == 200, answer.body
    return answer.body


@in_loop
async def test_the_job_of_a_killed_worker_is_made_by_another_with_the_same_pixels(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, workers=2) as app:
        names = [await app.create(seed=seed) for seed in range(3)]
        first, other = [await worker_of(app, name) for name in names[:2]]
        assert first != other
        assert (await app.get(names[2]))["status"] == "queued"  # it is at no worker that may die
        await app.until(lambda: app.state.jobs.shown(app.record(names[0])).progress > 5)
        os.kill(first, signal.SIGKILL)
        await app.until(lambda: app.pool.num_migrations == 1)
        for seed in range(3):
            (tmp_path / str(seed)).touch()
        for seed, name in enumerate(names):
            assert await content(app, name) == random.Random(seed).randbytes(64)
        metrics = (await app.call("GET", "/metrics")).body.decode()
        assert 'tokenmill_request_migrations_total{model_name="wan-tiny"} 1.0' in metrics


@in_loop
async def test_an_abort_between_steps_frees_the_worker(tmp_path: Path) -> None:
    async with served(tmp_path, workers=1) as app:
        endless, short = await app.create(seed=2), await app.create(seed=3)
        (tmp_path / "3").touch()
        await worker_of(app, endless)
        await app.call("DELETE", f"/v1/videos/{endless}")
        assert await content(app, short) == random.Random(3).randbytes(64)
        assert app.pool.num_open == 0 and app.pool.num_restarts == 0


@in_loop
async def test_workers_are_seen_and_scaled_and_the_queue_goes_to_the_new_one(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, workers=1) as app:
        names = [await app.create() for _ in range(3)]
        view = (await app.call("GET", "/workers")).json
        assert (view["task"], view["num_open"], view["num_held"]) == ("video", 3, 2)
        assert [worker["num_open"] for worker in view["workers"]] == [1]
        wrong = await app.call("POST", "/workers/scale", {}, TOKEN)
        assert (wrong.status, wrong.error["code"]) == (400, "missing_field")
        assert '{"workers": 2}' in wrong.error["message"]
        wrong = await app.call("POST", "/workers/scale", {"decode": 1}, TOKEN)
        assert (wrong.status, wrong.error["param"]) == (400, "decode")
        view = (await app.call("POST", "/workers/scale", {"workers": 2}, TOKEN)).json
        assert [worker["state"] for worker in view["workers"]] == ["ready", "ready"]
        assert await worker_of(app, names[0]) != await worker_of(app, names[1])
        console = ["status", "--url", app.url]
        assert await asyncio.to_thread(run, console) == 0
        for name in names:
            assert (await app.call("DELETE", f"/v1/videos/{name}")).status == 200
