"""Copies pages between the device's KV cache and slots of host memory.

On CPU a save is a plain copy and a load runs in a thread. On a GPU both go through a buffer on the
device: the engine's stream gathers what is to be saved, in order between two steps, and streams of
their own move it over the bus, so that no step waits for the bus.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.kv.transfer import Read

Bytes = NDArray[np.uint8]
_MOST_THREADS = 16
_SYSTEM_PAGE = 4096  # bytes

_log = logging.getLogger(__name__)
# Of a GPU's memory. Out go all blocks that a step of 8,192 tokens of a model of 8 billion weights
# evicts, so that it need not wait for the bus.
_STAGED_IN, _STAGED_OUT = 2**28, 2**30


class PageCopies(Protocol):
    """Moves pages between the cache and host memory."""

    host: Bytes  # [slots, bytes of a page]

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to slots, before any step that is launched after this call writes to them."""

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Start to copy slots to pages that no step under way uses."""

    def settle(self) -> None:
        """Wait until what was saved can be read from host memory; any thread may call it."""

    def close(self) -> None: ...


def tensors_of(kv_cache: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Each tensor once: layers of different groups share some."""
    return list({id(tensor): tensor for layer in kv_cache for tensor in layer}.values())


def page_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a block in all tensors [blocks, ...]."""
    return sum(tensor.nbytes // tensor.shape[0] for tensor in tensors)


def staged_bytes(device: str, host_bytes: int) -> int:
    """What copies take of a device's memory: no more than there is to copy."""
    if device != "cuda":
        return 0
    return min(_STAGED_IN, host_bytes) + min(_STAGED_OUT, host_bytes)


def open_copies(tensors: Sequence[torch.Tensor], num_slots: int) -> PageCopies:
    kind = CudaCopies if tensors[0].device.type == "cuda" else CpuCopies
    return kind(tensors, num_slots)


class CpuCopies:
    """Plain copies; a thread does those that a step need not wait for."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int) -> None:
        self._rows = [_rows(tensor).numpy() for tensor in tensors]
        # Pages of the system, which take no memory before their first use.
        self.host: Bytes = np.empty((num_slots, page_bytes(tensors)), np.uint8)
        self._thread = ThreadPoolExecutor(1, "kv-tiers")

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._copy(list(block_ids), list(slots), to_host=True)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        return self._thread.submit(self._copy, list(block_ids), list(slots), to_host=False)

    def _copy(self, block_ids: list[int], slots: list[int], to_host: bool) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            page, first = self.host[slot], 0
            for rows in self._rows:
                row = rows[block_id]
                part = page[first : first + row.size]
                if to_host:
                    part[:] = row
                else:
                    row[:] = part
                first += row.size

    def settle(self) -> None:
        """A save is over when it returns."""

    def close(self) -> None:
        self._thread.shutdown()


class _Arrival:
    """A load on a stream, as a Read."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def exception(self) -> BaseException | None:
        return None


