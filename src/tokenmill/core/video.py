"""Videos as requests: what a job asks for, and what a server of videos holds of them."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Literal

from tokenmill.core.flags import IMAGE_SIZE, SIZE, count, number, setting

# The settings of MLPerf Inference v6.0 for Wan 2.2 T2V A14B are the defaults below.
NEGATIVE_PROMPT = (
    "vivid colors, overexposed, static, blurry details, subtitles, style, work of art, painting, "
    "picture, still, overall grayish, worst quality, low quality, JPEG artifacts, ugly, deformed, "
    "extra fingers, poorly drawn hands, poorly drawn face, deformed, disfigured, deformed limbs, "
    "fused fingers, static image, cluttered background, three legs, many people in the "
    "background, walking backwards"
)


@dataclass(frozen=True, slots=True)
class VideoParams:
    """What a video job asks for beside its prompt."""

    size: tuple[int, int] = setting((1280, 720), "Width and height of the video.", IMAGE_SIZE)
    num_frames: int = setting(81, "Frames of the video; 4 n + 1.", count(1), flag="frames")
    fps: int = setting(16, "Frames per second.", count(1, 240))
    num_steps: int = setting(20, "Denoising steps.", count(1, 1000), flag="steps")
    guidance_scale: float = setting(
        4.0,
        "Strength of the prompt against the negative one; up to 1 the latter is not used.",
        number(0, 100),
    )
    guidance_scale_2: float = setting(
        3.0, "The same in the steps of the low-noise expert.", number(0, 100)
    )
    schedule: Literal["mlperf", "diffusers"] = setting(
        "mlperf", "Noise levels of diffusers 0.35, which MLPerf pins, or of 0.42."
    )
    flow_shift: float | None = setting(
        None, "Shift of the levels towards noise; the model's own.", number(0.01, math.inf)
    )
    boundary_ratio: float | None = setting(
        None, "Noise level below which the second expert works; the model's own.", number(0, 1)
    )
    latent: str | None = setting(
        None, "Tensor file (.pt) of the noise to start from, instead of --seed."
    )
    step_cache: float = setting(
        0.0,
        "Skip steps whose change is estimated below this: faster, not exact; 0 is off.",
        number(0, 10),
    )
    attention_dtype: Literal["auto", "int8", "int8-fp8", "fp8"] = setting(
        "auto",
        "Round queries and keys of self-attention to int8, with -fp8 values to fp8, or all to fp8: "
        "faster, not exact.",
    )
    vae_tiles: bool = setting(
        False, "Decode frames in tiles of 256 pixels: less memory, blended seams."
    )
    seed: int = 42  # of the noise
    negative_token_ids: tuple[int, ...] = ()

    @property
    def rounds_attention(self) -> bool:
        return self.attention_dtype != "auto"

    @property
    def approximations(self) -> list[str]:
        named = {
            "--step-cache": self.step_cache > 0.0,
            "--vae-tiles": self.vae_tiles,
            "--attention-dtype": self.rounds_attention,
        }
        return [flag for flag, is_set in named.items() if is_set]

    @property
    def guided(self) -> bool:
        """True where each step runs both prompts."""
        return self.guidance_scale > 1.0


@dataclass(frozen=True, slots=True)
class VideoServerConfig:
    video_dir: str | None = setting(
        None, "Folder of video jobs and their files (~/.cache/tokenmill/videos unless given)."
    )
    video_storage_bytes: int = setting(
        20 * 2**30,
        "Most disk space of finished videos; the oldest ones are removed first.",
        SIZE,
        flag="video-storage",
    )
    max_video_jobs: int = 256  # that wait or are being made
    max_video_megapixels: int = 300  # width times height times frames
    latent_dir: str | None = None  # of the files that calls may name in latent_path
    job: VideoParams = VideoParams()  # what a job is unless its call says otherwise


def clean_prompt(text: str) -> str:
    """As the models were trained: HTML entities resolved, all white space one blank."""
    return " ".join(html.unescape(html.unescape(text)).split())


def byte_token_ids(text: str, vocab_size: int) -> list[int]:
    """Ids for models with random weights, which have no tokenizer: the bytes of the text."""
    return [byte % vocab_size for byte in clean_prompt(text).encode()] or [0]
