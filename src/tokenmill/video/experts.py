"""The experts of a video model: on the device, or on the host with the one in use on the device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from math import prod

import torch

from tokenmill.core.specs.wan import WanTransformerSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.layers.linear import ComputeType
from tokenmill.models.wan.wan_split import TokenSplit
from tokenmill.models.wan.wan_transformer import WanTransformer, host_types, transformer_tensors

_ALIGNMENT = 64  # bytes, of every tensor in an expert's block of host memory
_PORTABLE = 1  # flag of cudaHostRegister


class Experts:
    """High noise first. With `offload` the device holds one of them at a time."""

    def __init__(
        self,
        spec: WanTransformerSpec,
        sources: Sequence[Mapping[str, torch.Tensor]],
        dtype: ComputeType,
        device: torch.device,
        offload: bool = False,
        split: TokenSplit | None = None,
    ) -> None:
        self.split = split or TokenSplit()
        self.spec, self.dtype, self.device, self.offload = spec, dtype, device, offload
        self.load_s = 0.0  # time that moving experts to the device has taken
        self._host: list[dict[str, torch.Tensor]] = []
        self._loaded: dict[int, WanTransformer] = {}
        if offload:
            self._host = [self._to_host(source) for source in sources]
            return
        for index, source in enumerate(sources):
            self._loaded[index] = self._make(source)

    def __getitem__(self, index: int) -> WanTransformer:
        """An expert, moved to the device if it is not there."""
        if index not in self._loaded:
            self.unload()  # its memory is free before the other one comes
            start = time.perf_counter()
            self._loaded[index] = self._make(self._host[index])
            synchronize(self.device)
            self.load_s += time.perf_counter() - start
        return self._loaded[index]

    def _make(self, source: Mapping[str, torch.Tensor]) -> WanTransformer:
        return WanTransformer(self.spec, source, self.dtype, self.device, self.split)

    def unload(self) -> None:
        if self.offload:
            self._loaded.clear()

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self._layout().values())

    def _layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
        """Type, shape and padded bytes of each tensor in host memory."""
        shapes, types = transformer_tensors(self.spec), host_types(self.spec, self.dtype)
        padded = {
            name: -(-prod(shape) * types[name].itemsize // _ALIGNMENT) * _ALIGNMENT
            for name, shape in shapes.items()
        }
        return {name: (types[name], shape, padded[name]) for name, shape in shapes.items()}

    def _to_host(self, source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies in one block, pinned for a GPU, which reads it at the bus's full speed.

        torch's own pinned memory would round every tensor up to a power of two.
        """
        block = torch.empty(self.num_bytes, dtype=torch.uint8)
        if self.device.type == "cuda":
            _pin(block)
            weakref.finalize(self, _unpin, block)
        copies, start = {}, 0
        for name, (dtype, shape, num_bytes) in self._layout().items():
            flat = block[start : start + num_bytes].view(dtype)
            copies[name] = flat[: prod(shape)].view(shape).copy_(source[name])
            start += num_bytes
        return copies


def _pin(block: torch.Tensor) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, _PORTABLE))
    if code != 0:
        size = f"{block.nbytes / 1e9:.1f} GB of host memory for an expert"
        problem = f"{size} cannot be pinned (CUDA error {code})"
        raise ModelLoadError(f"--offload: {problem}: raise the limit of locked memory (ulimit -l)")


def _unpin(block: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock tells what it did."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
