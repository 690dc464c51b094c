"""KV tiers on a GPU: blocks go over the bus beside the steps and come back as the same bits."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from driver import Answer
from kv.at_once import without_threads
from kv.conversations import converse, grow, hits
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kv.tiers import page_copies
from tokenmill.kv.tiers.offloading import KVTiers
from tokenmill.kv.tiers.page_copies import CudaCopies
from tokenmill.kv.transfer import Read

Build = Callable[[str], BuiltEngine]
PAGE = 2 * (4096 + 1024)  # bytes of a block of the tensors below
ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered
LONG = 2_000_000_000  # cycles of the GPU: about a second


def bits(answers: list[Answer]) -> list[object]:
    return [(answer.token_ids, [x.logprobs for x in answer.logprobs]) for answer in answers]


def tiers_of(built: BuiltEngine) -> KVTiers:
    assert isinstance(built.engine, LanguageEngine) and built.engine.tiers is not None
    return built.engine.tiers


def finish(read: Read) -> None:
    while not read.done():
        time.sleep(0.001)


@pytest.mark.parametrize("talk", [grow, converse])
def test_the_same_bits_on_and_off(
    build: Build, talk: Callable[[BuiltEngine], list[Answer]]
) -> None:
    """Where decoded tokens come back, an engine that has room for all has kept the same KV."""
    expected = bits(talk(build("tiers-off" if talk is grow else "tiers-room")))
    built = build("tiers-host")
    assert isinstance(tiers_of(built).copies, CudaCopies)
    assert bits(talk(built)) == expected
    assert hits(built) > 0
    built.close()


def test_the_same_bits_from_disk(build: Build) -> None:
    """The second engine begins with what the first has left in the folder."""
    expected = bits(grow(build("tiers-off")))
    for _ in range(2):
        built = build("tiers-disk")
        without_threads(tiers_of(built))
        assert bits(grow(built)) == expected
        built.close()
    assert hits(built, "disk") > 0


def test_threads_of_the_disk_change_nothing(build: Build) -> None:
    expected = bits(grow(build("tiers-off")))
    built = build("tiers-disk")
    assert bits(grow(built)) == expected
    assert bits(grow(built)) == expected
    built.close()


def test_windows_come_back(build: Build) -> None:
    expected = bits(grow(build("tiers-windows-off")))
    built = build("tiers-windows")
    assert bits(grow(built)) == expected
    assert hits(built) > 0
    built.close()


def test_graphs_run_beside_the_copies(build: Build) -> None:
    built = build("tiers-host-fast")
    answers = grow(built)
    assert all(len(answer.terminals) == 1 for answer in answers) and hits(built) > 0
    graphs = built.runner.decode.graphs
    assert graphs is not None and graphs.report.steps > 0
    built.close()


def test_one_engine_after_the_other(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    """Also where one was never closed: the next one's memory may lie at the same address."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            built = build("tiers-host")
            assert torch.from_numpy(tiers_of(built).copies.host).is_pinned()
            grow(built)
            assert hits(built) > 0
            del built
            gc.collect()
    assert "not pinned" not in caplog.text


def test_memory_that_cannot_be_pinned(
    build: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA keeps its error until it is asked for: no step may meet it."""
    expected = bits(grow(build("tiers-off")))
    cudart = torch.cuda.cudart()
    register = cudart.cudaHostRegister

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(cudart, name)

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            first = int(register(address, num_bytes, flags))
            again = int(register(address, num_bytes, flags))
            assert (first, again) == (0, ALREADY)
            cudart.cudaHostUnregister(address)
            return again

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    built = build("tiers-host")
    assert "not pinned (CUDA error 712)" in caplog.text
    assert bits(grow(built)) == expected and hits(built) > 0


def pages(count: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Keys and values of two layers, random bytes."""
    source = torch.Generator("cuda").manual_seed(1)
    shapes = [(4096,), (1024,)] * 2
    return [
        torch.randint(
            0, 255, (count, *shape), dtype=torch.uint8, device="cuda", generator=source
        ).view(dtype)
        for shape in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("staged", [1, 3, 100])
def test_pages_keep_their_bytes(
    dtype: torch.dtype, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they go through the buffers in several parts."""
    monkeypatch.setattr(page_copies, "_STAGED_IN", staged * PAGE)
    monkeypatch.setattr(page_copies, "_STAGED_OUT", staged * PAGE)
    tensors = pages(30, dtype)
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    copies = CudaCopies(tensors, 20)
    source = np.random.default_rng(0)
    block_ids, slots = (source.permutation(n)[:11].tolist() for n in (30, 20))
    copies.save(block_ids, slots)
    for tensor in tensors:  # at once, in the same stream
        tensor.view(torch.uint8).zero_()
    copies.settle()
    together = torch.cat([tensor[block_ids] for tensor in before], 1)
    assert np.array_equal(copies.host[slots], together.cpu().numpy())
    others = source.permutation(30)[:11].tolist()
    finish(copies.load(slots, others))
    for tensor, kept in zip(tensors, before, strict=True):
        found = tensor.view(torch.uint8)
        assert torch.equal(found[others], kept[block_ids])
        found[others] = 0
        assert not found.any()
    copies.close()


def test_no_step_waits_for_the_bus() -> None:
    """A save and a load end while the engine's stream is busy with what was launched after them."""
    tensors = pages(30)
    copies, engine = CudaCopies(tensors, 20), torch.cuda.current_stream()
    assert torch.from_numpy(copies.host).is_pinned()
    copies.save([1, 2], [3, 4])  # what the first use allocates
    finish(copies.load([3], [1]))
    torch.cuda.synchronize()
    copies.save(list(range(20)), list(range(20)))
    torch.cuda._sleep(LONG)
    copies.settle()
    assert not engine.query(), "the save waited for the step"
    torch.cuda.synchronize()
    read = copies.load(list(range(20)), list(range(20)))
    torch.cuda._sleep(LONG)
    finish(read)
    assert not engine.query(), "the load waited for the step"
    copies.close()


def test_a_load_waits_for_the_step_under_way() -> None:
    """It may still use the pages."""
    tensors = pages(30)
    copies, engine = CudaCopies(tensors, 20), torch.cuda.current_stream()
    copies.save([1], [3])
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    finish(copies.load([3], [2]))
    assert engine.query(), "the pages were written while a step was under way"
    copies.close()
