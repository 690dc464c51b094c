"""Row-wise kernels of a diffusion transformer, fp32 inside whatever the tensors hold.

A program takes a whole row, which it reads once. Rows come back as (values, scales), scales being
None unless the values are fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.rows import FP8_LIMIT, MAX_WARPS, Rows, activate

PART_PER_WARP = 1024  # elements of a row's first part


@triton.jit
def load_row(line, k, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """A row of k as fp32 in two parts, [HEAD] and [TAIL]; places past its end are 0."""
    columns, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    head = tl.load(line + columns).to(tl.float32)
    return head, tl.load(line + rest, mask=rest < k, other=0.0).to(tl.float32)


@triton.jit
def store_row(line, head, tail, k, HEAD: tl.constexpr, TAIL: tl.constexpr):
    columns, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    tl.store(line + columns, head.to(line.dtype.element_ty))
    tl.store(line + rest, tail.to(line.dtype.element_ty), mask=rest < k)


@triton.jit
def _store(head, tail, out, scales, row, k, FP8: tl.constexpr):
    if FP8:
        peak = tl.maximum(tl.max(tl.abs(head), axis=0), tl.max(tl.abs(tail), axis=0))
        peak = tl.maximum(peak, 1e-30)
        tl.store(scales + row, peak / FP8_LIMIT)
        head, tail = head * (FP8_LIMIT / peak), tail * (FP8_LIMIT / peak)
    store_row(out + row * k, head, tail, k, head.shape[0], tail.shape[0])


@triton.jit
def norm_modulate_kernel(
    x, delta, gate, factor, shift, out, scales, k, eps,
    ADD: tl.constexpr, GATED: tl.constexpr, FP8: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(EARLY)
    head, tail = load_row(x + row * k, k, HEAD, TAIL)
    if ADD:
        more, rest = load_row(delta + row * k, k, HEAD, TAIL)
        if GATED:
            share, last = load_row(gate, k, HEAD, TAIL)
            more, rest = more * share, rest * last
        head = (head + more).to(x.dtype.element_ty).to(tl.float32)
        tail = (tail + rest).to(x.dtype.element_ty).to(tl.float32)
        store_row(x + row * k, head, tail, k, HEAD, TAIL)
    mean = (tl.sum(head, axis=0) + tl.sum(tail, axis=0)) / k
    head, tail = head - mean, tl.where(HEAD + tl.arange(0, TAIL) < k, tail - mean, 0.0)
    squares = tl.sum(head * head, axis=0) + tl.sum(tail * tail, axis=0)
    inverse = tl.rsqrt(squares / k + eps)
    gain, last = load_row(factor, k, HEAD, TAIL)
    head, tail = head * inverse * gain, tail * inverse * last
    offset, last = load_row(shift, k, HEAD, TAIL)
    _store(head + offset, tail + last, out, scales, row, k, FP8)


@triton.jit
def _gelu(x, FAST: tl.constexpr):
    """x / 2 * (1 + tanh(u)); FAST: within 2^-11 of tanh, in one instruction instead of twelve."""
    if FAST:
        u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        return 0.5 * x * t + 0.5 * x
    else:
        return activate(x, "gelu_tanh")


@triton.jit
def gelu_rows_kernel(
    x, out, scales, k,
    FAST: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(EARLY)
    head, tail = load_row(x + row * k, k, HEAD, TAIL)
    head, tail = _gelu(head, FAST), _gelu(tail, FAST)
    _store(head, tail, out, scales, row, k, True)


def norm_modulate(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    fp8: bool,
    delta: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> Rows:
    """x[m, k] with fp32 factor[k] and shift[k]; delta[m, k] * gate[k] is added to x first."""
    m, k = x.shape
    assert x.is_contiguous() and factor.is_contiguous() and shift.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    assert gate is None or gate.is_contiguous()
    out, scales = _outputs(x, fp8)
    norm_modulate_kernel[(m,)](
        x, x if delta is None else delta, factor if gate is None else gate, factor, shift, out,
        out if scales is None else scales, k, eps,
        ADD=delta is not None, GATED=gate is not None, FP8=fp8, **row_parts(k),
    )  # fmt: skip
    return out, scales


def gelu_rows(x: torch.Tensor) -> Rows:
    """x[m, k] -> fp8 [m, k] and fp32 scales [m]."""
    m, k = x.shape
    assert x.is_contiguous()
    out, scales = _outputs(x, True)
    gelu_rows_kernel[(m,)](x, out, scales, k, FAST=x.is_cuda, **row_parts(k))
    return out, scales


def _outputs(x: torch.Tensor, fp8: bool) -> Rows:
    if not fp8:
        return torch.empty_like(x), None
    scales = torch.empty(len(x), device=x.device, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


def row_parts(k: int) -> dict[str, int | bool]:
    """A row in two parts, which waste less than one power of two, by few warps.

    So several programs share a multiprocessor, and one loads while another one reduces.
    """
    head = triton.next_power_of_2(k) // 2
    warps = min(MAX_WARPS, max(1, head // PART_PER_WARP))
    tail = triton.next_power_of_2(max(1, k - head))
    return {"HEAD": head, "TAIL": tail, "num_warps": warps, **launch_options()}
