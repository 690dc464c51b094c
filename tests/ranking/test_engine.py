"""The ranking engine and its batching: one answer each, deadlines, bounds, simulated latency."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.core.requests import RequestOutput
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.tasks import Scores
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.models.hstu import RankBatch
from tokenmill.ranking.batch import to_device
from tokenmill.ranking.engine import RankingEngine, largest_batch
from tokenmill.ranking.policy import BatchLimits, RankQueue
from tokenmill.ranking.requests import RankRequest, scores_of
from tokenmill.ranking.stores.store import EmbeddingError


def named(name: str, history: int = 10, candidates: int = 4, **changes: Any) -> RankRequest:
    return replace(tiny_request(history, candidates), request_id=name, **changes)


def drain(engine: RankingEngine) -> dict[str, RequestOutput]:
    """All answers by id; a second answer to one request fails."""
    found: dict[str, RequestOutput] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.request_id not in found
            found[output.request_id] = output
    return found


def test_answers_are_the_models_and_say_what_they_depend_on() -> None:
    requests = [named("a"), named("b", 30, 20)]
    for scaling in ("batch", 96):
        model = tiny_model(replace(TINY, scaling_seqlen=scaling))
        engine = RankingEngine(model)
        for request in requests:
            engine.submit(request.asked())
        found = drain(engine)
        for request, scores in zip(requests, model.score(requests), strict=True):
            answer = found[request.request_id]
            found_scores = answer.delta
            assert isinstance(found_scores, Scores) and found_scores.batch_size == 2
            np.testing.assert_array_equal(scores_of(answer), scores)
            assert found_scores.depends_on_batch == (scaling == "batch")
            assert found_scores.scaling_seqlen == (51 if scaling == "batch" else 96)
    stats = engine.stats()
    assert stats.num_finished == {"stop": 2} and stats.figures["candidates_total"] == 24


def test_a_batch_is_made_while_the_one_before_it_runs() -> None:
    """Answers come a step later, the same ones; what runs cannot be aborted."""
    model, limits = tiny_model(replace(TINY, scaling_seqlen=96)), BatchLimits(max_batch_requests=1)
    engine = RankingEngine(model, limits, overlapped=True)
    requests = [named(name, 10 + index) for index, name in enumerate("abc")]
    for request in requests:
        engine.submit(request.asked())
    assert engine.step() == []
    engine.abort("a")
    answers = [output for _ in range(3) for output in engine.step()]
    assert [output.request_id for output in answers] == ["a", "b", "c"]
    assert not engine.has_work() and engine.stats().num_steps == 3
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(scores_of(answer), model.score([request])[0], atol=1e-6)


def test_the_next_batch_is_launched_before_a_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches are in flight while a step waits, and it waits for the older one alone."""
    events: list[str] = []
    names = iter("abc")

    class Running:
        def __init__(self) -> None:
            self.name = next(names)
            events.append(f"launch {self.name}")

        def wait(self) -> np.ndarray:
            events.append(f"wait {self.name}")
            return np.zeros((4, 1), np.float32)

    engine = RankingEngine(tiny_model(), BatchLimits(max_batch_requests=1), overlapped=True)
    monkeypatch.setattr(engine.model, "launch", lambda batch: Running())
    for name in "abc":
        engine.submit(named(name).asked())
    assert list(drain(engine)) == ["a", "b", "c"]
    assert events == ["launch a", "launch b", "wait a", "launch c", "wait b", "wait c"]


@pytest.mark.parametrize("overlapped", [False, True])
def test_every_request_gets_exactly_one_answer(overlapped: bool) -> None:
    """Wrong, refused by a full queue, aborted, late, twice submitted, and those that run."""
    now = [0]
    limits = BatchLimits(max_queue_requests=3)
    engine = RankingEngine(tiny_model(), limits, lambda: now[0], overlapped)
    engine.submit(named("wrong", user_id=99).asked())
    engine.submit(named("late", deadline_ns=5).asked())
    engine.submit(named("gone").asked())
    engine.submit(named("runs").asked())
    engine.submit(named("full").asked())
    with pytest.raises(InvalidRequestError, match="request_id: 'runs' is already waiting"):
        engine.queue.add(named("runs"), 0)
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("nobody")
    now[0] = 6
    found = drain(engine)
    ends = {name: str(output.finish_reason) for name, output in found.items()}
    expected = {"wrong": "reject", "late": "abort", "gone": "abort", "runs": "stop"}
    assert ends == expected | {"full": "reject"}
    assert "user_id: 99 is unknown" in (found["wrong"].error or "")
    assert "max_queue_requests" in (found["full"].error or "")
    engine.submit(named("runs").asked())  # its name is free again
    assert set(drain(engine)) == {"runs"}


