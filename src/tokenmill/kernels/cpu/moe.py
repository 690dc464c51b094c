"""Experts: the router's choice, tokens sorted by expert, the weighted sum of what they return.

Every sum runs in the order of the experts or of the choice, token by token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from tokenmill.kernels.cpu.compiler import compiled
from tokenmill.kernels.cpu.grouped import MAX_ROWS, multiply_segments
from tokenmill.kernels.cpu.threads import float_bits, launch, rows_of_task, task_kernel
from tokenmill.kernels.cpu.tiles import as_float, exp32, f32_at, i32_at
from tokenmill.kernels.moe import PackedExperts, Routing, pick_rows
from tokenmill.kernels.rows import Activation, QuantizedRows, act_and_mul, quantize_rows

_LOWEST = np.float32(-np.inf)


@compiled
def _score(logits: Any, scores: Any, count: int, sigmoid: int) -> None:
    one = np.float32(1.0)
    if sigmoid != 0:
        for i in range(count):
            scores[i] = one / (one + exp32(-logits[i]))
        return
    top = logits[0]
    for i in range(count):
        top = max(top, logits[i])
    for i in range(count):
        scores[i] = exp32(logits[i] - top)
    total = np.float32(0.0)
    for i in range(count):
        total += scores[i]
    inverse = one / total
    for i in range(count):
        scores[i] *= inverse


@compiled
def _best(values: Any, first: int, end: int) -> int:
    best = first
    for i in range(first + 1, end):
        if values[i] > values[best]:
            best = i
    return best


@compiled
def _keep_groups(choice: Any, count: int, groups: int, top_groups: int) -> None:
    """Rule out the experts of all groups but those whose two best have the largest sums."""
    size = count // groups
    totals = np.empty(groups, np.float32)
    for g in range(groups):
        first = _best(choice, g * size, g * size + size)
        second = _LOWEST
        for i in range(g * size, g * size + size):
            if i != first:
                second = max(second, choice[i])
        totals[g] = choice[first] + second
    for _ in range(top_groups):
        totals[_best(totals, 0, groups)] = _LOWEST
    for i in range(count):
        if totals[i // size] > _LOWEST:
            choice[i] = _LOWEST


def _route_body(args: Any, task: int) -> None:
    tokens, count, top_k, rows = args[4], args[5], args[6], args[7]
    scaling = np.float32(as_float(args[10]))
    scores, choice = np.empty(count, np.float32), np.empty(count, np.float32)
    for t in range(task * rows, min(tokens, task * rows + rows)):
        _score(carray(f32_at(args[0] + 4 * t * args[13]), (count,)), scores, count, args[8])
        choice[:] = scores
        if args[1] != 0:
            bias = carray(f32_at(args[1]), (count,))
            for i in range(count):
                choice[i] += bias[i]
        if args[11] > 1:
            _keep_groups(choice, count, args[11], args[12])
        ids = carray(i32_at(args[2] + 4 * t * top_k), (top_k,))
        weights = carray(f32_at(args[3] + 4 * t * top_k), (top_k,))
        total = np.float32(1e-20)
        for i in range(top_k):
            best = _best(choice, 0, count)
            choice[best] = _LOWEST
            ids[i], weights[i] = best, scores[best]
            total += scores[best]
        factor = scaling / total if args[9] != 0 else scaling
        for i in range(top_k):
            weights[i] *= factor


def _sum_body(args: Any, task: int) -> None:
    tokens, n, top_k, rows = args[3], args[4], args[5], args[6]
    total = np.empty(n, np.float32)
    for t in range(task * rows, min(tokens, task * rows + rows)):
        weights = carray(f32_at(args[1] + 4 * t * top_k), (top_k,))
        total[:] = np.float32(0.0)
        for c in range(top_k):
            result = carray(f32_at(args[0] + 4 * (t * top_k + c) * n), (n,))
            weight = weights[c]
            for i in range(n):
                total[i] += result[i] * weight
        target = carray(f32_at(args[2] + 4 * t * args[7]), (n,))
        for i in range(n):
            target[i] += total[i]


_route_kernel = task_kernel(_route_body)
_sum_kernel = task_kernel(_sum_body)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    logit_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int32 [t, top_k] and their weights fp32 [t, top_k]; of equal scores the first."""
    logits = logits if logit_bias is None else logits + logit_bias
    tokens, count = logits.shape
    assert logits.stride(1) == 1 and (bias is None or bias.is_contiguous())
    ids = torch.empty(tokens, routing.top_k, dtype=torch.int32)
    weights = torch.empty(tokens, routing.top_k)
    rows = rows_of_task(tokens, count)
    launch(
        _route_kernel, -(-tokens // rows), logits.data_ptr(),
        0 if bias is None else bias.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, count,
        routing.top_k, rows, routing.sigmoid, routing.renormalise, float_bits(routing.scaling),
        routing.num_groups, routing.top_groups, logits.stride(0),
    )  # fmt: skip
    return ids, weights


@compiled
def _sort(ids: Any, num_experts: int, max_rows: int) -> Any:
    ends = np.zeros(num_experts + 1, np.int64)
    for i in range(len(ids)):
        ends[ids[i] + 1] += 1
    num_segments = 0
    for e in range(num_experts):
        num_segments += (ends[e + 1] + max_rows - 1) // max_rows
    segments = np.empty((num_segments, 3), np.int64)
    s, first = 0, 0
    for e in range(num_experts):
        count = ends[e + 1]
        ends[e + 1] = first + count
        for start in range(first, first + count, max_rows):
            segments[s, 0], segments[s, 1] = e, start
            segments[s, 2] = min(max_rows, first + count - start)
            s += 1
        first += count
    order = np.empty(len(ids), np.int64)
    for i in range(len(ids)):
        order[ends[ids[i]]] = i
        ends[ids[i]] += 1
    return order, segments


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Places of ids[t, top_k] by expert, and segments (expert, first place, count) of one expert.

    A segment is as long as a group of grouped.py may be.
    """
    order, segments = _sort(ids.numpy().reshape(-1), num_experts, MAX_ROWS)
    return torch.from_numpy(order), segments


def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
) -> torch.Tensor:
    """All experts in two launches, over rows sorted by expert."""
    if not ids.numel():
        return x.new_empty(0, down.n)
    order, segments = sort_by_expert(ids, gate_up.num_experts)
    rows = x if gate_up.rounding is None else quantize_rows(x, gate_up.rounding)
    experts = ids.flatten()[order]
    inner = _multiply(pick_rows(rows, order // ids.shape[1]), gate_up, segments, experts)
    outer = _multiply(act_and_mul(inner, down.rounding, activation), down, segments, experts)
    return torch.empty_like(outer).index_copy_(0, order, outer)


def _multiply(
    x: torch.Tensor | QuantizedRows,
    weight: PackedExperts,
    segments: NDArray[np.int64],
    experts: torch.Tensor,
) -> torch.Tensor:
    """Each segment's rows x[m, k] by the weight of its expert, experts[m] by row: [m, n]."""
    values, scales = x if isinstance(x, QuantizedRows) else (x, None)
    assert weight.data is not None
    out = torch.empty(values.shape[0], weight.n + -weight.n % 8)
    multiply_segments(values, scales, weight.data, weight.scales, segments, out)
    out = out[:, : weight.n].contiguous()
    return out if weight.bias is None else out.add_(weight.bias[experts])


def add_choices(results: torch.Tensor, weights: torch.Tensor, add_to: torch.Tensor) -> None:
    (tokens, top_k), n = weights.shape, results.shape[1]
    assert results.is_contiguous() and weights.is_contiguous() and add_to.stride(1) == 1
    if not tokens:
        return
    rows = rows_of_task(tokens, n * top_k)
    launch(
        _sum_kernel, -(-tokens // rows), results.data_ptr(), weights.data_ptr(), add_to.data_ptr(),
        tokens, n, top_k, rows, add_to.stride(0),
    )  # fmt: skip
