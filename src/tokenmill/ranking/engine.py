"""The ranking engine: submit, step, abort, stats; every request gets exactly one answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import InvalidRequestError, ModelLoadError, TokenmillError
from tokenmill.models.hstu import RankBatch
from tokenmill.ranking.batch import make_batch
from tokenmill.ranking.model import RankingModel, Scores
from tokenmill.ranking.policy import BatchLimits, RankQueue, StepMeter, Waiting
from tokenmill.ranking.requests import RankFinish, RankOutput, RankRequest, check_request

# What fails one batch only. After anything else the engine is not to be trusted: an error of CUDA
# comes back with every later call, so it is raised and ends the process.
_OF_THE_BATCH = (torch.OutOfMemoryError, MemoryError, TokenmillError)
_WARM_UPS = 3
FEW_CANDIDATES = (1, 2, 4, 5, 16)  # products in fp8 of so few rows have kernels of their own


@dataclass(slots=True)
class RankStats:
    """Counts since the engine was made."""

    num_steps: int = 0
    num_candidates: int = 0  # scored
    num_tokens: int = 0
    run_ns: int = 0
    num_waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by how requests ended


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A batch on its way."""

    waiting: list[Waiting]
    batch: RankBatch
    scores: Scores
    start_ns: int


class RankingEngine:
    """Batches of waiting requests through one model; one caller at a time.

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
        self._answers: list[RankOutput] = []  # of requests that ended outside a step
        self._stats = RankStats()

    def warm_up(self) -> None:
        """Run the largest batch until its kernels are compiled, its memory is taken and its rate
        is known: a step that compiles has none. An error says that it does not fit.
        """
        limits = self.queue.limits
        requests = largest_batch(self.model.spec, limits)
        first = requests[0]
        few = [_first_candidates(first, count) for count in FEW_CANDIDATES]
        for batch in (*([request] for request in few), *[requests] * _WARM_UPS):
            self.queue.meter = StepMeter()
            for request in batch:
                self.submit(request)
            while self.has_work():
                _check_warm(self.step(), limits)
        self._stats = RankStats()

    def submit(self, request: RankRequest) -> None:
        """Queue a request; the next step answers one that is wrong or does not fit the queue."""
        try:
            check_request(request, self.model.spec)
        except InvalidRequestError as wrong:
            name, message = request.request_id, str(wrong)
            refusal = RankOutput(name, RankFinish.REJECT, message=message, code="invalid")
            self._answers.append(refusal)
            return
        refused = self.queue.add(request, self.clock())
        if refused is not None:
            self._answers.append(refused)

    def abort(self, request_id: str) -> None:
        """End a waiting request; one that runs or has its answer already is left as it is."""
        answer = self.queue.abort(request_id)
        if answer is not None:
            self._answers.append(answer)

    def has_work(self) -> bool:
        return bool(self._answers) or len(self.queue) > 0 or self._in_flight is not None

    def step(self) -> list[RankOutput]:
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
        for answer in answers:
            ended = self._stats.finished
            ended[answer.finish] = ended.get(answer.finish, 0) + 1
        return answers

    def stats(self) -> RankStats:
        self._stats.num_waiting = len(self.queue)
        return self._stats

    def _launch(self, waiting: list[Waiting]) -> _Launched | list[RankOutput]:
        start, requests = self.clock(), [entry.request for entry in waiting]
        try:
            batch = make_batch(requests, self.model.spec, self.model.dense.device)
            return _Launched(waiting, batch, self.model.launch(batch), start)
        except _OF_THE_BATCH as fault:
            return _failed(waiting, fault)

    def _collect(self, launched: _Launched) -> list[RankOutput]:
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
        self._count(waiting, run_ns)
        rows, normaliser = launched.batch.rows, launched.batch.normaliser
        parts = np.split(scores, rows.candidates[1:-1])
        of_batch = self.model.spec.scaling_seqlen == "batch"
        return [
            _answer(entry, part, normaliser, of_batch, len(waiting), start_ns, run_ns)
            for entry, part in zip(waiting, parts, strict=True)
        ]

    def _count(self, waiting: list[Waiting], run_ns: int) -> None:
        requests = [entry.request for entry in waiting]
        self._stats.num_steps += 1
        self._stats.run_ns += run_ns
        self._stats.num_candidates += sum(request.num_candidates for request in requests)
        self._stats.num_tokens += sum(request.num_tokens for request in requests)


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


def _check_warm(outputs: list[RankOutput], limits: BatchLimits) -> None:
    for output in outputs:
        if output.finish is not RankFinish.DONE:
            raise ModelLoadError(
                f"a batch of at most {limits.max_batch_tokens} tokens cannot run: {output.message}"
            )


def _failed(waiting: list[Waiting], fault: Exception) -> list[RankOutput]:
    message = f"the step failed: {type(fault).__name__}: {fault}"
    names = [entry.request.request_id for entry in waiting]
    return [RankOutput(name, RankFinish.ERROR, message=message, code="failed") for name in names]


def _answer(
    waiting: Waiting,
    scores: np.ndarray,
    normaliser: int,
    of_batch: bool,
    batch_size: int,
    start_ns: int,
    run_ns: int,
) -> RankOutput:
    name, queued_ns = waiting.request.request_id, start_ns - waiting.arrival_ns
    if not np.isfinite(scores).all():
        message = "the model gave a score that is not a number; its weights or tables are damaged"
        return RankOutput(name, RankFinish.ERROR, message=message, code="failed")
    how = normaliser, of_batch, batch_size, queued_ns, run_ns
    return RankOutput(name, RankFinish.DONE, scores, "", "", *how)
