"""What a client may ask of a video model, and the job that it becomes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.requests import INT64_MAX, Schema, unsupported
from tokenmill.core.specs.wan import TEXT_TOKENS, WanSpec, check_video
from tokenmill.core.tasks import Video
from tokenmill.core.video import (
    NEGATIVE_PROMPT,
    VideoParams,
    VideoServerConfig,
    byte_token_ids,
    clean_prompt,
)
from tokenmill.core.video_parallel import VideoParallel, check_division
from tokenmill.text.tokenizer import Tokenizer

MAX_CHARACTERS = 32_000  # of a prompt: more than its tokens can have, and soon tokenized
MAX_SECONDS = 3600.0
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_TEXT_ONLY = unsupported("this model makes videos from text alone; leave the field out")

Scale = Annotated[float, Meta(ge=0, le=100)]


class VideoRequest(Schema, kw_only=True):
    """The body of POST /v1/videos and /v1/videos/sync."""

    ELSEWHERE: ClassVar[dict[str, str]] = {
        "width": "send size, such as '1280x720'",
        "height": "send size, such as '1280x720'",
        "aspect_ratio": "send size, such as '1280x720'",
        "duration": "send seconds",
        "frames": "send num_frames",
        "steps": "send num_inference_steps",
        "num_steps": "send num_inference_steps",
        "guidance": "send guidance_scale",
        "cfg_scale": "send guidance_scale",
        "frame_rate": "send fps",
        "n": "send one call for each video",
        "extra_body": "send its members at the top level",
        "latent": "send latent_path",
    }

    prompt: str
    model: str | None = None
    size: str | None = None
    seconds: str | float | None = None
    seed: Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)] | None = None
    negative_prompt: str | None = None
    num_frames: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    fps: Annotated[int, Meta(ge=1, le=240)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Scale | None = None
    guidance_scale_2: Scale | None = None
    flow_shift: Annotated[float, Meta(ge=0.01, le=1000)] | None = None
    boundary_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None
    latent_path: str | None = None
    input_reference: Annotated[None, _TEXT_ONLY] = None


class GenerationRequest(VideoRequest, kw_only=True):
    """The body of POST /v1/videos/generations, as MLPerf's endpoint client sends it."""

    output_format: Literal["mp4", "auto"] = "auto"
    response_format: Literal["video_path", "video_bytes"] = "video_path"


