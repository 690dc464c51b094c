"""Norms and activations of a video model, fp32 inside whatever the tensors hold.

A program takes a whole row, which it reads once; of frames it takes all channels of neighbouring
positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.gpu.rows import FP8_LIMIT, MAX_WARPS, activate
from tokenmill.kernels.modulation import Added
from tokenmill.kernels.rows import QuantizedRows, Rounding

PART_PER_WARP = 1024  # elements of a row's first part
FRAME_TILE = 8192  # channels, as a power of two, times positions of a program
FRAME_WARPS = 8


@triton.jit
def load_row(line, k, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """A row of k as fp32 in two parts, [HEAD] and [TAIL]; places past its end are 0."""
    columns, rest = tl.arange(0, HEAD), HEAD + tl.arange(0, TAIL)
    head = tl.load(line + columns).to(tl.float32)
    return head, tl.load(line + rest, mask=rest < k, other=0.0).to(tl.float32)


@triton.jit
def store_row(line, head, tail, k, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """In x's type or fp8; a thread has eight neighbours in either.

    With the sixteen that fill a store of fp8, its loads of fp32 would be 64 bytes apart, which
    takes the first cache four times as long.
    """
    columns = tl.max_contiguous(tl.arange(0, HEAD), 8)
    rest = tl.max_contiguous(HEAD + tl.arange(0, TAIL), 8)
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


@quick
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


@quick
@triton.jit
def round_rows_kernel(
    x, out, scales, k, GELU: tl.constexpr,
    FAST: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(EARLY)
    head, tail = load_row(x + row * k, k, HEAD, TAIL)
    if GELU:
        head, tail = _gelu(head, FAST), _gelu(tail, FAST)
    _store(head, tail, out, scales, row, k, True)


@quick
@triton.jit
def norm_silu_kernel(
    x, gamma, before, out, channels, frames, size, x_channel, x_frame, before_channel,
    before_frame, root, BLOCK: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[None, :]
    frame, channel = tl.program_id(1), tl.arange(0, BLOCK)
    seen = tl.num_programs(1) - frames
    inside = (channel < channels)[:, None] & (place < size)
    wide = channel.to(tl.int64)[:, None]
    target = out + wide * (tl.num_programs(1) * size) + frame.to(tl.int64) * size + place
    if frame < seen:
        line = before + wide * before_channel + frame.to(tl.int64) * before_frame
        tl.store(target, tl.load(line + place, mask=inside, other=0.0), mask=inside)
    else:
        line = x + wide * x_channel + (frame - seen).to(tl.int64) * x_frame
        values = tl.load(line + place, mask=inside, other=0.0).to(tl.float32)
        length = tl.maximum(tl.sqrt(tl.sum(values * values, axis=0)), 1e-12)
        gain = tl.load(gamma + channel, mask=channel < channels, other=0.0).to(tl.float32)
        y = values * (root / length)[None, :] * gain[:, None]
        y = y / (1.0 + tl.exp(-y))
        tl.store(target, y.to(out.dtype.element_ty), mask=inside)


def norm_modulate(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    added: Added | None = None,
) -> torch.Tensor | QuantizedRows:
    """factor and shift are fp32."""
    delta, gate = added or (None, None)
    m, k = x.shape
    assert x.is_contiguous() and factor.is_contiguous() and shift.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    assert gate is None or gate.is_contiguous()
    out, scales = _outputs(x, rounding is not None)
    norm_modulate_kernel[(m,)](
        x, x if delta is None else delta, factor if gate is None else gate, factor, shift, out,
        out if scales is None else scales, k, eps,
        ADD=delta is not None, GATED=gate is not None, FP8=scales is not None, **row_parts(k),
    )  # fmt: skip
    return out if scales is None else QuantizedRows(out, scales)


def gelu_rows(x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor | QuantizedRows:
    return _to_fp8(x, gelu=True)


def round_rows(x: torch.Tensor, rounding: Rounding | None) -> torch.Tensor | QuantizedRows:
    return _to_fp8(x, gelu=False)


def _to_fp8(x: torch.Tensor, gelu: bool) -> QuantizedRows:
    m, k = x.shape
    assert x.is_contiguous()
    out, scales = _outputs(x, True)
    assert scales is not None
    round_rows_kernel[(m,)](x, out, scales, k, GELU=gelu, FAST=x.is_cuda, **row_parts(k))
    return QuantizedRows(out, scales)


def _outputs(x: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not fp8:
        return torch.empty_like(x), None
    scales = torch.empty(len(x), device=x.device, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


def row_parts(k: int) -> dict[str, int | bool]:
    """A row in two parts, which waste less than one power of two, by few warps.

    So several programs share a multiprocessor, and one loads while another one reduces.
    """
    head = next_power_of_2(k) // 2
    warps = min(MAX_WARPS, max(1, head // PART_PER_WARP))
    tail = next_power_of_2(max(1, k - head))
    return {"HEAD": head, "TAIL": tail, "num_warps": warps, **launch_options()}


def norm_silu(x: torch.Tensor, gamma: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Frames must be dense."""
    _, channels, frames, height, width = x.shape
    seen, size = before.shape[2], height * width
    for part in (x, before):
        assert part.stride(4) == 1 and part.stride(3) == width
    out = torch.empty(1, channels, seen + frames, height, width, device=x.device, dtype=x.dtype)
    block = next_power_of_2(channels)
    positions = frame_positions(block)
    norm_silu_kernel[(cdiv(size, positions), seen + frames)](
        x, gamma, before, out, channels, frames, size, x.stride(1), x.stride(2),
        before.stride(1), before.stride(2), channels**0.5,
        BLOCK=block, POSITIONS=positions, num_warps=FRAME_WARPS,
    )  # fmt: skip
    return out


def frame_positions(block: int) -> int:
    """Positions of a program with so many channels: at least two sectors of memory in bf16."""
    return max(32, FRAME_TILE // block)
