"""HSTU's operations: the rows of a batch, SiLU attention over them, and the products around it.

Rows lie in two parts: all histories (each with its contextual token in front), then all candidates.
A history's row sees the rows before it and itself; a candidate sees its user's whole history and
itself, and no other candidate. There is no softmax: every weight is silu(q k / sqrt(d)) / N.

In fp8 the products' rows are rounded by row and their weights by output channel; attention, which
has no peak that rows could be scaled by without another pass, stays in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import layer_norm, silu

from tokenmill.kernels import always, kernel
from tokenmill.kernels.matmul import PackedWeight, matmul, pack
from tokenmill.kernels.modulation import norm_modulate
from tokenmill.kernels.rows import FP8, QuantizedRows, quantize_rows

EPS = 1e-6
TILE_ROWS = 128  # of the kernel: two warp groups of 64
STEP, COLUMNS = 64, 256  # of the products' tiles
HEAD_DIMS = (16, 32, 64, 128)  # of the attention kernel: more does not fit shared memory
_QUERY_ROWS = 1024  # of the reference at a time: its weights are [heads, rows, keys]


class Jagged(NamedTuple):
    """Where each user's rows begin and end: offsets [users + 1] into histories and candidates."""

    history: Sequence[int]
    candidates: Sequence[int]
    tiles: torch.Tensor  # int32[tiles, 5] of query_tiles, on the device of the rows
    num_target_tiles: int  # the first ones

    @property
    def num_history(self) -> int:
        return self.history[-1]

    @property
    def num_candidates(self) -> int:
        return self.candidates[-1]

    def some_candidates(self, start: int, end: int) -> Jagged:
        """The same histories with the candidates [start, end) alone."""
        offsets = [min(max(offset, start), end) - start for offset in self.candidates]
        return jagged(self.history, offsets, self.tiles.device)


def jagged(
    history: Sequence[int], candidates: Sequence[int], device: torch.device | str = "cpu"
) -> Jagged:
    """Offsets of a batch, with the tiles of the kernel where the device has one."""
    tiles, num_targets = batch_tiles(history, candidates, device)
    found = torch.from_numpy(tiles)
    if torch.device(device).type == "cuda":  # a copy of other memory waits for the whole stream
        found = found.pin_memory().to(device, non_blocking=True)
    return Jagged(history, candidates, found, num_targets)


def batch_tiles(
    history: Sequence[int], candidates: Sequence[int], device: torch.device | str
) -> tuple[np.ndarray, int]:
    """The kernel's tiles int32[n, 5] and how many are of candidates; none without a kernel."""
    if torch.device(device).type == "cpu":
        return np.zeros((0, len(JaggedTile._fields)), np.int32), 0
    targets, before = query_tiles(history, candidates, TILE_ROWS)
    return np.concatenate([targets, before]), len(targets)


class JaggedTile(NamedTuple):
    """Query rows that one program takes, and the keys of the history that they see."""

    first: int  # row among the histories or among the candidates
    rows: int
    first_key: int
    num_keys: int  # that the last row sees
    target: int  # 1: candidates, each of which also sees itself


