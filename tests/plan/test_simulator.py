from __future__ import annotations

import math
from typing import Any

import pytest

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.engine import LanguageEngine
from tokenmill.plan.simulator import SimRunner
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler

TOKENS = [11, 12, 13]


def run(requests: list[Request], **limits: Any) -> dict[str, RequestOutput]:
    """Each request's outputs put together."""
    config = SchedulerConfig(max_model_len=256, **limits)
    engine = LanguageEngine(Scheduler(config, BlockPool(64, 4), frozenset({12})), SimRunner(TOKENS))
    for request in requests:
        engine.submit(request)
    whole: dict[str, RequestOutput] = {}
    while engine.has_work():
        for output in engine.step():
            earlier = whole.setdefault(output.request_id, output)
            if earlier is not output:
                earlier.token_ids = earlier.token_ids + output.token_ids
                earlier.logprobs = (earlier.logprobs or []) + (output.logprobs or [])
                earlier.finish_reason = output.finish_reason
    return whole


def test_the_text_repeats_whatever_the_batch() -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [Request(str(i), Generate(list(range(1, 2 + 7 * i)), sampling)) for i in range(6)]
    for budget in (4, 512):
        outputs = run(requests, max_num_batched_tokens=budget)
        assert [o.token_ids for o in outputs.values()] == [[11, 12, 13, 11, 12, 13, 11, 12]] * 6


def test_the_schedulers_rules_hold() -> None:
    outputs = run(
        [
            Request("eos", Generate([1, 2], SamplingParams(max_tokens=9))),
            Request("stop", Generate([1, 2], SamplingParams(max_tokens=9, stop_token_ids=(11,)))),
            Request("empty", Generate([], SamplingParams())),
        ]
    )
    assert outputs["eos"].token_ids == [11, 12]
    assert outputs["eos"].finish_reason is FinishReason.STOP
    assert outputs["stop"].token_ids == [11]
    assert outputs["empty"].finish_reason is FinishReason.REJECT


@pytest.mark.parametrize("budget", [3, 512])
def test_logprobs_have_the_asked_shape(budget: int) -> None:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    prompt = [5, 6, 7, 8, 9, 10, 11]
    plain = Request("plain", Generate(prompt, SamplingParams(max_tokens=4, ignore_eos=True)))
    outputs = run([Request("r", Generate(prompt, sampling)), plain], max_num_batched_tokens=budget)
    output = outputs["r"]
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [p.token_ids[0] for p in output.logprobs] == output.token_ids
    assert all(len(p.token_ids) == 3 and p.token_ids[1] == p.token_ids[0] for p in output.logprobs)
    assert sum(math.exp(x) for x in output.logprobs[0].logprobs[1:]) <= 1.0
    assert output.prompt_logprobs[0] is None
    assert [p.token_ids for p in output.prompt_logprobs[1:] if p] == [[t] for t in prompt[1:]]
    assert not outputs["plain"].logprobs and outputs["plain"].prompt_logprobs is None


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        SimRunner([])
