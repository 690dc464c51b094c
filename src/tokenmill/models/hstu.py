"""DLRMv3, a generative recommender: HSTU layers over a user's history, scores of candidates.

Each row is the sum of three MLPs: of the item, of its category and of what the user did with it.
A contextual token, made of the user's row, stands in front; positions count back from the end of
the history, so that a longer history moves them all. The rows go through STU layers (pointwise
SiLU attention, gated), and a candidate's last row times the MLP of its item gives its scores.

Names of tensors are short here; REFERENCE_NAMES are those of MLPerf's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import sqrt
from typing import NamedTuple

import torch
from torch.nn.functional import layer_norm, linear, pad

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.hstu import (
    AffineNorm,
    Jagged,
    NormProduct,
    RowIds,
    RowTables,
    gate_output,
    gate_output_fp8,
    input_rows,
    norm_product_fp8,
    norm_uvqk,
    round_product,
    round_weight,
    silu_attention,
    swish_norm,
)
from tokenmill.models.family import Shape

Tensors = Mapping[str, torch.Tensor]
_EPS = 1e-5
_SECONDS_OF_BUCKET = 60.0
_PERIODS = ((3600, 24), (86400, 7))  # hour of the day, day of the week
_TURN = 2 * 3.14  # as the reference rounds it
_WHOLE = 8  # columns: a GPU's fast 16-bit products take rows of whole 16 bytes

_TRANSDUCER = "_hstu_transducer._"
_PREPROCESSOR = f"{_TRANSDUCER}input_preprocessor._"
_POSITIONS = f"{_TRANSDUCER}positional_encoder._"
_POST = f"{_TRANSDUCER}output_postprocessor._"
REFERENCE_NAMES: dict[str, str] = {
    "item.": f"{_PREPROCESSOR}content_embedding_mlp.",
    "category.": f"{_PREPROCESSOR}additional_embedding_mlp.",
    "action.": f"{_PREPROCESSOR}action_embedding_mlp.",
    "actions": f"{_PREPROCESSOR}action_encoder._action_embedding_table",
    "target_action": f"{_PREPROCESSOR}action_encoder._target_action_embedding_table",
    "context.weight": f"{_PREPROCESSOR}batched_contextual_linear_weights",
    "context.bias": f"{_PREPROCESSOR}batched_contextual_linear_bias",
    "positions": f"{_POSITIONS}position_embeddings_weight",
    "times": f"{_POSITIONS}timestamp_embeddings_weight",
    "layers.": f"{_TRANSDUCER}stu_module._stu_layers.",
    "user.0.": f"{_POST}time_feature_combiner.",
    "user.1.": f"{_POST}layer_norm.",
    "candidate.": "_item_embedding_mlp.",
    "head.": "_multitask_module._prediction_module.",
}
_LAYER_NAMES = {
    "norm.weight": "_input_norm_weight",
    "norm.bias": "_input_norm_bias",
    "uvqk.weight": "_uvqk_weight",
    "uvqk.bias": "_uvqk_beta",
    "out_norm.weight": "_output_norm_weight",
    "out_norm.bias": "_output_norm_bias",
    "out.weight": "_output_weight",
}


def dense_tensors(spec: HstuSpec) -> dict[str, Shape]:
    """Name -> shape of all tensors but the embedding tables."""
    columns, hidden, inner = spec.embedding_dim, spec.hidden_size, spec.preprocessor_dim
    actions, width = spec.num_actions * spec.action_dim, spec.num_heads * spec.v_dim
    tensors: dict[str, Shape] = {
        **_mlp("item", columns, inner, hidden),
        **_mlp("category", columns, inner, hidden),
        **_mlp("action", actions, inner, hidden),
        "actions": (spec.num_actions, spec.action_dim),
        "target_action": (1, actions),
        "context.weight": (1, columns, hidden),
        "context.bias": (1, hidden),
        "positions": (spec.num_positions, hidden),
        "times": (spec.num_time_buckets + 1, hidden),
        **_affine("user.0", hidden, hidden + 2 * len(_PERIODS)),
        **_affine("user.1", hidden),
        **_mlp("candidate", 2 * columns, spec.head_dim, hidden),
        **_affine("head.0", spec.head_dim, hidden),
        **_affine("head.1", spec.head_dim),
        **_affine("head.2", spec.num_tasks, spec.head_dim),
    }
    for index in range(spec.num_layers):
        name = f"layers.{index}"
        tensors |= _affine(f"{name}.norm", hidden) | _affine(f"{name}.out_norm", width)
        tensors[f"{name}.uvqk.weight"] = (hidden, spec.uvqk_dim)
        tensors[f"{name}.uvqk.bias"] = (spec.uvqk_dim,)
        tensors[f"{name}.out.weight"] = (3 * width, hidden)
    return tensors


def _affine(name: str, *shape: int) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _mlp(name: str, columns: int, inner: int, hidden: int) -> dict[str, Shape]:
    tensors = _affine(f"{name}.0", inner, columns) | _affine(f"{name}.1", inner)
    return tensors | _affine(f"{name}.2", hidden, inner) | _affine(f"{name}.3", hidden)


def reference_name(name: str) -> str:
    """What MLPerf's checkpoint calls a tensor."""
    prefix = next(
        p for p in REFERENCE_NAMES if name == p or (p.endswith(".") and name.startswith(p))
    )
    rest = name.removeprefix(prefix)
    if prefix == "layers.":
        index, _, part = rest.partition(".")
        rest = f"{index}.{_LAYER_NAMES[part]}"
    return REFERENCE_NAMES[prefix] + rest


