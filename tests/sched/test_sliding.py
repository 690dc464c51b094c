"""Blocks of sliding layers: they are freed behind the window, cached, lost, and found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokenmill
from fake_runner import EOS, FakeRunner, expected
from scheduler_cases import sampled
from scheduler_integrity import check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv_groups import (
    NONE_SLIDE,
    Sliding,
    kept_positions,
    layer_groups,
    plan_groups,
)
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams, StepResult
from tokenmill.engine.rerun import run_in_parts
from tokenmill.models import spec_of
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch

SHAPES = Path(tokenmill.__file__).parent / "bench" / "shapes"
ONE_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def test_layers_share_pages_of_one_size() -> None:
    alternating = plan_groups((128, None) * 18)
    assert alternating.page_layers == 18 and alternating.sliding == Sliding(128, 1)
    assert alternating.places[:4] == (0, 0, 1, 1)
    windows = tuple(None if layer % 6 == 5 else 512 for layer in range(26))
    gemma = plan_groups(windows)
    assert gemma.page_layers == 4 and gemma.sliding == Sliding(512, 6)
    groups = layer_groups(windows, 6)
    assert len(set(zip(groups, gemma.places, strict=True))) == 26, "two layers share a place"
    assert max(gemma.places) < gemma.page_layers
    drafting = plan_groups((128, None, 128), 1)  # the last one's pages are those of full layers
    assert drafting.places == (0, 0, 1) and drafting.sliding.num_groups == 1
    for alike in ((None,) * 3, (8,) * 3):
        assert plan_groups(alike).sliding == NONE_SLIDE and kept_positions(alike, 100) == 300


def test_gpt_oss_keeps_half_of_plain_paging_at_8k() -> None:
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        spec = spec_of(json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8")))
        share = kept_positions(spec.layer_windows, 8192) / (spec.num_layers * 8192)
        assert share == pytest.approx((1 + 128 / 8192) / 2)
        sliding = plan_groups(spec.layer_windows).sliding
        pages = sliding.num_pages(8192 // 64, 1, 64)  # what a sequence that decodes holds
        assert pages / (2 * 8192 / 64) == pytest.approx(0.5, abs=0.02)


def test_a_sequence_of_8k_tokens_holds_its_window() -> None:
    sliding, size, budget = Sliding(128, 2), 16, 512
    pool = BlockPool(8448 // size + 2 * sliding.most_blocks(budget, size), size, True, sliding)
    config = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=8448)
    scheduler = Scheduler(config, pool, EOS)
    scheduler.add(
        Request("r", Generate(list(range(8192)), SamplingParams(max_tokens=100, ignore_eos=True)))
    )
    while scheduler.has_work():
        batch = scheduler.schedule(0)
        ((seq, num_new),) = batch.items
        assert len(seq.window_ids) <= 2 * sliding.most_blocks(num_new, size)
        scheduler.update(batch, sampled(batch))
        if seq.num_output_tokens > size and not seq.finished:
            assert len(seq.window_ids) <= 2 * sliding.most_blocks(size, size)
            assert pool.num_used <= len(seq.block_ids) + 2 * sliding.most_blocks(size, size)
        check_scheduler(scheduler)
    stats = scheduler.stats()
    assert stats.num_preemptions == 0 and stats.num_kv_blocks_slid > 2 * (8192 - 256) // size


def finish(scheduler: Scheduler, runner: FakeRunner, request: Request) -> int:
    """Run a request alone; returns how many of its tokens were cached."""
    scheduler.add(request)
    tokens: list[int] = []
    while scheduler.has_work():
        batch = scheduler.schedule(0)
        for output in scheduler.update(batch, runner.run(batch)):
            tokens += output.token_ids
            cached = output.num_cached_tokens
        check_scheduler(scheduler)
    assert tokens == expected(request, 100, 100)[0]
    return cached


def test_a_hit_is_as_long_as_both_kinds_of_layers_know() -> None:
    pool = BlockPool(64, 2, True, Sliding(4, 1))
    scheduler = Scheduler(SchedulerConfig(max_model_len=100), pool, EOS)
    runner = FakeRunner(64, 2, sliding=pool.sliding)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]
    assert finish(scheduler, runner, Request("start", Generate(prompt[:7], ONE_TOKEN))) == 0
    assert finish(scheduler, runner, Request("a", Generate(prompt, ONE_TOKEN))) == 6
    assert finish(scheduler, runner, Request("b", Generate(prompt, ONE_TOKEN))) == 10
    full = [pool._by_hash[h] for h in pool.cached_hashes()]
    pool.forget(pool.beside(full[3]))  # tokens 6 and 7: seen after 8, 10
    assert finish(scheduler, runner, Request("c", Generate(prompt, ONE_TOKEN))) == 6
    assert (
        finish(scheduler, runner, Request("d", Generate(prompt, ONE_TOKEN))) == 10
    )  # c has put it back
    for block in full:
        pool.forget(pool.beside(block))
    assert finish(scheduler, runner, Request("e", Generate(prompt, ONE_TOKEN))) == 0
    assert len(pool.cached_hashes()) == len(full), "events tell of full layers alone"


@pytest.mark.parametrize("read", [False, True])
def test_what_a_failed_batch_had_to_write_behind_the_window_is_not_read(read: bool) -> None:
    """Full blocks are cached by one request, those beside them are written by another in flight."""
    pool = BlockPool(64, 2, True, Sliding(2, 1))
    config = SchedulerConfig(max_num_batched_tokens=8, max_model_len=100)
    scheduler = Scheduler(config, pool, EOS)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2]
    finish(
        scheduler,
        FakeRunner(64, 2, sliding=pool.sliding),
        Request("a", Generate(prompt, ONE_TOKEN)),
    )
    pool.forget([page for pages in list(pool._beside.values()) for page in pages])
    scheduler.add(
        Request("writer", Generate([*prompt[:6], 9, 9, 9, 9, 9, 9], ONE_TOKEN))
    )  # it branches
    first = scheduler.schedule(0)
    scheduler.advance(first)
    if read:
        scheduler.add(Request("reader", Generate([*prompt[:6], 5], ONE_TOKEN)))
    second = scheduler.schedule(0)
    items = [("reader", 1), ("writer", 4)] if read else [("writer", 4)]
    assert [(seq.request_id, num_new) for seq, num_new in second.items] == items
    ended = scheduler.fail(first, "the step raised")
    assert {output.request_id for output in ended} == {name for name, _ in items}
    assert all(output.finish_reason is FinishReason.ERROR for output in ended)
    assert not pool._beside, "what nobody wrote is found"


def test_a_part_of_a_failed_step_runs_after_the_windows_that_it_reads() -> None:
    """Full blocks are cached, and what sliding layers need beside them is written in this step."""
    pool = BlockPool(64, 2, True, Sliding(4, 1))
    scheduler = Scheduler(SchedulerConfig(max_model_len=100), pool, EOS)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]
    finish(
        scheduler,
        FakeRunner(64, 2, sliding=pool.sliding),
        Request("a", Generate(prompt, ONE_TOKEN)),
    )
    pool.forget([page for pages in list(pool._beside.values()) for page in pages])
    scheduler.add(Request("writer", Generate(prompt, ONE_TOKEN)))
    scheduler.add(Request("reader", Generate(prompt, ONE_TOKEN)))
    batch = scheduler.schedule(0)
    assert [(seq.request_id, new) for seq, new in batch.items] == [("reader", 1), ("writer", 11)]
    ran: list[str] = []

    def run(part: Batch) -> StepResult:
        ran.extend(seq.request_id for seq, _ in part.items)
        return StepResult([[1] for _ in part.items])

    run_in_parts(run, batch, 2, RuntimeError("the step raised"))
    assert ran == ["writer", "reader"]