def query_tiles(
    history: Sequence[int], candidates: Sequence[int], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of candidates and of histories, int32[n, 5] in the order of JaggedTile's fields.

    Those with most keys come first, so that the last ones are short.
    """
    start, end = np.array(history[:-1]), np.array(history[1:])
    first, rows, user = _pieces(np.array(candidates[:-1]), np.array(candidates[1:]), size)
    ones = np.ones_like(first)
    targets = first, rows, start[user], (end - start)[user], ones
    first, rows, user = _pieces(start, end, size)
    before = first, rows, start[user], first + rows - start[user], np.zeros_like(first)
    return _longest_first(targets), _longest_first(before)


def _pieces(
    start: np.ndarray, end: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First row, rows and user of the pieces of [start, end) of each user."""
    counts = -(-(end - start) // size)
    user = np.repeat(np.arange(len(start)), counts)
    index = np.arange(len(user)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = start[user] + index * size
    return first, np.minimum(size, end[user] - first), user


def _longest_first(fields: tuple[np.ndarray, ...]) -> np.ndarray:
    tiles = np.stack(fields, axis=1).astype(np.int32)
    return tiles[np.argsort(-tiles[:, JaggedTile._fields.index("num_keys")], kind="stable")]


def fits(x: torch.Tensor, *widths: int) -> bool:
    """Whether a GPU's tiles take x: 16-bit values, whose widths are whole steps of a tile.

    Tiles of 32-bit values do not fit shared memory.
    """
    return x.element_size() == 2 and all(width % STEP == 0 for width in widths)


class AffineNorm(NamedTuple):
    """Weight and bias of a LayerNorm over [k] channels."""

    weight: torch.Tensor
    bias: torch.Tensor


class RowTables(NamedTuple):
    """What rows are made of beside their items, [n, d] each."""

    context: torch.Tensor  # contextual tokens of the users
    categories: torch.Tensor
    actions: torch.Tensor  # the last one is that of candidates
    positions: torch.Tensor
    times: torch.Tensor


class RowIds(NamedTuple):
    """Which rows of the tables, int64."""

    order: torch.Tensor  # [rows]: places in [contextual tokens, history items, candidates]
    categories: torch.Tensor  # [history items + candidates]
    actions: torch.Tensor  # [history items]
    positions: torch.Tensor  # [rows]
    times: torch.Tensor  # [rows]


@kernel(gpu=lambda items: fits(items, items.shape[1]))
def input_rows(
    items: torch.Tensor, norm: AffineNorm, eps: float, tables: RowTables, ids: RowIds, scale: float
) -> torch.Tensor:
    """Rows [rows, d] in the given order, of items[history items + candidates, d].

    LayerNorm(item) + category + action, or a contextual token, times scale; and position + time.
    """
    candidates = items.shape[0] - ids.actions.shape[0]
    target = ids.actions.new_full((candidates,), tables.actions.shape[0] - 1)
    rows = layer_norm(items, norm.weight.shape, norm.weight, norm.bias, eps)
    rows = rows + tables.categories[ids.categories]
    rows = rows + tables.actions[torch.cat([ids.actions, target])]
    x = torch.cat([tables.context, rows])[ids.order] * scale
    return x + (tables.positions[ids.positions] + tables.times[ids.times])


@kernel(gpu=lambda x: fits(x, x.shape[1]))
def swish_norm(x: torch.Tensor, norm: AffineNorm, eps: float) -> torch.Tensor:
    """x[m, k] * sigmoid(LayerNorm(x))."""
    return x * torch.sigmoid(layer_norm(x, norm.weight.shape, norm.weight, norm.bias, eps))


@kernel(gpu=lambda q, v: fits(q) and q.shape[2] in HEAD_DIMS and v.shape[2] in HEAD_DIMS)
def silu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    rows: Jagged,
    normaliser: int,
) -> torch.Tensor:
    """Attention of q to histories' k[h, heads, d], v[h, heads, e], and of candidates to themselves.

    q[h + c, heads, d] are histories and candidates, or q[c, heads, d] candidates alone; own_k and
    own_v are the candidates' [c, heads, .]. The result is [rows of q, heads * e].
    """
    num_candidates = rows.num_candidates
    targets = q[q.shape[0] - num_candidates :]
    own = silu((targets * own_k).sum(-1, keepdim=True) * q.shape[-1] ** -0.5) / normaliser * own_v
    parts = []
    if q.shape[0] > num_candidates:
        for start, end in zip(rows.history, rows.history[1:], strict=False):
            parts += _weigh(q[start:end], k[start:end], v[start:end], normaliser, causal=True)
    begins = zip(rows.history, rows.history[1:], rows.candidates, rows.candidates[1:], strict=False)
    for start, end, first, last in begins:
        seen = _weigh(targets[first:last], k[start:end], v[start:end], normaliser, causal=False)
        parts.append(torch.cat(seen) + own[first:last] if seen else own[first:last])
    return torch.cat(parts).flatten(1)


def _weigh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, normaliser: int, causal: bool
) -> list[torch.Tensor]:
    """One user's rows q[n, heads, d] against a history, in pieces that bound the memory."""
    found, scale = [], q.shape[-1] ** -0.5
    for first in range(0, q.shape[0], _QUERY_ROWS):
        some = q[first : first + _QUERY_ROWS]
        keys = first + some.shape[0] if causal else k.shape[0]
        weights = torch.einsum("nhd,khd->hnk", some, k[:keys])
        weights = silu(weights * scale) / normaliser
        if causal:
            weights = weights.tril(first)
        found.append(torch.einsum("hnk,khe->nhe", weights, v[:keys]))
    return found


class FoldedNorm(NamedTuple):
    """LayerNorm(x) W + b = (x W' - mean * sums) / deviation + b', for x as it is."""

    weight: torch.Tensor  # W'[k, n] = diag(w) W
    sums: torch.Tensor  # float32[n], of W' by column
    bias: torch.Tensor  # float32[n]


class NormProduct:
    """A LayerNorm over k channels, and W[k, n], b[n] of the product behind it."""

    def __init__(self, norm: AffineNorm, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.norm, self.weight, self.bias = norm, weight, bias

    @cached_property
    def folded(self) -> FoldedNorm:
        weight = (self.norm.weight.float()[:, None] * self.weight.float()).to(self.weight.dtype)
        bias = self.norm.bias.float() @ self.weight.float() + self.bias.float()
        return FoldedNorm(weight, weight.float().sum(0), bias)


@kernel(gpu=lambda x, product, gated: gated % COLUMNS == 0 and fits(x, *product.weight.shape))
def norm_uvqk(x: torch.Tensor, product: NormProduct, gated: int) -> torch.Tensor:
    """LayerNorm(x[m, k]) W + b, [m, n], and SiLU of the first `gated` columns, which are u."""
    norm = product.norm
    normed = layer_norm(x.float(), x.shape[1:], norm.weight.float(), norm.bias.float(), EPS)
    out = torch.addmm(product.bias, normed.to(x.dtype), product.weight)
    return torch.cat([silu(out[:, :gated]), out[:, gated:]], dim=1) if gated else out


@kernel(gpu=lambda x, o: fits(x, x.shape[1], o.shape[1]))
def gate_output(
    x: torch.Tensor, u: torch.Tensor, o: torch.Tensor, norm: AffineNorm, weight: torch.Tensor
) -> torch.Tensor:
    """x[m, d] + [u, o, u * LayerNorm(o)] W[3e, d] of u[m, e] and attention's o[m, e]."""
    normed = layer_norm(o.float(), o.shape[1:], norm.weight.float(), norm.bias.float(), EPS)
    gated = (u.float() * normed).to(x.dtype)
    return torch.addmm(x, torch.cat([u, o, gated], dim=1), weight)


class RoundedProduct(NamedTuple):
    """A LayerNorm whose rows are rounded to fp8, W by output channel, and b of the product."""

    norm: AffineNorm  # in fp32
    weight: PackedWeight
    bias: torch.Tensor


def round_product(product: NormProduct) -> RoundedProduct:
    norm = AffineNorm(product.norm.weight.float(), product.norm.bias.float())
    return RoundedProduct(norm, round_weight(product.weight), product.bias)


def round_weight(weight: torch.Tensor) -> PackedWeight:
    """W[k, n] for a product with rows in fp8."""
    return pack(weight.T.contiguous(), "fp8", weight.device)


def norm_product_fp8(x: torch.Tensor, product: RoundedProduct) -> torch.Tensor:
    """LayerNorm(x[m, k]) W + b, [m, n] in bf16; u is before its SiLU, which gate_rows takes."""
    rows = norm_modulate(x, *product.norm, EPS, FP8)
    return matmul(rows, product.weight, product.bias)


def gate_output_fp8(
    x: torch.Tensor, u: torch.Tensor, o: torch.Tensor, norm: AffineNorm, weight: PackedWeight
) -> torch.Tensor:
    """x[m, d] + [u', o, u' * LayerNorm(o)] W of u' = SiLU(u)."""
    return x + matmul(gate_rows(u, o, norm), weight)


@kernel(gpu=always)
def gate_rows(u: torch.Tensor, o: torch.Tensor, norm: AffineNorm) -> QuantizedRows:
    """[u', o, u' * LayerNorm(o)] of u' = SiLU(u[m, e]) and o[m, e], rounded to fp8 [m, 3e]."""
    gate, seen = silu(u.float()), o.float()
    normed = layer_norm(seen, o.shape[1:], norm.weight.float(), norm.bias.float(), EPS)
    return quantize_rows.reference(torch.cat([gate, seen, gate * normed], dim=1), FP8)