def check_tensors(spec: HstuSpec, tensors: Tensors) -> None:
    """An error that names the first tensor which is missing, has another shape, or is unknown."""
    expected = dense_tensors(spec)
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelLoadError(f"{name}: the checkpoint has no such tensor")
        if (found := tuple(tensors[name].shape)) != shape:
            raise ModelLoadError(f"{name}: expected shape {shape}, got {found}")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise ModelLoadError(f"{unknown[0]}: the checkpoint has a tensor that the model has not")


class RankBatch(NamedTuple):
    """A jagged batch on the device; rows in the order of `Jagged`, offsets with contextual tokens.

    `order` [history rows + candidates] says where each row stands in [users' contextual tokens,
    history items, candidates].
    """

    rows: Jagged
    normaliser: int
    user_ids: torch.Tensor  # int64[users]
    item_ids: torch.Tensor  # int64[history items + candidates]
    category_ids: torch.Tensor  # int64[history items + candidates]
    actions: torch.Tensor  # int64[history items]: bits
    query_times: torch.Tensor  # int64[candidates]
    order: torch.Tensor  # int64[rows]
    positions: torch.Tensor  # int64[rows]
    time_buckets: torch.Tensor  # int64[rows]
    known: torch.Tensor  # bool[users]: enough items and candidates for the user's row to count


class Embedded(NamedTuple):
    """Rows of the tables for a batch, in its types."""

    users: torch.Tensor  # [users, columns]
    items: torch.Tensor  # [history items + candidates, columns]
    categories: torch.Tensor  # [all categories, columns]: they are few


class Mlp:
    """Linear, x * sigmoid(LayerNorm(x)), Linear and, where it has one, LayerNorm."""

    def __init__(self, tensors: Tensors, name: str) -> None:
        parts = [f"{name}.{index}.{kind}" for index in range(4) for kind in ("weight", "bias")]
        self.parts = [tensors[part] for part in parts if part in tensors]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before_norm(x)
        norm = self.parts[6:]
        return layer_norm(x, norm[0].shape, norm[0], norm[1], _EPS) if norm else x

    def before_norm(self, x: torch.Tensor) -> torch.Tensor:
        first, first_bias, swish, swish_bias, last, last_bias = self.parts[:6]
        x = swish_norm(linear(x, first, first_bias), AffineNorm(swish, swish_bias), _EPS)
        return linear(x, last, last_bias)

    @property
    def norm(self) -> AffineNorm:
        return AffineNorm(*self.parts[6:])


class KeysValues(NamedTuple):
    """Of the histories, [rows, heads, .]."""

    k: torch.Tensor
    v: torch.Tensor


