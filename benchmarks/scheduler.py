"""The cost of the scheduler per step, without a model."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from tokenmill.core.flags import count, setting
from tokenmill.core.metrics import summarize
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch

LIMIT_US = 1000.0  # of schedule() + update() at 512 running requests
WARMUP_STEPS = 50
_TOKEN = 7


@dataclass(frozen=True)
class Options:
    num_running: int = setting(512, "Requests that decode at once.", count(1))
    num_steps: int = setting(200, "Steps to measure.", count(1))


def run(options: Options) -> Report:
    """Time of schedule() and update() over steps in which all requests decode.

    The scheduler never waits: its cost is its CPU time, whoever else uses the machine.

    python -m benchmarks.scheduler --num-running 512
    """
    num_running = options.num_running
    # Prompts of under 150 tokens at 4 a step and request: all decode after some 50 steps.
    longest = 256 + options.num_steps + WARMUP_STEPS
    limits = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=4 * num_running,
        max_waiting=num_running,
        max_model_len=longest,
    )
    pool = BlockPool(num_running * (longest // DEFAULT_BLOCK_SIZE + 1), DEFAULT_BLOCK_SIZE)
    scheduler = Scheduler(limits, pool, frozenset())
    return measure_steps(scheduler, decode_requests(num_running), options.num_steps)


def show(report: Report) -> None:
    console.out.print(
        f"{report['num_running']} running requests: {report['total_us']['p50']:.0f} us a step "
        f"(schedule {report['schedule_us']['p50']:.0f}, update {report['update_us']['p50']:.0f}) "
        f"of a limit of {LIMIT_US:.0f} us"
    )


def decode_requests(num_running: int, prompt_tokens: int = 128) -> list[Request]:
    """Distinct prompts that decode up to the context limit, and fill their blocks at any step."""
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    return [
        Request(
            f"step-{i}",
            Generate([_TOKEN + 1 + i] * (prompt_tokens + i % DEFAULT_BLOCK_SIZE), sampling),
        )
        for i in range(num_running)
    ]


def fake_result(batch: Batch) -> StepResult:
    """One token for every item that samples."""
    return StepResult(
        [
            [_TOKEN] if seq.num_computed_tokens + num_new == len(seq.token_ids) else []
            for seq, num_new in batch.items
        ]
    )


def measure_steps(scheduler: Scheduler, requests: list[Request], num_steps: int) -> Report:
    """Time the steps in which all of these requests decode."""
    for request in requests:
        scheduler.add(request)
    _fill(scheduler, requests)
    gc.collect()
    gc.freeze()  # as a serving engine does once its weights are loaded
    schedule_us, update_us = [], []
    try:
        for _ in range(num_steps):
            begin = time.thread_time_ns()
            batch = scheduler.schedule(begin)
            chosen = time.thread_time_ns()
            result = fake_result(batch)
            ran = time.thread_time_ns()
            outputs = scheduler.update(batch, result)
            end = time.thread_time_ns()
            del outputs  # freed by their reader, off the clock
            schedule_us.append((chosen - begin) / 1000)
            update_us.append((end - ran) / 1000)
    finally:
        gc.unfreeze()
    if len(batch.items) != len(requests):
        raise ValueError(f"only {len(batch.items)} of {len(requests)} requests ran to the end")
    total = summarize((s + u for s, u in zip(schedule_us, update_us, strict=True)), 1)
    return {
        "num_running": len(requests),
        "num_steps": num_steps,
        "schedule_us": summarize(schedule_us, 1),
        "update_us": summarize(update_us, 1),
        "total_us": total,
        "limit_us": LIMIT_US,
        "share_of_limit": round(total["p50"] / LIMIT_US, 3),
    }


def _fill(scheduler: Scheduler, requests: list[Request]) -> None:
    """Run the prompts until every request decodes, then a few steps more."""

    def step() -> Batch:
        batch = scheduler.schedule(0)
        scheduler.update(batch, fake_result(batch))
        return batch

    most = sum(len(request.task.prompt_token_ids) for request in requests)
    if not any([new for _, new in step().items] == [1] * len(requests) for _ in range(most)):
        raise ValueError(f"the scheduler does not run {len(requests)} requests at once")
    for _ in range(WARMUP_STEPS):
        step()


BENCHMARK = Benchmark("scheduler", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
