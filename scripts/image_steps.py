"""What images cost the streams of text beside them, simulated with the real scheduler.

    python scripts/image_steps.py
    python scripts/image_steps.py --loads 8/512/2 --seeds 1

Qwen3-VL-30B-A3B in bf16 with the limits that an H200 has by default. A step takes what the planner
says (attention at 0.45 of the peak), and its patches what the encoder was measured to take. A load
is texts a second / their tokens / images a second; a text has 128 tokens out, and an image comes
with 400 to 1,200 tokens of text and has 43 out. Each is compared with itself without images:
ratio of the 99th percentiles of the time between tokens of texts, and the mean time to the first
token of texts and of images. At the end many images at once, and closed loops of them. The last
line is one JSON object. All of it is a prediction, none of it a measurement.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from qwen3_vl_requests import OUT, SIZES, TEXT

import tokenmill.bench
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.types import Request, SamplingParams, StepResult
from tokenmill.engine import limits
from tokenmill.models import spec_of
from tokenmill.plan.cluster.rank_work import Positions, RankWork
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.catalog import precisions_of
from tokenmill.plan.predict.efficiencies import find_fit
from tokenmill.plan.predict.step_cost import Replica, StepCost
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
LOADS = "8/512/2,16/512/4,8/512/4,24/256/4,20/128/2,4/2000/2,4/512/1"
ATTENTION, ENCODER_FLOPS = 0.45, 4.54e14  # share of the peak; docs/log.md, 2026-11-16
TEXT_OUT = 128
GPU_BYTES, NUM_BLOCKS, BLOCK = 141 * 10**9, 30_000, 16


class Clock:
    """The seconds of a step."""

    def __init__(self) -> None:
        gpu, fit = find_gpu("h200"), find_fit("tokenmill")
        self.spec = spec_of(json.loads((SHAPES / "qwen3-vl-30b-a3b.json").read_text()))
        assert self.spec.vision is not None
        self._vision = self.spec.vision
        efficiency = replace(fit.efficiency, attention=ATTENTION)
        precision = precisions_of(self.spec, "bf16")
        self._cost = StepCost(self.spec, fit.peaks(gpu), Replica(precision), efficiency)
        self.shares: dict[bytes, float] = {}  # of images that were encoded in part

    def step_s(self, batch: Batch) -> float:
        """Of a batch that is about to run: each image of it is encoded once."""
        flops = sum(self._encoding(batch))
        work = RankWork.of(batch, Positions(self.spec))
        return flops / ENCODER_FLOPS + self._cost.step_s(work.times(1.0))

    def _encoding(self, batch: Batch) -> Iterator[float]:
        for begun in batch.begun_images:
            yield self._up_to(begun.image, begun.share)
        for seq, num_new in batch.items:
            first = seq.num_computed_tokens
            for span in seq.request.images:
                if span.offset < first + num_new and span.end > first:
                    yield self._up_to(span.image, 1.0)

    def _up_to(self, image: ImageInput, share: float) -> float:
        done = self.shares.get(image.content_hash, 0.0)
        self.shares[image.content_hash] = max(done, share)
        return max(0.0, share - done) * self._vision.encode_flops(image.num_patches)


@dataclass
class Found:
    """What happened to the requests of a run; seconds."""

    gaps: list[float] = field(default_factory=list)  # between the tokens of texts
    text_ttft: list[float] = field(default_factory=list)
    image_ttft: list[float] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0


class Source:
    """Requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random, self._count = random.Random(seed), 0

    def text(self, length: int) -> Request:
        self._count += 1
        sampling = SamplingParams(max_tokens=TEXT_OUT, ignore_eos=True)
        return Request(f"text-{self._count}", [1] * length, sampling)

    def image(self) -> Request:
        self._count += 1
        width, height = self._random.choice(SIZES)
        length, tokens = self._random.randint(*TEXT), (height // 32) * (width // 32)
        grid = (1, height // 16, width // 16)
        image = ImageInput(b"", grid, self._random.randbytes(32))
        span = ImageSpan(length // 2 + 1, tokens, image)
        sampling = SamplingParams(max_tokens=OUT, ignore_eos=True)
        prompt = [1] * (length + tokens + 2)
        return Request(f"image-{self._count}", prompt, sampling, images=(span,))

    def arrivals(self, rate: float, seconds: float) -> Iterator[float]:
        at = self._random.expovariate(rate) if rate else seconds
        while at < seconds:
            yield at
            at += self._random.expovariate(rate)


class Simulation:
    """Requests that arrive, and the scheduler that runs them in the clock's time."""

    def __init__(self, clock: Clock) -> None:
        spec = clock.spec
        budget = limits.choose_budget(spec, GPU_BYTES)
        patches, tokens = limits.choose_image_parts(spec, GPU_BYTES, 2)
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=512,
            max_waiting=8192,
            max_model_len=32768,
            encoder_patches=limits.choose_encoder_patches(spec, budget),
            encoder_share=patches,
            image_tokens=tokens,
        )
        pool = BlockPool(NUM_BLOCKS, BLOCK, prefix_cache=False)
        self._scheduler = Scheduler(config, pool, frozenset())
        self._clock, self._now = clock, 0.0
        clock.shares.clear()
        self._came: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self.found = Found()

    def run(
        self, arriving: list[tuple[float, Request]], loop: Source | None = None, more: int = 0
    ) -> Found:
        """Until all have ended; in a closed loop each that ends brings one of so many more."""
        waiting = sorted(arriving, key=lambda each: -each[0])
        while waiting or self._scheduler.has_work():
            while waiting and waiting[-1][0] <= self._now:
                self._add(*waiting.pop())
            if not self._scheduler.has_work():
                self._now = waiting[-1][0]
                continue
            for _ in range(self._step()):
                if loop and more:
                    more -= 1
                    self._add(self._now, loop.image())
        self.found.seconds = self._now
        return self.found

    def _add(self, at: float, request: Request) -> None:
        self._came[request.request_id] = at
        self._scheduler.add(request)

    def _step(self) -> int:
        """Run a batch; returns how many requests ended."""
        batch = self._scheduler.schedule(int(self._now * 1e9))
        self._now += self._clock.step_s(batch)
        self.found.num_steps += 1
        tokens = [[5] if s.num_computed_tokens + n == s.num_tokens else [] for s, n in batch.items]
        outputs = self._scheduler.update(batch, StepResult(tokens))
        for output in outputs:
            self._count(output.request_id)
        return sum(output.finish_reason is not None for output in outputs)

    def _count(self, name: str) -> None:
        is_text, found = name.startswith("text"), self.found
        if name not in self._last:
            first = self._now - self._came[name]
            (found.text_ttft if is_text else found.image_ttft).append(first)
        elif is_text:
            found.gaps.append(self._now - self._last[name])
        self._last[name] = self._now


class Compared(NamedTuple):
    """A load with images beside itself without; milliseconds."""

    load: str
    seed: int
    p99_ms_alone: float
    p99_ms: float
    ttft_ms: float
    image_ttft_ms: float

    @property
    def ratio(self) -> float:
        return self.p99_ms / self.p99_ms_alone

    def figures(self) -> dict[str, object]:
        values = {name: round(x, 1) if isinstance(x, float) else x for name, x in self.items()}
        return values | {"ratio": round(self.ratio, 3)}

    def items(self) -> Iterator[tuple[str, str | float]]:
        return iter(self._asdict().items())


def simulate_load(clock: Clock, load: str, seed: int, seconds: float) -> Compared:
    """Both with the same texts at the same times."""
    texts, length, images = load.split("/")
    p99 = []
    for rate in (0.0, float(images)):
        source = Source(seed)
        arriving = [(at, source.text(int(length))) for at in source.arrivals(float(texts), seconds)]
        arriving += [(at, source.image()) for at in source.arrivals(rate, seconds)]
        found = Simulation(clock).run(arriving)
        p99.append(1e3 * float(np.percentile(found.gaps, 99)))
    means = (
        1e3 * float(np.mean(each))
        for each in (found.text_ttft + found.image_ttft, found.image_ttft)
    )
    return Compared(load, seed, *p99, *means)


def simulate_at_once(clock: Clock, at_once: int, more: int) -> dict[str, object]:
    """So many images at once, and each that ends brings another until there were `more`."""
    source = Source(1)
    arriving = [(0.0, source.image()) for _ in range(at_once)]
    found = Simulation(clock).run(arriving, source, more)
    rate = len(found.image_ttft) / found.seconds
    return {"at_once": at_once, "samples_s": round(rate, 2), "num_steps": found.num_steps}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", default=LOADS, help="texts a second/their tokens/images")
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals")
    parser.add_argument("--at-once", default="16,64,256", help="images; 256: no closed loop")
    args = parser.parse_args()
    clock, rows = Clock(), []
    for load in filter(None, args.loads.split(",")):
        for seed in range(1, args.seeds + 1):
            rows.append(simulate_load(clock, load, seed, args.seconds).figures())
            print(json.dumps(rows[-1]), flush=True)
    for at_once in map(int, filter(None, args.at_once.split(","))):
        rows.append(simulate_at_once(clock, at_once, 256 if at_once < 256 else 0))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"benchmark": "image-steps", "simulated": True, "rows": rows}))


if __name__ == "__main__":
    main()