class STULayer:
    """LayerNorm and one product for u, v, q, k; attention; x + [u, o, u * LayerNorm(o)] W."""

    def __init__(self, spec: HstuSpec, tensors: Tensors, name: str) -> None:
        self.num_heads = spec.num_heads
        self.width, self.qk_width = spec.num_heads * spec.v_dim, spec.num_heads * spec.qk_dim
        norm = AffineNorm(tensors[f"{name}.norm.weight"], tensors[f"{name}.norm.bias"])
        weight, bias = tensors[f"{name}.uvqk.weight"], tensors[f"{name}.uvqk.bias"]
        self.uvqk = NormProduct(norm, weight, bias)
        v_and_k = slice(self.width, 2 * self.width), slice(-self.qk_width, None)
        self.vk = NormProduct(
            norm,
            torch.cat([weight[:, part] for part in v_and_k], dim=1),
            torch.cat([bias[part] for part in v_and_k]),
        )
        out_norm = tensors[f"{name}.out_norm.weight"], tensors[f"{name}.out_norm.bias"]
        self.out_norm, self.out = AffineNorm(*out_norm), tensors[f"{name}.out.weight"]

    def __call__(
        self, x: torch.Tensor, rows: Jagged, normaliser: int, history: KeysValues | None = None
    ) -> tuple[torch.Tensor, KeysValues]:
        """x[histories + candidates, d] -> the same, or of candidates alone beside a history."""
        found = self._uvqk(x)
        u, v, q, k = found.split([self.width, self.width, self.qk_width, self.qk_width], dim=1)
        v, q, k = (self._by_head(part) for part in (v, q, k))
        first = x.shape[0] - rows.num_candidates
        history = history or KeysValues(k[:first], v[:first])
        o = silu_attention(q, *history, k[first:], v[first:], rows, normaliser)
        return self._output(x, u, o), history

    def keys_values(self, x: torch.Tensor) -> KeysValues:
        """Of rows whose own outputs nobody needs: half of the product."""
        v, k = self._vk(x).split([self.width, self.qk_width], dim=1)
        return KeysValues(self._by_head(k), self._by_head(v))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], self.num_heads, -1)

    def _uvqk(self, x: torch.Tensor) -> torch.Tensor:
        return norm_uvqk(x, self.uvqk, self.width)

    def _vk(self, x: torch.Tensor) -> torch.Tensor:
        return norm_uvqk(x, self.vk, 0)

    def _output(self, x: torch.Tensor, u: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return gate_output(x, u, o, self.out_norm, self.out)


class Fp8STULayer(STULayer):
    """The same with both products in fp8: rows are rounded by row, weights by output channel."""

    def __init__(self, spec: HstuSpec, tensors: Tensors, name: str) -> None:
        super().__init__(spec, tensors, name)
        self.uvqk_fp8, self.vk_fp8 = round_product(self.uvqk), round_product(self.vk)
        self.out_fp8 = round_weight(self.out)

    def _uvqk(self, x: torch.Tensor) -> torch.Tensor:
        return norm_product_fp8(x, self.uvqk_fp8)

    def _vk(self, x: torch.Tensor) -> torch.Tensor:
        return norm_product_fp8(x, self.vk_fp8)

    def _output(self, x: torch.Tensor, u: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return gate_output_fp8(x, u, o, self.out_norm, self.out_fp8)


class HstuModel:
    """The dense part: rows of the tables to logits of candidates.

    `targets_only` spares the last layer's work for histories, and `candidate_chunk` bounds the
    candidates of all users that go through the layers at a time; both are exact. `fp8` rounds what
    the layers' products take, beside a stream of bf16; the MLPs around the layers are not rounded.
    """

    def __init__(
        self,
        spec: HstuSpec,
        tensors: Tensors,
        *,
        targets_only: bool = True,
        candidate_chunk: int | None = None,
        fp8: bool = False,
    ) -> None:
        check_tensors(spec, tensors)
        self.spec, self.tensors, self.fp8 = spec, tensors, fp8
        self.targets_only, self.candidate_chunk = targets_only, candidate_chunk
        names = ("item", "category", "action", "candidate", "head")
        self.item, self.category, self.action, self.candidate, self.head = (
            Mlp(tensors, name) for name in names
        )
        user = tensors["user.0.weight"]
        self._padding = -user.shape[1] % _WHOLE if user.element_size() == 2 else 0
        self._user = pad(user, (0, self._padding))
        kind = Fp8STULayer if fp8 else STULayer
        self.layers = [kind(spec, tensors, f"layers.{index}") for index in range(spec.num_layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["positions"].dtype

    @property
    def type_name(self) -> str:
        return "fp8" if self.fp8 else str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        return self.tensors["positions"].device

    def logits(self, batch: RankBatch, embedded: Embedded) -> torch.Tensor:
        """Logits [candidates, tasks] in fp32."""
        x = self.inputs(batch, embedded)
        users = self._user_rows(self.encode(x, batch), batch)
        first = batch.actions.shape[0]
        categories = embedded.categories[batch.category_ids[first:]]
        items = torch.cat([embedded.items[first:], categories], dim=1)
        return self.head(users * self.candidate(items)).float()

    def scores(self, batch: RankBatch, embedded: Embedded) -> torch.Tensor:
        """Probabilities [candidates, tasks]."""
        return torch.sigmoid(self.logits(batch, embedded))

    def inputs(self, batch: RankBatch, embedded: Embedded) -> torch.Tensor:
        """Rows [histories + candidates, d] before the first layer.

        Categories and sets of actions are few: their MLPs run once for each, not for each row.
        """
        tensors, item = self.tensors, self.item
        users = embedded.users * batch.known[:, None]
        context = torch.addmm(tensors["context.bias"], users, tensors["context.weight"][0])
        of_tables = self.category(embedded.categories), self._actions
        tables = RowTables(context, *of_tables, tensors["positions"], tensors["times"])
        ids = RowIds(
            batch.order, batch.category_ids, batch.actions, batch.positions, batch.time_buckets
        )
        scale = sqrt(self.spec.hidden_size)
        return input_rows(item.before_norm(embedded.items), item.norm, _EPS, tables, ids, scale)

    @cached_property
    def _actions(self) -> torch.Tensor:
        """Every set of actions, [2 ** actions + 1, d]; a candidate has the learned last one."""
        count = self.spec.num_actions
        sets = torch.arange(1 << count, device=self.device)[:, None]
        bits = (sets >> torch.arange(count, device=self.device)) & 1
        known = (bits[:, :, None] * self.tensors["actions"]).flatten(1)
        return self.action(torch.cat([known, self.tensors["target_action"]]))

    def encode(self, x: torch.Tensor, batch: RankBatch) -> torch.Tensor:
        """The last layer's rows [candidates, d]."""
        rows, first = batch.rows, batch.rows.num_history
        if self.candidate_chunk is not None and rows.num_candidates > self.candidate_chunk:
            return self._encode_in_chunks(x, batch, self.candidate_chunk)
        for layer in self.layers[:-1]:
            x, _ = layer(x, rows, batch.normaliser)
        last = self.layers[-1]
        if not self.targets_only:
            return last(x, rows, batch.normaliser)[0][first:]
        return last(x[first:], rows, batch.normaliser, last.keys_values(x[:first]))[0]

    def _encode_in_chunks(self, x: torch.Tensor, batch: RankBatch, size: int) -> torch.Tensor:
        rows, first = batch.rows, batch.rows.num_history
        alone = rows.some_candidates(0, 0)
        past, kept = x[:first], []
        for layer in self.layers[:-1]:
            past, history = layer(past, alone, batch.normaliser)
            kept.append(history)
        kept.append(self.layers[-1].keys_values(past))
        found = []
        for start in range(0, rows.num_candidates, size):
            end = min(start + size, rows.num_candidates)
            some, chunk = x[first + start : first + end], rows.some_candidates(start, end)
            for layer, history in zip(self.layers, kept, strict=True):
                some, _ = layer(some, chunk, batch.normaliser, history)
            found.append(some)
        return torch.cat(found)

    def _user_rows(self, x: torch.Tensor, batch: RankBatch) -> torch.Tensor:
        """Candidates' rows with hour and weekday of their query, joined and normed."""
        t = self.tensors
        x = torch.cat([x, self._time_features(batch.query_times)], dim=1)
        x = linear(x, self._user, t["user.0.bias"])
        return layer_norm(x, x.shape[1:], t["user.1.weight"], t["user.1.bias"], _EPS)

    def _time_features(self, times: torch.Tensor) -> torch.Tensor:
        """Cosine and sine of each period's phase, [candidates, 4], and columns of zeros."""
        phases = [(times // seconds % units).float() / units for seconds, units in _PERIODS]
        parts = [turn(phase * _TURN) for phase in phases for turn in (torch.cos, torch.sin)]
        parts += [torch.zeros_like(parts[0])] * self._padding
        return torch.stack(parts, dim=1).to(self.dtype)


def time_buckets(ages: torch.Tensor, count: int) -> torch.Tensor:
    """Buckets int64[n] of ages in seconds before the last candidate's time, `count` at most."""
    found = torch.sqrt(ages.clamp(min=0).float() / _SECONDS_OF_BUCKET)
    return found.long().clamp(max=count)
