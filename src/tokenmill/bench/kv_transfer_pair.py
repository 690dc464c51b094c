"""Measures how fast KV blocks move between two processes, each with its own cache."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from tokenmill.console import fetch
from tokenmill.core.kv import KVAddress
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import TokenmillError
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.kv.connectors import CONNECTORS, KVLink
from tokenmill.kv.transfer import OwnConnector, Run
from tokenmill.models.checkpoints.weights import open_checkpoint

ORDERS = ("contiguous", "scattered")
START_S = 120.0  # for the other process to come up


def read_spec(model: str) -> ModelSpec:
    """The shape of a model; its weights are not needed."""
    return open_checkpoint(fetch(model), random_weights=True).spec


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
    results = {name: _measure(name, spec, block_size, num_blocks, rounds) for name in names}
    best = max(results.values(), key=lambda result: float(result["ratio"]))
    return {
        "benchmark": "kv-transfer",
        "num_tokens": num_blocks * block_size,
        "block_size": block_size,
        "bytes": spec.kv_bytes_per_token(4) * block_size * num_blocks,
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
        buffer = torch.ones(2, num_bytes // 4)
        rates: dict[str, list[float]] = {kind: [] for kind in (*ORDERS, "copy")}
        for turn in range(rounds + 1):  # the first one connects and touches memory
            for order in ORDERS:
                runs = _runs(order, num_blocks, turn)
                seconds = _timed_read(connector, peer.engine_id, runs)
                _check(tensors, runs)
                if turn:
                    rates[order].append(num_bytes / seconds / 1e9)
            start = time.perf_counter()
            buffer[0].copy_(buffer[1])
            if turn:
                rates["copy"].append(num_bytes / (time.perf_counter() - start) / 1e9)
        connector.close()
    pairs = zip(rates["contiguous"], rates["copy"], strict=True)
    return {
        "gb_s": {kind: statistics.median(found) for kind, found in rates.items()},
        "ratio": statistics.median(moved / copied for moved, copied in pairs),
    }


def _cache(
    name: str, spec: ModelSpec, block_size: int, num_blocks: int
) -> tuple[list[torch.Tensor], OwnConnector, KVAddress]:
    """A cache as an engine has it, reached by the connector."""
    link = KVLink.plan(name, "cpu")
    assert link is not None
    cache = allocate_kv_cache(spec, num_blocks, block_size, pages=link.pages)
    (connector,), address = link.reach(cache, spec, "fp32", block_size, num_blocks)
    return [tensor for layer in cache for tensor in layer], connector, address


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
        tensor.view(num_blocks, -1).copy_(_pattern(region, num_blocks)[:, None])
    pipe.send(address)
    pipe.recv()
    connector.close()


def _pattern(region: int, num_blocks: int) -> torch.Tensor:
    """What every number of a block is."""
    return torch.arange(num_blocks, dtype=torch.float32) + region * num_blocks


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
    for region, tensor in enumerate(tensors):
        rows = tensor.view(tensor.shape[0], -1)
        expected = _pattern(region, tensor.shape[0])[there]
        wrong = (rows[here, 0] != expected) | (rows[here, -1] != expected)
        if wrong.any():
            raise TokenmillError(f"region {region} arrived with {int(wrong.sum())} wrong blocks")
        rows[:, 0] = rows[:, -1] = -1
