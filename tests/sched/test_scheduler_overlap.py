"""Each rule of the overlapped loop: schedule(n + 1), launch, update(n), advance(n + 1)."""

from __future__ import annotations

from typing import Any

import pytest

from fake_runner import FakeRunner, Launched, expected
from scheduler_cases import VARIANTS, distinct, make, many_requests, request, step
from scheduler_integrity import check_scheduler
from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams, StepResult
from tokenmill.sched.scheduler import Batch, Scheduler
from tokenmill.sched.sequence import PENDING


def overlapped(scheduler: Scheduler, room: int = 10**6) -> list[RequestOutput]:
    """Run to the end, one batch ahead; steps of more than `room` tokens run out of memory."""
    runner = FakeRunner(scheduler.pool.num_blocks, scheduler.pool.block_size)
    outputs: list[RequestOutput] = []
    flying: tuple[Batch, Launched] | None = None
    while scheduler.has_work() or flying is not None:
        batch = scheduler.schedule(0)
        fits = 0 < batch.num_tokens <= room
        launched = runner.launch(batch) if fits else None
        if flying is not None:
            outputs += scheduler.update(flying[0], flying[1].wait())
        flying = None
        if launched is not None:
            scheduler.advance(batch)
            flying = batch, launched
        elif batch.items:
            outputs += scheduler.preempt(batch, "out of memory")
        check_scheduler(scheduler)
    return outputs


CHUNKED = [variant for variant in VARIANTS if variant.get("chunked_prefill", True)]


@pytest.mark.parametrize(
    ("variant", "room"), [(v, 10**6) for v in VARIANTS] + [(v, 2) for v in CHUNKED]
)
def test_same_answer_overlapped(variant: dict[str, Any], room: int) -> None:
    scheduler = make(**variant)
    requests = many_requests()
    for req in requests:
        scheduler.add(req)
    got: dict[str, list[int]] = {req.request_id: [] for req in requests}
    for output in overlapped(scheduler, room):
        got[output.request_id] += output.token_ids
    assert got == {req.request_id: expected(req, 8192, 10**6)[0] for req in requests}
    assert scheduler._budget <= room and scheduler.pool.num_used == 0


def test_preempt_halves_the_step_until_it_cannot() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(distinct("a", 6))
    for num_tokens in (6, 3, 1):
        batch = scheduler.schedule(0)
        assert batch.num_tokens == num_tokens
        outputs = scheduler.preempt(batch, "out of memory")
        check_scheduler(scheduler)
    assert [(o.finish_reason, o.error) for o in outputs] == [(FinishReason.ERROR, "out of memory")]
    assert not scheduler.has_work() and scheduler.pool.num_used == 0


def test_a_halved_step_grows_again() -> None:
    scheduler = make(num_blocks=512, max_num_batched_tokens=64, max_model_len=2048)
    scheduler.add(distinct("a", 64))
    scheduler.preempt(scheduler.schedule(0), "out of memory")
    assert step(scheduler) == {"a": 32}
    while scheduler.stats().num_steps % 256:
        step(scheduler)
    scheduler.add(distinct("b", 64))
    assert step(scheduler) == {"a": 1, "b": 63}


def test_a_whole_prompt_out_of_memory_ends_and_others_go_on() -> None:
    scheduler = make(chunked_prefill=False, max_num_batched_tokens=8)
    scheduler.add(distinct("a", 20))
    (output,) = scheduler.preempt(scheduler.schedule(0), "out of memory")
    assert output.request_id == "a" and output.error == "out of memory"
    scheduler.add(distinct("b", 8))
    assert step(scheduler) == {"b": 8}


def test_phases_out_of_order_are_refused() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    first = scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="before update"):
        scheduler.schedule(0)
    scheduler.advance(first)
    second = scheduler.schedule(0)
    assert [num_new for _, num_new in second.items] == [1]
    with pytest.raises(RuntimeError, match="before update"):
        scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="advance"):
        scheduler.advance(second)
    scheduler.update(first, StepResult([[5]]))
    scheduler.advance(second)
    assert scheduler._queues.get("a").token_ids == [1, 1, 1, 1, 5, PENDING]


