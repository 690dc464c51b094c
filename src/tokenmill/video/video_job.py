"""One video: its text is encoded, its noise denoised step by step, its latents decoded to frames.

A job shares nothing with others but the weights, and its noise comes from its own seed. So its
pixels do not depend on what ran before or beside it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch

from tokenmill.core.requests import Request
from tokenmill.core.specs.wan import WanSpec, check_video
from tokenmill.core.tasks import Video, VideoFrames
from tokenmill.core.types import InvalidRequestError
from tokenmill.core.video import VideoParams
from tokenmill.core.video_parallel import VideoParallel, check_division, check_ranks
from tokenmill.kernels.bidirectional import ROUNDINGS, runs_on
from tokenmill.models.wan.wan_transformer import TextKV, WanTransformer
from tokenmill.models.wan.wan_vae import LatentTiles
from tokenmill.video.experts import synchronize
from tokenmill.video.pipeline import Pipeline
from tokenmill.video.step_cache import StepCache
from tokenmill.video.unipc import TRAIN_STEPS, Schedule, UniPC, make_schedule

PARTS = ("text", "load", "denoise", "decode")


class VideoJob:
    """The state of one request; every `next(job.steps)` is one denoising step or latent frame."""

    def __init__(self, request: Request, pipeline: Pipeline) -> None:
        self.request, self.pipeline = request, pipeline
        self.task = _task(request, pipeline.spec)
        self.params = self.task.params
        width, height = self.params.size
        _check_latent(self.params, pipeline.spec)
        check_attention(self.params, pipeline.device)
        self.grid = pipeline.spec.grid(self.params.num_frames, height, width)
        check_division(pipeline.parallel, self.params, pipeline.spec)
        self.latents: torch.Tensor | None = None  # after the last step so far
        self.video: VideoFrames | None = None
        self.num_skipped = 0  # steps that the step cache skipped
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.step_seconds: list[float] = []
        self._done = 0.0
        self._expert: WanTransformer | None = None
        self._keys: list[TextKV] = []  # of each batch of branches
        self._caches: list[StepCache] = []
        self.steps = self._run()

    @property
    def noise(self) -> torch.Tensor:
        """What it starts from, drawn anew each time: jobs that wait hold no memory."""
        return _noise(self.params, self.pipeline.spec)

    @property
    def progress(self) -> float:
        """The share of its steps that are done; decoding counts as one of them."""
        return self._done / (self.params.num_steps + 1)

    def release(self) -> None:
        """Let go of all that it holds on the device; it cannot go on."""
        self.steps = iter(())
        self.latents = None
        self._forget()

    def _run(self) -> Iterator[None]:
        for latents in self._denoise(self.noise.to(self.pipeline.device)):
            self.latents = latents
            self._done += 1.0
            yield
        assert self.latents is not None
        self._forget()
        pieces, frames = self.decode(self.latents), []
        for index in range(self.grid[0]):
            with self._timed("decode"):
                frames.append(next(pieces))
            self._done += 1.0 / self.grid[0]
            if index + 1 < self.grid[0]:
                yield
        self._done = self.params.num_steps + 1.0
        width, height = self.params.size
        data, count = b"".join(frames), self.params.num_frames
        seconds, fps = dict(self.seconds), self.params.fps
        self.video = VideoFrames(width, height, fps, count, data, seconds, self.num_skipped)

    def decode(self, latents: torch.Tensor) -> Iterator[bytes]:
        """RGB bytes of each latent frame's frames; nothing on ranks other than the first."""
        tiles = LatentTiles() if self.params.vae_tiles else None
        leads = self.pipeline.split.ranks.rank == 0
        for frames in self.pipeline.decoder.frames(latents, tiles):
            yield _to_bytes(frames) if leads else b""

    def _denoise(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """The latents after each step."""
        params, schedule = self.params, self._schedule()
        with self._timed("text"):
            text = self._encode()
        solver, current = UniPC(schedule), -1
        for index, timestep in enumerate(schedule.timesteps):
            chosen = self._expert_index(timestep)
            if chosen != current:
                self._switch(chosen, text)
                current = chosen
            with self._timed("denoise", each=True):
                velocity = self._velocity(x, timestep, index + 1 == params.num_steps)
                scale = params.guidance_scale_2 if chosen else params.guidance_scale
                x = solver.step(_guided(velocity, scale), x)
            yield x

    def _schedule(self) -> Schedule:
        params = self.params
        shift = params.flow_shift or self.pipeline.spec.flow_shift
        return make_schedule(params.schedule, params.num_steps, shift)

    def num_experts(self, num_steps: int | None = None) -> int:
        """How many experts work in the first steps, or in all."""
        timesteps = self._schedule().timesteps[:num_steps]
        return len({self._expert_index(timestep) for timestep in timesteps})

    def _switch(self, chosen: int, text: list[torch.Tensor]) -> None:
        """Take another expert, and compute the keys and values of the text in it."""
        self._forget()  # an expert that leaves the device is not to be held here
        with self._timed("load"):
            self._expert = self.pipeline.experts[chosen]
        self._expert.round_attention(ROUNDINGS[self.params.attention_dtype])
        with self._timed("text"):
            self._keys = [self._expert.text_kv(part) for part in text]
        if self.params.step_cache > 0.0:
            self._caches = [StepCache(self.params.step_cache) for _ in text]

    def _forget(self) -> None:
        self.num_skipped += sum(cache.num_skipped for cache in self._caches[:1])
        self._expert, self._keys, self._caches = None, [], []

    def _encode(self) -> list[torch.Tensor]:
        """Embeddings in batches of branches: the prompt, with guidance also the negative one."""
        prompts = [self.task.prompt_token_ids]
        if self.params.guided:
            prompts.append(list(self.params.negative_token_ids))
        split = self.pipeline.split
        if split.cfg > 1:
            prompts = [prompts[split.branch]]
        text = self.pipeline.encode(prompts)
        num_tokens = self.pipeline.spec.transformer.num_tokens(self.grid)
        together = self.pipeline.batches_guidance(num_tokens // split.size)
        return [text] if together else list(text.split(1))

    def _expert_index(self, timestep: int) -> int:
        boundary = self.pipeline.spec.boundary_ratio
        if boundary is None:
            return 0
        ratio = boundary if self.params.boundary_ratio is None else self.params.boundary_ratio
        return int(timestep < ratio * TRAIN_STEPS)

    def _velocity(self, x: torch.Tensor, timestep: int, last: bool) -> torch.Tensor:
        """Of each branch, [branches, channels, frames, height, width]."""
        expert = self._expert
        assert expert is not None
        if not self._caches:
            return torch.cat([expert(x, timestep, keys) for keys in self._keys])
        pairs = zip(self._caches, self._keys, strict=True)
        return torch.cat([cache.velocity(expert, x, timestep, keys, last) for cache, keys in pairs])

    @contextmanager
    def _timed(self, part: str, each: bool = False) -> Iterator[None]:
        start = time.perf_counter()
        yield
        synchronize(self.pipeline.device)
        seconds = time.perf_counter() - start
        self.seconds[part] += seconds
        if each:
            self.step_seconds.append(seconds)


def _guided(velocity: torch.Tensor, scale: float) -> torch.Tensor:
    """Away from the negative prompt; one branch alone is taken as it is."""
    if len(velocity) == 1:
        return velocity[0]
    wanted, unwanted = velocity.unbind()
    return unwanted + scale * (wanted - unwanted)


def _to_bytes(frames: torch.Tensor) -> bytes:
    """fp32 [frames, 3, height, width] in [-1, 1] -> RGB bytes."""
    pixels = (frames * 0.5 + 0.5).clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous().cpu().numpy().tobytes()


def _task(request: Request, spec: WanSpec) -> Video:
    if not isinstance(task := request.task, Video):
        raise InvalidRequestError("this engine makes videos; the request asks for none", "task")
    check_video(task, spec)
    return task


def check_job(
    request: Request,
    spec: WanSpec,
    parallel: VideoParallel | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise what a job of the request would, before any weights are read."""
    params = _task(request, spec).params
    _check_latent(params, spec)
    if device is not None:
        check_attention(params, device)
    if parallel is not None:
        check_ranks(parallel, spec)
        check_division(parallel, params, spec)


def _noise(params: VideoParams, spec: WanSpec) -> torch.Tensor:
    """The latents to start from, fp32 on the host, so that every device has the same."""
    if params.latent is not None:
        return _fixed_latent(params.latent, _latent_shape(params, spec))
    generator = torch.Generator().manual_seed(params.seed)
    return torch.randn(_latent_shape(params, spec), generator=generator)


def _check_latent(params: VideoParams, spec: WanSpec) -> None:
    if params.latent is not None:
        _fixed_latent(params.latent, _latent_shape(params, spec))


def check_attention(params: VideoParams, device: torch.device) -> None:
    """Raise InvalidRequestError where attention cannot be rounded like that on a device."""
    if params.rounds_attention and not runs_on(device):
        problem = f"{params.attention_dtype} needs a Hopper GPU (H100, H200); use auto"
        raise InvalidRequestError(f"attention_dtype {problem}", "attention_dtype")


def _latent_shape(params: VideoParams, spec: WanSpec) -> tuple[int, ...]:
    width, height = params.size
    return (spec.vae.z_dim, *spec.grid(params.num_frames, height, width))


def _fixed_latent(file: str, shape: tuple[int, ...]) -> torch.Tensor:
    latents = _read_latent(Path(file)).float()
    found = latents[0] if latents.dim() == 5 and len(latents) == 1 else latents
    if found.shape != shape:
        problem = f"has the shape {list(latents.shape)}, the video needs {[1, *shape]}"
        raise InvalidRequestError(f"latent {file} {problem}", "latent")
    return found


def _read_latent(file: Path) -> torch.Tensor:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        first = str(error).splitlines()[0]
        raise InvalidRequestError(f"latent {file} cannot be read: {first}", "latent") from error
    if not isinstance(found, torch.Tensor):
        raise InvalidRequestError(f"latent {file} holds no tensor", "latent")
    return found
