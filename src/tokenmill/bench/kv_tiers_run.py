"""Requests whose KV is larger than the device's: with tiers, without, and without any cache."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tokenmill.bench.kv_tiers_load import Asked, Load, Play
from tokenmill.core.config import Setup
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.types import Request, RequestOutput, SamplingParams, TokenmillError
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import KV_BYTES
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.tiers.page_copies import PageCopies
from tokenmill.models.checkpoints.weights import read_spec

_FIRST = "recompute"  # a run to which no request finds another's KV
Say = Callable[[str], None]  # one line on what is done, with the figures so far
_COPIED_BYTES = 2**28  # of a copy that is timed
_ROUNDS = 5
_PARTS = 4  # of a run, whose figures are told as they come
_RUNS, _RESERVE_S = 3, 10.0  # for what a second start has beside the first, and for the copies


@dataclass(slots=True)
class _Run:
    """What one engine did."""

    times: list[RequestTimes] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0
    answers: dict[str, list[int]] = field(default_factory=dict)  # by request


@dataclass(slots=True)
class TimePlan:
    """How many requests are asked: as many as the first run, which computes most, has time for."""

    num_requests: int
    end_s: float = math.inf  # of all runs, by time.monotonic()

    def first_end_s(self, start_s: float) -> float:
        """When the first run may ask no more: two others follow, and another start."""
        now_s = time.monotonic()
        return now_s + max(0.0, self.end_s - now_s - start_s - _RESERVE_S) / _RUNS


def host_bytes(setup: Setup, load: Load) -> int:
    """Host memory that holds all that is asked, and an eighth more for blocks that are not full."""
    spec = read_spec(Path(setup.model.model))
    return load.num_kept_tokens * spec.kv_bytes_per_token(KV_BYTES[setup.cache.dtype]) * 9 // 8


def measure(
    setup: Setup, load: Load, times_device: float, say: Say, seconds: float | None = None
) -> dict[str, Any]:
    """The report: one engine after the other on the same requests, as many as time allows."""
    plan = TimePlan(load.num_requests, time.monotonic() + (seconds or math.inf))
    assert setup.cache.block_size is not None
    size, num_tokens = setup.cache.block_size, load.num_tokens
    num_blocks = max(1, int(num_tokens / times_device) // size)
    if num_blocks * size < load.longest + 1:
        raise TokenmillError(
            f"--working-set {times_device:g}: the device would hold {num_blocks * size:,} tokens, "
            f"but the longest request has {load.longest:,}; give more --conversations, or a "
            "smaller --working-set"
        )
    cache = replace(setup.cache, num_blocks=num_blocks)
    say(f"{load.words}; the device holds {num_blocks * size:,}")
    off = _measure(replace(setup, cache=replace(cache, offloading=None)), load, say, plan)
    on = _measure(replace(setup, cache=cache), load, say, plan)
    runs, answers = off.figures | on.figures, off.answers["off"]
    ttft = {name: figures["ttft_ms"]["mean"] for name, figures in runs.items()}
    return {
        "benchmark": "kv-tiers",
        "offloading": cache.offloading,
        "device": setup.model.device,
        "device_tokens": num_blocks * size,
        "working_set_tokens": num_tokens,
        "num_requests": plan.num_requests,
        "left_out": load.num_requests - plan.num_requests,
        "runs": runs,
        "copies": on.copies,
        "same_answers": sum(answers[name] == said for name, said in on.answers["on"].items()),
        "ttft_ratio": ttft["on"] / ttft["off"],
        "ttft_to_recompute": ttft["on"] / ttft["recompute"],
        "computed_ratio": runs["on"]["computed_tokens"] / runs["off"]["computed_tokens"],
    }


@dataclass(slots=True)
class _Side:
    """The figures of one engine, which is gone by then: by run."""

    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    copies: dict[str, float] = field(default_factory=dict)


def _measure(setup: Setup, load: Load, say: Say, plan: TimePlan) -> _Side:
    """Build an engine and ask it; its memory is free for the next one."""
    begin, has_tiers = time.monotonic(), setup.cache.offloading is not None
    names = ("on",) if has_tiers else (_FIRST, "off")
    say(f"tiers {names[-1]}: starting the engine")
    built = build_engine(setup)
    start_s, side = round(time.monotonic() - begin, 2), _Side()
    say(f"tiers {names[-1]}: the engine started in {start_s:.1f} s")
    for name in names:
        asking = _Asking(_engine(built), load, name, say, plan)
        end_s = plan.first_end_s(start_s) if name == _FIRST else math.inf
        run = asking.run(built.spec.vocab_size, end_s)
        side.figures[name] = {"start_s": start_s} | _figures(run, built)
        side.answers[name] = run.answers
    if has_tiers:
        side.copies = _copy_rates(built)
        say(_rates(side.copies))
    built.close()
    del built
    gc.collect()
    if setup.model.device == "cuda":
        torch.cuda.empty_cache()
    return side


def _rates(copies: dict[str, float]) -> str:
    return (
        f"blocks to host memory {copies['save_gb_s']:.2f} GB/s, back {copies['load_gb_s']:.2f} "
        f"GB/s, a plain copy {copies['plain_gb_s']:.2f} GB/s"
    )


def _engine(built: BuiltEngine) -> LanguageEngine:
    assert isinstance(built.engine, LanguageEngine), "tiers need an engine of one rank"
    return built.engine


class _Asking:
    """Asks an engine all requests, so many in flight; to `recompute` none finds another's KV."""

    def __init__(
        self, engine: LanguageEngine, load: Load, name: str, say: Say, plan: TimePlan
    ) -> None:
        self._engine, self._load, self._name, self._say = engine, load, name, say
        self._plan = plan
        self._run = _Run()
        self._live: dict[str, RequestTimes] = {}

    def run(self, vocab_size: int, end_s: float) -> _Run:
        """Ask until `end_s`, and some requests at least; the plan has as many from then on."""
        play, run, begin = self._load.play(vocab_size), self._run, time.monotonic()
        while len(run.answers) < self._plan.num_requests or self._live:
            self._fill(play)
            for output in self._engine.step():
                if self._take(output):
                    play.answered(output.request_id, run.answers[output.request_id])
                    run.seconds = time.monotonic() - begin
                    self._tell()
            if time.monotonic() > end_s and len(run.answers) < self._plan.num_requests:
                self._plan.num_requests = len(run.answers)
                self._say(f"tiers {self._name}: no time for more than {len(run.answers)} requests")
        return run

    def _fill(self, play: Play) -> None:
        """Ask what can be asked now."""
        while len(self._live) < self._load.at_once:
            if len(self._run.answers) == self._plan.num_requests or (asked := play.take()) is None:
                return
            self._ask(asked)

    def _ask(self, asked: Asked) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=asked.answer_tokens, ignore_eos=True)
        now_ns, salt = time.monotonic_ns(), asked.name if self._name == _FIRST else ""
        self._live[asked.name] = RequestTimes(now_ns)
        self._run.answers[asked.name] = []
        self._run.num_prompt_tokens += len(asked.prompt)
        self._engine.submit(
            Request(asked.name, asked.prompt, sampling, arrival_ns=now_ns, cache_salt=salt)
        )

    def _take(self, output: RequestOutput) -> bool:
        """Note what a request produced; True if it has ended."""
        if output.error:
            raise TokenmillError(output.error)
        if output.token_ids:
            self._live[output.request_id].record(time.monotonic_ns(), len(output.token_ids))
            self._run.answers[output.request_id] += output.token_ids
        if output.finish_reason is None:
            return False
        self._run.num_cached_tokens += output.num_cached_tokens
        self._run.times.append(self._live.pop(output.request_id))
        return True

    def _tell(self) -> None:
        """After each quarter: TTFT of its requests, and what was computed of all prompts so far."""
        run, total = self._run, self._plan.num_requests
        done, before = (_PARTS * n // total for n in (len(run.times), len(run.times) - 1))
        if done == before:
            return
        ttft = summarize([times.ttft_ms for times in run.times[total * (done - 1) // _PARTS :]])
        self._say(
            f"tiers {self._name}, {len(run.times)} of {total} requests: TTFT mean "
            f"{ttft['mean']:.0f} ms, max {ttft['max']:.0f} ms; so far "
            f"{run.num_prompt_tokens - run.num_cached_tokens:,} of {run.num_prompt_tokens:,} "
            f"prompt tokens computed, {run.seconds:.1f} s"
        )


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
