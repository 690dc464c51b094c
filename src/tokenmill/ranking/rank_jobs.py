"""The ranking engine as an engine of jobs, for workers: bytes in, bytes out, and its figures."""

from __future__ import annotations

import time
from bisect import bisect_left

import numpy as np

from tokenmill.core.jobs.job_engine import JobOutput
from tokenmill.core.jobs.rank_job import RankJob, RankScores, pack, unpack
from tokenmill.ranking.engine import RankingEngine
from tokenmill.ranking.request_json import best_of
from tokenmill.ranking.requests import Ids, RankFinish, RankOutput, RankRequest

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 160_000)


class RankJobs:
    """A JobEngine over a ranking engine."""

    def __init__(self, engine: RankingEngine) -> None:
        self.engine = engine
        self._open: dict[str, tuple[RankRequest, int | None]] = {}  # with its top_k
        self._batch_requests = _Histogram(_REQUESTS)
        self._batch_tokens = _Histogram(_TOKENS)
        self._num_steps = self._num_tokens = 0
        self._before = self._looked_up()  # by the warm-up

    def submit(self, job_id: str, payload: bytes) -> None:
        """Queue a request; the next step answers one that is wrong."""
        job = unpack(RankJob, payload)
        request = _request(job_id, job)
        self.engine.submit(request)
        self._open[job_id] = request, job.top_k

    def abort(self, job_id: str) -> None:
        self.engine.abort(job_id)

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> list[JobOutput]:
        """Run one batch."""
        outputs = self.engine.step()
        self._observe(outputs)
        return [self._output(output) for output in outputs]

    def stats(self) -> dict[str, float]:
        stats, waiting = self.engine.stats(), len(self.engine.queue)
        figures: dict[str, float] = {
            "num_waiting": waiting,
            "num_running": len(self._open) - waiting,
            "steps_total": stats.num_steps,
            "candidates_total": stats.num_candidates,
            "tokens_total": stats.num_tokens,
            "step_seconds_total": stats.run_ns / 1e9,
            **self._batch_requests.figures("batch_requests"),
            **self._batch_tokens.figures("batch_tokens"),
        }
        for finish in RankFinish:
            figures[f'requests_total{{finish="{finish}"}}'] = stats.finished.get(finish, 0)
        found = self._looked_up().items()
        return figures | {name: count - self._before.get(name, 0) for name, count in found}

    def _looked_up(self) -> dict[str, float]:
        """Keys and bytes of each table by the tier that they came from, the warm-up's included."""
        figures: dict[str, float] = {}
        for table, store in self.engine.model.stores.items():
            stats = store.stats()
            figures[f'embedding_hits_total{{table="{table}"}}'] = stats.num_hits
            for name, by_tier in (("keys", stats.keys_by_tier), ("bytes", stats.bytes_by_tier)):
                for tier, count in by_tier.items():
                    labels = f'{{table="{table}",tier="{tier}"}}'
                    figures[f"embedding_{name}_total{labels}"] = count
        return figures

    def _observe(self, outputs: list[RankOutput]) -> None:
        stats = self.engine.stats()
        if stats.num_steps > self._num_steps:
            size = max(output.batch_size for output in outputs)
            self._batch_requests.observe(size)
            self._batch_tokens.observe(stats.num_tokens - self._num_tokens)
        self._num_steps, self._num_tokens = stats.num_steps, stats.num_tokens

    def _output(self, output: RankOutput) -> JobOutput:
        request, top_k = self._open.pop(output.request_id)
        if output.finish is not RankFinish.DONE:
            return JobOutput(output.request_id, "failed", b"", output.message, output.code)
        scores, items = output.scores, None
        if top_k is not None:
            best = best_of(scores, top_k)
            scores, items = scores[best], request.candidate_ids[best]
        answer = RankScores(
            scores=scores.astype("<f4").tobytes(),
            item_ids=None if items is None else items.astype("<i8").tobytes(),
            num_tasks=scores.shape[1],
            num_tokens=request.num_tokens,
            scaling_seqlen=output.scaling_seqlen,
            depends_on_batch=output.batch_dependent,
            batch_size=output.batch_size,
            queue_ms=output.queued_ns / 1e6,
            run_ms=output.run_ns / 1e6,
        )
        return JobOutput(output.request_id, "done", pack(answer))


class _Histogram:
    """Counts per bucket, as Prometheus has them."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0

    def observe(self, value: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figures(self, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        labels = [*map(str, self._bounds), "+Inf"]
        for bound, count in zip(labels, np.cumsum(self._counts).tolist(), strict=True):
            found[f'{name}_bucket{{le="{bound}"}}'] = count
        return found | {f"{name}_sum": self._sum, f"{name}_count": sum(self._counts)}


def _request(job_id: str, job: RankJob) -> RankRequest:
    late_ns = None if job.timeout_s is None else time.monotonic_ns() + int(job.timeout_s * 1e9)
    return RankRequest(
        request_id=job_id,
        user_id=job.user_id,
        item_ids=_ids(job.item_ids),
        category_ids=_ids(job.category_ids),
        actions=_ids(job.actions),
        candidate_ids=_ids(job.candidate_ids),
        candidate_category_ids=_ids(job.candidate_category_ids),
        timestamps=None if job.timestamps is None else _ids(job.timestamps),
        query_time=job.query_time,
        deadline_ns=late_ns,
    )


def _ids(data: bytes) -> Ids:
    return np.frombuffer(data, "<i8")
