"""Experts on a GPU: the router's choice, products over the tiles of expert_tiles.py, their sum.

On Hopper kernels/gpu/hopper/moe.py takes the products of bfloat16; those of MXFP4 are in
kernels/gpu/mxfp4.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels import MODE
from tokenmill.kernels.gpu import hopper, mxfp4
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.expert_tiles import ExpertTiles, sort_by_expert
from tokenmill.kernels.gpu.hopper import moe as hopper_moe
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.gpu.matmul import _load, matmul_by_tiles, skinny_matmul
from tokenmill.kernels.gpu.rows import act_and_mul, quantize_rows
from tokenmill.kernels.matmul import SKINNY_ROWS, PackedWeight
from tokenmill.kernels.moe import PackedExperts, Routing
from tokenmill.kernels.rows import FP8, Activation, QuantizedRows

LINE_BYTES = 128  # of k per step
ROUTER_TILE = (1, 1024, 4, 3)  # of the few rows of W: a program each
GROUP = 8  # tiles that share their columns of W in L2
SUM_BLOCK = 1024


@quick
@triton.jit
def _route_kernel(
    logits, bias, logit_bias, ids, weights, num_experts, scaling,
    SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr, BIAS: tl.constexpr,
    LOGIT_BIAS: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, GROUP_SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    lowest = float("-inf")
    values = tl.load(logits + row * num_experts + expert, mask=inside, other=lowest)
    if LOGIT_BIAS:
        values += tl.load(logit_bias + expert, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = tl.sigmoid(values)
    else:
        scores = tl.exp(values - tl.max(values, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0)
    choice = tl.where(inside, choice, lowest)
    if GROUPS > 1:
        group = tl.arange(0, GROUP_SLOTS)
        member = expert[None, :] // (num_experts // GROUPS) == group[:, None]
        member = member & inside[None, :]
        per_group = tl.where(member, choice[None, :], lowest)
        first = tl.argmax(per_group, axis=1)
        rest = tl.where(expert[None, :] == first[:, None], lowest, per_group)
        total = tl.max(per_group, axis=1) + tl.max(rest, axis=1)
        total = tl.where(group < GROUPS, total, lowest)
        kept = tl.zeros([GROUP_SLOTS], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.argmax(total, axis=0)
            kept = tl.where(group == top, 1, kept)
            total = tl.where(group == top, lowest, total)
        allowed = tl.sum(tl.where(member, kept[:, None], 0), axis=0) > 0
        choice = tl.where(allowed, choice, lowest)
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(TOP_K):
        top = tl.argmax(choice, axis=0)
        chosen = tl.where(slot == i, top, chosen)
        weight = tl.where(slot == i, tl.sum(tl.where(expert == top, scores, 0.0), axis=0), weight)
        choice = tl.where(expert == top, lowest, choice)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    tl.store(ids + row * TOP_K + slot, chosen, mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, weight * scaling, mask=slot < TOP_K)


@quick
@triton.jit
def _grouped_kernel(
    x, weight, out, row_scales, column_scales, bias, sorted_rows, tile_experts, tile_sizes,
    num_tiles, n, k,
    SHARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    program, column_tiles = tl.program_id(0), tl.cdiv(n, BN)
    count = tl.load(num_tiles)
    if program >= count * column_tiles:
        return
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(count - first, GROUP)
    inner = program % (GROUP * column_tiles)
    tile = first + inner % height
    columns = inner // height * BN + tl.arange(0, BN)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    valid = tl.arange(0, BM) < tl.load(tile_sizes + tile)
    rows = tl.load(sorted_rows + tile * BM + tl.arange(0, BM), mask=valid, other=0)
    source, column = rows // SHARE, tl.minimum(columns, n - 1)
    x_line = x + source.to(tl.int64)[:, None] * k
    line = weight + expert * n * k + column.to(tl.int64)[None, :] * k
    steps = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        inside = steps < k - start
        values = _load(x_line + start + steps[None, :], inside[None, :], EVEN)
        weights = _load(line + start + steps[:, None], inside[:, None], EVEN)
        acc = tl.dot(values, weights, acc)
    if SCALED:
        acc = acc * tl.load(row_scales + source)[:, None]
        acc = acc * tl.load(column_scales + expert * n + column)[None, :]
    if BIAS:
        acc = acc + tl.load(bias + expert * n + column).to(tl.float32)[None, :]
    places = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    mask = valid[:, None] & (columns[None, :] < n)
    tl.store(places, acc.to(out.dtype.element_ty), mask=mask)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _sum_kernel(
    results, weights, out, n, num_rows,
    TOP_K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        row = token * TOP_K + i
        values = tl.load(results + row * n + columns, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more = results + (row + part * num_rows) * n + columns
            values += tl.load(more, mask=inside, other=0.0).to(tl.float32)
        total += values * tl.load(weights + row)
    total += tl.load(out + token * n + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * n + columns, total.to(out.dtype.element_ty), mask=inside)


def router_logits(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if MODE.batch_invariant:
        zeros = torch.zeros(x.shape[0], weight.n, device=x.device)
        return matmul_by_tiles(x, weight, None, zeros)
    if x.shape[0] <= SKINNY_ROWS:
        return skinny_matmul(x, weight, tile=ROUTER_TILE, out_dtype=torch.float32)
    return torch.mm(x, weight.data.T, out_dtype=torch.float32)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    logit_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, num_experts = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, routing.top_k, device=logits.device)
    _route_kernel[(tokens,)](
        logits, bias, logit_bias, ids, weights, num_experts, routing.scaling,
        SIGMOID=routing.sigmoid, RENORMALISE=routing.renormalise, BIAS=bias is not None,
        LOGIT_BIAS=logit_bias is not None, TOP_K=routing.top_k,
        SLOTS=next_power_of_2(routing.top_k),
        GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups,
        GROUP_SLOTS=next_power_of_2(routing.num_groups),
        EXPERTS=next_power_of_2(num_experts), num_warps=1, **launch_options(),
    )  # fmt: skip
    return ids, weights


def grouped_tile(rows: int) -> tuple[int, int, int]:
    """Columns of W per tile, warps and stages, as measured on an H200."""
    if rows == 16:
        return 128, 4, 4
    return 256, 8 if rows >= 64 else 4, 3


def grouped_matmul(
    x: torch.Tensor | QuantizedRows,
    weight: PackedExperts,
    tiles: ExpertTiles,
    num_rows: int,
    share: int,
) -> torch.Tensor:
    """Each tile's rows of x times its expert's W.T -> [num_rows, n]; row r reads x[r // share]."""
    values, scales = x if isinstance(x, QuantizedRows) else (x, None)
    data, n, k = weight.data, weight.n, weight.k
    assert data is not None and data.is_contiguous() and values.is_contiguous()
    assert values.dtype == data.dtype and (scales is None) == (weight.scales is None)
    assert weight.bias is None or weight.bias.is_contiguous()
    dtype = values.dtype if scales is None else torch.bfloat16
    out = torch.empty(num_rows, n, dtype=dtype, device=values.device)
    bk = LINE_BYTES // values.element_size()
    bn, warps, stages = grouped_tile(tiles.rows)
    _grouped_kernel[(tiles.most * cdiv(n, bn),)](
        values, data, out, scales, weight.scales, weight.bias, tiles.sorted_rows, tiles.experts,
        tiles.sizes, tiles.num_used, n, k,
        SHARE=share, BM=tiles.rows, BN=bn, BK=bk, GROUP=GROUP, EVEN=k % bk == 0,
        SCALED=scales is not None, BIAS=weight.bias is not None, num_warps=warps,
        num_stages=stages, **launch_options(),
    )  # fmt: skip
    return out


def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
) -> torch.Tensor:
    count, top_k, num_experts = ids.numel(), ids.shape[1], gate_up.num_experts
    if not count:
        return x.new_empty(0, down.n)
    if gate_up.mxfp4:
        return mxfp4.apply_experts(x, ids, gate_up, down, activation)
    if activation == "silu" and _suits_hopper(x, gate_up, down):
        tiles = sort_by_expert(ids, num_experts, hopper_moe.tile_rows(count, num_experts))
        gated = hopper_moe.gate_up_product(x, gate_up, tiles, share=top_k)
        return hopper_moe.down_product(gated, down, tiles, count)
    rounding = FP8 if gate_up.scales is not None else None
    rows = quantize_rows(x, rounding) if rounding else x
    tiles = sort_by_expert(ids, num_experts)
    inner = grouped_matmul(rows, gate_up, tiles, count, share=top_k)
    return grouped_matmul(act_and_mul(inner, rounding, activation), down, tiles, count, share=1)


def _suits_hopper(x: torch.Tensor, gate_up: PackedExperts, down: PackedExperts) -> bool:
    """bfloat16 without biases and matrices of whole tiles of kernels/gpu/hopper/moe.py."""
    if not hopper.is_usable() or x.dtype != torch.bfloat16 or gate_up.bias is not None:
        return False
    both = gate_up, down
    return all(w.data is not None and w.data.dtype == x.dtype and hopper_moe.suits(w) for w in both)


def add_choices(results: torch.Tensor, weights: torch.Tensor, add_to: torch.Tensor) -> None:
    if not weights.numel():
        return
    (tokens, top_k), n = weights.shape, results.shape[-1]
    parts = results.shape[0] if results.dim() == 3 else 1
    assert results.is_contiguous() and add_to.is_contiguous() and add_to.shape == (tokens, n)
    _sum_kernel[(tokens, cdiv(n, SUM_BLOCK))](
        results, weights, add_to, n, tokens * top_k, TOP_K=top_k, PARTS=parts, BLOCK=SUM_BLOCK,
        num_warps=4, **launch_options(),
    )  # fmt: skip
