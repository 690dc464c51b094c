"""Host memory that a GPU copies from and to by itself, and that is unregistered before it is freed.

torch's own pinned memory would round its size up to a power of two.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_MOST_THREADS = 16
_SYSTEM_PAGE = 4096  # bytes

_log = logging.getLogger(__name__)


class PinnedMemory:
    """Pages [rows, bytes] that are registered with CUDA until close(), or until nobody uses them.

    Where CUDA refuses they are plain memory, from which copies are slower.
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
