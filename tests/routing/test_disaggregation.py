"""Leases, sequences that wait for KV, and where a prompt is computed: policy without an engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fake_runner import EOS, VOCAB, FakeRunner, Launched, expected
from scheduler_cases import asked
from scheduler_integrity import check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv import PREFILLED, KVNotice
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.routing.disaggregation import DisaggregationRule, place_prefill
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler
from tokenmill.sched.sequence import Sequence

BLOCK = 4
MS = 10**6


class Side:
    """A scheduler and a fake model whose KV can be copied."""

    def __init__(
        self, num_blocks: int = 32, overlap: bool = False, fault_rate: float = 0.0, **config: Any
    ) -> None:
        config = {"max_model_len": 128, "max_num_batched_tokens": 8, "max_num_seqs": 6} | config
        self.scheduler = Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, BLOCK), EOS)
        self.runner = FakeRunner(num_blocks, BLOCK)
        self.overlap, self.fault_rate = overlap, fault_rate
        self.faults = random.Random(num_blocks)
        self.flying: tuple[Batch, Launched] | None = None
        self.now_ns = 0

    def schedule(self) -> Batch:
        self.now_ns += MS
        batch = self.scheduler.schedule(self.now_ns)
        check_scheduler(self.scheduler)
        return batch

    def step(self) -> list[RequestOutput]:
        """One step; now and then it fails, before its launch or after it."""
        batch = self.schedule()
        outputs = self.scheduler.take_finished()
        launched = None
        if batch.items and not (fails := self._fails()):
            launched = self.runner.launch(batch)
        if self.overlap:
            outputs += self._collect()
        if launched is not None:
            self.flying = (batch, launched)
            if self.overlap:
                self.scheduler.advance(batch)
        elif batch.items:
            end = self.scheduler.preempt if fails > 1 else self.scheduler.fail
            outputs += end(batch, "it failed")
        if not self.overlap:
            outputs += self._collect()
        check_scheduler(self.scheduler)
        return outputs

    def _collect(self) -> list[RequestOutput]:
        if self.flying is None:
            return []
        (batch, launched), self.flying = self.flying, None
        if self._fails():
            launched.lose()
            return self.scheduler.fail(batch, "it failed")
        return self.scheduler.update(batch, launched.wait())

    def _fails(self) -> int:
        """0: no; 1: it raises; 2: it is out of memory."""
        return self.faults.randrange(1, 3) if self.faults.random() < self.fault_rate else 0


def request(name: str, length: int, seed: int, **options: Any) -> Request:
    source = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=options.pop("max_tokens", 20))
    return asked(name, [source.randrange(VOCAB) for _ in range(length)], sampling, **options)


def copy_block(source: Side, target: Side, there: int, here: int) -> None:
    for offset in range(BLOCK):
        value = source.runner.kv[there * BLOCK + offset]
        target.runner.kv[here * BLOCK + offset] = value


class Pair:
    """Two sides that share requests; blocks arrive one by one, in any order of steps."""

    def __init__(self, prefill: Side, decode: Side) -> None:
        self.prefill, self.decode = prefill, decode
        self.receiving: dict[str, Sequence] = {}
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}

    def turn(self, source: random.Random) -> None:
        if source.random() < 0.6:
            self._collect(self.prefill.step())
            for notice in self.prefill.scheduler.leases.take_notices():
                self._note(notice)
        if source.random() < 0.6:
            self._collect(self.decode.step())
        for seq in self.decode.scheduler.admission.take_to_receive():
            if seq.finished:
                self.decode.scheduler.release(seq)
            else:
                self.receiving[seq.request_id] = seq
        for name in list(self.receiving):
            if source.random() < 0.5:
                self._receive(name)

    def is_idle(self) -> bool:
        sides = (self.prefill.scheduler, self.decode.scheduler)
        flying = self.prefill.flying or self.decode.flying
        used = any(side.has_work() or side.pool.num_used for side in sides)
        return not (self.receiving or flying or used)

    def _note(self, notice: KVNotice) -> None:
        blocks = self.blocks.setdefault(notice.request_id, [])
        assert notice.first == len(blocks)
        blocks += notice.block_ids
        if notice.token_id is not None:
            self.tokens[notice.request_id] = notice.token_id

    def _receive(self, name: str) -> None:
        seq = self.receiving[name]
        if seq.finished:
            del self.receiving[name]
            self.decode.scheduler.release(seq)
        elif name in self.tokens:
            for index in range(seq.num_inserted_blocks, len(self.blocks[name])):
                copy_block(
                    self.prefill, self.decode, self.blocks[name][index], seq.block_ids[index]
                )
            self.decode.scheduler.receive(seq, self.tokens[name])
            del self.receiving[name]
            self.prefill.scheduler.leases.release(name)

    def _collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            parts = self.outputs.setdefault(output.request_id, [])
            if parts and parts[-1].finish_reason is not None:
                assert output.finish_reason is FinishReason.ABORT, "a request ended twice"
                continue  # the other side was told to stop
            if output.stop_reason == PREFILLED:
                output.finish_reason = output.stop_reason = None
            parts.append(output)
            if output.finish_reason is not None:  # the front tells the other side
                for side in (self.prefill, self.decode):
                    side.scheduler.abort(output.request_id)


@pytest.mark.parametrize("fault_rate", [0.0, 0.03])
@pytest.mark.parametrize("seed", [0, 1, 2, 13])
def test_any_order_of_chunks_arrivals_aborts_and_failures(seed: int, fault_rate: float) -> None:
    source = random.Random(seed)
    overlap = bool(seed % 2)
    num_blocks = source.choice([14, 32])
    pair = Pair(Side(24, overlap, fault_rate), Side(num_blocks, overlap, fault_rate))
    requests: dict[str, Request] = {}
    aborted: set[str] = set()
    for i in range(30):
        one = request(f"r{i}", source.randrange(1, 30), source.randrange(12))
        requests[one.request_id] = one
        kind = source.random()
        if kind < 0.7:
            pair.prefill.scheduler.add(one.with_task(hold_kv_s=1000.0))
            pair.decode.scheduler.add(one.with_task(kv_from="p"))
        else:
            (pair.prefill if kind < 0.8 else pair.decode).scheduler.add(one)
        for _ in range(source.randrange(4)):
            pair.turn(source)
        if source.random() < 0.2:
            name = source.choice(list(requests))
            aborted.add(name)
            for side in (pair.prefill, pair.decode):
                side.scheduler.abort(name)
    for _ in range(3000):
        pair.turn(source)
        if pair.is_idle():
            break
    for side in (pair.prefill, pair.decode):
        assert not side.scheduler.has_work()
        assert side.scheduler.pool.num_used == 0, "blocks are left behind"
        assert side.scheduler.stats().num_leases == side.scheduler.stats().num_receiving == 0
    capacity = pair.decode.scheduler.pool.num_blocks * BLOCK
    for name, one in requests.items():
        parts = pair.outputs[name]
        tokens = [token for part in parts for token in part.token_ids]
        assert parts[-1].finish_reason is not None
        if parts[-1].finish_reason is FinishReason.ERROR:
            assert fault_rate > 0
        elif name not in aborted:
            assert tokens == expected(one, 128, capacity)[0]


def test_notices_come_per_chunk_and_whole_blocks_only() -> None:
    side = Side()
    side.scheduler.add(request("a", 18, 1, hold_kv_s=0.02))
    seen = []
    for _ in range(3):
        outputs = side.step()
        seen += [(n.first, len(n.block_ids)) for n in side.scheduler.leases.take_notices()]
    assert seen == [(0, 2), (2, 2), (4, 1)]  # of 8, 8 and 2 tokens
    assert [(o.finish_reason, o.stop_reason) for o in outputs] == [("length", PREFILLED)]
    assert side.scheduler.pool.num_used == 5 and not side.scheduler.has_work()
    side.scheduler.add(request("a", 3, 1))
    assert side.step()[0].stop_reason == "duplicate_id"
    for _ in range(20):
        side.schedule()
    assert side.scheduler.leases.take_expired() == ["a"]
    assert side.scheduler.pool.num_used == 0


def test_what_was_announced_outlives_preemption() -> None:
    """A running request takes the blocks of the prompt; those announced stay as they were."""
    side = Side(num_blocks=8, max_num_batched_tokens=6)
    side.scheduler.add(request("grows", 8, 5, max_tokens=16))
    for _ in range(3):
        side.step()
    side.scheduler.add(request("held", 14, 3, hold_kv_s=1000.0))
    side.step()
    (notice,) = side.scheduler.leases.take_notices()
    held = [side.runner.kv[b * BLOCK : (b + 1) * BLOCK] for b in notice.block_ids]
    seq = side.scheduler._queues.get("held")
    side.scheduler._requeue(seq)
    while side.scheduler.has_work():
        side.step()
        now = [side.runner.kv[b * BLOCK : (b + 1) * BLOCK] for b in notice.block_ids]
        assert now == held
    later = side.scheduler.leases.take_notices()
    assert later[0].first == len(notice.block_ids) and later[-1].token_id is not None


def test_a_step_that_fails_ends_who_waits_for_what_it_was_to_write() -> None:
    """A received sequence may count on cached blocks that the very same step computes."""
    side = Side(max_num_batched_tokens=16)
    prompt = request("writes", 8, 1)
    side.scheduler.add(prompt)
    side.scheduler.add(
        Request(
            "reads",
            Generate([*prompt.task.prompt_token_ids, 1, 2], prompt.task.sampling, kv_from="p"),
        )
    )
    batch = side.schedule()
    (reads,) = side.scheduler.admission.take_to_receive()
    assert reads.num_inserted_blocks == 2
    outputs = side.scheduler.fail(batch, "it failed")
    assert {o.request_id for o in outputs} == {"writes", "reads"}
    assert all(o.finish_reason is FinishReason.ERROR for o in outputs)
    side.scheduler.release(reads)
    assert side.scheduler.pool.num_used == 0


def test_short_or_cached_prompts_stay_where_they_decode() -> None:
    rule = DisaggregationRule(min_tokens=100, min_share=0.25)
    assert place_prefill(1000, 0, rule).remote
    assert place_prefill(1000, 750, rule).remote
    for num_prompt, num_cached in ((99, 0), (1000, 901), (1000, 751)):
        assert not place_prefill(num_prompt, num_cached, rule).remote
    assert place_prefill(99, 0, rule).reason == "99 uncached tokens, under 100"
    assert not place_prefill(1000, 0, rule, has_prefill_worker=False).remote
