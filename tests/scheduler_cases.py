"""Schedulers, requests and results that the scheduler's tests share."""

from __future__ import annotations

from typing import Any

from fake_runner import EOS
from scheduler_integrity import check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

GO_ON = SamplingParams(max_tokens=None, ignore_eos=True)

ENVELOPE = {"priority", "arrival_ns", "deadline_ns", "account"}


def make(num_blocks: int = 64, block_size: int = 4, cache: bool = True, **config: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, block_size, cache), EOS)


def asked(name: str, prompt: list[int], sampling: SamplingParams, **fields: Any) -> Request:
    """A request with these fields of its own and of its task."""
    own = {key: fields.pop(key) for key in ENVELOPE & fields.keys()}
    return Request(name, Generate(prompt, sampling, **fields), **own)


def request(
    name: str, prompt: list[int] | int, sampling: SamplingParams = GO_ON, **fields: Any
) -> Request:
    tokens = [1] * prompt if isinstance(prompt, int) else prompt
    return asked(name, tokens, sampling, **fields)


def distinct(name: str, length: int, sampling: SamplingParams = GO_ON, **fields: Any) -> Request:
    """A prompt that shares nothing with others."""
    start = sum(name.encode()) * 1000
    return asked(name, list(range(start, start + length)), sampling, **fields)


def sampled(batch: Batch, token: int = 5) -> StepResult:
    return StepResult(
        [[token] if s.num_computed_tokens + n == s.num_tokens else [] for s, n in batch.items]
    )


def step(scheduler: Scheduler, token: int = 5, now_ns: int = 0) -> dict[str, int]:
    """One step of a model that always says `token`; returns the tokens scheduled per request."""
    batch = scheduler.schedule(now_ns)
    scheduler.update(batch, sampled(batch, token))
    check_scheduler(scheduler)
    return {seq.request_id: num_new for seq, num_new in batch.items}


VARIANTS: list[dict[str, Any]] = [
    {},
    {"cache": False},
    {"chunked_prefill": False, "max_num_batched_tokens": 12},
    {"max_num_batched_tokens": 3},
    {"num_blocks": 9},
    {"num_blocks": 9, "max_num_batched_tokens": 5, "policy": "fcfs"},
    {"max_num_seqs": 1},
]


def many_requests() -> list[Request]:
    return [
        request(f"r{i}", [1] * (i % 12) + [i % 5] * 3, SamplingParams(max_tokens=12))
        for i in range(20)
    ]
