"""Tensors of safetensors files onto a GPU: threads read pieces of them into pinned memory.

One thread that copies from a mapped file reaches a few GB/s: it waits for the pages, and a copy
from memory that is not pinned runs through a buffer of the driver. Here every thread has a pinned
buffer of its own, reads a piece of a tensor into it and starts the copy, so the link to the GPU is
busy while other threads read. No tensor is ever whole in host memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tokenmill.core.types import ModelLoadError
from tokenmill.models.family import Shape

NUM_THREADS = 8
PIECE_BYTES = 2**24  # of a buffer: long enough that a read's and a copy's fixed cost vanish
AHEAD_BYTES = 2**29  # on the device before the tensor that is waited for


class FileTensor(Protocol):
    """A tensor that lies in a file from byte `begin` on."""

    @property
    def file(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Upload:
    tensor: torch.Tensor
    pieces: list[Future[None]]

    def wait(self) -> torch.Tensor:
        for piece in self.pieces:
            piece.result()
        return self.tensor


class Uploader:
    """Threads with a buffer each, which copy in the order of the stream that made this."""

    def __init__(self, device: torch.device | str, piece_bytes: int = PIECE_BYTES) -> None:
        self._device, self._piece_bytes = torch.device(device), piece_bytes
        # What a freed tensor was read by runs in this stream before a copy to the same memory.
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.current_stream(self._device) if on_gpu else None
        self._threads = ThreadPoolExecutor(NUM_THREADS, "weights")
        self._own = threading.local()

    def start(self, stored: FileTensor) -> _Upload:
        """Begin to copy a tensor; its memory is there at once."""
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=self._device)
        data, size = tensor.view(-1).view(torch.uint8), self._piece_bytes
        pieces = [
            self._threads.submit(self._copy, stored, stored.begin + at, data[at : at + size])
            for at in range(0, stored.num_bytes, size)
        ]
        return _Upload(tensor, pieces)

    def close(self) -> None:
        """Forget what has not begun, and wait for the rest."""
        self._threads.shutdown(cancel_futures=True)

    def _copy(self, stored: FileTensor, begin: int, target: torch.Tensor) -> None:
        buffer, copied = self._buffer()
        piece = buffer[: target.numel()]
        if copied is not None:
            copied.synchronize()  # what this buffer held before
        _read(stored, begin, piece.numpy().data)
        with torch.cuda.stream(self._stream):  # of None: nothing changes
            target.copy_(piece, non_blocking=True)
            if copied is not None:
                copied.record()

    def _buffer(self) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """This thread's, and what says that the copy out of it is over."""
        if not hasattr(self._own, "buffer"):
            on_gpu = self._stream is not None
            self._own.buffer = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            self._own.copied = torch.cuda.Event() if on_gpu else None
        return self._own.buffer, self._own.copied


def upload(
    tensors: Iterable[FileTensor], device: torch.device | str, piece_bytes: int = PIECE_BYTES
) -> Iterator[torch.Tensor]:
    """Yield every tensor on the device, in order; those that follow are on their way by then."""
    uploader = Uploader(device, piece_bytes)
    started: deque[_Upload] = deque()
    ahead = 0
    try:
        for stored in tensors:
            while started and ahead + stored.num_bytes > AHEAD_BYTES:
                ahead -= started[0].tensor.nbytes
                yield started.popleft().wait()
            started.append(uploader.start(stored))
            ahead += stored.num_bytes
        while started:
            yield started.popleft().wait()
    finally:
        uploader.close()


def _read(stored: FileTensor, begin: int, into: memoryview) -> None:
    """Fill `into` from byte `begin` of the file on."""
    try:
        with stored.file.open("rb", buffering=0) as file:
            while into:
                count = os.preadv(file.fileno(), [into], begin)
                if not count:
                    raise OSError(f"it ends at byte {begin}, within the tensor")
                into, begin = into[count:], begin + count
    except OSError as error:
        problem = error.strerror or error
        raise ModelLoadError(f"{stored.file}: {stored.name} cannot be read: {problem}") from error
