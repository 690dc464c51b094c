"""The metrics of a server that makes videos."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from tokenmill.api.telemetry.prometheus import Counts, Histogram, ServerMetrics
from tokenmill.api.videos.video_record import VideoRecord
from tokenmill.workers.jobs.job_pool import JobWorkerView

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
        self._restarts = self._migrations = 0
        self.step_s, self.job_s = Histogram(_STEP_SECONDS), Histogram(_JOB_SECONDS)

    def exposition(self, workers: list[JobWorkerView], restarts: int, migrations: int) -> bytes:
        """The text that GET /metrics answers, for these workers and counts."""
        self._workers, self._restarts, self._migrations = workers, restarts, migrations
        return generate_latest(self._registry)

    def count(self, record: VideoRecord) -> None:
        """Count a job that has ended."""
        self.ended[record.status] += 1
        self.job_s.observe((time.time_ns() - record.created_ns) / 1e9)

    def collect(self) -> Iterator[Metric]:
        """All families; called by prometheus_client."""
        states = GaugeMetricFamily(
            "tokenmill_video_jobs", "Jobs by state.", labels=["model_name", "state"]
        )
        for state, count in self.jobs().items():
            states.add_metric([self._model, state], float(count))
        yield states
        steps = GaugeMetricFamily(
            "tokenmill_video_steps",
            "Denoising steps of jobs that have not ended, done or left.",
            labels=["model_name", "state"],
        )
        for state, count in self.steps().items():
            steps.add_metric([self._model, state], float(count))
        yield steps
        stored = GaugeMetricFamily(
            "tokenmill_video_storage_bytes", "Size of finished videos.", labels=["model_name"]
        )
        stored.add_metric([self._model], float(self.stored_bytes()))
        yield stored
        ended: Counts = {(how,): self.ended[how] for how in ("completed", "failed", "deleted")}
        yield self._labelled("videos", "Jobs that ended, by how.", ["result"], ended)
        yield self.step_s.family("tokenmill_video_step_seconds", "Denoising steps.", self._model)
        text = "Asked for to ended."
        yield self.job_s.family("tokenmill_video_job_seconds", text, self._model)
        yield self._counter("worker_restarts", "Times a worker was restarted.", self._restarts)
        text = "Times a request went on at another worker."
        yield self._counter("request_migrations", text, self._migrations)
        yield from self._worker_gauges()
        yield from self.own_counters()

    def _worker_gauges(self) -> Iterator[Metric]:
        labels = ["model_name", "worker"]
        for name, text, value in (
            ("up", "1 while the worker takes requests.", lambda w: w.state == "ready"),
            ("requests", "Requests routed there that have not ended.", lambda w: w.num_open),
            ("busy", "Share of the last minute with something to compute.", lambda w: w.busy),
        ):
            family = GaugeMetricFamily(f"tokenmill_worker_{name}", text, labels=labels)
            for worker in self._workers:
                family.add_metric([self._model, worker.name], float(value(worker)))
            yield family
