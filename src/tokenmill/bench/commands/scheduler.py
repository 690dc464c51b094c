"""tokenmill bench scheduler: the cost of the scheduler per step, without a model."""

from __future__ import annotations

import gc
import time
from typing import Any, Protocol

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.results.reports import SchedulerReport
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from tokenmill.core.metrics import summarize
from tokenmill.core.types import Request, RequestOutput, SamplingParams, StepResult
from tokenmill.settings import SETTINGS, Settings

PANELS = {
    "Benchmark": (SETTINGS["num-running"], SETTINGS["num-steps"], SETTINGS["json-only"]),
}
LIMIT_US = 1000.0  # of schedule() + update() at 512 running requests
WARMUP_STEPS = 50
_TOKEN = 7


def scheduler(settings: Settings) -> None:
    """Time of the scheduler in one step, without a model.

    tokenmill bench scheduler --num-running 512
    """
    from tokenmill.sched.cache.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler

    num_running, num_steps = settings.get("num-running"), settings.get("num-steps")
    # Prompts of under 150 tokens at 4 a step and request: all decode after some 50 steps.
    longest = 256 + num_steps + WARMUP_STEPS
    limits = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=4 * num_running,
        max_waiting=num_running,
        max_model_len=longest,
    )
    requests = decode_requests(num_running)
    block_size = DEFAULT_BLOCK_SIZE
    pool = BlockPool(num_running * (longest // block_size + 1), block_size)
    report = measure_steps(Scheduler(limits, pool, frozenset()), requests, num_steps)
    if not settings.get("json-only"):
        console.out.print(
            f"{num_running} running requests: {report['total_us']['p50']:.0f} us a step (schedule "
            f"{report['schedule_us']['p50']:.0f}, update {report['update_us']['p50']:.0f}) "
            f"of a limit of {report['limit_us']:.0f} us"
        )
    console.print_json(report)


class StepScheduler(Protocol):
    """The part of a scheduler that a step uses; its batch has `items` of (sequence, num_new)."""

    def add(self, request: Request) -> None: ...

    def schedule(self, now_ns: int) -> Any: ...

    def update(self, batch: Any, result: StepResult) -> list[RequestOutput]: ...


def decode_requests(num_running: int, prompt_tokens: int = 128, spread: int = 16) -> list[Request]:
    """Distinct prompts that decode up to the context limit.

    Prompt lengths differ by up to `spread` tokens; with 1 all requests fill their blocks in step.
    """
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    return [
        Request(f"step-{i}", [_TOKEN + 1 + i] * (prompt_tokens + i % spread), sampling)
        for i in range(num_running)
    ]


def fake_result(batch: Any) -> StepResult:
    """One token for every item that samples."""
    return StepResult(
        [
            [_TOKEN] if seq.num_computed_tokens + num_new == len(seq.token_ids) else []
            for seq, num_new in batch.items
        ]
    )


def measure_steps(
    scheduler: StepScheduler, requests: list[Request], num_steps: int
) -> SchedulerReport:
    """Time schedule() and update() over num_steps steps in which all requests decode.

    The scheduler never waits: its cost is its CPU time, whoever else uses the machine.
    """
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
    return _report(len(requests), schedule_us, update_us)


def _fill(scheduler: StepScheduler, requests: list[Request]) -> None:
    """Run the prompts until every request decodes, then a few steps more."""
    most = sum(len(request.prompt_token_ids) for request in requests)
    for _ in range(most):
        batch = scheduler.schedule(0)
        scheduler.update(batch, fake_result(batch))
        if [num_new for _, num_new in batch.items] == [1] * len(requests):
            break
    else:
        raise ValueError(f"the scheduler does not run {len(requests)} requests at once")
    for _ in range(WARMUP_STEPS):
        batch = scheduler.schedule(0)
        scheduler.update(batch, fake_result(batch))


def _report(num_running: int, schedule_us: list[float], update_us: list[float]) -> SchedulerReport:
    total = summarize((s + u for s, u in zip(schedule_us, update_us, strict=True)), 1)
    return {
        "benchmark": "scheduler_steps",
        "num_running": num_running,
        "num_steps": len(schedule_us),
        "schedule_us": summarize(schedule_us, 1),
        "update_us": summarize(update_us, 1),
        "total_us": total,
        "limit_us": LIMIT_US,
        "share_of_limit": round(total["p50"] / LIMIT_US, 3),
    }


COMMANDS = (BenchCommand("scheduler", scheduler, PANELS),)
