"""Decode steps of a chosen batch and context, timed as the engine launches them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from tokenmill.core.types import Request
from tokenmill.engine.graphs.capture import CaptureLimits, capture_all
from tokenmill.engine.graphs.decode_graphs import DecodeGraphs
from tokenmill.engine.runner import ModelRunner
from tokenmill.kernels import MODE
from tokenmill.sched.sequence import Batch, Sequence

GRAPH_BYTES = 2**34
PROFILED = 3


class DecodeProbe:
    """Repeats one decode step: `size` sequences that have `context` tokens in the cache each.

    The cache holds zeros, so nothing is learnt from the answers. The newest tokens differ, so that
    they choose experts of their own.
    """

    def __init__(self, runner: ModelRunner, size: int, context: int) -> None:
        self.runner, self.size = runner, size
        vocab, source = runner.model.spec.vocab_size, random.Random(0)
        num_blocks, per_seq = context // runner.block_size + 1, pages_per_seq(runner, context)
        items = []
        for slot in range(size):
            token_ids = [0] * context + [source.randrange(vocab)]
            seq = Sequence(Request(str(slot), token_ids), (0, 0, slot), context + 2, frozenset())
            pages = list(range(slot * per_seq, (slot + 1) * per_seq))
            seq.block_ids, seq.window_ids = pages[:num_blocks], pages[num_blocks:]
            if groups := runner.sliding.num_groups:
                seq.window_first = num_blocks - len(seq.window_ids) // groups
            seq.slot, seq.num_computed_tokens = slot, context
            items.append((seq, 1))
        self.batch = Batch(items, size, [(seq, 0) for seq, _ in items])

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture this size alone; without it the kernels are launched one by one."""
        runner = self.runner
        graphs = runner.decode.graphs = DecodeGraphs(
            runner.model, runner.kv_cache, runner.builder, self.size, [self.size]
        )
        jobs = graphs.jobs(torch.cuda.graph_pool_handle())
        graphs.start(capture_all(jobs, CaptureLimits(math.inf, GRAPH_BYTES)))

    def seconds(self, repeats: int = 20) -> float:
        """The mean time of a step."""
        self._run(3)
        begin = time.perf_counter()
        self._run(repeats)
        return (time.perf_counter() - begin) / repeats

    def kernels(self) -> dict[str, float]:
        """Seconds of a step by kernel of the GPU."""
        self._run(1)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self._run(PROFILED)
        return {
            event.key: event.self_device_time_total * 1e-6 / PROFILED
            for event in profiled.key_averages()
            if event.self_device_time_total
        }

    def _run(self, repeats: int) -> None:
        """As in the overlapped loop, a step is launched before the one before it is over."""
        running = self.runner.launch(self.batch)
        for _ in range(repeats - 1):
            running, last = self.runner.launch(self.batch), running
            last.wait()
        running.wait()


def pages_per_seq(runner: ModelRunner, context: int) -> int:
    """Blocks of the cache that a sequence takes which decodes after so many tokens."""
    return runner.sliding.num_pages(context // runner.block_size + 1, 1, runner.block_size)


@contextmanager
def without(kernels: Iterable[str]) -> Iterator[None]:
    """Let torch's operations stand in for these Triton kernels."""
    before, MODE.without = MODE.without, frozenset(kernels)
    try:
        yield
    finally:
        MODE.without = before
