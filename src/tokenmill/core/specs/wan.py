"""Wan text-to-video models: the shapes of their three parts, and what a video costs in FLOPs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from tokenmill.core.specs.fields import Settings, fixed, flag, number, positive_int
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.core.video import VideoParams

if TYPE_CHECKING:
    from tokenmill.core.tasks import Video

TEXT_TOKENS = 512  # every prompt is padded with zeros, or cut, to so many embeddings
_LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)


@dataclass(frozen=True, slots=True)
class WanTransformerSpec:
    """The diffusion transformer; the defaults are one expert of Wan 2.2 A14B."""

    patch_size: tuple[int, int, int] = (1, 2, 2)  # of the latents: frames, height, width
    num_heads: int = 40
    head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13_824
    num_layers: int = 40
    eps: float = 1e-6
    max_positions: int = 1024  # of each of the three axes
    cross_attn_norm: bool = True

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def intermediate_size(self) -> int:
        return self.ffn_dim

    @property
    def head_split(self) -> tuple[int, int, int]:
        """Channels of a head that turn by frame, by row and by column."""
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

    def num_block_params(self) -> int:
        hidden = self.hidden_size
        return self.num_layers * (8 * hidden**2 + 2 * hidden * self.ffn_dim)

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Patches of latents of (frames, height, width)."""
        return prod(size // patch for size, patch in zip(grid, self.patch_size, strict=True))

    def linear_flops(self, num_tokens: int) -> int:
        """Of the blocks' linears in one forward of one branch, without the text's."""
        hidden = self.hidden_size
        return 2 * num_tokens * self.num_layers * (6 * hidden**2 + 2 * hidden * self.ffn_dim)

    def attention_flops(self, num_tokens: int) -> int:
        """Of self-attention and of attention to the text, in one forward of one branch."""
        seen = num_tokens + TEXT_TOKENS
        return 4 * num_tokens * seen * self.hidden_size * self.num_layers


@dataclass(frozen=True, slots=True)
class TextEncoderSpec:
    """UMT5's encoder; the defaults are UMT5-XXL."""

    vocab_size: int = 256_384
    hidden_size: int = 4096
    num_layers: int = 24
    num_heads: int = 64
    head_dim: int = 64
    ffn_dim: int = 10_240
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6

    def flops(self, num_tokens: int) -> int:
        inner = self.num_heads * self.head_dim
        params = 4 * self.hidden_size * inner + 3 * self.hidden_size * self.ffn_dim
        return self.num_layers * (2 * num_tokens * params + 4 * num_tokens**2 * inner)


@dataclass(frozen=True, slots=True)
class VaeSpec:
    """The video autoencoder; the defaults are Wan 2.1's, which the 14B models of 2.2 use, too."""

    z_dim: int = 16
    base_dim: int = 96
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    latents_mean: tuple[float, ...] = _LATENTS_MEAN
    latents_std: tuple[float, ...] = _LATENTS_STD

    @property
    def spatial_stride(self) -> int:
        return 1 << (len(self.dim_mult) - 1)

    @property
    def temporal_stride(self) -> int:
        """Frames of one latent frame, but for the first, which has one."""
        return 1 << sum(self.temporal_downsample)

    @property
    def decoder_dims(self) -> tuple[tuple[int, int], ...]:
        """Channels in and out of each up block; an upsampling halves them."""
        dims = [self.base_dim * mult for mult in (self.dim_mult[-1], *reversed(self.dim_mult))]
        pairs = pairwise(dims)
        return tuple((first // 2 if i else first, last) for i, (first, last) in enumerate(pairs))

    def decode_flops(self, grid: tuple[int, int, int]) -> int:
        """Of a whole decode of latents of (frames, height, width), convolutions alone."""
        frames, height, width = grid
        positions = frames * height * width
        dim = self.decoder_dims[0][0]
        total = 2 * positions * 27 * (self.z_dim * dim + 4 * dim * dim)
        temporal = self.temporal_downsample[::-1]
        for index, (first, last) in enumerate(self.decoder_dims):
            convs = first * last + (2 * self.num_res_blocks + 1) * last * last
            total += 2 * positions * 27 * convs
            if index < len(temporal):
                if temporal[index]:
                    total += 2 * positions * 3 * last * 2 * last
                    frames = 2 * frames - 1
                height, width = 2 * height, 2 * width
                positions = frames * height * width
                total += 2 * positions * 9 * last * (last // 2)
        return total + 2 * positions * 27 * self.decoder_dims[-1][1] * 3


@dataclass(frozen=True, slots=True)
class WanSpec:
    """A text-to-video model; with a boundary it has one expert for high noise, one for low."""

    transformer: WanTransformerSpec = field(default_factory=WanTransformerSpec)
    text: TextEncoderSpec = field(default_factory=TextEncoderSpec)
    vae: VaeSpec = field(default_factory=VaeSpec)
    boundary_ratio: float | None = 0.875
    flow_shift: float = 3.0

    def grid(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Latent frames, rows and columns of a video."""
        side = self.vae.spatial_stride
        return (num_frames - 1) // self.vae.temporal_stride + 1, height // side, width // side

    def frame_sides(self) -> tuple[int, int]:
        """What height and width must be multiples of."""
        side, (_, rows, columns) = self.vae.spatial_stride, self.transformer.patch_size
        return side * rows, side * columns

    def step_flops(self, grid: tuple[int, int, int], branches: int = 2) -> int:
        tokens = self.transformer.num_tokens(grid)
        own = self.transformer.linear_flops(tokens) + self.transformer.attention_flops(tokens)
        return branches * own


A14B = WanSpec()
TINY = WanSpec(
    WanTransformerSpec(
        num_heads=2, head_dim=12, text_dim=32, freq_dim=16, ffn_dim=40, num_layers=2
    ),
    TextEncoderSpec(
        vocab_size=256, hidden_size=32, num_layers=2, num_heads=2, head_dim=8, ffn_dim=64
    ),
    VaeSpec(base_dim=8, dim_mult=(1, 1, 1, 1), num_res_blocks=1),
)
SHAPES = {"wan2.2-t2v-a14b": A14B, "wan-tiny": TINY}


def read_transformer(config: Settings) -> WanTransformerSpec:
    """From config.json of a diffusers WanTransformer3DModel, text-to-video alone."""
    for key, only in (
        ("_class_name", "WanTransformer3DModel"),
        ("qk_norm", "rms_norm_across_heads"),
        ("image_dim", None),
        ("added_kv_proj_dim", None),
        ("pos_embed_seq_len", None),
    ):
        fixed(config, key, only)
    names = {
        "num_heads": "num_attention_heads",
        "head_dim": "attention_head_dim",
        "max_positions": "rope_max_seq_len",
    }
    same = ("in_channels", "out_channels", "text_dim", "freq_dim", "ffn_dim", "num_layers")
    sizes = _sizes(WanTransformerSpec(), config, names | {key: key for key in same})
    config = {"eps": 1e-6, "cross_attn_norm": True, "patch_size": (1, 2, 2)} | config
    patch = _integers(config, "patch_size", 3)
    spec = WanTransformerSpec(
        patch_size=(patch[0], patch[1], patch[2]),
        eps=number(config, "eps"),
        cross_attn_norm=flag(config, "cross_attn_norm"),
        **sizes,
    )
    if min(spec.head_split) < 2:
        raise ModelLoadError(f"attention_head_dim: expected at least 6, got {spec.head_dim}")
    return spec


def read_text_encoder(config: Settings) -> TextEncoderSpec:
    """From config.json of a transformers UMT5EncoderModel."""
    fixed(config, "model_type", "umt5")
    fixed(config, "feed_forward_proj", "gated-gelu")
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "num_layers": "num_layers",
        "num_heads": "num_heads",
        "head_dim": "d_kv",
        "ffn_dim": "d_ff",
        "num_buckets": "relative_attention_num_buckets",
        "max_distance": "relative_attention_max_distance",
    }
    eps = number({"layer_norm_epsilon": 1e-6} | config, "layer_norm_epsilon")
    return TextEncoderSpec(eps=eps, **_sizes(TextEncoderSpec(), config, names))


def read_vae(config: Settings) -> VaeSpec:
    """From config.json of a diffusers AutoencoderKLWan of Wan 2.1's kind."""
    for key, only in (("is_residual", False), ("patch_size", None), ("attn_scales", [])):
        fixed(config, key, only)
    base = config.get("decoder_base_dim") or config.get("base_dim", 96)
    names = {key: key for key in ("z_dim", "num_res_blocks")}
    sizes = _sizes(VaeSpec(), config, names)
    mult = _integers({"dim_mult": (1, 2, 4, 4)} | config, "dim_mult")
    temporal = tuple(config.get("temperal_downsample", (False, True, True)))
    if len(temporal) != len(mult) - 1:
        problem = f"expected {len(mult) - 1} values, got {list(temporal)}"
        raise ModelLoadError(f"temperal_downsample: {problem}")
    spec = VaeSpec(
        base_dim=positive_int({"base_dim": base}, "base_dim"),
        dim_mult=mult,
        temporal_downsample=temporal,
        latents_mean=tuple(config.get("latents_mean", _LATENTS_MEAN)),
        latents_std=tuple(config.get("latents_std", _LATENTS_STD)),
        **sizes,
    )
    for key, values in (("latents_mean", spec.latents_mean), ("latents_std", spec.latents_std)):
        if len(values) != spec.z_dim:
            raise ModelLoadError(f"{key}: expected {spec.z_dim} numbers, got {len(values)}")
    return spec


def _sizes(defaults: Any, config: Settings, names: dict[str, str]) -> dict[str, Any]:
    """Positive integers by our field's name; a key that is left out has the default."""
    return {
        own: positive_int({key: getattr(defaults, own)} | config, key) for own, key in names.items()
    }


def _integers(config: Settings, key: str, length: int | None = None) -> tuple[int, ...]:
    values = config[key]
    is_list = isinstance(values, list | tuple) and len(values) == (length or len(values))
    if not is_list or not all(isinstance(value, int) and value > 0 for value in values):
        what = f"{length} positive integers" if length else "positive integers"
        raise ModelLoadError(f"{key}: expected {what}, got {values!r}")
    return tuple(values)


def check_video(task: Video, spec: WanSpec) -> None:
    """InvalidRequestError names the first field that cannot be."""
    params = task.params
    _check_tokens(task.prompt_token_ids, spec, "prompt")
    if params.guided:
        _check_tokens(list(params.negative_token_ids), spec, "negative_prompt")
    stride = spec.vae.temporal_stride
    if params.num_frames < 1 or (params.num_frames - 1) % stride:
        fewer = max(0, params.num_frames - 1) // stride * stride + 1
        problem = f"must be {stride} n + 1, such as {fewer} or {fewer + stride}"
        raise InvalidRequestError(f"num_frames {problem}, got {params.num_frames}", "num_frames")
    width, height = params.size
    rows, columns = spec.frame_sides()
    if width < columns or height < rows or width % columns or height % rows:
        sides = f"a width in multiples of {columns} and a height in multiples of {rows}"
        raise InvalidRequestError(f"size must have {sides}, got {width}x{height}", "size")
    _check_positions(params, spec)
    if params.num_steps < 1:
        raise InvalidRequestError(f"num_steps must be at least 1, got {params.num_steps}", "steps")
    if not -(2**63) <= params.seed < 2**63:
        raise InvalidRequestError(f"seed must be a 64-bit integer, got {params.seed}", "seed")


def _check_tokens(token_ids: list[int], spec: WanSpec, name: str) -> None:
    if not token_ids:
        raise InvalidRequestError(f"{name} must have at least one token", name)
    if not 0 <= min(token_ids) <= max(token_ids) < spec.text.vocab_size:
        limit = spec.text.vocab_size - 1
        raise InvalidRequestError(f"{name}: token ids must be from 0 to {limit}", name)


def _check_positions(params: VideoParams, spec: WanSpec) -> None:
    width, height = params.size
    grid = spec.grid(params.num_frames, height, width)
    places = (size // p for size, p in zip(grid, spec.transformer.patch_size, strict=True))
    if max(places) > spec.transformer.max_positions:
        limit = f"the model knows {spec.transformer.max_positions} positions of an axis"
        asked = f"{params.num_frames} frames of {width}x{height}"
        raise InvalidRequestError(f"{asked} are too large: {limit}", "size")
