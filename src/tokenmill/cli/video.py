"""tokenmill video."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill import console
from tokenmill.core.config import ModelConfig
from tokenmill.core.flags import INTEGER, setting
from tokenmill.core.types import TokenmillError
from tokenmill.core.video import NEGATIVE_PROMPT, VideoParams
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.settings import VIDEO, VIDEO_PARALLEL, Settings, SettingsError
from tokenmill.settings.options import command
from tokenmill.settings.shared import JsonOption, VideoModel

if TYPE_CHECKING:
    from tokenmill.core.requests import Request, RequestOutput
    from tokenmill.core.tasks import VideoFrames
    from tokenmill.models.checkpoints.diffusers_folder import WanCheckpoint
    from tokenmill.video.pipeline import Pipeline

DEFAULTS = {"model": VideoModel().model}


@dataclass(frozen=True, slots=True)
class OutOption:
    out: str = setting("video.mp4", "File to write (.mp4), or a folder for PNG frames.")


@dataclass(frozen=True, slots=True)
class VideoJobOptions:
    negative_prompt: str | None = setting(
        None, "What the video is not to be (MLPerf's unless given)."
    )
    seed: int = setting(VideoParams().seed, "Same seed, same pixels.", INTEGER)


PANELS = {
    "Output": (OutOption, JsonOption),
    "Video": (*VIDEO, VideoJobOptions),
    "Model": VideoModel,
    "Parallelism": VIDEO_PARALLEL,
}


def register(app: typer.Typer) -> None:
    command(app, "video", PANELS, defaults=DEFAULTS)(video)


def video(
    settings: Settings,
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="What to show; - reads it from stdin.")
    ],
) -> None:
    """Make a video of a text, in this process.

    The defaults are MLPerf's settings for Wan 2.2 T2V A14B.

    tokenmill video "a red fox in snow" --out fox.mp4
    tokenmill video "a red fox in snow" --size 832x480 --seed 7 --offload
    tokenmill video "a red fox in snow" --cfg-parallel 2 --ulysses 4
    tokenmill video "noise" --random-weights --model wan-tiny --size 64x64 --frames 33
    """
    from tokenmill.video.pipeline import choose_device, open_pipeline
    from tokenmill.video.video_files import check_target, write_video
    from tokenmill.video.video_job import check_job

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise SettingsError("PROMPT is empty: say what the video is to show")
    target = Path(settings.get("out")).expanduser()
    check_target(target)
    config = settings.build(ModelConfig)
    checkpoint = open_pipeline(config)
    request = _request(settings, checkpoint, text)
    parallel, device = settings.build(VideoParallel), choose_device(config)
    check_job(request, checkpoint.spec, parallel, device)
    pipeline = _load(settings, checkpoint, config)
    made = make(pipeline, request)
    write_video(made, target)
    report = {"file": str(target), **summary(made, request.task.params, pipeline)}
    if settings.get("json"):
        console.print_json(report, settings.get("json"))
    else:
        console.out.print(str(target), markup=False)
    console.note(sentence(report))


def _request(settings: Settings, checkpoint: WanCheckpoint, text: str) -> Request:
    from tokenmill.core.requests import Request
    from tokenmill.core.tasks import Video

    negative = prompt_ids(checkpoint, settings.get("negative-prompt") or NEGATIVE_PROMPT)
    params = settings.build(
        VideoParams, seed=settings.get("seed"), negative_token_ids=tuple(negative)
    )
    return Request("video", Video(prompt_ids(checkpoint, text), params))


def _load(settings: Settings, checkpoint: WanCheckpoint, config: ModelConfig) -> Pipeline:
    from tokenmill.video.video_ranks import load_ranks

    if checkpoint.tokenizer is None:
        console.note(f"{checkpoint.name}: the video will be noise, whatever the prompt says")
    parallel = settings.build(VideoParallel)
    with console.progress("Loading weights", size_in_bytes=True) as loaded:
        return load_ranks(checkpoint, config, parallel, settings.get("offload"), loaded)


def prompt_ids(checkpoint: WanCheckpoint, text: str) -> list[int]:
    from tokenmill.text.video_prompts import video_prompt_ids

    vocab_size = checkpoint.spec.text.vocab_size
    return video_prompt_ids(checkpoint.tokenizer, vocab_size, [text])[0]


def make(pipeline: Pipeline, request: Request) -> VideoFrames:
    """Run one job to its end, with a bar of its steps."""
    from tokenmill.core.tasks import TaskProgress
    from tokenmill.video.video_ranks import make_engine

    engine = make_engine(pipeline)
    engine.submit(request)
    with console.progress("Denoising and decoding") as update:
        while engine.has_work():
            for output in engine.step():
                if isinstance(output.delta, TaskProgress):
                    update(round(1000 * output.delta.share), 1000)
                if output.finish_reason is not None:
                    return _result(output)
    raise AssertionError("a job ends in one terminal output")


def _result(output: RequestOutput) -> VideoFrames:
    from tokenmill.core.tasks import VideoFrames

    if not isinstance(output.delta, VideoFrames):
        raise TokenmillError(output.error or f"the job ended: {output.finish_reason}")
    return output.delta


def summary(made: VideoFrames, params: VideoParams, pipeline: Pipeline) -> dict[str, object]:
    return {
        "model": pipeline.name,
        "dtype": pipeline.dtype,
        "offload": pipeline.experts.offload,
        "cfg_parallel": pipeline.parallel.cfg,
        "ulysses": pipeline.parallel.ulysses,
        "size": f"{made.width}x{made.height}",
        "num_frames": made.num_frames,
        "fps": made.fps,
        "num_steps": params.num_steps,
        "schedule": params.schedule,
        "seed": params.seed,
        "step_cache": params.step_cache,
        "attention_dtype": params.attention_dtype,
        "exact": not params.approximations,
        "num_skipped": made.num_skipped,
        "seconds": {part: round(seconds, 3) for part, seconds in made.seconds.items()},
    }


def sentence(report: dict[str, object]) -> str:
    seconds = report["seconds"]
    assert isinstance(seconds, dict)
    always = {"load"} if report["offload"] else set[str]()  # what --offload costs
    parts = ", ".join(
        f"{part} {value:.1f}" for part, value in seconds.items() if part in always or value >= 0.05
    )
    skipped = report["num_skipped"]
    exact = f"; {skipped} steps were skipped, not exact" if skipped else ""
    return (
        f"{report['num_frames']} frames of {report['size']}, {report['num_steps']} steps, "
        f"{sum(seconds.values()):.1f} s ({parts}){exact}"
    )
