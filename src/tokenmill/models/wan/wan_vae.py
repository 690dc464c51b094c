"""The video decoder of Wan: latents to frames, one latent frame after the other.

Convolutions look back two frames in time. What they have seen is kept between latent frames, so
that a video is decoded in the memory of a few frames. The first latent frame is one frame, each
other one is four.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import conv2d, conv3d, interpolate
from torch.nn.functional import scaled_dot_product_attention as attention

from tokenmill.core.specs.wan import VaeSpec
from tokenmill.kernels.modulation import norm_frames, norm_silu
from tokenmill.layers.linear import Device
from tokenmill.models.family import Shape
from tokenmill.models.wan.wan_split import ColumnSplit

_WHOLE = ColumnSplit()
_SEEN = 2  # frames that a convolution of three frames looks back
Seen = dict[str, torch.Tensor]  # the last frames that each convolution has had


def decoder_tensors(spec: VaeSpec) -> dict[str, Shape]:
    """Name -> shape of what decoding takes, as diffusers stores an AutoencoderKLWan."""
    dim = spec.decoder_dims[0][0]
    tensors = _conv("post_quant_conv", spec.z_dim, spec.z_dim, 1, 1, 1)
    tensors |= _conv("decoder.conv_in", dim, spec.z_dim, 3, 3, 3)
    for index in (0, 1):
        tensors |= _res_tensors(f"decoder.mid_block.resnets.{index}", dim, dim)
    attention_name = "decoder.mid_block.attentions.0"
    tensors |= {f"{attention_name}.norm.gamma": (dim, 1, 1)}
    tensors |= _conv(f"{attention_name}.to_qkv", 3 * dim, dim, 1, 1)
    tensors |= _conv(f"{attention_name}.proj", dim, dim, 1, 1)
    for index, (first, last) in enumerate(spec.decoder_dims):
        block = f"decoder.up_blocks.{index}"
        for number in range(spec.num_res_blocks + 1):
            own = first if number == 0 else last
            tensors |= _res_tensors(f"{block}.resnets.{number}", own, last)
        if index < len(spec.temporal_downsample):
            up = f"{block}.upsamplers.0"
            tensors |= _conv(f"{up}.resample.1", last // 2, last, 3, 3)
            if spec.temporal_downsample[::-1][index]:
                tensors |= _conv(f"{up}.time_conv", 2 * last, last, 3, 1, 1)
    tensors |= {"decoder.norm_out.gamma": (spec.decoder_dims[-1][1], 1, 1, 1)}
    return tensors | _conv("decoder.conv_out", 3, spec.decoder_dims[-1][1], 3, 3, 3)


def _conv(name: str, *shape: int) -> dict[str, Shape]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _res_tensors(name: str, first: int, last: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        f"{name}.norm1.gamma": (first, 1, 1, 1),
        f"{name}.norm2.gamma": (last, 1, 1, 1),
    }
    tensors |= _conv(f"{name}.conv1", last, first, 3, 3, 3)
    tensors |= _conv(f"{name}.conv2", last, last, 3, 3, 3)
    return tensors | (_conv(f"{name}.conv_shortcut", last, first, 1, 1, 1) if first != last else {})


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """Squares of latents that are decoded one by one; they overlap, and are blended there."""

    size: int = 32
    stride: int = 24


class VideoDecoder:
    """All weights by name, in one type; what a video has been through so far is the caller's."""

    def __init__(
        self,
        spec: VaeSpec,
        tensors: Mapping[str, torch.Tensor],
        device: Device,
        dtype: torch.dtype = torch.float32,
        split: ColumnSplit = _WHOLE,
    ) -> None:
        self.split = split
        self.spec, self.device, self.dtype = spec, torch.device(device), dtype
        self._tensors = {name: tensors[name].to(device, dtype) for name in decoder_tensors(spec)}
        shape = (1, spec.z_dim, 1, 1, 1)
        self._mean = torch.tensor(spec.latents_mean, device=device).view(shape)
        self._std = torch.tensor(spec.latents_std, device=device).view(shape)

    def frames(
        self, latents: torch.Tensor, tiles: LatentTiles | None = None
    ) -> Iterator[torch.Tensor]:
        """Latents [channels, frames, height, width] -> fp32 [frames, 3, height, width] in [-1, 1].

        One piece for each latent frame: one frame, then four at a time. Of several ranks, which
        have no tiles, rank 0 gets whole frames.
        """
        z = latents.to(self.device, torch.float32)[None] * self._std + self._mean
        z = self._conv3d(z.to(self.dtype), "post_quant_conv", None)
        columns = z.shape[-1]
        own = self.split.own(z)
        places = _places(own.shape[-2:], tiles)
        seen: list[list[Seen]] = [[{} for _ in row] for row in places]
        for frame in own.split(1, dim=2):
            rows = [
                [
                    self._decode(frame[..., top:bottom, left:right], state, columns)
                    for (top, bottom, left, right), state in zip(row, kept, strict=True)
                ]
                for row, kept in zip(places, seen, strict=True)
            ]
            if tiles is None:
                whole = self.split.join(rows[0][0], columns)
            else:
                whole = self._join(rows, tiles)
            height, width = (side * self.spec.spatial_stride for side in z.shape[-2:])
            yield whole[0, :, :, :height, :width].float().clamp(-1.0, 1.0).transpose(0, 1)

    def _decode(self, x: torch.Tensor, seen: Seen, columns: int) -> torch.Tensor:
        """One latent frame [1, z, 1, h, w] -> [1, 3, frames, 8h, 8w]; `columns` are all ranks'."""
        x = self._conv3d(x, "decoder.conv_in", seen)
        x = self._res_block(x, "decoder.mid_block.resnets.0", seen)
        x = self._attend(x, "decoder.mid_block.attentions.0", columns)
        x = self._res_block(x, "decoder.mid_block.resnets.1", seen)
        temporal = self.spec.temporal_downsample[::-1]
        for index in range(len(self.spec.dim_mult)):
            block = f"decoder.up_blocks.{index}"
            for number in range(self.spec.num_res_blocks + 1):
                x = self._res_block(x, f"{block}.resnets.{number}", seen)
            if index < len(temporal):
                x = self._upsample(x, f"{block}.upsamplers.0", seen, temporal[index])
        return self._norm_conv3d(x, "decoder.norm_out", "decoder.conv_out", seen)

    def _conv3d(self, x: torch.Tensor, name: str, seen: Seen | None) -> torch.Tensor:
        """A convolution that sees its frame and, in a kernel of three, the two before it."""
        if seen is not None:
            x = torch.cat([_before(x, name, seen), x], dim=2)
            seen[name] = x[:, :, -_SEEN:].clone()
        return self._convolve(x, name)

    def _norm_conv3d(self, x: torch.Tensor, norm_name: str, name: str, seen: Seen) -> torch.Tensor:
        x = norm_silu(x, self._gamma(norm_name), _before(x, name, seen))
        seen[name] = x[:, :, -_SEEN:].clone()
        return self._convolve(x, name)

    def _convolve(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x[1, c, frames, h, w] begins with the frames that the first result looks back to."""
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        rows, columns = weight.shape[3:]
        x, padding = self._with_neighbours(x, columns // 2)
        return conv3d(x, weight, bias, padding=(0, rows // 2, padding))

    def _with_neighbours(self, x: torch.Tensor, columns: int) -> tuple[torch.Tensor, int]:
        """x with the columns that a convolution sees of other ranks, and the padding beside it."""
        if self.split.ranks.size == 1 or not columns:
            return x, columns
        return self.split.with_neighbours(x), 0

    def _gamma(self, name: str) -> torch.Tensor:
        return self._tensors[f"{name}.gamma"]

    def _res_block(self, x: torch.Tensor, name: str, seen: Seen) -> torch.Tensor:
        same = f"{name}.conv_shortcut.weight" not in self._tensors
        shortcut = x if same else self._conv3d(x, f"{name}.conv_shortcut", None)
        x = self._norm_conv3d(x, f"{name}.norm1", f"{name}.conv1", seen)
        return shortcut + self._norm_conv3d(x, f"{name}.norm2", f"{name}.conv2", seen)

    def _attend(self, x: torch.Tensor, name: str, columns: int) -> torch.Tensor:
        """Attention of one head over the positions of each frame."""
        frames = x[0].transpose(0, 1)
        qkv = self._conv2d(norm_frames(frames, self._gamma(f"{name}.norm")), f"{name}.to_qkv")
        dim = frames.shape[1]
        q = qkv[:, :dim].flatten(2).transpose(1, 2)
        kv = self.split.all_columns(qkv[:, dim:], columns)
        k, v = kv.flatten(2).transpose(1, 2).chunk(2, dim=-1)
        seen = attention(q[:, None], k[:, None], v[:, None])[:, 0]
        out = self._conv2d(seen.transpose(1, 2).reshape(frames.shape), f"{name}.proj")
        return x + out.transpose(0, 1)[None]

    def _conv2d(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        rows, columns = weight.shape[2:]
        x, padding = self._with_neighbours(x, columns // 2)
        return conv2d(x, weight, bias, padding=(rows // 2, padding))

    def _upsample(self, x: torch.Tensor, name: str, seen: Seen, in_time: bool) -> torch.Tensor:
        """Twice as high and wide; in time as well, but for the first latent frame."""
        if in_time and name in seen:
            first, second = self._conv3d(x, f"{name}.time_conv", seen).chunk(2, dim=1)
            x = torch.stack([first, second], dim=3).flatten(2, 3)
        seen[name] = x.new_empty(0)  # a mark: from here on frames are doubled
        frames = interpolate(x[0].transpose(0, 1), scale_factor=2.0, mode="nearest-exact")
        return self._conv2d(frames, f"{name}.resample.1").transpose(0, 1)[None]

    def _join(self, rows: list[list[torch.Tensor]], tiles: LatentTiles) -> torch.Tensor:
        """Tiles blended into those above them and to their left, then side by side."""
        stride = tiles.stride * self.spec.spatial_stride
        overlap = (tiles.size - tiles.stride) * self.spec.spatial_stride
        joined = []
        for i, row in enumerate(rows):
            for j, tile in enumerate(row):
                if i:
                    _blend(rows[i - 1][j], tile, overlap, -2)
                if j:
                    _blend(row[j - 1], tile, overlap, -1)
            joined.append(torch.cat([tile[..., :stride, :stride] for tile in row], dim=-1))
        return torch.cat(joined, dim=-2)


def _before(x: torch.Tensor, name: str, seen: Seen) -> torch.Tensor:
    """The two frames that a convolution had before x's; at the beginning of a video zeros."""
    return seen[name] if name in seen else x.new_zeros(*x.shape[:2], _SEEN, *x.shape[3:])


def _places(shape: torch.Size, tiles: LatentTiles | None) -> list[list[tuple[int, int, int, int]]]:
    """Top, bottom, left and right of each tile, by row; without tiles one of all."""
    height, width = shape
    if tiles is None:
        return [[(0, height, 0, width)]]
    return [
        [(top, top + tiles.size, left, left + tiles.size) for left in range(0, width, tiles.stride)]
        for top in range(0, height, tiles.stride)
    ]


def _blend(before: torch.Tensor, tile: torch.Tensor, overlap: int, dim: int) -> None:
    """Fade from the end of `before` to the beginning of `tile`, in place."""
    overlap = min(before.shape[dim], tile.shape[dim], overlap)
    shape = [1] * tile.dim()
    shape[dim] = overlap
    share = (torch.arange(overlap, device=tile.device) / overlap).view(shape).to(tile.dtype)
    begin = tile.narrow(dim, 0, overlap)
    end = before.narrow(dim, before.shape[dim] - overlap, overlap)
    begin.copy_(end * (1 - share) + begin * share)
