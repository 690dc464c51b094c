"""Each rule of the scheduler by itself."""

from __future__ import annotations

from typing import Any

import pytest

from fake_runner import FakeRunner, expected
from scheduler_cases import GO_ON, VARIANTS, distinct, make, many_requests, request, sampled, step
from scheduler_integrity import check_scheduler
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams, StepResult, TokenLogprobs
from tokenmill.sched.cache.blocks import block_hashes
from tokenmill.sched.scheduler import Scheduler


def rejected(scheduler: Scheduler, req: Request) -> RequestOutput:
    scheduler.add(req)
    (output,) = scheduler.take_finished()
    assert output.finish_reason is FinishReason.REJECT and output.error
    assert output.token_ids == [] and output.request_id == req.request_id
    return output


# Admission


@pytest.mark.parametrize(
    ("reason", "config", "req"),
    [
        ("empty_prompt", {}, request("x", [])),
        ("too_long", {"max_model_len": 16}, request("x", 16)),
        ("no_capacity", {"num_blocks": 3}, request("x", 12)),
        ("queue_full", {"max_waiting": 1}, request("x", 4)),
        ("duplicate_id", {}, request("live", 4)),
    ],
)
def test_reject_names_its_reason(reason: str, config: dict[str, Any], req: Request) -> None:
    scheduler = make(**config)
    scheduler.add(request("live", 2))
    assert rejected(scheduler, req).stop_reason == reason
    assert scheduler.take_finished() == []
    assert scheduler.stats().num_finished == {"reject": 1}
    assert step(scheduler) == {"live": 2}


def test_longest_prompts_that_fit_are_taken() -> None:
    scheduler = make(num_blocks=3, max_model_len=12)
    scheduler.add(request("context", 11))
    assert step(scheduler) == {"context": 11}
    scheduler = make(num_blocks=3, max_model_len=100)
    scheduler.add(request("pool", 11))
    assert step(scheduler) == {"pool": 11}


def test_id_is_free_again_after_the_end() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    scheduler.abort("a")
    scheduler.add(request("a", 4))
    assert [o.finish_reason for o in scheduler.take_finished()] == [FinishReason.ABORT]
    assert step(scheduler) == {"a": 4}


def test_waiting_run_by_priority_then_arrival() -> None:
    names = {}
    for policy in ("priority", "fcfs"):
        scheduler = make(policy=policy, max_num_seqs=1)
        for name, priority, arrival in (("c", 1, 0), ("b", 0, 9), ("a", 0, 5), ("d", 1, 1)):
            one = SamplingParams(max_tokens=1)
            scheduler.add(distinct(name, 3, one, priority=priority, arrival_ns=arrival))
        names[policy] = [next(iter(step(scheduler))) for _ in range(4)]
    assert names == {"priority": ["a", "b", "c", "d"], "fcfs": ["c", "d", "a", "b"]}


def test_budget_and_max_num_seqs_limit_a_step() -> None:
    scheduler = make(max_num_batched_tokens=10, max_num_seqs=3)
    for name in "abcd":
        scheduler.add(distinct(name, 6))
    assert step(scheduler) == {"a": 6, "b": 4}
    assert step(scheduler) == {"a": 1, "b": 2, "c": 6}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (3, 1, 3)


def test_prompt_is_chunked_and_leaves_a_token_to_each_decode() -> None:
    scheduler = make(max_num_batched_tokens=8)
    for name in "ab":
        scheduler.add(distinct(name, 4, arrival_ns=5))
    step(scheduler)
    scheduler.add(distinct("long", 15, arrival_ns=9))
    assert step(scheduler) == {"a": 1, "b": 1, "long": 6}
    scheduler.add(distinct("first", 20, priority=-1))
    assert step(scheduler) == {"a": 1, "b": 1, "long": 6}
    batch = scheduler.schedule(0)
    assert [(s.request_id, n) for s, n in batch.items] == [
        ("a", 1),
        ("b", 1),
        ("long", 3),
        ("first", 3),
    ]
    assert batch.num_tokens == 8
    scheduler.update(batch, sampled(batch))
    # The better key takes what is left beyond one token for each of the others.
    assert step(scheduler) == {"a": 1, "b": 1, "long": 1, "first": 5}