class CudaCopies:
    """Copies over the bus on streams of their own, from and to pinned memory."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int) -> None:
        device, size = tensors[0].device, page_bytes(tensors)
        # Gathered by words where that is possible: by bytes it takes eight times as many loads.
        word = torch.int64 if all(_rows(t).shape[1] % 8 == 0 for t in tensors) else torch.uint8
        self._rows = [_rows(tensor).view(word) for tensor in tensors]
        self._device = device
        self._memory = PinnedMemory((num_slots, size), device)
        self.host = self._memory.pages
        self._host = torch.from_numpy(self.host).view(word)
        self._staged = [
            torch.empty(
                (max(1, min(num_slots, staged // size)), self._host.shape[1]),
                dtype=word,
                device=device,
            )
            for staged in (_STAGED_IN, _STAGED_OUT)
        ]
        self._in, self._out = (torch.cuda.Stream(device) for _ in "io")
        self._saved = torch.cuda.Event()  # the last save is in host memory
        self._saved.record(self._out)

    @torch.inference_mode()
    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Gather pages on the engine's stream, and send them on another."""
        staged, engine = self._staged[1], torch.cuda.current_stream(self._device)
        for first in range(0, len(block_ids), len(staged)):
            some = self._indices(block_ids[first : first + len(staged)])
            engine.wait_event(self._saved)  # the buffer is empty
            for rows, part in self._parts(staged[: len(some)]):
                part.copy_(rows.index_select(0, some))
            self._out.wait_stream(engine)
            with torch.cuda.stream(self._out):
                for index, slot in enumerate(slots[first : first + len(some)]):
                    self._host[slot].copy_(staged[index], non_blocking=True)
                saved = torch.cuda.Event()
                saved.record()
                self._saved = saved  # only now: other threads wait for it

    @torch.inference_mode()
    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Send slots to the device and scatter them, after all that is launched so far."""
        staged, engine = self._staged[0], torch.cuda.current_stream(self._device)
        launched = torch.cuda.Event()
        launched.record(engine)
        self._in.wait_event(self._saved)
        with torch.cuda.stream(self._in):
            for first in range(0, len(slots), len(staged)):
                some = self._indices(block_ids[first : first + len(staged)])
                for index, slot in enumerate(slots[first : first + len(some)]):
                    staged[index].copy_(self._host[slot], non_blocking=True)
                self._in.wait_event(launched)  # a step under way may use these pages
                for rows, part in self._parts(staged[: len(some)]):
                    rows.index_copy_(0, some, part)
            event = torch.cuda.Event()
            event.record()
        return _Arrival(event)

    def _indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        host = torch.tensor(block_ids, dtype=torch.int64).pin_memory()  # else the copy would wait
        return host.to(self._device, non_blocking=True)

    def _parts(self, staged: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor's rows, and where they lie in staged pages."""
        parts, first = [], 0
        for rows in self._rows:
            parts.append((rows, staged[:, first : first + rows.shape[1]]))
            first += rows.shape[1]
        return parts

    def settle(self) -> None:
        self._saved.synchronize()

    def close(self) -> None:
        self._memory.close()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A cache [blocks, ...] as the bytes of its blocks."""
    rows: torch.Tensor = tensor.reshape(tensor.shape[0], -1).view(torch.uint8)
    assert rows.data_ptr() == tensor.data_ptr(), "the cache is not contiguous"
    return rows


class PinnedMemory:
    """Pages [rows, bytes] that are registered with CUDA until close(), or until nobody uses them.

    Where CUDA refuses they are plain memory, from which copies are slower. torch's own pinned
    memory would round its size up to a power of two.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        size = shape[0] * shape[1]
        padded = -(-size // _SYSTEM_PAGE) * _SYSTEM_PAGE
        # CUDA registers pages of the system: none of them may be another array's, too.
        owner = np.empty(padded + _SYSTEM_PAGE, np.uint8)
        first = -owner.ctypes.data % _SYSTEM_PAGE
        self.pages: Bytes = owner[first : first + size].reshape(shape)
        begin = time.monotonic()
        touch(self.pages)
        self._unregister: weakref.finalize | None = None
        address = owner.ctypes.data + first
        code = int(torch.cuda.cudart().cudaHostRegister(address, padded, 0))
        if code == 0:
            # All views keep the owner alive, whose weak references end before its memory does.
            self._unregister = weakref.finalize(owner, _unregister, address, device)
            self._unregister.atexit = False  # the process gives all of it back by itself
            seconds = time.monotonic() - begin
            _log.info("pinned %.1f GiB of host memory in %.1f s", size / 2**30, seconds)
        else:
            _clear_error(device)
            _log.warning("--kv-offloading: host memory is not pinned (CUDA error %s), so copies "
                         "are slower", code)  # fmt: skip

    def close(self) -> None:
        """Wait for copies and unregister the memory, which stays as plain memory."""
        if self._unregister is not None:
            self._unregister()


def _unregister(address: int, device: torch.device) -> None:
    with suppress(RuntimeError):  # of a step; the memory is to be unregistered all the same
        torch.cuda.synchronize(device)
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """Let torch meet the last error of CUDA here: it is kept until somebody asks for it.

    A launch asks for it, and torch raises what it finds.
    """
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def touch(pages: Bytes) -> None:
    """Let the system give memory to pages, in threads: it takes seconds for some gigabytes."""
    num_threads = min(_MOST_THREADS, os.cpu_count() or 1)
    parts = np.array_split(pages.reshape(-1), 4 * num_threads)
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda part: part[::_SYSTEM_PAGE].fill(0), parts))
