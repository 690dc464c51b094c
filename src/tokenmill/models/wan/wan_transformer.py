"""The diffusion transformer of Wan: noisy latents, a timestep and a text to the latents' velocity.

A block is self-attention and an MLP, both modulated by the timestep, with attention to the text
between them. Guidance runs two branches, which differ in their text alone, as rows of one batch.
What can be fused is called at one place each: kernels/modulation.py, kernels/bidirectional.py and
the linears of layers/linear.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import gelu, linear, silu

from tokenmill.core.specs.wan import WanTransformerSpec
from tokenmill.kernels.bidirectional import (
    AttentionRounding,
    Rotation,
    attend,
    attend_rounded,
    norm_rotate,
)
from tokenmill.kernels.modulation import Added, add_gated, gelu_rows, norm_modulate, round_rows
from tokenmill.kernels.rows import QuantizedRows
from tokenmill.layers.linear import ComputeType, Device, Linear, activation_dtype, plain_type
from tokenmill.models.family import Shape
from tokenmill.models.wan.wan_split import TokenSplit

Grid = tuple[int, int, int]
Rows = torch.Tensor | QuantizedRows  # rows that a linear reads, in fp8 where it asks for it
TextKV = list[tuple[torch.Tensor, torch.Tensor]]  # of each block, [branches, tokens, heads, dim]
_THETA = 10_000.0
_MAX_PERIOD = 10_000.0
_WHOLE = TokenSplit()


def transformer_tensors(spec: WanTransformerSpec) -> dict[str, Shape]:
    """Name -> shape of an expert's tensors, as diffusers stores them."""
    hidden = spec.hidden_size
    embedder = "condition_embedder"
    tensors: dict[str, Shape] = {
        "patch_embedding.weight": (hidden, spec.in_channels, *spec.patch_size),
        "patch_embedding.bias": (hidden,),
        "scale_shift_table": (1, 2, hidden),
    }
    patch = spec.out_channels * spec.patch_size[0] * spec.patch_size[1] * spec.patch_size[2]
    tensors |= _affine("proj_out", patch, hidden)
    tensors |= _affine(f"{embedder}.time_embedder.linear_1", hidden, spec.freq_dim)
    tensors |= _affine(f"{embedder}.time_embedder.linear_2", hidden, hidden)
    tensors |= _affine(f"{embedder}.time_proj", 6 * hidden, hidden)
    tensors |= _affine(f"{embedder}.text_embedder.linear_1", hidden, spec.text_dim)
    tensors |= _affine(f"{embedder}.text_embedder.linear_2", hidden, hidden)
    for index in range(spec.num_layers):
        tensors |= _block_tensors(spec, f"blocks.{index}")
    return tensors


def _block_tensors(spec: WanTransformerSpec, name: str) -> dict[str, Shape]:
    hidden = spec.hidden_size
    tensors: dict[str, Shape] = {f"{name}.scale_shift_table": (1, 6, hidden)}
    if spec.cross_attn_norm:
        tensors |= _affine(f"{name}.norm2", hidden)
    for attention in (f"{name}.attn1", f"{name}.attn2"):
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            tensors |= _affine(f"{attention}.{part}", hidden, hidden)
        tensors |= {f"{attention}.{norm}.weight": (hidden,) for norm in ("norm_q", "norm_k")}
    tensors |= _affine(f"{name}.ffn.net.0.proj", spec.ffn_dim, hidden)
    return tensors | _affine(f"{name}.ffn.net.2", hidden, spec.ffn_dim)


def host_types(spec: WanTransformerSpec, dtype: ComputeType) -> dict[str, torch.dtype]:
    """Types in which tensors wait in host memory: linears as `_Tensors` takes them, others fp32."""
    return {
        name: activation_dtype(dtype) if _in_linear(name, shape) else torch.float32
        for name, shape in transformer_tensors(spec).items()
    }