def test_without_chunking_a_prompt_runs_whole() -> None:
    scheduler = make(max_num_batched_tokens=10, chunked_prefill=False)
    scheduler.add(distinct("a", 6))
    scheduler.add(distinct("b", 6))
    assert step(scheduler) == {"a": 6}
    scheduler.add(distinct("huge", 30))
    assert step(scheduler) == {"a": 1, "b": 6}
    assert step(scheduler) == {"huge": 30}
    assert step(scheduler) == {"a": 1, "b": 1, "huge": 1}


def test_one_new_token_comes_first_in_a_batch() -> None:
    scheduler = make()
    scheduler.add(distinct("a", 9))
    step(scheduler)
    scheduler.add(distinct("b", 7))
    scheduler.add(distinct("c", 1))
    batch = scheduler.schedule(0)
    assert [(s.request_id, n) for s, n in batch.items] == [("a", 1), ("c", 1), ("b", 7)]


def test_bad_config_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1"):
        make(max_num_seqs=0)


# Prefix cache


def test_prefix_hit_leaves_a_token_to_compute() -> None:
    scheduler = make()
    scheduler.add(request("a", 8))
    step(scheduler)
    scheduler.add(request("b", 8))  # both blocks are cached; the last is computed again
    scheduler.add(request("c", 9))
    assert step(scheduler) == {"a": 1, "b": 4, "c": 1}
    stats = scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (25, 12)
    assert stats.num_prompt_tokens == 25
    a, b, c = (scheduler._queues.get(name).block_ids for name in "abc")
    assert b[0] == a[0] and c[:2] == a[:2] and b[1] != a[1]


def test_siblings_of_one_batch_share_blocks() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.add(request(name, 11))
    assert step(scheduler) == {"a": 11, "b": 3, "c": 3}
    assert scheduler.pool.num_used == 2 + 3


def test_num_cached_tokens_is_on_every_output() -> None:
    scheduler = make()
    scheduler.add(request("a", 8))
    step(scheduler)
    scheduler.add(request("b", 9))
    for _ in range(3):
        batch = scheduler.schedule(0)
        outputs = scheduler.update(batch, sampled(batch))
        assert [o.num_cached_tokens for o in outputs] == [0, 8]
    scheduler.abort("b")
    assert scheduler.take_finished()[0].num_cached_tokens == 8


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    scheduler = make()
    scheduler.add(request("turn", [1, 2, 3], SamplingParams(max_tokens=7)))
    for _ in range(7):
        step(scheduler)
    assert not scheduler.has_work() and scheduler.pool.num_used == 0
    scheduler.add(request("next", [1, 2, 3, *[5] * 7, 8, 9]))
    # 10 tokens were known, the last one was never computed: two full blocks.
    assert step(scheduler) == {"next": 4}


def test_salts_do_not_share_and_cache_can_be_off() -> None:
    scheduler = make()
    scheduler.add(request("a", 9, cache_salt="x"))
    scheduler.add(request("b", 9))
    scheduler.add(request("c", 9, cache_salt="x"))
    assert step(scheduler) == {"a": 9, "b": 9, "c": 1}
    scheduler = make(cache=False)
    scheduler.add(request("a", 9))
    scheduler.add(request("b", 9))
    assert step(scheduler) == {"a": 9, "b": 9}
    assert scheduler.stats().prefix_query_tokens == 0


