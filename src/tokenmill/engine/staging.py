"""What the host sends to the device for a step, by copies that do not wait."""

from __future__ import annotations

import numpy as np
import torch

_NUM_BUFFERS = (
    16  # a step takes at most seven, and two steps are under way: none is filled too early
)
ALIGN = 4  # int32 per 16 bytes: a pointer's alignment is part of what a Triton kernel is built for


class Staging:
    """Host buffers in turn, pinned for a GPU, so that a copy runs while the next one is filled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [self._allocate(4096) for _ in range(_NUM_BUFFERS)]
        self._turn = 0

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def buffer(self, size: int) -> torch.Tensor:
        """The next host buffer, int32 [size]."""
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = self._allocate(2 * size)
        return self._buffers[self._turn][:size]

    def send(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        """The parts as int32 tensors on the device, by one copy that does not wait."""
        sizes = [len(part) + -len(part) % ALIGN for part in parts]
        host = self.buffer(sum(sizes))
        array, starts = host.numpy(), np.cumsum([0, *sizes])
        for part, start in zip(parts, starts, strict=False):
            array[start : start + len(part)] = part
        sent = host.to(self.device, non_blocking=True) if self.device.type == "cuda" else host
        return [sent[i : i + len(part)] for part, i in zip(parts, starts, strict=False)]


def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, by pinned memory that nobody else gets while the copy runs."""
    if device.type == "cpu":
        return torch.tensor(array)
    host = torch.from_numpy(np.empty(0, array.dtype)).new_empty(array.shape, pin_memory=True)
    host.numpy()[:] = array
    return host.to(device, non_blocking=True)
