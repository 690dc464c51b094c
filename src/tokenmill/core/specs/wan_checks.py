"""What a video request may ask of a model, checked without its weights."""

from __future__ import annotations

from tokenmill.core.specs.wan import WanSpec
from tokenmill.core.types import InvalidRequestError, Request
from tokenmill.core.video import VideoParams


def check_video(request: Request, spec: WanSpec) -> VideoParams:
    """The request's parameters; InvalidRequestError names the first that cannot be."""
    params = request.video
    if params is None:
        raise InvalidRequestError("this engine makes videos; the request asks for text", "video")
    _check_tokens(request.prompt_token_ids, spec, "prompt")
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
    return params


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
