"""Stands in for a GPU's memory where there is none: allocations are shared pages of the host.

The connector above it is the real one, so that its protocol is tested between real processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from tokenmill.core.kv import CUDA_IPC
from tokenmill.kernels.blocks import block_regions, copy_blocks
from tokenmill.kv.connectors import CONNECTORS
from tokenmill.kv.cuda_ipc import CudaIpcConnector
from tokenmill.kv.cuda_memory import HANDLE_BYTES, block_pairs
from tokenmill.kv.shared_memory import SharedPages
from tokenmill.kv.transfer import Run, TransferError


class HostMemory:
    """One allocation: all that `pages` hold, exported tensor by tensor in order."""

    def __init__(self, pages: SharedPages) -> None:
        self._handle = f"{os.getpid()}:{pages.fd}".encode().ljust(HANDLE_BYTES)
        self._exported = 0
        self.mapped: dict[int, mmap.mmap] = {}  # by address

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        offset = self._exported
        self._exported += tensor.nbytes + -tensor.nbytes % mmap.ALLOCATIONGRANULARITY
        return self._handle, offset

    def map(self, handle: bytes) -> int:
        pid, _, fd = handle.decode().strip().partition(":")
        try:
            opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            raise TransferError(f"the peer's memory cannot be mapped: {error.strerror}") from error
        pages = mmap.mmap(opened, 0)
        os.close(opened)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.mapped[address] = pages
        return address

    def unmap(self, address: int) -> None:
        del self.mapped[address]

    def view(self, address: int, num_blocks: int, block_bytes: int) -> torch.Tensor:
        base = max(start for start in self.mapped if start <= address)
        pages = torch.frombuffer(self.mapped[base], dtype=torch.uint8)
        first, size = address - base, num_blocks * block_bytes
        return pages[first : first + size].view(num_blocks, block_bytes)

    def copier(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Callable[[list[Run]], None]:
        regions = block_regions(sources, targets)
        return lambda runs: copy_blocks(regions, block_pairs(runs))


class HostIpcConnector(CudaIpcConnector):
    """The connector over the host's memory."""

    reads_host, needs_pages = True, True

    @classmethod
    def over(
        cls, engine_id: str, tensors: list[torch.Tensor], pages: SharedPages | None
    ) -> HostIpcConnector:
        assert pages is not None
        return cls(tensors, HostMemory(pages))


@contextmanager
def on_the_host() -> Iterator[None]:
    """In it cuda-ipc moves the host's memory, and is what auto means."""
    choose = "tokenmill.kv.connectors.choose_connectors"
    with (
        mock.patch.dict(CONNECTORS, {CUDA_IPC: HostIpcConnector}),
        mock.patch(choose, lambda asked, on_gpu: (CUDA_IPC if asked == "auto" else asked,)),
    ):
        yield
