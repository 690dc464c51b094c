"""The vision encoder of a model: its dimensions, and how images stand in a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from tokenmill.core.images import ImageInput
from tokenmill.core.specs.fields import Settings, count, fixed, positive_int
from tokenmill.core.types import ModelLoadError

if TYPE_CHECKING:
    from tokenmill.core.requests import Request


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An encoder of patches, as Qwen3-VL has it: merge x merge patches become one token."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_size: int  # the text model's hidden size
    grid_side: int  # learned positions form a square, which is resampled to an image's grid
    deepstack_layers: tuple[int, ...]  # whose outputs the first layers of the text model add
    rope_sections: tuple[int, int, int]  # channels of a text head by time, height and width
    image_token_id: int
    vision_start_id: int
    vision_end_id: int

    @property
    def patch_dim(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def num_features(self) -> int:
        """Vectors of a token: its embedding, and one for each layer that adds to the text model."""
        return 1 + len(self.deepstack_layers)

    def num_params(self) -> int:
        hidden, inner, merged = self.hidden_size, self.intermediate_size, self.merged_size
        outer = (self.patch_dim + 1) * hidden + self.grid_side**2 * hidden
        layer = 4 * hidden * (hidden + 1) + 2 * hidden * inner + inner + hidden + 4 * hidden
        mergers = self.num_features * (merged * (merged + 1) + (merged + 1) * self.out_size)
        norms = 2 * hidden + 2 * merged * len(self.deepstack_layers)
        return outer + self.depth * layer + mergers + norms

    def encode_flops(self, num_patches: int) -> int:
        hidden, merged = self.hidden_size, self.merged_size
        layer = 4 * hidden**2 + 2 * hidden * self.intermediate_size
        attention = 4 * num_patches * hidden
        token = self.num_features * merged * (merged + self.out_size)
        each = 2 * (self.patch_dim * hidden + self.depth * layer) + self.depth * attention
        return num_patches * each + 2 * num_patches // self.merge_size**2 * token


def image_problem(request: Request, vision: VisionSpec | None) -> str | None:
    """What is wrong with the images of a request, in a sentence; None: nothing."""
    if not request.task.images:
        return None
    if vision is None:
        return "images: this model takes text alone"
    end = 0
    for index, span in enumerate(request.task.images):
        name, num_prompt = f"images[{index}]", len(request.task.prompt_token_ids)
        merge = vision.merge_size
        if (problem := _patches_problem(span.image, vision)) is not None:
            return f"{name}.{problem}"
        if span.num_tokens != span.image.num_tokens(merge):
            wanted = f"{span.image.num_tokens(merge)} as its grid says"
            return f"{name}.num_tokens must be {wanted}, got {span.num_tokens}"
        if span.offset < end or span.end > num_prompt:
            wanted = f"behind the image before it and inside the {num_prompt} tokens of the prompt"
            return f"{name}.offset must be {wanted}, got {span.offset}"
        end = span.end
    return None


def _patches_problem(image: ImageInput, vision: VisionSpec) -> str | None:
    merge, (_, height, width) = vision.merge_size, image.grid
    if min(image.grid) < 1 or height % merge or width % merge:
        return f"grid must be multiples of {merge}, got {image.grid}"
    numbers, levels = image.num_patches * vision.patch_dim, 4 * 256 * vision.in_channels
    if len(image.levels) not in (0, levels):
        return f"levels must be {levels} bytes, got {len(image.levels)}"
    sizes = (numbers, numbers // vision.temporal_patch_size) if image.levels else (4 * numbers,)
    if len(image.data) in sizes:
        return None
    kind = "bytes" if image.levels else "float32 numbers"
    wanted = f"{image.num_patches} patches of {vision.patch_dim} {kind}"
    return f"data must be {wanted}, got {len(image.data)} bytes"


def read_vision(settings: Settings, hidden_size: int, head_dim: int) -> VisionSpec:
    """The encoder that `vision_config` describes, and the tokens and rotations around it."""
    config = settings.get("vision_config")
    if not isinstance(config, dict):
        raise ModelLoadError(f"vision_config: expected an object, got {config!r}")
    with _inside("vision_config"):
        spec = _read_encoder(config, settings, head_dim)
        if spec.out_size != hidden_size:
            wanted = f"expected the text model's hidden_size {hidden_size}, got {spec.out_size}"
            raise ModelLoadError(f"out_hidden_size: {wanted}")
    return spec


def _read_encoder(config: Settings, settings: Settings, head_dim: int) -> VisionSpec:
    fixed(config, "hidden_act", "gelu_pytorch_tanh")
    names = ("depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size")
    sizes = {name: positive_int(config, name) for name in names}
    hidden, heads = sizes["hidden_size"], sizes["num_heads"]
    if hidden % (4 * heads):
        problem = f"num_heads {heads} must leave heads of a multiple of 4 channels"
        raise ModelLoadError(f"hidden_size: {hidden} with {problem}")
    positions = positive_int(config, "num_position_embeddings")
    if isqrt(positions) ** 2 != positions:
        problem = f"expected the size of a square grid, got {positions}"
        raise ModelLoadError(f"num_position_embeddings: {problem}")
    return VisionSpec(
        **sizes,
        temporal_patch_size=positive_int(config, "temporal_patch_size"),
        merge_size=positive_int(config, "spatial_merge_size"),
        out_size=positive_int(config, "out_hidden_size"),
        grid_side=isqrt(positions),
        deepstack_layers=_deepstack(config, sizes["depth"]),
        rope_sections=_sections(settings, head_dim),
        image_token_id=count(settings, "image_token_id"),
        vision_start_id=count(settings, "vision_start_token_id"),
        vision_end_id=count(settings, "vision_end_token_id"),
    )


def _deepstack(config: Settings, depth: int) -> tuple[int, ...]:
    layers = config.get("deepstack_visual_indexes")
    known = isinstance(layers, list) and all(type(x) is int and 0 <= x < depth for x in layers)
    if known and layers == sorted(set(layers or [])):
        return tuple(layers or [])
    problem = f"expected layers below depth {depth} in rising order, got {layers!r}"
    raise ModelLoadError(f"deepstack_visual_indexes: {problem}")


def _sections(settings: Settings, head_dim: int) -> tuple[int, int, int]:
    sections = settings["mrope_section"]
    known = isinstance(sections, list) and all(type(x) is int and x >= 0 for x in sections)
    if not known or len(sections) != 3 or sum(sections) != head_dim // 2:
        wanted = f"three counts that sum to half of head_dim {head_dim}"
        raise ModelLoadError(f"mrope_section: expected {wanted}, got {sections!r}")
    time, height, width = sections
    return time, height, width


@contextmanager
def _inside(field: str) -> Iterator[None]:
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{field}.{error}") from error
