"""Linear layers over packed weights, and the token embedding that a tied head shares."""

from __future__ import annotations

from typing import Literal

import torch

from tokenmill.kernels.matmul import (
    PackedWeight,
    adds_in_place,
    matmul,
    matmul_parts,
    pack,
    sum_parts,
)
from tokenmill.kernels.rows import QuantizedRows, Rounding, quantize_rows
from tokenmill.parallel import ONE, Ranks

ComputeType = Literal["fp32", "int8", "bf16", "fp8"]
Device = torch.device | str
Tensors = dict[str, torch.Tensor]


def activation_dtype(dtype: ComputeType) -> torch.dtype:
    return torch.bfloat16 if dtype in ("bf16", "fp8") else torch.float32


def plain_type(dtype: ComputeType) -> ComputeType:
    """What a weight is packed as that may not be rounded to 8 bits: the stream's type."""
    return "bf16" if dtype in ("bf16", "fp8") else "fp32"


class Linear:
    """y = x W^T (+ b); several weights are stacked, so that q, k and v are one product."""

    def __init__(
        self,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor],
        dtype: ComputeType,
        device: Device = "cpu",
    ) -> None:
        stacked = torch.cat([weight.to(device) for weight in weights])
        self.weight: PackedWeight = pack(stacked, dtype, device, grouped=True)
        self.bias = torch.cat(biases).to(device, activation_dtype(dtype)) if biases else None

    @classmethod
    def named(
        cls, tensors: Tensors, names: list[str], dtype: ComputeType, device: Device = "cpu"
    ) -> Linear:
        weights = [tensors[f"{name}.weight"] for name in names]
        biases = [tensors[key] for name in names if (key := f"{name}.bias") in tensors]
        return cls(weights, biases, dtype, device)

    @property
    def rounding(self) -> Rounding | None:
        return self.weight.rounding

    def __call__(
        self, x: torch.Tensor | QuantizedRows, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[m, k] -> [m, n], or added to `add_to` in place."""
        if self.rounding and isinstance(x, torch.Tensor):
            x = quantize_rows(x, self.rounding)
        return matmul(x, self.weight, self.bias, add_to)

    def partial(self, x: torch.Tensor | QuantizedRows, num_ranks: int) -> torch.Tensor | None:
        """A rank's part of the product in fp32, where its order of sums is that of one rank."""
        parts = sum_parts(self.weight, self.bias, num_ranks)
        if not parts:
            return None
        assert isinstance(x, torch.Tensor)
        return matmul_parts(x, self.weight, parts)

    def add(self, x: torch.Tensor | QuantizedRows, add_to: torch.Tensor) -> None:
        """Add the product to `add_to` in place; ranks that divide it get the same bits."""
        parts = sum_parts(self.weight, self.bias)
        if parts and isinstance(x, torch.Tensor):
            matmul_parts(x, self.weight, parts, add_to)
        else:
            self(x, add_to)

    def adds_in_place(self, x: torch.Tensor | QuantizedRows) -> bool:
        """False where `add_to` costs a pass of its own."""
        return adds_in_place(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias is None else self.bias.nbytes)


class Embedding:
    """Rows of a table by token id, times `scale`; a tied table is the head's own packed weight.

    Of several ranks each has its share of the vocabulary; what the others have is added up.
    """

    def __init__(
        self,
        table: torch.Tensor | PackedWeight,
        dtype: ComputeType,
        own: slice = slice(0),
        ranks: Ranks = ONE,
        scale: float = 1.0,
    ) -> None:
        self.table, self.own, self.ranks = table, own, ranks
        self.dtype = activation_dtype(dtype)
        self.scale = torch.tensor(scale, dtype=self.dtype).item()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [m] -> [m, hidden]."""
        if self.ranks.size == 1:
            return self._rows(token_ids)
        first, end = self.own.start, self.own.stop
        elsewhere = (token_ids < first) | (token_ids >= end)
        rows = self._rows((token_ids - first).masked_fill_(elsewhere, 0))
        return self.ranks.add_up(rows.masked_fill_(elsewhere[:, None], 0.0))

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.table
        rows = table.rows(token_ids) if isinstance(table, PackedWeight) else table[token_ids]
        rows = rows.to(self.dtype)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)

    @property
    def num_bytes(self) -> int:
        """Bytes of its own: none when the table is the head's."""
        return 0 if isinstance(self.table, PackedWeight) else self.table.nbytes