def test_constant_hash_gives_no_wrong_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(tokens: list[int], size: int, *_: Any) -> list[int]:
        return [7] * (len(tokens) // size)

    monkeypatch.setattr("tokenmill.sched.cache.prefix.block_hashes", constant)
    scheduler = make(num_blocks=12)
    runner = FakeRunner(12, 4)
    for i in range(30):
        prompt = [i % 3] * 5 + [i % 2] * 4
        scheduler.add(request(f"r{i}", prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
    while scheduler.has_work():
        batch = scheduler.schedule(0)
        scheduler.update(batch, runner.run(batch))
        check_scheduler(scheduler)


def test_hashes_are_those_of_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that sees only tokens computes the same keys; nothing is hashed twice."""
    calls = []

    def counted(tokens: list[int], *args: Any) -> list[int]:
        calls.append(len(tokens))
        return block_hashes(tokens, *args)

    monkeypatch.setattr("tokenmill.sched.cache.prefix.block_hashes", counted)
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", list(range(21)), cache_salt="t"))
    for _ in range(20):
        step(scheduler)
    seq = scheduler._queues.get("a")
    assert calls == [21]
    assert seq.chain[1:] == block_hashes(seq.token_ids, 4, salt="t")[: len(seq.chain) - 1]
    assert len(seq.chain) - 1 == seq.num_computed_tokens // 4


# Preemption


def test_last_in_order_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(distinct("a", 7))
    scheduler.add(distinct("b", 7))
    step(scheduler)
    assert step(scheduler) == {"a": 1, "b": 1}
    b = scheduler._queues.get("b")
    assert step(scheduler) == {"a": 1}  # a needs a third block
    assert scheduler.stats().num_preemptions == 1
    assert (b.num_computed_tokens, b.block_ids, b.num_output_tokens) == (0, [], 2)
    scheduler.abort("a")
    scheduler.take_finished()
    assert step(scheduler) == {"b": 5}  # its first block was still cached
    assert b.num_output_tokens == 3 and b.num_cached_tokens == 0
    assert scheduler.stats().num_prompt_tokens == 14


def test_blocks_computed_again_after_eviction_are_cached_again() -> None:
    scheduler = make(num_blocks=6)
    scheduler.add(distinct("a", 11))
    scheduler.add(distinct("b", 11))
    while scheduler.stats().num_preemptions == 0:
        step(scheduler)
    while scheduler._queues.get("a").capacity < 24:  # a takes every block
        step(scheduler)
    scheduler.abort("a")
    assert step(scheduler) == {"b": 13}
    scheduler.add(Request("c", Generate(scheduler._queues.get("b").token_ids[:12], GO_ON)))
    assert step(scheduler) == {"b": 1, "c": 4}


@pytest.mark.parametrize(("policy", "victim"), [("priority", "a"), ("fcfs", "c")])
def test_victim_is_the_worst_by_policy(policy: str, victim: str) -> None:
    scheduler = make(num_blocks=6, policy=policy)
    for name, priority in (("a", 5), ("b", 0), ("c", 0)):
        scheduler.add(distinct(name, 7, priority=priority))
    step(scheduler)
    step(scheduler)
    assert set(step(scheduler)) == {"a", "b", "c"} - {victim}


def test_request_without_anyone_behind_it_preempts_itself() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(distinct("a", 5))
    scheduler.add(distinct("b", 8))
    step(scheduler)
    assert step(scheduler) == {"a": 1}  # b would need a third block
    assert scheduler.stats().num_preemptions == 1


def test_no_admission_in_a_step_that_preempts_nor_by_preempting() -> None:
    scheduler = make(num_blocks=4)
    scheduler.add(distinct("a", 7))
    scheduler.add(distinct("b", 7))
    step(scheduler)
    scheduler.add(distinct("vip", 4, priority=-9))
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"a": 1}
    assert step(scheduler) == {"a": 1, "vip": 4}  # now there is room


def test_admission_keeps_room_for_prompts_already_begun() -> None:
    scheduler = make(num_blocks=8, max_num_batched_tokens=10)
    scheduler.add(distinct("long", 24))
    assert step(scheduler) == {"long": 10}
    scheduler.add(distinct("late", 12))  # 5 blocks are free, 3 of them spoken for
    for expected_tokens in (10, 4, 1):
        assert step(scheduler) == {"long": expected_tokens}
    assert scheduler.stats().num_preemptions == 0
    scheduler.abort("long")
    assert step(scheduler) == {"late": 10}


def test_admission_leaves_a_watermark_to_the_running() -> None:
    scheduler = make(num_blocks=200, block_size=1, cache=False)
    scheduler.add(distinct("a", 100))
    step(scheduler)
    scheduler.add(distinct("b", 98))  # a takes one block more: 99 are free, 2 are kept
    assert step(scheduler) == {"a": 1}
    scheduler.abort("b")
    scheduler.add(distinct("c", 96))
    assert step(scheduler) == {"a": 1, "c": 96}


# Aborts and deadlines


def test_abort_waiting_running_and_unknown() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(distinct("a", 4))
    scheduler.add(distinct("b", 4))
    step(scheduler)
    for name in ("b", "a", "a", "nobody"):
        scheduler.abort(name)
    ends = scheduler.take_finished()
    assert [(o.request_id, o.finish_reason, o.stop_reason) for o in ends] == [
        ("b", FinishReason.ABORT, None),
        ("a", FinishReason.ABORT, None),
    ]
    assert not scheduler.has_work() and scheduler.pool.num_used == 0
    assert scheduler.schedule(0).items == []


def test_abort_in_flight_keeps_blocks_until_the_step_is_over() -> None:
    scheduler = make()
    scheduler.add(distinct("a", 4))
    scheduler.add(distinct("b", 4))
    batch = scheduler.schedule(0)
    seq = batch.items[0][0]
    seq.sampler_state = "matcher"
    scheduler.abort("a")
    assert [o.request_id for o in scheduler.take_finished()] == ["a"]
    assert len(seq.block_ids) == 1 and seq.sampler_state == "matcher"
    check_scheduler(scheduler)
    assert [o.request_id for o in scheduler.update(batch, sampled(batch))] == ["b"]
    assert seq.block_ids == [] and seq.sampler_state is None and seq.num_output_tokens == 0
    assert scheduler.pool.num_used == 1
    assert scheduler.take_finished() == []


def test_deadlines_end_waiting_and_running() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(distinct("run", 4, deadline_ns=100))
    scheduler.add(distinct("wait", 4, deadline_ns=50))
    scheduler.add(distinct("free", 4))
    assert step(scheduler, now_ns=49) == {"run": 4}
    assert step(scheduler, now_ns=50) == {"run": 1}
    assert step(scheduler, now_ns=100) == {"free": 4}
    ends = scheduler.take_finished()
    assert [(o.request_id, o.finish_reason, o.stop_reason) for o in ends] == [
        ("wait", FinishReason.ABORT, "deadline"),
        ("run", FinishReason.ABORT, "deadline"),
    ]


def test_finished_entries_do_not_pile_up() -> None:
    scheduler = make(max_num_seqs=1, max_waiting=10_000)
    scheduler.add(request("first", 2))
    for i in range(1000):
        scheduler.add(request(f"r{i}", 4, priority=5, deadline_ns=10**9))
        scheduler.abort(f"r{i}")
    assert len(scheduler._queues._waiting) < 100 and len(scheduler._queues._deadlines) < 100
    assert len(scheduler.take_finished()) == 1000


# Ends


def ends_with(
    sampling: SamplingParams, tokens: list[list[int]], **config: Any
) -> tuple[list[int], FinishReason | None, int | str | None]:
    """Feed tokens step by step; returns all outputs' tokens and the terminal reasons."""
    scheduler = make(**config)
    scheduler.add(request("a", 3, sampling))
    got: list[int] = []
    for step_tokens in tokens:
        batch = scheduler.schedule(0)
        assert batch.items
        (output,) = scheduler.update(batch, StepResult([step_tokens]))
        check_scheduler(scheduler)
        got += output.token_ids
        if output.finish_reason is not None:
            assert not scheduler.has_work() and scheduler.pool.num_used == 0
            return got, output.finish_reason, output.stop_reason
    return got, None, None


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **fields})


@pytest.mark.parametrize(
    ("sampling", "tokens", "end"),
    [
        (params(), [[4], [0]], ([4, 0], STOP, None)),
        (params(ignore_eos=True), [[0], [4]], ([0, 4], None, None)),
        (params(min_tokens=3), [[0], [0], [0]], ([0, 0, 0], STOP, None)),
        (params(stop_token_ids=[7]), [[4], [7]], ([4, 7], STOP, 7)),
        (params(stop_token_ids=[7], min_tokens=2), [[7], [7]], ([7, 7], STOP, 7)),
        (params(stop_token_ids=[0]), [[0]], ([0], STOP, None)),
        (params(stop_token_ids=[0], ignore_eos=True), [[0]], ([0], STOP, 0)),
        (params(max_tokens=2), [[4], [4]], ([4, 4], LENGTH, None)),
        (params(max_tokens=1), [[0]], ([0], STOP, None)),
        (params(max_tokens=3), [[4, 4, 4, 4]], ([4, 4, 4], LENGTH, None)),
        (params(), [[4], [5, 0, 6]], ([4, 5, 0], STOP, None)),
        (params(stop_token_ids=[7]), [[5, 6, 7, 0]], ([5, 6, 7], STOP, 7)),
        (params(min_tokens=2), [[0, 4, 0, 5]], ([0, 4, 0], STOP, None)),
    ],
)
def test_stop_rules(sampling: SamplingParams, tokens: list[list[int]], end: object) -> None:
    assert ends_with(sampling, tokens) == end


def test_context_limit_and_pool_limit() -> None:
    many = [[4]] * 50
    assert ends_with(params(), many, max_model_len=8) == ([4] * 5, LENGTH, None)
    # 2 blocks of 4 hold 8 tokens, and the ninth needs no room.
    assert ends_with(params(), many, num_blocks=2) == ([4] * 6, LENGTH, "kv_capacity")
    assert ends_with(params(max_tokens=6), many, num_blocks=2) == ([4] * 6, LENGTH, None)


def test_two_requests_that_outgrow_the_pool_both_end() -> None:
    scheduler = make(num_blocks=4)
    for name in "ab":
        scheduler.add(distinct(name, 4))
    outputs = []
    for _ in range(100):
        if not scheduler.has_work():
            break
        batch = scheduler.schedule(0)
        outputs += scheduler.update(batch, sampled(batch))
        check_scheduler(scheduler)
    ends = {o.request_id: o.stop_reason for o in outputs if o.finish_reason is LENGTH}
    assert ends == {"a": "kv_capacity", "b": "kv_capacity"}


def test_logprobs_are_cut_with_the_tokens() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, SamplingParams(logprobs=0)))
    entries = [TokenLogprobs([t], [0.0], 1) for t in (4, 0, 5)]
    (output,) = scheduler.update(scheduler.schedule(0), StepResult([[4, 0, 5]], [entries]))
    assert output.token_ids == [4, 0] and output.logprobs == entries[:2]