def test_damaged_weights_are_errors_not_scores() -> None:
    model = tiny_model()
    engine = RankingEngine(model)
    model.dense.tensors["positions"].fill_(torch.nan)  # type: ignore[index]
    engine.submit(named("nan").asked())
    assert drain(engine)["nan"].finish_reason == "error"


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_batch_that_does_not_fit_fails_alone_and_any_other_fault_ends_the_engine(
    overlapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RankingEngine(tiny_model(), overlapped=overlapped)

    def fail_with(fault: Exception) -> None:
        def launch(batch: RankBatch) -> torch.Tensor:
            raise fault

        monkeypatch.setattr(engine.model, "launch", launch)
        engine.submit(named("fails").asked())

    for fault in (torch.OutOfMemoryError("CUDA out of memory"), EmbeddingError("no such row")):
        fail_with(fault)
        found = drain(engine)["fails"]
        assert (found.finish_reason, found.stop_reason) == ("error", "failed")
        assert str(fault) in (found.error or "")
    monkeypatch.undo()
    engine.submit(named("runs").asked())
    assert drain(engine)["runs"].finish_reason == "stop"
    fail_with(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


def test_batches_are_bounded_by_tokens_and_by_the_steps_time() -> None:
    queue = RankQueue(TINY, BatchLimits(max_batch_tokens=45, latency_ms=15))
    for index in range(6):
        assert queue.add(named(str(index)), 0) is None  # 15 tokens each
    assert [w.request.request_id for w in queue.take(0)[0]] == ["0", "1", "2"]
    flops = TINY.flops(10, 4)
    queue.meter.observe(flops, 2.4e6)  # two of them fit a third of 15 ms
    assert [w.request.request_id for w in queue.take(0)[0]] == ["3", "4"]
    refused = queue.add(named("wide", 45, 1), 0)
    assert refused is not None and "max_batch_tokens" in (refused.error or "")


def simulate(limits: BatchLimits, rate: float, count: int) -> list[float]:
    """Latencies in ms of Poisson arrivals at a GPU that needs 0.8 ms a request and 2 ms a step."""
    spec = HstuSpec()
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1e9 / rate, count)).astype(int)
    ids = np.zeros(6714, np.int64)
    one = RankRequest("", 0, ids, ids, ids, ids[:2048], ids[:2048])
    queue, now, coming = RankQueue(spec, limits), 0, 0
    latencies: list[float] = []
    while len(latencies) < count:
        while coming < count and arrivals[coming] <= now:
            queue.add(replace(one, request_id=str(coming)), int(arrivals[coming]))
            coming += 1
        batch, late = queue.take(now)
        assert not late
        if not batch:
            now = int(arrivals[coming])
            continue
        step_ns = 2_000_000 + 800_000 * len(batch)
        now += step_ns
        queue.meter.observe(sum(w.flops for w in batch), step_ns)
        latencies += [(now - w.arrival_ns) / 1e6 for w in batch]
    return latencies


def test_the_limit_holds_in_simulation_and_batches_carry_the_load() -> None:
    """At 1,000 requests/s single ones (2.8 ms each) would pile up; batches keep 99 % in 80 ms."""
    batched = simulate(BatchLimits(), 1000, 3000)
    assert np.percentile(batched, 99) < 80
    single = simulate(BatchLimits(max_batch_requests=1), 1000, 3000)
    assert np.percentile(single, 99) > 1000


def test_a_warm_engine_knows_its_rate_and_has_counted_nothing() -> None:
    """The step that compiled does not count: after it alone all batches would be of one request."""
    limits = BatchLimits(max_batch_tokens=400)
    requests = largest_batch(TINY, limits)
    sizes = {request.num_tokens for request in requests}
    assert len(requests) == 4 and max(sizes) * 4 <= 400 and max(sizes) >= TINY.max_seq_len - 1
    times = iter([0, 10**12, *range(10**12, 10**12 + 1000)])  # the first step took 1,000 s
    engine = RankingEngine(tiny_model(), limits, clock=lambda: next(times))
    engine.warm_up()
    assert 0 < engine.queue.meter.ns_per_flop < 1e-3
    stats = engine.stats()
    assert not stats.num_finished and not any(stats.figures.values()) and not engine.has_work()


def test_a_batch_that_does_not_fit_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: RankBatch) -> None:
        raise torch.OutOfMemoryError("2 GiB are missing")

    engine = RankingEngine(tiny_model(), BatchLimits(max_batch_tokens=400))
    monkeypatch.setattr(engine.model, "launch", fail)
    with pytest.raises(ModelLoadError, match=r"400 tokens .* 2 GiB"):
        engine.warm_up()


@pytest.mark.parametrize("sizes", [[1, 2, 3], [3, 0, 5, 1]])
def test_columns_of_a_batch_are_aligned(sizes: list[int]) -> None:
    columns = [[np.arange(size), np.arange(size // 2)] for size in sizes]
    for column, sent in zip(columns, to_device(columns, "cpu"), strict=True):
        assert sent.tolist() == np.concatenate(column).tolist()
        assert sent.data_ptr() % 16 == 0 or not len(sent)


def test_a_requests_time_is_in_the_queue_or_in_its_batch() -> None:
    """Also the time between the launch of its batch and the end of the one before it."""
    times = itertools.count(0, 5)
    limits = BatchLimits(max_batch_requests=1)
    engine = RankingEngine(tiny_model(), limits, lambda: next(times), overlapped=True)
    for index, name in enumerate("abc"):
        engine.submit(named(name).asked())
        assert next(times) == 10 * index + 5
    while engine.has_work():
        for answer in engine.step():
            came = 10 * "abc".index(answer.request_id)
            assert isinstance(answer.delta, Scores)
            took_ns = 1e6 * (answer.delta.queue_ms + answer.delta.run_ms)
            assert came + took_ns == pytest.approx(engine._collected_ns)
