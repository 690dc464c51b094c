"""A GPU's memory as other processes map it: CUDA's driver has the calls, torch has not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.blocks import BlockRegions, block_regions, copy_blocks
from tokenmill.kv.transfer import Run, TransferError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of other GPUs, too
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class _Handle(ctypes.Structure):  # CUipcMemHandle, which calls take by value
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Span:
    """Bytes at an address, as torch takes those of other libraries."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": "|u1",
            "version": 3,
        }


class CudaMemory:
    """The memory of a process on a GPU, and its peers' on whichever GPU of the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        ordinal, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(ordinal), device.index or 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        """Return the handle of the allocation that a tensor lies in, and where it begins there."""
        handle, base, size = _Handle(), ctypes.c_uint64(), ctypes.c_size_t()
        address = ctypes.c_uint64(tensor.data_ptr())
        try:
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        except TransferError as error:
            raise ModelLoadError(
                f"kv_connector cuda-ipc: other processes cannot map this GPU's memory: {error}; "
                "leave out PYTORCH_CUDA_ALLOC_CONF, or take --kv-connector nixl"
            ) from error
        return bytes(handle.reserved), tensor.data_ptr() - base.value

    def map(self, handle: bytes) -> int:
        """Return the address of a peer's allocation here; raises TransferError."""
        address = ctypes.c_uint64()
        copied = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, flags)
        return address.value

    def unmap(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def view(self, address: int, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Return the blocks at an address, uint8 [blocks, bytes], on the GPU that has them."""
        ordinal, attribute = ctypes.c_int(), ctypes.c_int(_DEVICE_ORDINAL)
        pointer = ctypes.c_uint64(address)
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), attribute, pointer)
        span = _Span(address, (num_blocks, block_bytes))
        blocks = torch.as_tensor(span, device=f"cuda:{ordinal.value}")
        assert blocks.data_ptr() == address, "a copy of the peer's cache was made"
        return blocks

    def copier(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Callable[[list[Run]], None]:
        """Return what copies runs of blocks, beside whatever steps do, and waits for them."""
        return BlockCopier(self._device, block_regions(sources, targets))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the driver in torch's context, whichever thread this is; raises TransferError."""
        self._check("cuCtxSetCurrent", self._context)
        self._check(name, *arguments)

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise TransferError(f"{name} says {(text.value or b'').decode() or code}")


class BlockCopier:
    """Copies blocks on a stream of its own; one thread calls it.

    Nothing is allocated in a call and the host waits for the device once, at the end: a kernel
    moves half a gigabyte in a third of a millisecond, less than a few careless calls take.
    """

    def __init__(self, device: torch.device, regions: BlockRegions) -> None:
        self.regions = regions
        self._device, self._stream = device, torch.cuda.Stream(device)
        num_numbers = 2 * len(regions.targets[0])  # no block is written twice
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._host = torch.empty(num_numbers, dtype=torch.int64, pin_memory=True)
            self._pairs = torch.empty(num_numbers, dtype=torch.int64, device=device)
        self._done = torch.cuda.Event(blocking=True)  # others have work for the thread's core

    @torch.inference_mode()
    def __call__(self, runs: list[Run]) -> None:
        """Copy runs of blocks; returns when they are there."""
        numbers = block_pairs(runs)
        size = numbers.numel()
        host, pairs = self._host[:size].view(2, -1), self._pairs[:size].view(2, -1)
        host.copy_(numbers)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy_blocks(self.regions, pairs.copy_(host, non_blocking=True))
            self._done.record()
        self._done.synchronize()


def block_pairs(runs: list[Run]) -> torch.Tensor:
    """The blocks of runs one by one, int64 [2, blocks]: there, and here."""
    numbers = np.fromiter(chain.from_iterable(runs), np.int64, 3 * len(runs)).reshape(-1, 3)
    counts = numbers[:, 2]
    ends = np.cumsum(counts)
    firsts = numbers[:, :2] - (ends - counts)[:, None]
    pairs = np.repeat(firsts.T, counts, axis=1) + np.arange(ends[-1] if len(ends) else 0)
    return torch.from_numpy(pairs)
