"""The ranking engine: batches of waiting requests through one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from tokenmill.core.requests import End, Request, RequestOutput
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.tasks import Rank, Scores
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    InvalidRequestError,
    ModelLoadError,
    TokenmillError,
)
from tokenmill.models.hstu import RankBatch
from tokenmill.ranking.batch import make_batch
from tokenmill.ranking.model import PendingScores, RankingModel
from tokenmill.ranking.policy import BatchLimits, BatchRate, RankQueue, Waiting
from tokenmill.ranking.rank_figures import RankFigures
from tokenmill.ranking.requests import RankRequest, best_of, check_request, request_of

# What fails one batch only. After anything else the engine is not to be trusted: an error of CUDA
# comes back with every later call, so it is raised and ends the process.
_OF_THE_BATCH = (torch.OutOfMemoryError, MemoryError, TokenmillError)
_WARM_UPS = 3
FEW_CANDIDATES = (1, 2, 4, 5, 16)  # products in fp8 of so few rows have kernels of their own


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    waiting: list[Waiting]
    batch: RankBatch
    scores: PendingScores
    start_ns: int


class RankingEngine:
    """An Engine over a model; one thread calls it.

    `overlapped` has two batches in flight: a step makes and launches one while the GPU runs the one
    before it, and then returns the answers of that one.
    """

    def __init__(
        self,
        model: RankingModel,
        limits: BatchLimits | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        overlapped: bool | None = None,
    ) -> None:
        self.model, self.clock = model, clock
        self.queue = RankQueue(model.spec, limits or BatchLimits())
        self.on_gpu = model.dense.device.type == "cuda"
        self._overlapped = self.on_gpu if overlapped is None else overlapped
        self._in_flight: _Launched | None = None
        self._collected_ns = 0
        self._answers: list[RequestOutput] = []  # of requests that ended outside a step
        self._figures = RankFigures(model.stores)

    def warm_up(self) -> None:
        """Run the largest batch until its kernels are compiled, its memory is taken and its rate
        is known: a step that compiles has none. An error says that it does not fit.
        """
        limits = self.queue.limits
        requests = largest_batch(self.model.spec, limits)
        first = requests[0]
        few = [_first_candidates(first, count) for count in FEW_CANDIDATES]
        for batch in (*([request] for request in few), *[requests] * _WARM_UPS):
            self.queue.meter = BatchRate()
            for request in batch:
                self.submit(request.asked())
            while self.has_work():
                _check_warm(self.step(), limits)
        self._figures = RankFigures(self.model.stores)

    def submit(self, request: Request) -> None:
        """Queue a request; the next step answers one that is wrong or does not fit the queue."""
        try:
            if not isinstance(request.task, Rank):
                problem = "task: this engine scores candidates; the request asks for none"
                raise InvalidRequestError(problem, "task")
            asked = request_of(request)
            check_request(asked, self.model.spec)
            refused = self.queue.add(asked, self.clock())
        except ValueError as wrong:
            refused = End(FinishReason.REJECT, "invalid", str(wrong)).output(request.request_id)
        if refused is not None:
            self._answers.append(refused)

    def abort(self, request_id: str) -> None:
        """End a waiting request; one that runs or has its answer already is left as it is."""
        answer = self.queue.abort(request_id)
        if answer is not None:
            self._answers.append(answer)

    def has_work(self) -> bool:
        return bool(self._answers) or len(self.queue) > 0 or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Run one batch; the answers of its requests, and of those that ended without running.

        Raises what later steps would fail of, too; the engine has ended then.
        """
        batch, late = self.queue.take(self.clock())
        answers, self._answers = self._answers + late, []
        ending, self._in_flight = self._in_flight, None
        if batch:
            launched = self._launch(batch)
            if isinstance(launched, list):
                answers += launched
            elif self._overlapped:
                self._in_flight = launched
            else:
                ending = launched
        if ending is not None:
            answers += self._collect(ending)
        self._figures.ended(answers)
        return answers

    def stats(self) -> EngineStats:
        running = self._in_flight
        return self._figures.stats(len(self.queue), len(running.waiting) if running else 0)

    def _launch(self, waiting: list[Waiting]) -> _Launched | list[RequestOutput]:
        start, requests = self.clock(), [entry.request for entry in waiting]
        try:
            batch = make_batch(requests, self.model.spec, self.model.dense.device)
            return _Launched(waiting, batch, self.model.launch(batch), start)
        except _OF_THE_BATCH as fault:
            return _failed(waiting, fault)

    def _collect(self, launched: _Launched) -> list[RequestOutput]:
        waiting = launched.waiting
        try:
            scores = launched.scores.wait()
        except _OF_THE_BATCH as fault:
            return _failed(waiting, fault)
        now = self.clock()
        # A batch that was launched behind another one has begun when that one was done.
        start_ns = max(launched.start_ns, self._collected_ns)
        run_ns, self._collected_ns = now - start_ns, now
        self.queue.meter.observe(sum(entry.flops for entry in waiting), run_ns)
        self._figures.ran([entry.request for entry in waiting], run_ns)
        rows, normaliser = launched.batch.rows, launched.batch.normaliser
        parts = np.split(scores, rows.candidates[1:-1])
        of_batch = self.model.spec.scaling_seqlen == "batch"
        return [
            _answer(entry, part, normaliser, of_batch, len(waiting), start_ns, run_ns)
            for entry, part in zip(waiting, parts, strict=True)
        ]


