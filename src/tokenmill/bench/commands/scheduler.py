"""tokenmill bench scheduler."""

from __future__ import annotations

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from tokenmill.settings import SETTINGS, Settings

PANELS = {
    "Benchmark": (SETTINGS["num-running"], SETTINGS["num-steps"], SETTINGS["json-only"]),
}


def scheduler(settings: Settings) -> None:
    """Time of the scheduler in one step, without a model.

    tokenmill bench scheduler --num-running 512
    """
    from tokenmill.bench import scheduler_steps as steps
    from tokenmill.sched.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler

    num_running, num_steps = settings.get("num-running"), settings.get("num-steps")
    # Prompts of under 150 tokens at 4 a step and request: all decode after some 50 steps.
    longest = 256 + num_steps + steps.WARMUP_STEPS
    limits = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=4 * num_running,
        max_waiting=num_running,
        max_model_len=longest,
    )
    requests = steps.decode_requests(num_running)
    block_size = DEFAULT_BLOCK_SIZE
    pool = BlockPool(num_running * (longest // block_size + 1), block_size)
    report = steps.measure_steps(Scheduler(limits, pool, frozenset()), requests, num_steps)
    if not settings.get("json-only"):
        console.out.print(
            f"{num_running} running requests: {report['total_us']['p50']:.0f} us a step (schedule "
            f"{report['schedule_us']['p50']:.0f}, update {report['update_us']['p50']:.0f}) "
            f"of a limit of {report['limit_us']:.0f} us"
        )
    console.print_json(report)


COMMANDS = (BenchCommand("scheduler", scheduler, PANELS),)
