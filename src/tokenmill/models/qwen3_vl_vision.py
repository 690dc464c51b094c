"""The vision encoder of Qwen3-VL: one image's patches to the features of its tokens.

Patches come in the order of the merged tokens, merge x merge of one token side by side. Learned
positions are resampled bilinearly to the image's grid, and heads are rotated by row and column. An
image is encoded by itself, so that its features do not depend on others.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.specs.vision import VisionSpec
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
Grid = tuple[int, int, int]


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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, _EPS)


class VisionBlock:
    """Attention over all patches of an image, then an MLP, both of the normed stream."""

    def __init__(self, tensors: _Tensors, name: str, num_heads: int) -> None:
        self.norm1, self.norm2 = tensors.norm(f"{name}.norm1"), tensors.norm(f"{name}.norm2")
        self.qkv, self.out = tensors.linear(f"{name}.attn.qkv"), tensors.linear(f"{name}.attn.proj")
        self.up = tensors.linear(f"{name}.mlp.linear_fc1")
        self.down = tensors.linear(f"{name}.mlp.linear_fc2")
        self.num_heads = num_heads

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.norm1(x), cos, sin)
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))

    def _attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        q, k = (_rotate(part, cos, sin) for part in qkv[:2])
        out = scaled_dot_product_attention(q[None], k[None], qkv[2][None])[0]
        return self.out(out.transpose(0, 1).flatten(1))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.up, self.down


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [heads, patches, dim] in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


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
        self._known: dict[Grid, tuple[torch.Tensor, ...]] = {}
        self.blocks = [
            VisionBlock(own, f"blocks.{index}", spec.num_heads) for index in range(spec.depth)
        ]
        self.merger = Merger(own, "merger", spec.merged_size)
        self.deepstack = {
            layer: Merger(own, f"deepstack_merger_list.{index}", spec.merged_size)
            for index, layer in enumerate(spec.deepstack_layers)
        }

    def __call__(self, pixels: torch.Tensor, grid: Grid) -> torch.Tensor:
        """[patches, patch_dim] -> [1 + deepstack layers, tokens, text hidden]."""
        indices, weights, cos, sin = self._places(grid)
        x = self.patches(pixels.to(self.positions))
        x = x + (self.positions[indices] * weights).sum(1)
        deep = []
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if index in self.deepstack:
                deep.append(self.deepstack[index](x))
        return torch.stack([self.merger(x), *deep])

    def _places(self, grid: Grid) -> tuple[torch.Tensor, ...]:
        """What a grid's patches have on the device, kept for the next image of its size.

        The learned positions around each and their weights, [patches, 4] and [patches, 4, 1]; its
        cosines and sines, [patches, head_dim / 2] each, by row and then by column.
        """
        if grid not in self._known:
            if len(self._known) == _MOST_GRIDS:
                del self._known[next(iter(self._known))]
            frames, height, width = grid
            spec, device = self.spec, self.positions.device
            order = _order(height, width, spec.merge_size)
            indices, weights = _taps(spec.grid_side, height, width, order)
            table = rotary_table(RopeSpec(), spec.head_dim // 2, max(height, width))
            cos, sin = (part[order].flatten(1) for part in table.chunk(2, 1))
            weights = weights.to(self.positions.dtype)[:, :, None]
            parts = (indices, weights, cos, sin)
            self._known[grid] = tuple(torch.cat([part] * frames).to(device) for part in parts)
        return self._known[grid]

    @property
    def num_bytes(self) -> int:
        mergers = [self.merger, *self.deepstack.values()]
        linears = [self.patches, *(linear for block in self.blocks for linear in block.linears)]
        linears += [linear for merger in mergers for linear in merger.linears]
        return self.positions.nbytes + sum(linear.num_bytes for linear in linears)


def _order(height: int, width: int, merge: int) -> torch.Tensor:
    """Row and column of each patch of a frame, [patches, 2]: by token, then inside it."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([rows, columns], dim=-1)
    blocks = places.view(height // merge, merge, width // merge, merge, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def _taps(
    side: int, height: int, width: int, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The four learned positions around each patch and their weights, [patches, 4] each."""
    sizes = torch.tensor([height, width])
    places = order * ((side - 1) / (sizes - 1).clamp(min=1))
    low = places.floor().long()
    high, part = (low + 1).clamp(max=side - 1), places - low
    (top, left), (bottom, right), (down, across) = low.T, high.T, part.T
    indices = [top * side + left, top * side + right, bottom * side + left, bottom * side + right]
    weights = [
        (1 - down) * (1 - across),
        (1 - down) * across,
        down * (1 - across),
        down * across,
    ]
    return torch.stack(indices, 1), torch.stack(weights, 1)
