"""Unpacks pages of an fp8 KV cache to bf16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick

PART = 4096  # elements of a page, and as many of keys as of values, per program


@quick
@triton.jit(do_not_specialize=["stride"])
def _unpack_kernel(
    k_cache, v_cache, keys, values, tables, stride, rows, columns, size,
    PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    page = tl.program_id(0).to(tl.int64)
    line = tl.load(rows + page).to(tl.int64) * stride
    block = tl.load(tables + line + tl.load(columns + page)).to(tl.int64)
    index = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = index < size
    wait(EARLY)
    k = tl.load(k_cache + block * size + index, mask=inside)
    v = tl.load(v_cache + block * size + index, mask=inside)
    tl.store(keys + page * size + index, k.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + page * size + index, v.to(values.dtype.element_ty), mask=inside)


def unpack(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and tables.stride(1) == 1
    assert k_cache.shape == v_cache.shape
    shape, size = (rows.shape[0], *k_cache.shape[1:]), k_cache[0].numel()
    keys, values = (k_cache.new_empty(shape, dtype=torch.bfloat16) for _ in range(2))
    part = min(PART, next_power_of_2(size))
    _unpack_kernel[(rows.shape[0], cdiv(size, part))](
        k_cache, v_cache, keys, values, tables, tables.stride(0), rows, columns, size, PART=part,
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return keys, values