def test_scheduled_ns_is_the_first_step_of_the_request() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    for now_ns in (70, 80):
        batch = scheduler.schedule(now_ns)
        (output,) = scheduler.update(batch, sampled(batch))
        assert output.scheduled_ns == 70


# Prompt logprobs


def test_prompt_logprobs_survive_chunks_and_preemption_once() -> None:
    scheduler = make(num_blocks=5, max_num_batched_tokens=6)
    runner = FakeRunner(5, 4)
    scheduler.add(request("warm", 9, SamplingParams(max_tokens=1)))
    outputs = []

    def run(steps: int) -> None:
        for _ in range(steps):
            batch = scheduler.schedule(0)
            outputs.extend(scheduler.update(batch, runner.run(batch)))
            check_scheduler(scheduler)

    run(2)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    scheduler.add(request("a", 9, sampling))
    run(1)
    seq = scheduler._queues.get("a")
    assert seq.num_computed_tokens == 6 and seq.num_cached_tokens == 0
    assert seq.prompt_logprobs is not None and len(seq.prompt_logprobs) == 7
    # It starts over after a preemption in the middle of the prompt.
    scheduler._requeue(seq)
    run(4)
    mine = [o for o in outputs if o.request_id == "a"]
    assert [o.prompt_logprobs is not None for o in mine] == [True, False, False]
    entries = mine[0].prompt_logprobs
    assert entries is not None and entries[0] is None
    assert [e.logprobs for e in entries if e is not None] == [[-float(p)] for p in range(1, 9)]


