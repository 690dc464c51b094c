"""The vision encoder of Qwen3-VL: the patches of images to the features of their tokens.

Patches come in the order of the merged tokens, merge x merge of one token side by side. Learned
positions are resampled bilinearly to an image's grid, and heads are rotated by row and column. A
patch sees those of its own image alone, or of its frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.nn.functional import gelu

from tokenmill.core.images import Grid
from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.kernels.matmul import matmul_gelu
from tokenmill.kernels.rows import layer_norm
from tokenmill.kernels.segments import plan_segments, rotate_heads, segment_attention
from tokenmill.layers.images import BegunPatches, Places
from tokenmill.layers.linear import (
    ComputeType,
    Device,
    Linear,
    Tensors,
    activation_dtype,
    plain_type,
)
from tokenmill.layers.rotary import rotary_table
from tokenmill.models.family import Shape

_EPS = 1e-6
_MOST_GRIDS = 16  # sizes of images whose places are kept


def vision_tensors(spec: VisionSpec) -> dict[str, Shape]:
    """Name -> shape of the encoder's tensors, as they are called behind `visual.`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    patch = (hidden, spec.in_channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size)
    tensors: dict[str, Shape] = {
        "patch_embed.proj.weight": patch,
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (spec.grid_side**2, hidden),
    }
    for index in range(spec.depth):
        block = f"blocks.{index}"
        tensors |= _affine(f"{block}.norm1", hidden) | _affine(f"{block}.norm2", hidden)
        tensors |= _affine(f"{block}.attn.qkv", 3 * hidden, hidden)
        tensors |= _affine(f"{block}.attn.proj", hidden, hidden)
        tensors |= _affine(f"{block}.mlp.linear_fc1", inner, hidden)
        tensors |= _affine(f"{block}.mlp.linear_fc2", hidden, inner)
    tensors |= _merger("merger", spec, hidden)
    for index in range(len(spec.deepstack_layers)):
        tensors |= _merger(f"deepstack_merger_list.{index}", spec, spec.merged_size)
    return tensors


def _affine(name: str, *shape: int) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _merger(name: str, spec: VisionSpec, normed: int) -> dict[str, Shape]:
    merged = spec.merged_size
    tensors = _affine(f"{name}.norm", normed)
    tensors |= _affine(f"{name}.linear_fc1", merged, merged)
    return tensors | _affine(f"{name}.linear_fc2", spec.out_size, merged)


class _Tensors:
    """The encoder's tensors by name, as parts of it take them."""

    def __init__(self, tensors: Tensors, dtype: ComputeType, device: Device) -> None:
        self._tensors, self._device = tensors, device
        self.dtype, self._plain = activation_dtype(dtype), plain_type(dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device, self.dtype)

    def linear(self, name: str) -> Linear:
        return Linear.named(self._tensors, [name], self._plain, self._device)

    def norm(self, name: str) -> LayerNorm:
        return LayerNorm(self[f"{name}.weight"], self[f"{name}.bias"])


class LayerNorm:
    """Mean and deviation over the last dimension."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, to which `delta` is added in place before."""
        return layer_norm(x, self.weight, self.bias, _EPS, delta)


class VisionBlock:
    """Attention over all patches of a frame, then an MLP, both of the normed stream."""

    def __init__(self, tensors: _Tensors, name: str, spec: VisionSpec) -> None:
        self.norm1, self.norm2 = tensors.norm(f"{name}.norm1"), tensors.norm(f"{name}.norm2")
        self.qkv, self.out = tensors.linear(f"{name}.attn.qkv"), tensors.linear(f"{name}.attn.proj")
        self.up = tensors.linear(f"{name}.mlp.linear_fc1")
        self.down = tensors.linear(f"{name}.mlp.linear_fc2")
        self.num_heads, self.scale = spec.num_heads, spec.head_dim**-0.5

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None, places: Places) -> torch.Tensor:
        """x[patches, hidden] with `delta` becomes x with what is returned; x is changed."""
        qkv = self.qkv(self.norm1(x, delta))
        rotate_heads(qkv, places.cos_sin, self.num_heads, self.scale)
        attended = segment_attention(qkv, places.segments, self.num_heads)
        normed = self.norm2(x, self.out(attended))
        assert self.up.bias is not None
        return self.down(matmul_gelu(normed, self.up.weight, self.up.bias))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.up, self.down


class Merger:
    """Joins the patches of a token to one vector of the text model; its norm may come after."""

    def __init__(self, tensors: _Tensors, name: str, merged_size: int) -> None:
        self.norm, self.merged_size = tensors.norm(f"{name}.norm"), merged_size
        self.up = tensors.linear(f"{name}.linear_fc1")
        self.down = tensors.linear(f"{name}.linear_fc2")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        joined = x.view(-1, self.norm.weight.shape[0])
        joined = self.norm(joined).view(-1, self.merged_size)
        return self.down(gelu(self.up(joined)))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.up, self.down


