"""Pinned host memory is registered no longer than it lives, and does without where CUDA refuses."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmill.kv.tiers import page_copies
from tokenmill.kv.tiers.page_copies import PinnedMemory, touch

CPU = torch.device("cpu")
SHAPE = (64, 2**20 + 8)  # so large that the system takes it back as soon as it is freed
ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class Cudart:
    """Stands for CUDA's runtime: it knows what is registered, and keeps its last error."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "probe").open("wb")
        self.ranges: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == num_bytes % 4096 == 0, "a page may be another array's, too"
        if any(address < at + n and at < address + num_bytes for at, n in self.ranges.items()):
            self.last_error = ALREADY
            return ALREADY
        self.ranges[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        last = address + self.ranges.pop(address) - 1
        for byte in (address, last):  # the system refuses to read memory that is freed
            assert os.write(self._file.fileno(), (ctypes.c_char * 1).from_address(byte)) == 1
        return 0

    def launch(self, *args: object, **options: object) -> None:
        """What torch does on a GPU: it raises the last error, which ends with that."""
        code, self.last_error = self.last_error, 0
        if code:
            raise RuntimeError(f"CUDA error {code}")


@pytest.fixture
def cudart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart(tmp_path)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", made.launch)
    monkeypatch.setattr(page_copies.torch, "ones", made.launch)
    monkeypatch.setattr(page_copies, "touch", lambda pages: None)
    return made


def test_memory_is_unregistered_before_it_is_freed(cudart: Cudart) -> None:
    memory = PinnedMemory(SHAPE, CPU)
    tensor = torch.from_numpy(memory.pages).view(torch.int64)
    assert cudart.ranges and tensor.shape == (64, 2**17 + 1)
    del memory
    gc.collect()
    row = tensor[3]
    del tensor
    assert cudart.ranges, "a tensor still uses the memory"
    del row
    gc.collect()
    assert not cudart.ranges


def test_close_unregisters_once(cudart: Cudart) -> None:
    memory = PinnedMemory(SHAPE, CPU)
    memory.close()
    assert not cudart.ranges
    memory.pages[0, 0] = 1  # it is there until nobody uses it
    memory.close()
    for _ in range(3):  # the system gives the same addresses again
        memory = PinnedMemory(SHAPE, CPU)
        assert len(cudart.ranges) == 1


def test_what_cuda_refuses_is_plain_memory(
    cudart: Cudart, caplog: pytest.LogCaptureFixture
) -> None:
    cudart.ranges[0] = 2**63  # all there is
    with caplog.at_level(logging.INFO):
        memory = PinnedMemory((2, 10), CPU)
    assert "not pinned (CUDA error 712)" in caplog.text and "pinned 0.0 GiB" not in caplog.text
    cudart.launch()  # the next step of the engine
    memory.pages[:] = 3
    memory.close()
    assert len(cudart.ranges) == 1


@pytest.mark.parametrize("shape", [(3, 10), (40, 50_000)])
def test_memory_is_touched(shape: tuple[int, int]) -> None:
    """A byte of each page of the system, also of pages smaller than the parts of all threads."""
    pages = np.ones(shape, np.uint8)
    touch(pages)
    untouched = np.diff(np.flatnonzero(pages.reshape(-1) == 0), prepend=0, append=pages.size)
    assert untouched.max() <= 4096
