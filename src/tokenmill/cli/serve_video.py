"""tokenmill serve --task video, and its worker process."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill import console
from tokenmill.cli.serve_rank import TEXT_SERVER_ONLY
from tokenmill.cli.video import DEFAULTS
from tokenmill.core.config import ModelConfig, PoolConfig, ServerConfig
from tokenmill.core.installation import install_command
from tokenmill.core.types import TokenmillError
from tokenmill.core.video import VideoParams, VideoServerConfig
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.settings import (
    POOL,
    SERVER,
    VIDEO,
    VIDEO_PARALLEL,
    Settings,
    SettingsError,
    only,
    settings_of,
    without,
)
from tokenmill.settings.shared import VideoModel

if TYPE_CHECKING:
    from tokenmill.core.requests import Engine
    from tokenmill.video.pipeline import Pipeline
    from tokenmill.workers.messages import ModelFacts

HANG_TIMEOUT_S = 600.0  # a step of a large video takes a minute on a slow GPU
# What all videos of a server have: its operator says how fast and how exact they are.
SERVED_JOB = only(VIDEO, "step-cache", "attention-dtype")
OFFLOAD = only(VideoModel, "offload")
VIDEO_SETTINGS = (*settings_of(VideoServerConfig), *SERVED_JOB, *OFFLOAD, *VIDEO_PARALLEL)
VIDEO_ONLY = tuple(setting.key for setting in VIDEO_SETTINGS)
VIDEO_MODEL = without(VideoModel, "weights-seed")
WORKER_SETTINGS = (
    *VIDEO_MODEL,
    *VIDEO_PARALLEL,
    *only(VIDEO, "attention-dtype"),
    *only(SERVER, "log-level"),
)
_KNOWN = (*SERVER, *POOL, *VIDEO_SETTINGS, *VIDEO_MODEL)
_TAKEN = {s.key for s in _KNOWN} - TEXT_SERVER_ONLY | {"task"}


def is_video_model(model: str) -> bool:
    return (Path(model).expanduser() / "model_index.json").is_file()


def serve_video(settings: Settings, config: ServerConfig) -> None:
    """Serve OpenAI's Videos API for the model that the settings name."""
    from tokenmill.api.videos.video_server import serve_videos
    from tokenmill.video.video_files import can_write_mp4

    for key in sorted(set(settings.values) - _TAKEN):
        raise SettingsError(f"--{key} has no effect with --task video: leave it out")
    if not can_write_mp4():
        raise TokenmillError(f"videos are mp4 files, which need PyAV: {install_command('video')}")
    model = settings.values.get("model", DEFAULTS["model"])
    path = Path(model).expanduser()
    name = config.served_model_name or (path.resolve().name if path.exists() else model)
    given = settings | {"model": model}
    logger = logging.getLogger(__name__)
    job = settings.build(VideoParams)

    def on_listening(url: str, told: ModelFacts) -> None:
        facts = told.about
        noise = "; its weights are random: videos are noise" if facts["tokenizer"] is None else ""
        flags = " and ".join(job.approximations)
        loose = f"; videos are not exact, by {flags}" if flags else ""
        served = f"{name} ({facts['dtype']} on {facts['device']})"
        logger.info(f"{served} is served at {url}/v1/videos{noise}{loose}; {url}/docs describes it")
        logger.info(f"dashboard: {url}/dashboard")

    folder = settings.get("video-dir")
    latents = None if folder is None else str(Path(folder) / "latents")
    pool, videos = _pool(given), settings.build(VideoServerConfig, job=job, latent_dir=latents)
    num_ranks = settings.build(VideoParallel).num_ranks
    serve_videos(_worker_command(given), config, videos, name, on_listening, pool, num_ranks)


def _pool(settings: Settings) -> PoolConfig:
    """The workers; those of several ranks start these themselves, on their machine."""
    device, share = settings.get("device"), settings.get("share-gpus")
    pool = settings.build(
        PoolConfig, device=device, share_gpus=share, hang_timeout_s=HANG_TIMEOUT_S
    )
    if settings.build(VideoParallel).num_ranks == 1:
        return pool
    if pool.placement == "ray" or pool.ray_address is not None:
        raise SettingsError("--placement ray: a video worker has its ranks on one machine")
    return pool


def _worker_command(settings: Settings) -> list[str]:
    # -P: a folder named tokenmill in the working directory is not the package.
    command = [sys.executable, "-P", "-m", "tokenmill", "worker-process", "--task=video"]
    return [*command, *settings.flags(WORKER_SETTINGS)]


def load_video_worker(settings: Settings) -> tuple[Engine, ModelFacts]:
    """The engine of a worker, and what the API has to know of it."""
    from tokenmill.video.preview import frame_picture, latents_picture
    from tokenmill.video.video_engine import VideoEngine
    from tokenmill.video.video_files import mp4_bytes
    from tokenmill.video.video_ranks import LeadingVideoEngine
    from tokenmill.video.video_task_engine import VideoTaskEngine
    from tokenmill.workers.messages import ModelFacts

    pipeline = _load(settings)
    own = VideoEngine(pipeline)
    engine = own if pipeline.group is None else LeadingVideoEngine(own, pipeline.group)
    worker = VideoTaskEngine(engine, mp4_bytes, frame_picture, lambda: latents_picture(own))
    facts = {
        "spec": asdict(pipeline.spec),
        "parallel": asdict(pipeline.parallel),
        "tokenizer": None if pipeline.tokenizer is None else str(pipeline.tokenizer),
        "dtype": pipeline.dtype,
        "device": pipeline.device.type,
    }
    return worker, ModelFacts(about=facts)


def _load(settings: Settings) -> Pipeline:
    from tokenmill.video.pipeline import choose_device, open_pipeline
    from tokenmill.video.video_job import check_attention
    from tokenmill.video.video_ranks import load_ranks

    config, parallel = settings.build(ModelConfig), settings.build(VideoParallel)
    check_attention(settings.build(VideoParams), choose_device(config))
    checkpoint = open_pipeline(config)
    with console.progress("Loading weights", size_in_bytes=True) as loaded:
        return load_ranks(checkpoint, config, parallel, settings.get("offload"), loaded)