class VisionEncoder:
    """Patch embedding, blocks and mergers."""

    def __init__(
        self, spec: VisionSpec, tensors: Tensors, dtype: ComputeType, device: Device
    ) -> None:
        self.spec = spec
        own = _Tensors(tensors, dtype, device)
        weight, bias = tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"]
        self.patches = Linear([weight.flatten(1)], [bias], plain_type(dtype), device)
        self.positions = own["pos_embed.weight"]
        self._known: dict[Grid, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._table = self.positions[:0].float()
        self.blocks = [VisionBlock(own, f"blocks.{index}", spec) for index in range(spec.depth)]
        self.merger = Merger(own, "merger", spec.merged_size)
        self.deepstack = {
            layer: Merger(own, f"deepstack_merger_list.{index}", spec.merged_size)
            for index, layer in enumerate(spec.deepstack_layers)
        }

    def __call__(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Patches of images one after the other, [patches, patch_dim], to each one's features.

        An image's are [1 + deepstack layers, tokens, text hidden].
        """
        places = self.place(grids)
        merged = self.encode(pixels, places)
        sizes = [prod(grid) // self.spec.merge_size**2 for grid in grids]
        parts = zip(*(layer.split(sizes) for layer in merged), strict=True)
        return [torch.stack(part) for part in parts]

    def encode(self, pixels: torch.Tensor, places: Places) -> list[torch.Tensor]:
        """[patches, patch_dim] -> merged tokens, and those of each deepstack layer, [., hidden]."""
        return self.finish(self.begin(pixels, places))

    def begin(self, pixels: torch.Tensor, places: Places) -> BegunPatches:
        """[patches, patch_dim] before the first block."""
        x = self.patches(pixels.to(self.positions))
        x += (self.positions[places.indices] * places.weights).sum(1)
        return BegunPatches(places, x)

    def finish(self, begun: BegunPatches) -> list[torch.Tensor]:
        """Run the blocks that are left, and the merger."""
        self.go_on(begun, len(self.blocks))
        x = begun.x if begun.delta is None else begun.x.add_(begun.delta)
        return [self.merger(x), *begun.deep]

    def go_on(self, begun: BegunPatches, end: int) -> None:
        """Run the blocks before `end` that have not run."""
        for index in range(begun.layer, end):
            begun.delta = self.blocks[index](begun.x, begun.delta, begun.places)
            if index in self.deepstack:
                begun.x += begun.delta
                begun.deep.append(self.deepstack[index](begun.x))
                begun.delta = None
        begun.layer = max(begun.layer, end)

    def place(self, grids: Sequence[Grid]) -> Places:
        parts = [self._places(grid) for grid in grids]
        indices, weights, cos_sin = (
            same[0] if len(same) == 1 else torch.cat(same) for same in zip(*parts, strict=True)
        )
        frames = tuple(h * w for t, h, w in grids for _ in range(t))
        segments = plan_segments(frames, self.positions.device)
        return Places(indices, weights, cos_sin, segments)

    def _places(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places.indices, weights and cos_sin of one image, kept for the next of its size."""
        if grid not in self._known:
            if len(self._known) == _MOST_GRIDS:
                del self._known[next(iter(self._known))]
            frames, height, width = grid
            spec, device = self.spec, self.positions.device
            order = _order(height, width, spec.merge_size, device)
            indices, weights = _taps(spec.grid_side, height, width, order)
            halves = self._turns(max(height, width))[order].unflatten(-1, (2, -1))
            cos_sin = halves.transpose(1, 2).flatten(1)
            weights = weights.to(self.positions.dtype)[:, :, None]
            parts = indices, weights, cos_sin
            indices, weights, cos_sin = (torch.cat([part] * frames) for part in parts)
            self._known[grid] = indices, weights, cos_sin
        return self._known[grid]

    def _turns(self, side: int) -> torch.Tensor:
        """Cosines and sines by row or column, for images of at least such a side."""
        if len(self._table) < side:
            table = rotary_table(RopeSpec(), self.spec.head_dim // 2, 2 * side)
            self._table = table.to(self.positions.device)
        return self._table

    @property
    def num_bytes(self) -> int:
        mergers = [self.merger, *self.deepstack.values()]
        linears = [self.patches, *(linear for block in self.blocks for linear in block.linears)]
        linears += [linear for merger in mergers for linear in merger.linears]
        return self.positions.nbytes + sum(linear.num_bytes for linear in linears)


def _order(height: int, width: int, merge: int, device: torch.device) -> torch.Tensor:
    """Row and column of each patch of a frame, [patches, 2]: by token, then inside it."""
    sides = (torch.arange(side, device=device) for side in (height, width))
    places = torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1)
    blocks = places.view(height // merge, merge, width // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def _taps(
    side: int, height: int, width: int, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The four learned positions around each patch and their weights, [patches, 4] each."""
    down, across = (
        places * ((side - 1) / max(1, size - 1))
        for places, size in zip(order.T, (height, width), strict=True)
    )
    top, left = down.floor().long(), across.floor().long()
    bottom, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    down, across = down - top, across - left
    indices = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [
        (1 - down) * (1 - across),
        (1 - down) * across,
        down * (1 - across),
        down * across,
    ]
    return torch.stack(indices, 1), torch.stack(weights, 1)
