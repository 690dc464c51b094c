"""Any order of submit, step, abort, failure and time: nothing leaks, nothing is answered twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fake_runner import EOS, VOCAB, FakeRunner, expected
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.types import FinishReason, Request, RequestOutput, SamplingParams
from tokenmill.sched import blocks
from tokenmill.sched.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

REFUSALS = {"queue_full", "too_long", "no_capacity", "empty_prompt"}


class Session:
    """A scheduler, its fake model, and a record of all that came out."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, tokens_per_step: int = 1) -> None:
        self.config = config
        self.pool = pool
        self.scheduler = Scheduler(config, pool, EOS)
        self.runner = FakeRunner(pool.num_blocks, pool.block_size, tokens_per_step)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}
        self.prompt_logprobs: dict[str, int] = {}
        self.batch = Batch()
        self.now_ns = 0

    def submit(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.scheduler.add(request)
        self.collect(self.scheduler.take_finished())

    def schedule(self) -> None:
        before = {seq.request_id: seq.num_computed_tokens for seq in self.scheduler._running}
        self.batch = self.scheduler.schedule(self.now_ns)
        for seq, _ in self.batch.items:
            computed = seq.num_computed_tokens
            assert before.get(seq.request_id, computed) == computed, "preempted and scheduled"
        self.collect(self.scheduler.take_finished())
        stats = self.scheduler.stats()
        live = stats.num_waiting + stats.num_running
        assert bool(self.batch.items) == bool(live), "a step with live requests does something"
        assert len(self.batch.items) <= self.config.max_num_seqs
        if self.config.chunked_prefill:
            assert self.batch.num_tokens <= self.config.max_num_batched_tokens
        assert not any(seq.finished for seq, _ in self.batch.items)

    def update(self) -> None:
        self.collect(self.scheduler.update(self.batch, self.runner.run(self.batch)))
        self.batch = Batch()

    def fail(self) -> None:
        outputs = self.scheduler.fail(self.batch, "the step raised")
        assert all(output.error == "the step raised" for output in outputs)
        self.collect(outputs)
        self.batch = Batch()

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.collect(self.scheduler.take_finished())

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            request_id = output.request_id
            assert request_id not in self.ends, "an output follows the terminal one"
            request = self.requests[request_id]
            assert output.token_ids or output.finish_reason is not None
            if output.token_ids and request.sampling.prompt_logprobs is not None:
                self.check_prompt_logprobs(request, output)
            self.tokens[request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[request_id] = output
                self.check_end(request, output)

    def check_prompt_logprobs(self, request: Request, output: RequestOutput) -> None:
        prompt = request.prompt_token_ids
        if self.tokens[request.request_id]:
            assert output.prompt_logprobs is None
            return
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        entries = [e for e in output.prompt_logprobs if e is not None]
        assert [e.token_ids for e in entries] == [[t] for t in prompt[1:]]
        assert [e.logprobs for e in entries] == [[-float(p)] for p in range(1, len(prompt))]
        assert output.num_cached_tokens == 0

    def check_end(self, request: Request, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.REJECT:
            assert output.error and output.stop_reason in REFUSALS and not output.token_ids
            return
        tokens, reasons = expected(
            request, self.config.max_model_len, self.pool.num_blocks * self.pool.block_size
        )
        got = self.tokens[request.request_id]
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == tokens
            assert (output.finish_reason, output.stop_reason) == reasons
        else:
            assert got == tokens[: len(got)]
            assert len(got) < len(tokens)
        if output.stop_reason == "deadline":
            assert request.deadline_ns is not None and request.deadline_ns <= self.now_ns

    def run_out(self) -> None:
        """Drive everything to its end."""
        if self.batch.items:
            self.update()
        for _ in range(10_000):
            if not self.scheduler.has_work():
                break
            self.schedule()
            self.scheduler.check_integrity()
            if self.batch.items:
                self.update()
        assert set(self.ends) == set(self.requests)
        assert not self.scheduler.has_work()
        assert self.pool.num_free == self.pool.num_blocks
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running, stats.num_kv_blocks_used) == (0, 0, 0)
        assert sum(stats.num_finished.values()) == len(self.requests)
        assert stats.num_output_tokens == sum(len(t) for t in self.tokens.values())


configs = st.builds(
    SchedulerConfig,
    max_num_batched_tokens=st.integers(1, 24),
    max_num_seqs=st.integers(1, 5),
    max_waiting=st.integers(3, 12),
    max_model_len=st.integers(14, 40),
    chunked_prefill=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
pools = st.builds(
    BlockPool,
    st.integers(5, 12),
    st.integers(2, 4),
    prefix_cache=st.sampled_from([True, True, True, False]),
)
moduli = st.sampled_from([2**64, 2**64, 2, 5, 20])  # small ones force collisions
stems = st.sampled_from([[1] * 12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]])
samplings = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([20, 9, 4, None]),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.sampled_from([True, True, False]),
    stop_token_ids=st.sampled_from([(), (), (3,), (0, 5)]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    logprobs=st.sampled_from([None, None, 0]),
)

submissions = st.fixed_dictionaries(
    {
        "stem": stems,
        "shared": st.sampled_from([8, 4, 6, 12, 0]),
        "tail": st.sampled_from([[], [3], [4, 5, 6]]),
        "sampling": samplings,
        "priority": st.sampled_from([0, -1, 1]),
        "timeout": st.sampled_from([None, None, None, 0, 15]),
        "salt": st.sampled_from(["", "", "", "s"]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs, pool=pools, tokens=st.integers(1, 3), modulus=moduli)
    def start(self, config: SchedulerConfig, pool: BlockPool, tokens: int, modulus: int) -> None:
        self.session = Session(config, pool, tokens)
        self.patches = [
            mock.patch(f"tokenmill.sched.scheduler.{name}", _modulo(getattr(blocks, name), modulus))
            for name in ("block_hashes", "next_block_hashes")
        ]
        for patch in self.patches:
            patch.start()

    @rule(burst=st.lists(submissions, min_size=1, max_size=5))
    def submit(self, burst: list[dict[str, Any]]) -> None:
        session = self.session
        for fields in burst:
            order = len(session.requests)
            timeout = fields["timeout"]
            request = Request(
                f"r{order}",
                fields["stem"][: fields["shared"]] + fields["tail"],
                fields["sampling"],
                fields["priority"],
                arrival_ns=order,
                deadline_ns=None if timeout is None else session.now_ns + timeout,
                cache_salt=fields["salt"],
            )
            session.submit(request)

    @precondition(lambda self: not self.session.batch.items)
    @rule()
    def schedule(self) -> None:
        self.session.schedule()

    @precondition(lambda self: self.session.batch.items)
    @rule()
    def update(self) -> None:
        self.session.update()

    @rule(steps=st.integers(1, 20))
    def steps(self, steps: int) -> None:
        if self.session.batch.items:
            self.session.update()
        for _ in range(steps):
            self.session.schedule()
            self.session.scheduler.check_integrity()
            if self.session.batch.items:
                self.session.update()

    @precondition(lambda self: self.session.batch.items)
    @rule(really=st.sampled_from([False, False, True]))
    def fail(self, really: bool) -> None:
        if really:
            self.session.fail()

    @precondition(lambda self: self.session.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.session.abort(data.draw(st.sampled_from(sorted(self.session.requests))))

    @rule(ns=st.integers(1, 10))
    def wait(self, ns: int) -> None:
        self.session.now_ns += ns

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "session"):
            self.session.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "session"):
            try:
                self.session.run_out()
            finally:
                for patch in self.patches:
                    patch.stop()


def _modulo(function: Callable[..., list[int]], modulus: int) -> Callable[..., list[int]]:
    return lambda *args: [h % modulus for h in function(*args)]


SchedulerMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, derandomize=True
)
TestScheduler = SchedulerMachine.TestCase


def test_a_long_random_run_meets_every_situation() -> None:
    """The same checks over thousands of steps, and proof that the rare events took place."""
    rng = random.Random(5)
    config = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6, max_model_len=64)
    session = Session(config, BlockPool(24, 4))
    cached: list[int] = []
    for order in range(300):
        stem = [1 + order % 3] * 24
        prompt = stem[: rng.randrange(24)] + [rng.randrange(VOCAB) for _ in range(8)]
        sampling = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True)
        session.submit(Request(f"r{order}", prompt, sampling, rng.randrange(3), order))
        for _ in range(rng.randrange(12)):
            session.schedule()
            session.scheduler.check_integrity()
            cached += [seq.num_cached_tokens for seq, _ in session.batch.items]
            if rng.random() < 0.1:
                session.abort(f"r{rng.randrange(order + 1)}")
            if session.batch.items:
                session.update()
    session.run_out()
    stats = session.scheduler.stats()
    assert stats.num_preemptions > 20
    assert stats.prefix_hit_tokens > 500
    assert max(cached) > 8
    assert set(stats.num_finished) == {"length", "abort"}