@dataclass(frozen=True, slots=True)
class VideoPreparer:
    """Turns calls into jobs of one model."""

    spec: WanSpec
    tokenizer: Tokenizer | None  # None: random weights, prompts are their bytes
    config: VideoServerConfig
    parallel: VideoParallel = field(default_factory=VideoParallel)  # of each worker

    def prepare(self, call: VideoRequest) -> dict[str, Any]:
        """The fields of a record; ApiError or InvalidRequestError names the wrong field."""
        prompt_ids = self._token_ids(call.prompt, "prompt")
        negative = NEGATIVE_PROMPT if call.negative_prompt is None else call.negative_prompt
        params = self._params(call)
        if params.guided:
            ids = tuple(self._token_ids(negative, "negative_prompt"))
            params = replace(params, negative_token_ids=ids)
        self._check_pixels(call, params)
        check_video(Video(prompt_ids, params), self.spec)
        check_division(self.parallel, params, self.spec)
        return {
            "prompt": call.prompt,
            "negative_prompt": call.negative_prompt,
            "prompt_token_ids": prompt_ids,
            "params": params,
        }

    def _token_ids(self, text: str, name: str) -> list[int]:
        if not text.strip():
            raise ApiError(400, f"{name}: is empty; send a text", name, "invalid_value")
        too_long = "context_length_exceeded"
        if len(text) > MAX_CHARACTERS:
            message = f"{name}: has {len(text)} characters; send at most {MAX_CHARACTERS}"
            raise ApiError(400, message, name, too_long)
        if self.tokenizer is None:
            ids = byte_token_ids(text, self.spec.text.vocab_size)
        else:
            ids = self.tokenizer.encode(clean_prompt(text))
        if len(ids) > TEXT_TOKENS:
            message = f"{name}: has {len(ids)} tokens; the model reads {TEXT_TOKENS} at most"
            raise ApiError(400, message, name, too_long)
        return ids

    def _params(self, call: VideoRequest) -> VideoParams:
        named = {
            "fps": call.fps,
            "num_steps": call.num_inference_steps,
            "guidance_scale": call.guidance_scale,
            "guidance_scale_2": call.guidance_scale_2,
            "flow_shift": call.flow_shift,
            "boundary_ratio": call.boundary_ratio,
            "size": None if call.size is None else _size(call.size),
            "latent": None if call.latent_path is None else self._latent(call.latent_path),
        }
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        # A job that runs again, here or after a restart, has the noise that it had.
        seed = int.from_bytes(os.urandom(4), "big") if call.seed is None else call.seed
        params = replace(self.config.job, seed=seed, **given)
        return replace(params, num_frames=self._num_frames(call, params))

    def _num_frames(self, call: VideoRequest, params: VideoParams) -> int:
        if call.seconds is None:
            return params.num_frames if call.num_frames is None else call.num_frames
        stride = self.spec.vae.temporal_stride
        seconds = _seconds(call.seconds)
        num_frames = stride * round(seconds * params.fps / stride) + 1
        if call.num_frames is None and num_frames > 1:
            return num_frames
        if call.num_frames is None:
            least = f"send at least {stride / params.fps:g} at {params.fps} frames per second"
            message = f"seconds: {seconds:g} are too few; {least}"
            raise ApiError(400, message, "seconds", "invalid_value")
        # MLPerf's client always sends both, its defaults where nothing else is said.
        if call.num_frames != num_frames and not isinstance(call, GenerationRequest):
            told = f"{seconds:g} at {params.fps} frames per second are {num_frames} frames"
            message = f"seconds: {told}, but num_frames is {call.num_frames}; send one of the two"
            raise ApiError(400, message, "seconds", "invalid_value")
        return call.num_frames

    def _check_pixels(self, call: VideoRequest, params: VideoParams) -> None:
        (width, height), limit = params.size, self.config.max_video_megapixels
        if width * height * params.num_frames <= limit * 10**6:
            return
        usual = VideoParams()
        is_large = width * height > usual.size[0] * usual.size[1]
        name = "num_frames" if call.num_frames is not None else "seconds"
        name = "size" if is_large or params.num_frames <= usual.num_frames else name
        asked = f"{params.num_frames} frames of {width}x{height}"
        most = max(1, limit * 10**6 // (width * height))
        message = f"{name}: {asked} are too large; this server makes {limit} million pixels at most"
        message += f", {most} frames of this size"
        raise ApiError(400, message, name, "invalid_value")

    def _latent(self, text: str) -> str:
        """A file below the folder that the server lets calls name."""
        if self.config.latent_dir is None:
            message = "latent_path: files lie in the folder latents of --video-dir"
            raise ApiError(400, message, "latent_path", "unsupported_value")
        folder = Path(self.config.latent_dir).expanduser().resolve()
        try:
            path = (folder / text).resolve()
            is_there = path.is_relative_to(folder) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # too long, a null byte, links in a ring
            is_there = False
        if not is_there:
            message = f"latent_path: there is no file {text[:200]!r} in the folder latents"
            raise ApiError(400, message, "latent_path", "invalid_value")
        return str(path)


def _size(text: str) -> tuple[int, int]:
    found = _SIZE.fullmatch(text)
    if found is None:
        message = f"size: {text[:60]!r} is not valid; send WIDTHxHEIGHT, such as '1280x720'"
        raise ApiError(400, message, "size", "invalid_value")
    return int(found[1]), int(found[2])


def _seconds(value: str | float) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= MAX_SECONDS:
        message = f"seconds: {str(value)[:60]!r} is not valid; send a number above 0 and at most "
        raise ApiError(400, f"{message}{MAX_SECONDS:g}", "seconds", "invalid_value")
    return seconds
