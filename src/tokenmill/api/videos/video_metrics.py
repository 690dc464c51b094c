"""The metrics of a server that makes videos."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from tokenmill.api.telemetry import figures
from tokenmill.api.telemetry.job_view import JobWorkerView, worker_views
from tokenmill.api.telemetry.prometheus import Histogram, ServerMetrics
from tokenmill.api.videos.video_record import VideoRecord
from tokenmill.workers.pool import WorkerPool

_STEP_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0)
_JOB_SECONDS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)


class VideoMetrics(ServerMetrics):
    """What the front sees of each job."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.jobs: Callable[[], dict[str, int]] = dict  # by state
        self.steps: Callable[[], dict[str, int]] = dict  # of unfinished jobs, done or left
        self.stored_bytes: Callable[[], int] = lambda: 0
        self.ended: Counter[str] = Counter()  # by how: completed, failed or deleted
        self._workers: list[JobWorkerView] = []
        self.num_migrations = 0
        self.step_s, self.job_s = Histogram(_STEP_SECONDS), Histogram(_JOB_SECONDS)

    def render_jobs(self, pool: WorkerPool) -> bytes:
        self._workers = worker_views(pool)
        self.num_worker_restarts, self.num_migrations = pool.num_restarts, pool.num_migrations
        return self.exposition()

    def count(self, record: VideoRecord) -> None:
        self.ended[record.status] += 1
        self.job_s.observe((time.time_ns() - record.created_ns) / 1e9)

    def collect(self) -> Iterator[Metric]:
        yield from self.families((*figures.CALLS, *figures.ANSWERS, *figures.VIDEOS))
        yield from self.by_worker(figures.VIDEO_WORKERS, self._workers)

    def derived(self) -> dict[str, Any]:
        return super().derived() | {
            "jobs": self.jobs(),
            "steps": self.steps(),
            "num_stored_bytes": self.stored_bytes(),
            "ended": {how: self.ended[how] for how in ("completed", "failed", "deleted")},
        }
