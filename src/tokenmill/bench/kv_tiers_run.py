"""Conversations whose KV is larger than the device's: with tiers behind it, and without."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from tokenmill.core.config import Setup
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.types import Request, SamplingParams, TokenmillError
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.tiers.page_copies import PageCopies

_COPIED_BYTES = 2**28  # of a copy that is timed
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Conversations:
    """Each turn's prompt is all that was said before, and so many tokens more."""

    count: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    at_once: int  # requests in flight
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all conversations at their end."""
        return self.count * self.turns * (self.turn_tokens + self.answer_tokens)


@dataclass(slots=True)
class _Run:
    """What one engine did."""

    times: list[RequestTimes] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)


def measure(setup: Setup, load: Conversations, times_device: float) -> dict[str, Any]:
    """The report: one engine after the other on the same conversations."""
    assert setup.cache.block_size is not None
    num_blocks = max(1, int(load.num_tokens / times_device) // setup.cache.block_size)
    cache = replace(setup.cache, num_blocks=num_blocks)
    runs, answers, copies = {}, {}, {}
    for name, offloading in (("off", None), ("on", cache.offloading)):
        built = build_engine(replace(setup, cache=replace(cache, offloading=offloading)))
        run = _converse(_engine(built), load, built.spec.vocab_size)
        runs[name] = _figures(run, built)
        answers[name] = run.answers
        if offloading is not None:
            copies = _copy_rates(built)
        built.close()
    same = sum(a == b for a, b in zip(*answers.values(), strict=True))
    on, off = runs["on"], runs["off"]
    return {
        "benchmark": "kv-tiers",
        "offloading": cache.offloading,
        "device": setup.model.device,
        "device_tokens": num_blocks * setup.cache.block_size,
        "conversation_tokens": load.num_tokens,
        "num_requests": load.count * load.turns,
        "runs": runs,
        "copies": copies,
        "same_answers": same,
        "ttft_ratio": on["ttft_ms"]["mean"] / off["ttft_ms"]["mean"],
        "computed_ratio": on["computed_tokens"] / off["computed_tokens"],
    }


def _engine(built: BuiltEngine) -> LanguageEngine:
    assert isinstance(built.engine, LanguageEngine), "tiers need an engine of one rank"
    return built.engine


def _converse(engine: LanguageEngine, load: Conversations, vocab_size: int) -> _Run:
    """All conversations turn by turn, so that each comes back when all others have spoken."""
    source, run = random.Random(load.seed), _Run()
    spoken: list[list[int]] = [[] for _ in range(load.count)]
    begin = time.monotonic()
    for turn in range(load.turns):
        waiting = list(enumerate(spoken))
        for said in spoken:
            said += [source.randrange(3, vocab_size) for _ in range(load.turn_tokens)]
        while waiting:
            some, waiting = waiting[: load.at_once], waiting[load.at_once :]
            _ask(engine, turn, some, load.answer_tokens, run)
    run.seconds = time.monotonic() - begin
    return run


def _ask(
    engine: LanguageEngine,
    turn: int,
    some: list[tuple[int, list[int]]],
    answer_tokens: int,
    run: _Run,
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    times, spoken = {}, {}
    for index, said in some:
        now_ns, request_id = time.monotonic_ns(), f"{turn}-{index}"
        times[request_id], spoken[request_id] = RequestTimes(now_ns), said
        run.num_prompt_tokens += len(said)
        engine.submit(Request(request_id, list(said), sampling, arrival_ns=now_ns))
    while engine.has_work():
        for output in engine.step():
            if output.error:
                raise TokenmillError(output.error)
            if output.token_ids:
                times[output.request_id].record(time.monotonic_ns(), len(output.token_ids))
                spoken[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                run.num_cached_tokens += output.num_cached_tokens
    run.times += times.values()
    run.answers += [said[-answer_tokens:] for said in spoken.values()]


def _figures(run: _Run, built: BuiltEngine) -> dict[str, Any]:
    tiers = built.engine.stats().tiers
    return {
        "ttft_ms": summarize([times.ttft_ms for times in run.times], 2),
        "prompt_tokens": run.num_prompt_tokens,
        "computed_tokens": run.num_prompt_tokens - run.num_cached_tokens,
        "seconds": round(run.seconds, 2),
        **({"tiers": {name: round(value, 4) for name, value in tiers.items()}} if tiers else {}),
    }


def _copy_rates(built: BuiltEngine) -> dict[str, float]:
    """GB/s of blocks to host memory and back, beside a plain copy of as many bytes."""
    tiers = _engine(built).tiers
    assert tiers is not None
    tiers.flush()  # what is measured overwrites slots
    copies = tiers.copies
    count = max(1, min(built.num_blocks, len(copies.host), _COPIED_BYTES // copies.host.shape[1]))
    ids, rates = list(range(count)), {"save_gb_s": 0.0, "load_gb_s": 0.0, "plain_gb_s": 0.0}
    num_bytes, on_gpu = count * copies.host.shape[1], built.device == "cuda"
    for _ in range(_ROUNDS):
        for name, seconds in zip(rates, _timed(copies, ids, num_bytes, on_gpu), strict=True):
            rates[name] = max(rates[name], num_bytes / seconds / 1e9)
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()} | {"bytes": num_bytes}


def _timed(copies: PageCopies, ids: list[int], num_bytes: int, on_gpu: bool) -> list[float]:
    """Seconds of a save, a load and a plain copy."""
    plain = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    target = torch.empty_like(plain, device="cuda" if on_gpu else "cpu", pin_memory=False)
    marks = [time.perf_counter()]
    copies.save(ids, ids)
    copies.settle()
    marks.append(time.perf_counter())
    read = copies.load(ids, ids)
    while not read.done():
        time.sleep(0)
    marks.append(time.perf_counter())
    target.copy_(plain, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()
    marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]
