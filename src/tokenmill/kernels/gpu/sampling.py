"""Argmax, penalties, biases, masks and the seeded draw over rows of the vocabulary, without a sort.

Rows are cut into chunks, one program each: a row of 150,000 logits keeps dozens of multiprocessors
busy, so that one row takes no longer than many. A second program per row looks at the chunks'
results alone. No sum depends on how many rows there are.

The threshold of top_k and top_p is found by bisection over fp32 in its integer order: the largest
value such that those which reach it number top_k, or weigh top_p of all. Only the values near the
best are looked at, collected beforehand, unless they are too many or do not suffice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.sampling import Biases, Filters, Masks, Penalties

CHUNK = 4096  # logits of one program
CAPACITY = 16384  # values near the best that are collected of a row
REACH = tl.constexpr(12.0)  # how far below the best they lie, in units of the temperature
INF = tl.constexpr(float("inf"))
FLOAT_MIN = tl.constexpr(-3.4028234663852886e38)
BLOCK = 4096


@triton.jit
def _load(values, columns, size):
    """fp32; -inf beyond the end, and inf for NaN, which comparisons would lose."""
    x = tl.load(values + columns, mask=columns < size, other=-float("inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def _weights(x, threshold, best, scale):
    """fp64 probabilities over that of the best, 0 below the threshold."""
    weights = tl.exp(tl.div_rn(x - best, scale.to(tl.float32)))
    return tl.where(x >= threshold, weights, 0.0).to(tl.float64)


@triton.jit
def _order(bits):
    """Bits of fp32 to int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _row_sum(parts, row, chunks, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    return tl.sum(tl.load(parts + row * chunks + columns, mask=columns < chunks, other=0), axis=0)


@triton.jit
def _row_best(bests, row, chunks, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    parts = tl.load(bests + row * chunks + columns, mask=columns < chunks, other=-float("inf"))
    return tl.max(parts, axis=0)


@triton.jit
def _row_argmax(bests, best_ids, row, chunks, WIDTH: tl.constexpr):
    """The id of the row's best; -1 if that is not finite."""
    columns = tl.arange(0, WIDTH)
    inside = columns < chunks
    parts = tl.load(bests + row * chunks + columns, mask=inside, other=-float("inf"))
    ids = tl.load(best_ids + row * chunks + columns, mask=inside, other=0)
    best = tl.max(parts, axis=0)
    token = tl.min(tl.where(inside & (parts == best), ids, 0x7FFFFFFF), axis=0)
    return tl.where((best > -INF) & (best < INF), token, -1)


@quick
@triton.jit
def _chunk_best_kernel(logits, stride, size, bests, best_ids, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(logits + row * stride, columns, size)
    best = tl.max(x, axis=0)
    tl.store(bests + row * chunks + chunk, best)
    token = tl.min(tl.where(x == best, columns, 0x7FFFFFFF), axis=0)
    tl.store(best_ids + row * chunks + chunk, token)


@quick
@triton.jit
def _argmax_kernel(bests, best_ids, out, chunks, LEAST: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, tl.maximum(_row_argmax(bests, best_ids, row, chunks, WIDTH), LEAST))


@triton.jit
def _bounds(best, scale, min_p):
    """The floor that min_p sets, and the reach of the values near the best, not below it."""
    floor = tl.maximum(best.to(tl.float64) + scale * tl.log(min_p), FLOAT_MIN).to(tl.float32)
    near = (best.to(tl.float64) - REACH * scale).to(tl.float32)
    return floor, tl.maximum(near, floor)


@triton.jit
def _is_filtered(scale, min_p, k, p, best):
    return (scale > 0) & (best > -INF) & (best < INF) & ((min_p > 0) | (k > 0) | (p < 1))


@triton.jit
def _load_filters(temperature, min_p, top_k, top_p, row, size):
    k = tl.load(top_k + row)
    k = tl.where(k < size, k, 0)
    return tl.load(temperature + row), tl.load(min_p + row), k, tl.load(top_p + row)


@quick
@triton.jit
def _survey_kernel(
    logits, stride, size, bests, temperature, min_p, top_k, top_p, counts, near_sums, sums, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of each chunk: how many values are near the best, their weight, and that of all."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = _row_best(bests, row, chunks, WIDTH)
    scale, share, k, p = _load_filters(temperature, min_p, top_k, top_p, row, size)
    if _is_filtered(scale, share, k, p, best):
        x = _load(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), size)
        floor, near = _bounds(best, scale, share)
        part = row * chunks + chunk
        weights = _weights(x, floor, best, scale)
        tl.store(sums + part, tl.sum(weights, axis=0))
        tl.store(near_sums + part, tl.sum(tl.where(x >= near, weights, 0.0), axis=0))
        tl.store(counts + part, tl.sum((x >= near).to(tl.int32), axis=0))


@quick
@triton.jit
def _collect_kernel(
    logits, stride, size, bests, temperature, min_p, top_k, top_p, counts, near_values, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Write the values near the best, in the order of their ids, to near_values[row]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = _row_best(bests, row, chunks, WIDTH)
    scale, share, k, p = _load_filters(temperature, min_p, top_k, top_p, row, size)
    if _is_filtered(scale, share, k, p, best):
        x = _load(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), size)
        _, near = _bounds(best, scale, share)
        earlier = tl.arange(0, WIDTH)
        parts = tl.load(counts + row * chunks + earlier, mask=earlier < chunk, other=0)
        kept = x >= near
        places = tl.sum(parts, axis=0) + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(near_values + row * CAPACITY + places, x, mask=kept & (places < CAPACITY))


@triton.jit
def _mass(values, size, threshold, best, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Number or weight, fp64, of the values that reach the threshold."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        x = _load(values, start + tl.arange(0, BLOCK), size)
        if COUNT:
            total += (x >= threshold).to(tl.float64)
        else:
            total += _weights(x, threshold, best, scale)
    return tl.sum(total, axis=0)


@triton.jit
def _bisect(values, size, low, best, scale, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest threshold in [low, best] whose mass reaches the target; `low` if none does."""
    first = _order(low.to(tl.int32, bitcast=True)).to(tl.int64)
    end = _order(best.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    reached = target - 1.0
    while (end - first > 1) & (reached != target):
        middle = (first + end) >> 1
        threshold = _order(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        mass = _mass(values, size, threshold, best, scale, COUNT, BLOCK)
        enough = mass >= target
        first = tl.where(enough, middle, first)
        end = tl.where(enough, end, middle)
        reached = tl.where(enough, mass, reached)
    return _order(first.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(values, size, low, best, scale, k, p, total, BLOCK: tl.constexpr):
    """The logit that top_k and then top_p ask for, not below `low`; total: the weight above it."""
    if k > 0:
        low = _bisect(values, size, low, best, scale, k.to(tl.float64), True, BLOCK)
        total = _mass(values, size, low, best, scale, False, BLOCK)
    if p < 1:
        low = _bisect(values, size, low, best, scale, p * total, False, BLOCK)
    return low


@quick
@triton.jit
def _threshold_kernel(
    logits, stride, size, bests, temperature, min_p, top_k, top_p, counts, near_sums, sums,
    near_values, thresholds, chunks,
    WIDTH: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best = _row_best(bests, row, chunks, WIDTH)
    scale, share, k, p = _load_filters(temperature, min_p, top_k, top_p, row, size)
    low = tl.full((), FLOAT_MIN, tl.float32)
    if _is_filtered(scale, share, k, p, best):
        floor, near = _bounds(best, scale, share)
        low = floor
        count = _row_sum(counts, row, chunks, WIDTH)
        total = _row_sum(sums, row, chunks, WIDTH)
        near_total = _row_sum(near_sums, row, chunks, WIDTH)
        suffice = tl.where(k > 0, count >= k, near_total >= p * total) | (near == floor)
        if suffice & (count <= CAPACITY):
            values = near_values + row * CAPACITY
            if (k > 0) | (p < 1):
                low = _threshold(values, count, near, best, scale, k, p, total, BLOCK)
        else:
            low = _threshold(logits + row * stride, size, floor, best, scale, k, p, total, BLOCK)
    tl.store(thresholds + row, low)


@quick
@triton.jit
def _chunk_sum_kernel(
    logits, stride, size, bests, temperature, thresholds, sums, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = tl.load(temperature + row)
    if scale > 0:
        best = _row_best(bests, row, chunks, WIDTH)
        x = _load(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), size)
        weights = _weights(x, tl.load(thresholds + row), best, scale)
        tl.store(sums + row * chunks + chunk, tl.sum(weights, axis=0))


@triton.jit
def _first_above(weights, ends, target, indices):
    """The first index with a weight whose cumulative sum exceeds the target, else the last."""
    first = tl.min(tl.where((weights > 0) & (ends > target), indices, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(weights > 0, indices, 0), axis=0)
    return tl.minimum(first, last)


@quick
@triton.jit
def _draw_kernel(
    logits, stride, size, bests, best_ids, temperature, thresholds, sums, uniforms, out, chunks,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = _row_argmax(bests, best_ids, row, chunks, WIDTH)
    scale = tl.load(temperature + row)
    if (scale > 0) & (token >= 0):
        best = _row_best(bests, row, chunks, WIDTH)
        parts = tl.arange(0, WIDTH)
        weights = tl.load(sums + row * chunks + parts, mask=parts < chunks, other=0.0)
        target = tl.load(uniforms + row) * tl.sum(weights, axis=0)
        chunk = _first_above(weights, tl.cumsum(weights, axis=0), target, parts)
        before = tl.sum(tl.where(parts < chunk, weights, 0.0), axis=0)
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load(logits + row * stride, columns, size)
        weights = _weights(x, tl.load(thresholds + row), best, scale)
        token = _first_above(weights, before + tl.cumsum(weights, axis=0), target, columns)
    tl.store(out + row, token)


@triton.jit
def _penalised(x, count, repetition, frequency, presence):
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = x - frequency * count
    return x - tl.where(count > 0, presence, 0.0)


@quick
@triton.jit
def _penalise_kernel(
    logits, stride, offsets, ids, num_outputs, repetitions, frequencies, presences, last_ids,
    pending,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    repetition = tl.load(repetitions + row)
    frequency, presence = tl.load(frequencies + row), tl.load(presences + row)
    last = tl.where(tl.load(pending + row) > 0, tl.load(last_ids + row), -1)
    num_listed = 0  # entries that are the pending token
    for start in range(tl.load(offsets + row), tl.load(offsets + row + 1), BLOCK):
        entries = start + tl.arange(0, BLOCK)
        inside = entries < tl.load(offsets + row + 1)
        tokens = tl.load(ids + entries, mask=inside, other=0)
        is_last = inside & (tokens == last)
        counts = tl.load(num_outputs + entries, mask=inside, other=0.0) + is_last.to(tl.float32)
        x = tl.load(base + tokens, mask=inside, other=0.0)
        x = _penalised(x, counts, repetition, frequency, presence)
        tl.store(base + tokens, x, mask=inside)
        num_listed += tl.sum(is_last.to(tl.int32), axis=0)
    if (last >= 0) & (num_listed == 0):
        once = tl.full((), 1.0, tl.float32)
        x = _penalised(tl.load(base + last), once, repetition, frequency, presence)
        tl.store(base + last, x)


@quick
@triton.jit
def _bias_kernel(logits, stride, offsets, ids, values, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(tl.load(offsets + row), tl.load(offsets + row + 1), BLOCK):
        entries = start + tl.arange(0, BLOCK)
        inside = entries < tl.load(offsets + row + 1)
        places = logits + row * stride + tl.load(ids + entries, mask=inside, other=0)
        x = tl.load(places, mask=inside, other=0.0)
        tl.store(places, x + tl.load(values + entries, mask=inside, other=0.0), mask=inside)


@quick
@triton.jit
def _mask_kernel(logits, stride, size, numbers, words, num_words, out, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = columns < size
    number = tl.load(numbers + row).to(tl.int64)
    bounded = inside & (number >= 0)
    own = tl.load(words + number * num_words + columns // 32, mask=bounded, other=-1)
    x = tl.load(logits + row * stride + columns, mask=inside).to(tl.float32)
    x = tl.where((own >> (columns % 32)) & 1 != 0, x, -float("inf"))
    tl.store(out + row * size + columns, x, mask=inside)


def _chunk_bests(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each chunk and its id, [rows, chunks]."""
    rows, size = logits.shape
    assert logits.stride(1) == 1 and size < 2**31
    chunks = cdiv(size, CHUNK)
    bests = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    _chunk_best_kernel[(rows, chunks)](
        logits, logits.stride(0), size, bests, best_ids, chunks, CHUNK=CHUNK
    )
    return bests, best_ids


def argmax(logits: torch.Tensor, least: int = -1) -> torch.Tensor:
    bests, best_ids = _chunk_bests(logits)
    rows, chunks = bests.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    width = next_power_of_2(chunks)
    _argmax_kernel[(rows,)](bests, best_ids, out, chunks, LEAST=least, WIDTH=width, num_warps=1)
    return out


def _thresholds(logits: torch.Tensor, bests: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The smallest logit of each row that min_p, top_k and top_p let pass, fp32 [rows]."""
    rows, chunks = bests.shape
    width = next_power_of_2(chunks)
    counts = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    near_sums = torch.empty_like(sums)  # a view of one tensor of both would not always be aligned
    near_values = torch.empty(rows, CAPACITY, dtype=torch.float32, device=logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    inputs = (logits, logits.stride(0), logits.shape[1], bests, *filters)
    _survey_kernel[(rows, chunks)](
        *inputs, counts, near_sums, sums, chunks, WIDTH=width, CHUNK=CHUNK
    )
    _collect_kernel[(rows, chunks)](
        *inputs, counts, near_values, chunks, WIDTH=width, CHUNK=CHUNK, CAPACITY=CAPACITY
    )
    _threshold_kernel[(rows,)](
        *inputs, counts, near_sums, sums, near_values, thresholds, chunks,
        WIDTH=width, CAPACITY=CAPACITY, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return thresholds


def sample(logits: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    bests, best_ids = _chunk_bests(logits)
    thresholds = _thresholds(logits, bests, filters)
    rows, chunks = bests.shape
    width = next_power_of_2(chunks)
    sums = torch.empty(rows, chunks, dtype=torch.float64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    strided = (logits, logits.stride(0), logits.shape[1], bests)
    _chunk_sum_kernel[(rows, chunks)](
        *strided, filters.temperature, thresholds, sums, chunks, WIDTH=width, CHUNK=CHUNK
    )
    _draw_kernel[(rows,)](
        *strided, best_ids, filters.temperature, thresholds, sums, uniforms, out, chunks,
        WIDTH=width, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return out


def adjust(
    logits: torch.Tensor, penalties: Penalties | None, biases: Biases | None
) -> torch.Tensor:
    logits = logits.to(torch.float32, copy=True)
    if penalties is not None:
        penalise(logits, penalties)
    if biases is not None:
        add_biases(logits, biases)
    return logits


def penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Apply penalties to fp32 logits [rows, vocab] in place, with numpy's roundings."""
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    _penalise_kernel[(len(logits),)](
        logits, logits.stride(0), *penalties, BLOCK=1024, enable_fp_fusion=False
    )


def masked(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    (rows, size), num_words = logits.shape, masks.words.shape[1]
    assert logits.stride(1) == 1 and masks.words.is_contiguous() and 32 * num_words >= size
    out = torch.empty(rows, size, dtype=logits.dtype, device=logits.device)
    _mask_kernel[(rows, cdiv(size, CHUNK))](
        logits, logits.stride(0), size, *masks, num_words, out, CHUNK=CHUNK
    )
    return out


def add_biases(logits: torch.Tensor, biases: Biases) -> None:
    """Add biases to fp32 logits [rows, vocab] in place."""
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    _bias_kernel[(len(logits),)](logits, logits.stride(0), *biases, BLOCK=256)
