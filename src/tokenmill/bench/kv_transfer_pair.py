"""Measures how fast KV blocks move between two processes, each with its own cache.

Blocks of a connector for GPUs alone lie on a GPU, those of all others in host memory.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tokenmill.core.kv import KVAddress
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import TokenmillError
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.kv.connectors import CONNECTORS, KVLink
from tokenmill.kv.transfer import OwnConnector, Run
from tokenmill.models.checkpoints.weights import open_checkpoint

ORDERS = ("contiguous", "scattered")
START_S = 120.0  # for the other process to come up


def read_spec(path: Path) -> ModelSpec:
    """The shape of a model; its weights are not needed."""
    return open_checkpoint(path, random_weights=True).spec


def connectors(asked: str) -> list[str]:
    """Those to measure."""
    if asked in CONNECTORS:
        return [asked]
    return [name for name, connector in CONNECTORS.items() if connector.installed()]


def measure(
    spec: ModelSpec, names: list[str], block_size: int, num_blocks: int, rounds: int
) -> dict[str, Any]:
    """The report: median rates of each connector, and of a copy made in each round.

    `ratio` is the median over the rounds of blocks side by side against that copy.
    """
    torch.set_num_threads(1)
    for name in names:
        if _device(name) == "cuda" and not torch.cuda.is_available():
            raise TokenmillError(
                f"--kv-connector {name} moves a GPU's memory: torch sees none here"
            )
    results = {name: _measure(name, spec, block_size, num_blocks, rounds) for name in names}
    best = max(results.values(), key=lambda result: float(result["ratio"]))
    return {
        "benchmark": "kv-transfer",
        "num_tokens": num_blocks * block_size,
        "block_size": block_size,
        "bytes": best["bytes"],
        "rounds": rounds,
        "connectors": results,
        "ratio": best["ratio"],
    }


def _measure(
    name: str, spec: ModelSpec, block_size: int, num_blocks: int, rounds: int
) -> dict[str, Any]:
    with _source(name, spec, block_size, num_blocks) as peer:
        tensors, connector, _ = _cache(name, spec, block_size, num_blocks)
        connector.connect(peer, peer.ways[0])
        num_bytes = sum(peer.geometry.block_bytes) * num_blocks
        buffer = torch.ones(2, num_bytes // 4, device=tensors[0].device)
        rates: dict[str, list[float]] = {kind: [] for kind in (*ORDERS, "copy")}
        for turn in range(rounds + 1):  # the first one connects and touches memory
            for order in ORDERS:
                runs = _runs(order, num_blocks, turn)
                seconds = _timed_read(connector, peer.engine_id, runs)
                _check(tensors, runs)
                if turn:
                    rates[order].append(num_bytes / seconds / 1e9)
            _finish(buffer)
            start = time.perf_counter()
            buffer[0].copy_(buffer[1])
            _finish(buffer)
            if turn:
                rates["copy"].append(num_bytes / (time.perf_counter() - start) / 1e9)
        connector.close()
    pairs = zip(rates["contiguous"], rates["copy"], strict=True)
    return {
        "device": _device(name),
        "bytes": num_bytes,
        "gb_s": {kind: statistics.median(found) for kind, found in rates.items()},
        "ratio": statistics.median(moved / copied for moved, copied in pairs),
    }


def _cache(
    name: str, spec: ModelSpec, block_size: int, num_blocks: int
) -> tuple[list[torch.Tensor], OwnConnector, KVAddress]:
    """A cache as an engine has it, reached by the connector."""
    device = _device(name)
    dtype = "fp32" if device == "cpu" else "bf16"
    link = KVLink.plan(name, device)
    assert link is not None
    cache = allocate_kv_cache(spec, num_blocks, block_size, device, dtype, link.pages)
    (connector,), address = link.reach(cache, spec, dtype, block_size, num_blocks)
    # Numbers that every type has room for.
    words = [t.view(num_blocks, -1).view(torch.int32) for layer in cache for t in layer]
    return words, connector, address


def _device(name: str) -> str:
    return "cpu" if CONNECTORS[name].reads_host else "cuda"


def _finish(x: torch.Tensor) -> None:
    """Connectors know nothing of a GPU's queue."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


@contextmanager
def _source(name: str, spec: ModelSpec, block_size: int, num_blocks: int) -> Iterator[KVAddress]:
    """A process whose blocks are filled; yields its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (name, spec, block_size, num_blocks, theirs)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise TokenmillError(f"the other process did not start within {START_S:g} s")
        yield ours.recv()
        ours.send(None)
        process.join(10)
    finally:
        process.kill()


def _serve(name: str, spec: ModelSpec, block_size: int, num_blocks: int, pipe: Connection) -> None:
    tensors, connector, address = _cache(name, spec, block_size, num_blocks)
    for region, tensor in enumerate(tensors):
        tensor.copy_(_pattern(region, num_blocks)[:, None])
    _finish(tensors[0])
    pipe.send(address)
    pipe.recv()
    connector.close()


def _pattern(region: int, num_blocks: int) -> torch.Tensor:
    """What every number of a block is."""
    return torch.arange(num_blocks, dtype=torch.int32) + region * num_blocks


def _runs(order: str, num_blocks: int, seed: int) -> list[Run]:
    """All blocks; scattered ones go to places that have nothing to do with where they were."""
    if order == "contiguous":
        return [(0, 0, num_blocks)]
    here = random.Random(seed).sample(range(num_blocks), num_blocks)
    return [(there, place, 1) for there, place in enumerate(here)]


def _timed_read(connector: OwnConnector, engine_id: str, runs: list[Run]) -> float:
    start = time.perf_counter()
    connector.read(engine_id, runs).result()
    return time.perf_counter() - start


def _check(tensors: list[torch.Tensor], runs: list[Run]) -> None:
    """What has arrived is what was sent."""
    there = [first + i for first, _, count in runs for i in range(count)]
    here = [first + i for _, first, count in runs for i in range(count)]
    for region, rows in enumerate(tensors):
        expected = _pattern(region, rows.shape[0])[there].to(rows.device)
        wrong = (rows[here, 0] != expected) | (rows[here, -1] != expected)
        if wrong.any():
            raise TokenmillError(f"region {region} arrived with {int(wrong.sum())} wrong blocks")
        rows[:, 0] = rows[:, -1] = -1
    _finish(tensors[0])