# The engine's side of the contract


def test_failed_step_ends_its_items_and_caches_nothing() -> None:
    scheduler = make()
    scheduler.add(request("a", 9))
    scheduler.add(request("b", 9))
    batch = scheduler.schedule(0)
    scheduler.abort("b")
    scheduler.take_finished()
    (output,) = scheduler.fail(batch, "out of memory")
    assert (output.request_id, output.finish_reason, output.error) == (
        "a",
        FinishReason.ERROR,
        "out of memory",
    )
    assert scheduler.pool.num_used == 0 and not scheduler.has_work()
    check_scheduler(scheduler)
    scheduler.add(request("c", 9))
    assert step(scheduler) == {"c": 9}


@pytest.mark.parametrize("tokens", [[[]], [[5]]])
def test_result_that_breaks_the_contract_ends_the_request(tokens: list[list[int]]) -> None:
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 4 if tokens == [[]] else 8))
    (output,) = scheduler.update(scheduler.schedule(0), StepResult(tokens))
    assert output.finish_reason is FinishReason.ERROR and output.error
    assert not scheduler.has_work() and scheduler.pool.num_used == 0


def test_result_of_another_length_is_refused() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    batch = scheduler.schedule(0)
    with pytest.raises(ValueError, match="1 items, the result 2 token_ids"):
        scheduler.update(batch, StepResult([[5], [5]]))
    assert len(scheduler.fail(batch, "wrong result")) == 1


