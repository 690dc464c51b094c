"""How the ranks of a video engine divide a video, and which numbers of them can."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.flags import count, setting
from tokenmill.core.specs.wan import WanSpec
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.core.video import VideoParams


@dataclass(frozen=True, slots=True)
class VideoParallel:
    """Processes that make one video together: their number is the product of both."""

    cfg: int = setting(
        1,
        "Ranks, a process each, for the two prompts of guidance: 2 gives each prompt its own.",
        count(1, 2),
        flag="cfg-parallel",
    )
    ulysses: int = setting(
        1,
        "Ranks, a process each, that divide the tokens of a video, and the heads in attention.",
        count(1, 4096),
    )

    @property
    def num_ranks(self) -> int:
        return self.cfg * self.ulysses


def check_ranks(parallel: VideoParallel, spec: WanSpec) -> None:
    """Raise ModelLoadError where the model cannot be divided like that."""
    heads = spec.transformer.num_heads
    if heads % parallel.ulysses:
        fits = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        problem = f"does not divide the {heads} heads of the model; use one of {fits}"
        raise ModelLoadError(f"--ulysses {parallel.ulysses} {problem}")


def check_division(parallel: VideoParallel, params: VideoParams, spec: WanSpec) -> None:
    """Raise InvalidRequestError where a job cannot be divided like that."""
    width, height = params.size
    grid = spec.grid(params.num_frames, height, width)
    tokens = spec.transformer.num_tokens(grid)
    if tokens % parallel.ulysses:
        asked = f"{params.num_frames} frames of {width}x{height} are {tokens} tokens"
        problem = f"which --ulysses {parallel.ulysses} does not divide"
        raise InvalidRequestError(f"{asked}, {problem}: ask for another size", "size")
    if parallel.cfg > 1 and not params.guided:
        problem = f"guidance_scale {params.guidance_scale:g} runs one prompt alone"
        raise InvalidRequestError(
            f"{problem}, but --cfg-parallel {parallel.cfg} divides two: ask for more than 1",
            "guidance_scale",
        )
    if params.vae_tiles and parallel.num_ranks > 1:
        problem = "vae_tiles is for one rank: several decode columns of the picture each"
        raise InvalidRequestError(f"{problem}, which takes less memory, too", "vae_tiles")
    if grid[2] < parallel.num_ranks:
        problem = f"a width of {width} is {grid[2]} latents, too few for {parallel.num_ranks} ranks"
        raise InvalidRequestError(f"{problem}: ask for another size", "size")
