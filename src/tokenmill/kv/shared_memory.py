"""Moves KV blocks by shared memory, which other processes of the same user can map and copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.kv import SHM, KVAddress, KVWay
from tokenmill.kv.transfer import Run, TransferError

if TYPE_CHECKING:
    import torch

Number = TypeVar("Number", bound=np.number[Any])
Bytes = NDArray[np.uint8]  # [blocks, bytes of a block]


class SharedPages:
    """Zeroed memory behind a file descriptor: it has no name to leak and dies with its process.

    A reader that has mapped it keeps it, so that the death of the owner cannot fault the reader.
    """

    def __init__(self, engine_id: str) -> None:
        self.fd = os.memfd_create(f"tokenmill-{engine_id}")
        self.num_bytes = 0

    def zeros(self, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
        """An array in pages of its own, which take no memory before their first use."""
        count = int(np.prod(shape))
        used = count * np.dtype(kind).itemsize
        size = used + -used % mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.fd, self.num_bytes + size)
        pages = mmap.mmap(self.fd, size, offset=self.num_bytes)
        self.num_bytes += size
        return np.frombuffer(pages, kind, count).reshape(shape)

    def close(self) -> None:
        os.close(self.fd)


class SharedMemoryConnector:
    """Reads the blocks of engines on the same host by one plain copy, in a thread of its own."""

    name, reads_gpus, reads_host, needs_pages = SHM, False, True, True

    @classmethod
    def over(
        cls, engine_id: str, tensors: list[torch.Tensor], pages: SharedPages | None
    ) -> SharedMemoryConnector:
        assert pages is not None
        return cls(pages, [tensor.numpy() for tensor in tensors])

    @staticmethod
    def installed() -> bool:
        return True

    def __init__(self, pages: SharedPages, caches: Iterable[NDArray[Any]]) -> None:
        """The caches [blocks, ...] must be all that `pages` holds, in order."""
        self._pages = pages
        self._own = [_blocks(cache) for cache in caches]
        granularity, offset, regions = mmap.ALLOCATIONGRANULARITY, 0, []
        for blocks in self._own:
            regions.append(offset)
            offset += blocks.nbytes + -blocks.nbytes % granularity
        if offset != pages.num_bytes:
            raise ValueError(f"the caches take {offset} bytes of {pages.num_bytes} shared ones")
        self.regions = tuple(regions)
        self.endpoint = f"{os.getpid()}:{pages.fd}".encode()
        self._peers: dict[str, list[Bytes]] = {}
        self._thread = ThreadPoolExecutor(1, "kv-shm")

    def connect(self, peer: KVAddress, way: KVWay) -> None:
        pid, _, fd = way.endpoint.decode().partition(":")
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if f"tokenmill-{peer.engine_id}" not in os.readlink(path):
                raise TransferError(f"the memory of engine {peer.engine_id} is gone")
            opened = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise TransferError(
                f"the memory of engine {peer.engine_id} cannot be opened: {error.strerror} (shm "
                "needs one host and one user)"
            ) from error
        with os.fdopen(opened, "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._peers[peer.engine_id] = [
            np.frombuffer(pages, np.uint8, size * peer.num_blocks, offset).reshape(-1, size)
            for offset, size in zip(way.regions, peer.geometry.block_bytes, strict=True)
        ]

    def disconnect(self, engine_id: str) -> None:
        self._peers.pop(engine_id, None)

    def read(self, engine_id: str, runs: list[Run]) -> Future[None]:
        """Start to copy runs of a peer's blocks into our own."""
        return self._thread.submit(_copy, self._peers[engine_id], self._own, runs)

    def close(self) -> None:
        self._thread.shutdown()
        self._peers.clear()
        self._pages.close()


def host_identity() -> str:
    """Equal for processes that can map each other's memory: one boot, one PID space, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _blocks(cache: NDArray[Any]) -> Bytes:
    rows: Bytes = cache.view(np.uint8).reshape(cache.shape[0], -1)
    return rows


def _copy(source: list[Bytes], target: list[Bytes], runs: list[Run]) -> None:
    for theirs, ours in zip(source, target, strict=True):
        for first, to, count in runs:
            ours[to : to + count] = theirs[first : first + count]
