"""The experts of a video model: on the device, or on the host with the one in use on the device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from tokenmill.core.specs.wan import WanTransformerSpec
from tokenmill.layers.linear import ComputeType
from tokenmill.models.wan.wan_transformer import WanTransformer


class Experts:
    """High noise first. With `offload` the device holds one of them at a time."""

    def __init__(
        self,
        spec: WanTransformerSpec,
        sources: Sequence[Mapping[str, torch.Tensor]],
        dtype: ComputeType,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.spec, self.dtype, self.device, self.offload = spec, dtype, device, offload
        self.load_s = 0.0  # time that moving experts to the device has taken
        self._host: list[dict[str, torch.Tensor]] = []
        self._loaded: dict[int, WanTransformer] = {}
        if offload:
            self._host = [self._to_host(source) for source in sources]
            return
        for index, source in enumerate(sources):
            self._loaded[index] = WanTransformer(spec, source, dtype, device)

    def __getitem__(self, index: int) -> WanTransformer:
        """An expert, moved to the device if it is not there."""
        if index not in self._loaded:
            self.unload()  # its memory is free before the other one comes
            start = time.perf_counter()
            self._loaded[index] = WanTransformer(
                self.spec, self._host[index], self.dtype, self.device
            )
            synchronize(self.device)
            self.load_s += time.perf_counter() - start
        return self._loaded[index]

    def unload(self) -> None:
        """Take what is offloaded off the device."""
        if self.offload:
            self._loaded.clear()

    def _to_host(self, source: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies in pinned memory, from which a GPU reads at the bus's full speed."""
        pinned = self.device.type == "cuda"
        copies = {}
        for name, tensor in source.items():
            copies[name] = tensor.cpu().pin_memory() if pinned else tensor.cpu()
        return copies


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock tells what it did."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
