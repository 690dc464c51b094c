"""Conversations whose KV is larger than the device's: with tiers behind it, and without."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tokenmill.core.config import Setup
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.types import Request, SamplingParams, TokenmillError
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import KV_BYTES
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.tiers.page_copies import PageCopies
from tokenmill.models.checkpoints.weights import read_spec

Say = Callable[[str], None]  # one line on what is done, with the figures so far
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


def host_bytes(setup: Setup, load: Conversations) -> int:
    """Host memory that holds all conversations, and an eighth more for blocks that are not full."""
    spec = read_spec(Path(setup.model.model))
    return load.num_tokens * spec.kv_bytes_per_token(KV_BYTES[setup.cache.dtype]) * 9 // 8


def measure(setup: Setup, load: Conversations, times_device: float, say: Say) -> dict[str, Any]:
    """The report: one engine after the other on the same conversations."""
    assert setup.cache.block_size is not None
    num_blocks = max(1, int(load.num_tokens / times_device) // setup.cache.block_size)
    cache = replace(setup.cache, num_blocks=num_blocks)
    say(
        f"{load.count} conversations of {load.num_tokens:,} tokens in all; the device holds "
        f"{num_blocks * setup.cache.block_size:,}"
    )
    off = _measure(replace(setup, cache=replace(cache, offloading=None)), load, "off", say)
    on = _measure(replace(setup, cache=cache), load, "on", say)
    return {
        "benchmark": "kv-tiers",
        "offloading": cache.offloading,
        "device": setup.model.device,
        "device_tokens": num_blocks * setup.cache.block_size,
        "conversation_tokens": load.num_tokens,
        "num_requests": load.count * load.turns,
        "runs": {"off": off.figures, "on": on.figures},
        "copies": on.copies,
        "same_answers": sum(a == b for a, b in zip(off.answers, on.answers, strict=True)),
        "ttft_ratio": on.figures["ttft_ms"]["mean"] / off.figures["ttft_ms"]["mean"],
        "computed_ratio": on.figures["computed_tokens"] / off.figures["computed_tokens"],
    }


@dataclass(frozen=True, slots=True)
class _Side:
    """The figures of one engine, which is gone by then."""

    figures: dict[str, Any]
    answers: list[list[int]]
    copies: dict[str, float]


def _measure(setup: Setup, load: Conversations, name: str, say: Say) -> _Side:
    """Build an engine and talk to it; its memory is free for the next one."""
    begin = time.monotonic()
    say(f"tiers {name}: starting the engine")
    built = build_engine(setup)
    start_s = round(time.monotonic() - begin, 2)
    say(f"tiers {name}: the engine started in {start_s:.1f} s")
    run = _converse(
        _engine(built), load, built.spec.vocab_size, lambda line: say(f"tiers {name}, {line}")
    )
    figures, copies = {"start_s": start_s} | _figures(run, built), {}
    if _engine(built).tiers is not None:
        copies = _copy_rates(built)
        say(_rates(copies))
    built.close()
    del built
    gc.collect()
    if setup.model.device == "cuda":
        torch.cuda.empty_cache()
    return _Side(figures, run.answers, copies)


def _rates(copies: dict[str, float]) -> str:
    return (
        f"blocks to host memory {copies['save_gb_s']:.2f} GB/s, back {copies['load_gb_s']:.2f} "
        f"GB/s, a plain copy {copies['plain_gb_s']:.2f} GB/s"
    )


def _engine(built: BuiltEngine) -> LanguageEngine:
    assert isinstance(built.engine, LanguageEngine), "tiers need an engine of one rank"
    return built.engine


def _converse(engine: LanguageEngine, load: Conversations, vocab_size: int, say: Say) -> _Run:
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
        say(f"turn {turn + 1} of {load.turns}: {_so_far(run, load.count)}")
    return run


def _so_far(run: _Run, count: int) -> str:
    """TTFT of the latest requests, and what was computed of all prompts."""
    ttft = summarize([times.ttft_ms for times in run.times[-count:]])
    return (
        f"TTFT mean {ttft['mean']:.0f} ms, max {ttft['max']:.0f} ms; so far "
        f"{run.num_prompt_tokens - run.num_cached_tokens:,} of {run.num_prompt_tokens:,} prompt "
        f"tokens computed, {run.seconds:.1f} s"
    )


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
