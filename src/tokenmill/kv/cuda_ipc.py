"""Moves KV blocks between processes on the GPUs of one host, from device to device.

CUDA IPC: a peer's cache is mapped once, and a kernel copies blocks out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tokenmill.core.kv import CUDA_IPC, KVAddress, KVWay
from tokenmill.kv.cuda_memory import HANDLE_BYTES, CudaMemory
from tokenmill.kv.shared_memory import SharedPages
from tokenmill.kv.transfer import Run

Copier = Callable[[list[Run]], None]


class IpcMemory(Protocol):
    """Memory that other processes can map."""

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        """Return the handle of the allocation that a tensor lies in, and where it begins there."""

    def map(self, handle: bytes) -> int:
        """Return the address of a peer's allocation here; raises TransferError."""

    def unmap(self, address: int) -> None: ...

    def view(self, address: int, num_blocks: int, block_bytes: int) -> torch.Tensor:
        """Return the blocks at an address, uint8 [blocks, bytes]."""

    def copier(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Copier:
        """Return what copies runs of blocks, beside whatever steps do, and waits for them."""


@dataclass(slots=True)
class _Peer:
    addresses: list[int] = field(default_factory=list)  # of the allocations, each mapped once
    copy: Copier | None = None


class CudaIpcConnector:
    """Reads the blocks of engines on the same host; one thread maps, copies and unmaps in turn."""

    name, reads_gpus, reads_host, needs_pages = CUDA_IPC, True, False, False

    @classmethod
    def over(
        cls, engine_id: str, tensors: list[torch.Tensor], pages: SharedPages | None
    ) -> CudaIpcConnector:
        return cls(tensors, CudaMemory(tensors[0].device))

    @staticmethod
    def installed() -> bool:
        return torch.cuda.is_available()

    def __init__(self, tensors: list[torch.Tensor], memory: IpcMemory) -> None:
        self._memory = memory
        self._own = [_blocks(tensor) for tensor in tensors]
        handles, offsets = zip(*map(memory.export, tensors), strict=True)
        self.regions = tuple(offsets)
        self.endpoint = b"".join(handles)
        self._peers: dict[str, _Peer] = {}
        self._thread = ThreadPoolExecutor(1, "kv-cuda-ipc")
        # A block onto itself: the first read does not wait for a compiler.
        self._thread.submit(memory.copier(self._own, self._own), [(0, 0, 1)]).result()

    def connect(self, peer: KVAddress, way: KVWay) -> None:
        self._peers[peer.engine_id] = self._thread.submit(self._map, peer, way).result()

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; its cache stays mapped until the reads from it have ended."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self._thread.submit(self._unmap, peer)

    def read(self, engine_id: str, runs: list[Run]) -> Future[None]:
        """Start to copy runs of a peer's blocks into our own."""
        return self._thread.submit(self.copier(engine_id), runs)

    def copier(self, engine_id: str) -> Copier:
        copy = self._peers[engine_id].copy
        assert copy is not None, "a peer that is forgotten was asked for"
        return copy

    def close(self) -> None:
        for engine_id in list(self._peers):
            self.disconnect(engine_id)
        self._thread.shutdown()

    def _map(self, peer: KVAddress, way: KVWay) -> _Peer:
        memory, end = self._memory, len(way.endpoint)
        handles = [way.endpoint[i : i + HANDLE_BYTES] for i in range(0, end, HANDLE_BYTES)]
        addresses: dict[bytes, int] = {}  # tensors that are small share an allocation
        mapped = _Peer()
        try:
            for handle in handles:
                if handle not in addresses:
                    addresses[handle] = memory.map(handle)
                    mapped.addresses.append(addresses[handle])
            parts = zip(handles, way.regions, peer.geometry.block_bytes, strict=True)
            sources = [
                memory.view(addresses[handle] + offset, peer.num_blocks, size)
                for handle, offset, size in parts
            ]
            mapped.copy = memory.copier(sources, self._own)
        except BaseException:
            self._unmap(mapped)
            raise
        return mapped

    def _unmap(self, peer: _Peer) -> None:
        peer.copy = None  # and with it the views of what is unmapped
        for address in peer.addresses:
            self._memory.unmap(address)


def _blocks(cache: torch.Tensor) -> torch.Tensor:
    """A cache [blocks, ...] as the bytes of its blocks."""
    rows: torch.Tensor = cache.view(cache.shape[0], -1).view(torch.uint8)
    return rows