def test_slots_are_reused() -> None:
    scheduler = make(max_num_seqs=2)
    for i in range(20):
        scheduler.add(distinct(f"r{i}", 4, SamplingParams(max_tokens=1 + i % 3)))
    assert len(overlapped(scheduler)) > 20
    assert scheduler._ledger.num_slots <= 4


def test_end_of_a_launched_request_keeps_its_blocks_for_both_batches() -> None:
    scheduler = make()
    scheduler.add(distinct("a", 4))
    first = scheduler.schedule(0)
    scheduler.advance(first)
    second = scheduler.schedule(0)
    seq = second.items[0][0]
    scheduler.abort("a")
    assert scheduler.update(first, StepResult([[5]])) == []
    assert seq.block_ids and seq.slot == 0
    scheduler.advance(second)
    assert scheduler.update(second, StepResult([[5]])) == []
    assert seq.block_ids == [] and scheduler.pool.num_used == 0


def test_length_is_known_ahead_and_a_stop_one_step_late() -> None:
    scheduler = make()
    scheduler.add(distinct("length", 4, SamplingParams(max_tokens=1, ignore_eos=True)))
    scheduler.add(distinct("stop", 4, SamplingParams(max_tokens=9)))
    first = scheduler.schedule(0)
    scheduler.advance(first)
    second = scheduler.schedule(0)
    assert [seq.request_id for seq, _ in second.items] == ["stop"]
    ends = scheduler.update(first, StepResult([[0], [0]]))
    assert [(o.token_ids, o.finish_reason) for o in ends] == [
        ([0], FinishReason.LENGTH),
        ([0], FinishReason.STOP),
    ]
    scheduler.advance(second)
    assert scheduler.schedule(0).items == []
    assert scheduler.update(second, StepResult([[7]])) == []
    assert scheduler.stats().num_output_tokens == 2 and scheduler.pool.num_used == 0


def test_block_that_ends_with_a_late_token_is_found() -> None:
    scheduler = make()
    scheduler.add(request("a", [1, 2, 3]))
    first = scheduler.schedule(0)
    scheduler.advance(first)
    second = scheduler.schedule(0)  # computes the fourth token, whatever it is
    scheduler.update(first, StepResult([[4]]))
    scheduler.advance(second)
    scheduler.add(request("b", [1, 2, 3, 4, 5]))
    third = scheduler.schedule(0)
    assert {seq.request_id: seq.num_cached_tokens for seq, _ in third.items} == {"a": 0, "b": 4}


def test_whoever_reads_from_a_failed_batch_ends_with_it() -> None:
    scheduler = make()
    scheduler.add(request("old", 4))
    step(scheduler)
    scheduler.add(request("a", [1] * 4 + [2] * 5))
    first = scheduler.schedule(0)
    scheduler.advance(first)
    scheduler.add(request("reader", [1] * 4 + [2] * 4 + [3]))
    scheduler.add(request("innocent", [1] * 4 + [3]))
    second = scheduler.schedule(0)
    names = [o.request_id for o in scheduler.fail(first, "boom")]
    assert names == ["old", "a", "reader"]
    scheduler.advance(second)
    tokens = [[5] if seq.request_id == "innocent" else [] for seq, _ in second.items]
    (output,) = scheduler.update(second, StepResult(tokens))
    assert output.request_id == "innocent" and output.error is None
    check_scheduler(scheduler)


def test_blocks_preempted_from_a_failed_batch_are_not_found() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(distinct("a", 7))
    scheduler.add(request("b", 7))
    step(scheduler)
    first = scheduler.schedule(0)  # completes the second block of both
    scheduler.advance(first)
    second = scheduler.schedule(0)  # a takes the blocks of b
    assert [seq.request_id for seq, _ in second.items] == ["a"]
    assert len(scheduler.fail(first, "boom")) == 2
    scheduler.fail(second, "boom")
    scheduler.add(request("c", 9))
    assert step(scheduler) == {"c": 9}
