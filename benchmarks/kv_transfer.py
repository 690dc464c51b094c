"""How fast KV blocks move between two processes, beside a plain copy."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.bench.commands.throughput import model_path
from tokenmill.core.config import ModelConfig
from tokenmill.core.flags import count, one_of, setting
from tokenmill.core.kv import KVAddress
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import TokenmillError
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.kernels.blocks import copy_blocks
from tokenmill.kv.connectors import CONNECTORS, KVLink
from tokenmill.kv.cuda_ipc import CudaIpcConnector
from tokenmill.kv.cuda_memory import BlockCopier, block_pairs
from tokenmill.kv.transfer import OwnConnector, Run
from tokenmill.models.checkpoints.weights import open_checkpoint

ORDERS = ("contiguous", "scattered")
START_S = 120.0  # for the other process to come up
_GROWTH = 8  # of a read's size to the next
_LAUNCHES, _SLEEP_CYCLES = 4, 4_000_000  # a sleep of two milliseconds


@dataclass(frozen=True)
class Options:
    model: str = setting("smollm2", "Model, or a shape, whose KV moves.")
    kv_connector: str = setting(
        "all", "One connector; by default all that are installed.", one_of("all", *CONNECTORS)
    )
    block_size: int = setting(16, "Tokens of a block.", count(1))
    kv_tokens: int = setting(2048, "Tokens whose KV moves.", count(16))
    rounds: int = setting(5, "Measured rounds; the median counts.", count(1, 100))


def run(options: Options) -> Report:
    """Speed of KV blocks between two processes, beside a plain copy of the same size.

    The blocks come from a second process: one block, eight times as many and so on, up to
    --kv-tokens. They are first contiguous, as in a fresh cache, then scattered. Those of cuda-ipc
    lie on a GPU, whose own time is given in brackets: the rest is the host's, such as the launch
    and the wait for the end. `ratio` is the median over the rounds of contiguous blocks against a
    copy made in the same round.

    python -m benchmarks.kv_transfer --kv-connector nixl --kv-tokens 8192
    python -m benchmarks.kv_transfer --kv-connector cuda-ipc --model llama3.1-8b --block-size 64
    """
    path = model_path(ModelConfig(options.model, random_weights=True))
    spec = open_checkpoint(path, random_weights=True).spec
    torch.set_num_threads(1)
    asked, names = options.kv_connector, connectors(options.kv_connector)
    if asked in names and _device(asked) == "cuda" and not torch.cuda.is_available():
        raise TokenmillError(f"--kv-connector {asked} moves a GPU's memory: torch sees none here")
    num_blocks = -(-options.kv_tokens // options.block_size)
    results = {
        name: measure(Pair(name, spec, options.block_size, num_blocks), options.rounds)
        for name in names
    }
    best = max(results.values(), key=lambda result: float(result["ratio"]))
    return {
        "num_tokens": num_blocks * options.block_size,
        "block_size": options.block_size,
        "bytes": best["bytes"],
        "rounds": options.rounds,
        "connectors": results,
        "ratio": best["ratio"],
    }


def show(report: Report) -> None:
    rows = [["connector", "MB", "side by side", "scattered", "plain copy", "of a copy"]]
    for name, result in report["connectors"].items():
        for size in result["by_size"]:
            figures = [_gb_s(size, kind) for kind in ("contiguous", "scattered", "copy")]
            rows.append([name, f"{size['bytes'] / 1e6:.1f}", *figures, f"{size['ratio']:.0%}"])
    console.print_table(rows)


def _gb_s(size: Report, kind: str) -> str:
    """A rate from call to end, and that of the kernel alone where it was measured."""
    kernel = f" ({size[f'{kind}_kernel']:.0f})" if f"{kind}_kernel" in size else ""
    return f"{size[kind]:.2f}{kernel} GB/s"


def connectors(asked: str) -> list[str]:
    if asked in CONNECTORS:
        return [asked]
    return [name for name, connector in CONNECTORS.items() if connector.installed()]


@dataclass(frozen=True, slots=True)
class Pair:
    """A connector, and what both processes have in their caches."""

    name: str
    spec: ModelSpec
    block_size: int
    num_blocks: int

    def open(self) -> tuple[list[torch.Tensor], OwnConnector, KVAddress]:
        """A cache as an engine has it, reached by the connector."""
        device = _device(self.name)
        dtype = "fp32" if device == "cpu" else "bf16"
        link = KVLink.plan(self.name, device, weights="")
        assert link is not None
        sizes = self.num_blocks, self.block_size
        cache = allocate_kv_cache(self.spec, *sizes, device, dtype, link.pages)
        (connector,), address = link.reach(cache, self.spec, dtype, *reversed(sizes))
        # Numbers that every type has room for.
        words = [t.view(self.num_blocks, -1).view(torch.int32) for layer in cache for t in layer]
        return words, connector, address

    @contextmanager
    def source(self) -> Iterator[KVAddress]:
        """A process whose blocks are filled; yields its address."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=self.serve, args=(theirs,), daemon=True)
        process.start()
        try:
            if not ours.poll(START_S):
                raise TokenmillError(f"the other process did not start within {START_S:g} s")
            yield ours.recv()
            ours.send(None)
            process.join(10)
        finally:
            process.kill()

    def serve(self, pipe: Connection) -> None:
        tensors, connector, address = self.open()
        for region, tensor in enumerate(tensors):
            tensor.copy_(_pattern(region, self.num_blocks)[:, None])
        _finish(tensors[0])
        pipe.send(address)
        pipe.recv()
        connector.close()