def _in_linear(name: str, shape: Shape) -> bool:
    """True for the weight of a Linear; the time embedder computes in fp32."""
    is_matrix = name.endswith(".weight") and len(shape) > 1
    return is_matrix and not name.startswith("condition_embedder.time_")


def _affine(name: str, *shape: int) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


class _Tensors:
    """An expert's tensors by name; each is read when a part takes it, and not kept."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], dtype: ComputeType, device: Device
    ) -> None:
        self._tensors, self.dtype, self.device = tensors, dtype, device

    def fp32(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self.device, torch.float32)

    def linear(self, *names: str, plain: bool = False) -> Linear:
        dtype = plain_type(self.dtype) if plain else self.dtype
        # fp8 codes come from the plain type, so that an expert that was offloaded has the same.
        stored = (self._tensors[f"{name}.weight"].flatten(1) for name in names)
        weights = [weight.to(self.device).to(activation_dtype(dtype)) for weight in stored]
        biases = [self._tensors[f"{name}.bias"] for name in names]
        return Linear(weights, biases, dtype, self.device)


class SelfAttention:
    """All patches see all patches; queries and keys are normed over all heads, then rotated."""

    def __init__(
        self, tensors: _Tensors, name: str, spec: WanTransformerSpec, split: TokenSplit
    ) -> None:
        self.split = split
        self.qkv = tensors.linear(*(f"{name}.to_{part}" for part in "qkv"))
        self.out = tensors.linear(f"{name}.to_out.0")
        self.norms = [tensors.fp32(f"{name}.norm_{part}.weight") for part in "qk"]
        self.num_heads, self.eps = spec.num_heads, spec.eps
        self.rounding: AttentionRounding | None = None

    def __call__(self, x: Rows, rotation: Rotation, branches: int) -> torch.Tensor:
        """[branches * n, k] -> the same shape; n are the tokens of this rank."""
        q, k, v = self.qkv(x).unflatten(0, (branches, -1)).chunk(3, dim=-1)
        q, k = (
            norm_rotate(part, weight, self.eps, self.num_heads, rotation)
            for part, weight in zip((q, k), self.norms, strict=True)
        )
        q, k, v = self.split.to_heads(q, k, v.unflatten(-1, (self.num_heads, -1)))
        rounding = self.rounding
        seen = attend_rounded(q, k, v, rounding) if rounding else attend(q, k, v)
        seen = self.split.to_tokens(seen)
        return self.out(round_rows(seen.flatten(2).flatten(0, 1), self.out.rounding))


class TextAttention:
    """Patches see the text, whose keys and values are the same in every step of a job."""

    def __init__(self, tensors: _Tensors, name: str, spec: WanTransformerSpec) -> None:
        self.q, self.out = tensors.linear(f"{name}.to_q"), tensors.linear(f"{name}.to_out.0")
        self.kv = tensors.linear(f"{name}.to_k", f"{name}.to_v")
        self.norms = [tensors.fp32(f"{name}.norm_{part}.weight") for part in "qk"]
        self.num_heads, self.eps = spec.num_heads, spec.eps

    def text_kv(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[branches, tokens, k] -> keys and values, [branches, tokens, heads, dim] each."""
        rows = self.kv(text.flatten(0, 1)).unflatten(0, text.shape[:2])
        k, v = rows.chunk(2, dim=-1)
        k = norm_rotate(k, self.norms[1], self.eps, self.num_heads, None)
        return k, v.unflatten(-1, (self.num_heads, -1)).contiguous()

    def __call__(self, x: Rows, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[branches * n, k] -> the same shape."""
        k, v = kv
        q = self.q(x).unflatten(0, (k.shape[0], -1))
        q = norm_rotate(q, self.norms[0], self.eps, self.num_heads, None)
        seen = attend(q, k, v).flatten(2).flatten(0, 1)
        return self.out(round_rows(seen, self.out.rounding))


class FeedForward:
    """An MLP with GELU by its tanh formula."""

    def __init__(self, tensors: _Tensors, name: str) -> None:
        self.up = tensors.linear(f"{name}.net.0.proj")
        self.down = tensors.linear(f"{name}.net.2")

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.down(gelu_rows(self.up(x), self.down.rounding))


class WanBlock:
    """Self-attention, attention to the text and an MLP; the timestep modulates first and last."""

    def __init__(
        self, tensors: _Tensors, name: str, spec: WanTransformerSpec, split: TokenSplit
    ) -> None:
        self.attention = SelfAttention(tensors, f"{name}.attn1", spec, split)
        self.text = TextAttention(tensors, f"{name}.attn2", spec)
        self.ffn, self.eps = FeedForward(tensors, f"{name}.ffn"), spec.eps
        self.table = tensors.fp32(f"{name}.scale_shift_table")[0]
        self.norm: tuple[torch.Tensor, torch.Tensor] | None = None
        if spec.cross_attn_norm:
            self.norm = tensors.fp32(f"{name}.norm2.weight"), tensors.fp32(f"{name}.norm2.bias")

    def __call__(
        self,
        x: torch.Tensor,
        time: torch.Tensor,
        rotation: Rotation,
        kv: tuple[torch.Tensor, torch.Tensor],
        added: Added | None,
    ) -> Added:
        """x[branches * n, k], in place, and the timestep's fp32 [6, k] -> what is yet to be added.

        `added` is that of the block before: it is added in the pass of the first norm.
        """
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = self.table + time
        branches = kv[0].shape[0]
        qkv, q, up = self.attention.qkv, self.text.q, self.ffn.up
        normed = norm_modulate(x, 1 + scale, shift, self.eps, qkv.rounding, added)
        added = Added(self.attention(normed, rotation, branches), gate)
        if self.norm is None:
            normed = add_gated(x, added)
        else:
            normed = norm_modulate(x, *self.norm, self.eps, q.rounding, added)
        added = Added(self.text(normed, kv), None)
        normed = norm_modulate(x, 1 + ffn_scale, ffn_shift, self.eps, up.rounding, added)
        return Added(self.ffn(normed), ffn_gate)


class WanTransformer:
    """One expert: patches in, blocks, velocity of each patch out."""

    def __init__(
        self,
        spec: WanTransformerSpec,
        tensors: Mapping[str, torch.Tensor],
        dtype: ComputeType,
        device: Device,
        split: TokenSplit = _WHOLE,
    ) -> None:
        self.spec, self.dtype, self.device = spec, activation_dtype(dtype), torch.device(device)
        self.split = split
        own = _Tensors(tensors, dtype, device)
        names = ("time_embedder.linear_1", "time_embedder.linear_2", "time_proj")
        self._time = [
            tuple(own.fp32(f"condition_embedder.{name}.{part}") for part in ("weight", "bias"))
            for name in names
        ]
        embedder = "condition_embedder.text_embedder.linear"
        self._text = [own.linear(f"{embedder}_{number}", plain=True) for number in (1, 2)]
        self.patches = own.linear("patch_embedding", plain=True)
        self.blocks = [WanBlock(own, f"blocks.{i}", spec, split) for i in range(spec.num_layers)]
        self.table = own.fp32("scale_shift_table")[0]
        self.out = own.linear("proj_out", plain=True)
        self._rotation: tuple[Grid, Rotation] | None = None

    def round_attention(self, rounding: AttentionRounding | None) -> None:
        for block in self.blocks:
            block.attention.rounding = rounding

    def text_kv(self, text: torch.Tensor) -> TextKV:
        """Keys and values of the text in all blocks, from embeddings [branches, tokens, dim]."""
        rows = text.to(self.device, self.dtype).flatten(0, 1)
        rows = self._text[1](gelu(self._text[0](rows), approximate="tanh"))
        own = rows.unflatten(0, text.shape[:2])
        return [block.text.text_kv(own) for block in self.blocks]

    def embed_time(self, timestep: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The timestep's embedding, fp32 [k], and the modulation of blocks, fp32 [6, k]."""
        half = self.spec.freq_dim // 2
        exponents = torch.arange(half, dtype=torch.float32, device=self.device) / half
        angles = timestep * torch.exp(exponents * -torch.tensor(_MAX_PERIOD).log().item())
        x = torch.cat([angles.cos(), angles.sin()])
        first, second, last = self._time
        embedding = linear(silu(linear(x, *first)), *second)
        return embedding, linear(silu(embedding), *last).unflatten(0, (6, -1))

    def __call__(self, latents: torch.Tensor, timestep: float, text: TextKV) -> torch.Tensor:
        """Latents [channels, frames, height, width] -> velocities, [branches, ...], in fp32."""
        embedding, time = self.embed_time(timestep)
        x = self.embed_patches(latents, text[0][0].shape[0])
        x = self.run_blocks(x, time, self.grid(latents), text)
        return self.project(x, embedding, latents.shape)

    def grid(self, latents: torch.Tensor) -> Grid:
        frames, height, width = latents.shape[1:]
        first, second, third = self.spec.patch_size
        return frames // first, height // second, width // third

    def embed_patches(self, latents: torch.Tensor, branches: int) -> torch.Tensor:
        """Rows of this rank's patches, the same for each branch: [branches * n, k]."""
        (frames, rows, columns), (t, h, w) = self.grid(latents), self.spec.patch_size
        parts = latents.to(self.device, self.dtype).reshape(-1, frames, t, rows, h, columns, w)
        patches = parts.permute(1, 3, 5, 0, 2, 4, 6).reshape(frames * rows * columns, -1)
        own = patches[self.split.own(len(patches))]
        return self.patches(own).repeat(branches, 1)

    def run_blocks(
        self, x: torch.Tensor, time: torch.Tensor, grid: Grid, text: TextKV
    ) -> torch.Tensor:
        rotation, added = self.rotation(grid), None
        for block, kv in zip(self.blocks, text, strict=True):
            added = block(x, time, rotation, kv, added)
        return x if added is None else add_gated(x, added)

    def project(self, x: torch.Tensor, embedding: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Rows of patches -> fp32 [branches of all ranks, channels, frames, height, width]."""
        shift, scale = self.table + embedding
        x = self.out(norm_modulate(x, 1 + scale, shift, self.spec.eps)).float()
        t, h, w = self.spec.patch_size
        frames, height, width = shape[1:]
        num_patches = frames * height * width // (t * h * w)
        x = self.split.gather(x, len(x) * self.split.size // num_patches)
        parts = x.reshape(-1, frames // t, height // h, width // w, t, h, w, self.spec.out_channels)
        return parts.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(
            -1, self.spec.out_channels, frames, height, width
        )

    def rotation(self, grid: Grid) -> Rotation:
        """Cosines and sines of this rank's patches; those of the last grid are kept."""
        if self._rotation is None or self._rotation[0] != grid:
            cos, sin = rotation_of(self.spec, grid, self.device)
            own = self.split.own(len(cos))
            self._rotation = grid, (cos[own], sin[own])
        return self._rotation[1]


def rotation_of(spec: WanTransformerSpec, grid: Grid, device: Device) -> Rotation:
    """Cosines and sines of each patch, fp32 [n, head_dim / 2]: by frame, row and column."""
    angles = []
    for axis, (size, dim) in enumerate(zip(grid, spec.head_split, strict=True)):
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        own = torch.outer(torch.arange(size, dtype=torch.float64), _THETA**-exponents)
        shape = [1, 1, 1, dim // 2]
        shape[axis] = size
        angles.append(own.view(shape).expand(*grid, dim // 2))
    joined = torch.cat(angles, dim=-1).flatten(0, 2)
    return joined.cos().float().to(device), joined.sin().float().to(device)