def test_one_batch_is_in_flight_at_a_time() -> None:
    scheduler = make()
    scheduler.add(request("a", 4))
    scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="before update"):
        scheduler.schedule(0)


def test_empty_scheduler_does_nothing() -> None:
    scheduler = make()
    batch = scheduler.schedule(0)
    assert batch.items == [] and batch.num_tokens == 0 and not scheduler.has_work()
    assert scheduler.update(batch, StepResult([])) == []
    assert scheduler.stats().num_steps == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_answer_in_every_mode(variant: dict[str, Any]) -> None:
    scheduler = make(**variant)
    runner = FakeRunner(scheduler.pool.num_blocks, 4)
    requests = many_requests()
    for req in requests:
        scheduler.add(req)
    got: dict[str, list[int]] = {req.request_id: [] for req in requests}
    while scheduler.has_work():
        batch = scheduler.schedule(0)
        for output in scheduler.update(batch, runner.run(batch)):
            got[output.request_id] += output.token_ids
    assert got == {req.request_id: expected(req, 8192, 10**6)[0] for req in requests}


# Overlap: a batch is chosen while the tokens of the last one are unknown


def test_who_is_held_sits_out_and_holds_up_nobody() -> None:
    scheduler, runner = make(num_blocks=12), FakeRunner(12, 4)
    for name in "ab":
        scheduler.add(request(name, [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)))
    scheduler.update(batch := scheduler.schedule(0), runner.run(batch))
    scheduler.hold({"a"})
    ended = []
    while scheduler.has_work():
        batch = scheduler.schedule(0)
        if not batch.items:
            assert ended == ["b"]
            scheduler.hold(set())
            continue
        outputs = scheduler.update(batch, runner.run(batch))
        ended += [o.request_id for o in outputs if o.finish_reason is not None]
    assert ended == ["b", "a"]