def measure(pair: Pair, rounds: int) -> Report:
    with pair.source() as peer:
        tensors, connector, _ = pair.open()
        connector.connect(peer, peer.ways[0])
        block_bytes = sum(peer.geometry.block_bytes)
        buffer = torch.ones(2, block_bytes * pair.num_blocks // 4, device=tensors[0].device)
        by_size = []
        for count in _counts(pair.num_blocks):
            measured = _Rates(connector, peer.engine_id, tensors, buffer, count * block_bytes)
            by_size.append(measured.run(count, rounds))
        connector.close()
    whole = by_size[-1]
    return {
        "device": _device(pair.name),
        "bytes": whole["bytes"],
        "gb_s": {kind: whole[kind] for kind in (*ORDERS, "copy")},
        "ratio": whole["ratio"],
        "by_size": by_size,
    }


def _counts(num_blocks: int) -> list[int]:
    """Blocks of a read: one, eight times as many, and so on, and at last all."""
    counts = [1]
    while counts[-1] * _GROWTH < num_blocks:
        counts.append(counts[-1] * _GROWTH)
    return counts + [num_blocks] * (num_blocks > 1)


@dataclass(frozen=True, slots=True)
class _Rates:
    connector: OwnConnector
    engine_id: str
    tensors: list[torch.Tensor]
    buffer: torch.Tensor  # [2, words], of which a plain copy takes as many bytes
    num_bytes: int

    def run(self, count: int, rounds: int) -> Report:
        """Medians over the rounds: from the call to its end, and on a GPU of the kernel alone."""
        rates: dict[str, list[float]] = {}
        for turn in range(rounds + 1):  # the first one connects and touches memory
            seconds = {order: self._read(order, count, turn) for order in ORDERS}
            seconds |= {"copy": self._copy()} | self._kernels(count, turn)
            for kind, taken in seconds.items() if turn else ():
                rates.setdefault(kind, []).append(self.num_bytes / taken / 1e9)
        pairs = zip(rates["contiguous"], rates["copy"], strict=True)
        ratio = statistics.median(moved / copied for moved, copied in pairs)
        medians = {kind: statistics.median(found) for kind, found in rates.items()}
        return {"bytes": self.num_bytes, "blocks": count} | medians | {"ratio": ratio}

    def _read(self, order: str, count: int, turn: int) -> float:
        runs = _runs(order, len(self.tensors[0]), count, turn)
        start = time.perf_counter()
        self.connector.read(self.engine_id, runs).result()
        seconds = time.perf_counter() - start
        _check(self.tensors, runs)
        return seconds

    def _copy(self) -> float:
        target, source = self.buffer[:, : self.num_bytes // 4]
        _finish(target)
        start = time.perf_counter()
        target.copy_(source)
        _finish(target)
        return time.perf_counter() - start

    def _kernels(self, count: int, turn: int) -> dict[str, float]:
        """Seconds that a GPU takes for a read and a copy, without what the host does for them."""
        if not isinstance(self.connector, CudaIpcConnector):
            return {}
        copier = self.connector.copier(self.engine_id)
        if not isinstance(copier, BlockCopier):
            return {}
        target, source = self.buffer[:, : self.num_bytes // 4]
        seconds = {"copy_kernel": _device_seconds(lambda: target.copy_(source))}
        for order in ORDERS:
            pairs = block_pairs(_runs(order, len(self.tensors[0]), count, turn)).to(target.device)
            launch = partial(copy_blocks, copier.regions, pairs)
            seconds[f"{order}_kernel"] = _device_seconds(launch)
        _clear(self.tensors)
        return seconds


def _device_seconds(launch: Callable[[], object]) -> float:
    """Seconds of a launch on the device, which waits until all launches have been made."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    for _ in range(_LAUNCHES):
        launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _LAUNCHES


def _device(name: str) -> str:
    return "cpu" if CONNECTORS[name].reads_host else "cuda"


def _finish(x: torch.Tensor) -> None:
    """Connectors know nothing of a GPU's queue."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _pattern(region: int, num_blocks: int) -> torch.Tensor:
    """What every number of a block is."""
    return torch.arange(num_blocks, dtype=torch.int32) + region * num_blocks


def _runs(order: str, num_blocks: int, count: int, seed: int) -> list[Run]:
    """So many blocks; scattered ones lie anywhere on both sides, without regard to each other."""
    if order == "contiguous":
        return [(0, 0, count)]
    source = random.Random(seed)
    there, here = (source.sample(range(num_blocks), count) for _ in range(2))
    return [(first, place, 1) for first, place in zip(there, here, strict=True)]


def _check(tensors: list[torch.Tensor], runs: list[Run]) -> None:
    there = [first + i for first, _, count in runs for i in range(count)]
    here = [first + i for _, first, count in runs for i in range(count)]
    for region, rows in enumerate(tensors):
        expected = _pattern(region, rows.shape[0])[there].to(rows.device)
        wrong = (rows[here, 0] != expected) | (rows[here, -1] != expected)
        if wrong.any():
            raise TokenmillError(f"region {region} arrived with {int(wrong.sum())} wrong blocks")
    _clear(tensors)


def _clear(tensors: list[torch.Tensor]) -> None:
    """What is there may not be taken for what arrives next."""
    for rows in tensors:
        rows[:, 0] = rows[:, -1] = -1
    _finish(tensors[0])


BENCHMARK = Benchmark("kv_transfer", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
