"""Streams of text beside requests with images: the time between tokens, and where steps spend it.

qwen3_vl_gpu.py measures with it.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from qwen3_vl_requests import Work

from tokenmill.core.types import Request
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.launched import Launched
from tokenmill.engine.runner import ModelRunner
from tokenmill.sched.sequence import Batch

_SLOW_S = 0.04  # a step that is looked at by itself


@dataclass(frozen=True)
class Load:
    """Requests a second, and for how long they arrive."""

    text_rate: float
    image_rate: float
    seconds: float
    tiny: bool = False
    other_tokens: tuple[int, ...] = ()  # of an image's part in a step, tried after the usual ones


@dataclass
class Gaps:
    """Seconds of streams: between the tokens of texts, and to the first token."""

    texts: list[float] = field(default_factory=list)
    text_ttft: list[float] = field(default_factory=list)
    image_ttft: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """In milliseconds."""
        p50, p90, p99, most = np.percentile(self.texts, [50, 90, 99, 100]) * 1e3
        found = {"itl_ms_p50": p50, "itl_ms_p90": p90, "itl_ms_p99": p99, "itl_ms_max": most}
        found["ttft_ms"] = np.mean(self.text_ttft) * 1e3
        if self.image_ttft:
            found["image_ttft_ms"] = np.mean(self.image_ttft) * 1e3
        rounded = {name: round(float(value), 2) for name, value in found.items()}
        return rounded | {"gaps": len(self.texts)}


@dataclass
class TimedStep:
    """A launch, and the events around its work on the device."""

    kind: str
    num_tokens: int
    launch_s: float
    begin: torch.cuda.Event | None
    end: torch.cuda.Event | None
    wall_s: float = 0.0  # of the engine's step that launched it

    def device_ms(self) -> float:
        """From the end of the step before, or its own launch, to its end."""
        if self.begin is None or self.end is None:
            return 0.0
        return self.begin.elapsed_time(self.end)


class StepWatch:
    """Times all steps of a runner, and notes what else happened in slow ones."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._launch = runner, runner.launch
        self._on_gpu = runner.builder.device.type == "cuda"
        self.steps: list[TimedStep] = []
        self.slow: list[dict[str, Any]] = []
        self._compiled: list[str] = []
        self._gc_s = self._gc_began = 0.0
        runner.launch = self._timed  # type: ignore[method-assign]
        gc.callbacks.append(self._collected)
        if self._on_gpu:
            from triton import knobs

            knobs.runtime.jit_cache_hook = self._noted
        self._before = self._counts()

    def clear(self) -> None:
        """Forget what was timed so far."""
        self.steps, self.slow, self._before = [], [], self._counts()

    def _noted(self, **about: Any) -> bool:
        self._compiled.append(str(about.get("repr"))[:90])
        return False

    def _collected(self, phase: str, info: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._gc_began = now
        else:
            self._gc_s += now - self._gc_began

    def _event(self) -> torch.cuda.Event | None:
        if not self._on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timed(self, batch: Batch) -> Launched:
        images = self._runner.images
        assert images is not None
        known = len(images) - len(batch.dropped_images)
        begin_event, begin = self._event(), time.perf_counter()
        launched = self._launch(batch)
        seconds = time.perf_counter() - begin
        kind = _kind(batch, encodes=bool(batch.begun_images) or len(images) > known)
        step = TimedStep(kind, batch.num_tokens, seconds, begin_event, self._event())
        self.steps.append(step)
        return launched

    def stepped(self, wall_s: float) -> None:
        """Note how long the engine's step took, of the last launch; say more of a slow one."""
        if not self.steps:
            return
        self.steps[-1].wall_s = wall_s
        if wall_s > _SLOW_S:
            counts = self._counts()
            changed = {name: counts[name] - self._before[name] for name in counts}
            step = self.steps[-1]
            self.slow.append(
                {
                    "wall_ms": round(1e3 * wall_s, 1),
                    "launch_ms": round(1e3 * step.launch_s, 1),
                    "kind": step.kind,
                    "tokens": step.num_tokens,
                    **{name: round(value, 1) for name, value in changed.items() if value},
                    "compiled_names": self._compiled[-3:] if changed["compiled"] else [],
                }
            )
            self._before = counts

    def _counts(self) -> dict[str, float]:
        """What may hold a step up: each since the start, so since the last slow step."""
        found = {"compiled": float(len(self._compiled)), "gc_ms": 1e3 * self._gc_s}
        if self._on_gpu:
            stats = torch.cuda.memory_stats()
            found["alloc_retries"] = stats.get("num_alloc_retries", 0)
            found["device_allocs"] = stats.get("num_device_alloc", 0)
        return found

    def figures(self) -> dict[str, dict[str, float]]:
        """Of each kind of step: how many, and the means."""
        if self._on_gpu:
            torch.cuda.synchronize()
        by_kind: dict[str, list[TimedStep]] = {}
        for step in self.steps:
            by_kind.setdefault(step.kind, []).append(step)
        return {kind: _means(steps) for kind, steps in sorted(by_kind.items())}


def _means(steps: list[TimedStep]) -> dict[str, float]:
    walls, launches = ([getattr(s, name) * 1e3 for s in steps] for name in ("wall_s", "launch_s"))
    found = {
        "tokens": np.mean([s.num_tokens for s in steps]),
        "launch_ms": np.mean(launches),
        "device_ms": np.mean([s.device_ms() for s in steps]),
        "wall_ms": np.mean(walls),
        "wall_ms_p99": np.percentile(walls, 99),
    }
    return {"steps": len(steps)} | {name: round(float(x), 2) for name, x in found.items()}


def _kind(batch: Batch, encodes: bool) -> str:
    """What a step has besides requests that decode."""
    chunks = [(seq, n) for seq, n in batch.items if seq.num_computed_tokens < seq.num_prompt_tokens]
    parts = ["text"] if any(_runs_text(seq, n) for seq, n in chunks) else []
    parts += ["image"] if any(_runs_image(seq, n) for seq, n in chunks) else []
    parts += ["encoder"] if encodes else []
    return " + ".join(parts) or "decode"


def _runs_image(seq: Any, num_new: int) -> bool:
    first, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new
    return any(span.offset < end and first < span.end for span in seq.request.images)


def _runs_text(seq: Any, num_new: int) -> bool:
    return not _runs_image(seq, num_new)


def compare(
    built: BuiltEngine, work: Work, load: Load, add: Callable[..., None], watch: StepWatch
) -> None:
    """Text requests alone, beside images and alone again, all after batches of the same kinds."""
    for rate in (0.0, load.image_rate):
        _run(built, work, load, rate, load.seconds / 4, Gaps(), watch)
    if watch.slow:
        add(streams_slow_in_warm_up=watch.slow[:6])
    alone, beside = Gaps(), Gaps()
    turns = (alone, 0.0, 0.5), (beside, load.image_rate, 1.0), (alone, 0.0, 0.5)
    for found, rate, share in turns:
        watch.clear()
        _run(built, work, load, rate, share * load.seconds, found, watch)
        name = "images" if rate else "alone"
        add(**{f"streams_{name}": found.figures(), f"steps_{name}": watch.figures()})
        if watch.slow:
            slow = sorted(watch.slow, key=lambda each: -each["wall_ms"])
            add(**{f"slow_{name}": slow[:6], f"num_slow_{name}": len(slow)})
    add(streams_p99_ratio=_ratio(beside, alone), streams_p99_ratio_limit=1.5)
    for tokens in load.other_tokens:
        other = Gaps()
        set_part(built, tokens)
        watch.clear()
        _run(built, work, load, load.image_rate, load.seconds, other, watch)
        found = {"ratio": _ratio(other, alone), **other.figures(), "steps": watch.figures()}
        add(**{f"streams_images_{tokens}": found})


def _ratio(beside: Gaps, alone: Gaps) -> float:
    return round(float(np.percentile(beside.texts, 99) / np.percentile(alone.texts, 99)), 3)


def set_part(built: BuiltEngine, tokens: int) -> None:
    """Run so many tokens of a prompt with an image in a step that decodes, or as long patches."""
    assert isinstance(built.engine, LanguageEngine)
    cache = built.engine._scheduler.images
    if cache.divides:
        cache._share, cache._tokens = tokens * cache._share // cache._tokens, tokens


def _arrivals(
    work: Work, load: Load, image_rate: float, seconds: float
) -> list[tuple[float, Request]]:
    """Requests and when they come, at random; the last first."""
    source, found = random.Random(3), []
    length, out = (20, 8) if load.tiny else (512, 128)
    for rate, made in (
        (load.text_rate, partial(work.text, length, out)),
        (image_rate, work.sample),
    ):
        at = source.expovariate(rate) if rate else seconds
        while at < seconds:
            found.append((at, made()))
            at += source.expovariate(rate)
    return sorted(found, key=lambda each: -each[0])


def _run(
    built: BuiltEngine,
    work: Work,
    load: Load,
    image_rate: float,
    seconds: float,
    found: Gaps,
    watch: StepWatch,
) -> None:
    """Run requests that arrive for a while, until all have ended."""
    waiting, engine = _arrivals(work, load, image_rate, seconds), built.engine
    came: dict[str, tuple[float, bool]] = {}
    last: dict[str, float] = {}
    begin = time.perf_counter()
    while waiting or engine.has_work():
        while waiting and waiting[-1][0] <= time.perf_counter() - begin:
            at, request = waiting.pop()
            came[request.request_id] = begin + at, bool(request.images)
            engine.submit(request)
        if not engine.has_work():
            continue
        stepped = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        watch.stepped(now - stepped)
        for output in outputs:
            if not output.token_ids:
                continue
            name = output.request_id
            arrived, has_image = came[name]
            if name not in last:
                (found.image_ttft if has_image else found.text_ttft).append(now - arrived)
            elif not has_image:
                found.texts.append(now - last[name])
            last[name] = now