def largest_batch(spec: HstuSpec, limits: BatchLimits) -> list[RankRequest]:
    """As many of the longest requests as one batch takes; all of item 0 and user 0."""
    candidates = max(1, min(spec.max_candidates, limits.max_batch_tokens // 2))
    history = max(1, min(spec.max_seq_len, limits.max_batch_tokens) - candidates - 1)
    count = max(1, limits.max_batch_tokens // (history + candidates + 1))
    items, others = np.zeros(history, np.int64), np.zeros(candidates, np.int64)
    return [
        RankRequest(f"warm-up-{index}", 0, items, items, items, others, others)
        for index in range(min(count, limits.max_batch_requests, limits.max_queue_requests))
    ]


def _first_candidates(request: RankRequest, count: int) -> RankRequest:
    few = request.candidate_ids[:count]
    return replace(request, candidate_ids=few, candidate_category_ids=few)


def _check_warm(outputs: list[RequestOutput], limits: BatchLimits) -> None:
    for output in outputs:
        if output.finish_reason is not FinishReason.STOP:
            raise ModelLoadError(
                f"a batch of at most {limits.max_batch_tokens} tokens cannot run: {output.error}"
            )


def _failed(waiting: list[Waiting], fault: Exception) -> list[RequestOutput]:
    end = End(FinishReason.ERROR, "failed", f"the step failed: {type(fault).__name__}: {fault}")
    return [end.output(entry.request.request_id) for entry in waiting]


def _answer(
    waiting: Waiting,
    scores: np.ndarray,
    normaliser: int,
    of_batch: bool,
    batch_size: int,
    start_ns: int,
    run_ns: int,
) -> RequestOutput:
    request, items = waiting.request, None
    if not np.isfinite(scores).all():
        message = "the model gave a score that is not a number; its weights or tables are damaged"
        return End(FinishReason.ERROR, "failed", message).output(request.request_id)
    if request.top_k is not None:
        best = best_of(scores, request.top_k)
        scores, items = scores[best], request.candidate_ids[best].astype("<i8").tobytes()
    found = Scores(
        scores=scores.astype("<f4").tobytes(),
        item_ids=items,
        num_tasks=scores.shape[1],
        num_tokens=request.num_tokens,
        scaling_seqlen=normaliser,
        depends_on_batch=of_batch,
        batch_size=batch_size,
        queue_ms=(start_ns - waiting.arrival_ns) / 1e6,
        run_ms=run_ns / 1e6,
    )
    return RequestOutput(request.request_id, [], finish_reason=FinishReason.STOP, delta=found)
