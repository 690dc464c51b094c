"""tokenmill video."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill import console
from tokenmill.core.config import ModelConfig
from tokenmill.core.types import FinishReason, Request, RequestOutput, TokenmillError
from tokenmill.core.video import NEGATIVE_PROMPT, Video, VideoParams
from tokenmill.settings import SETTINGS, VIDEO, Settings, SettingsError, video_model
from tokenmill.settings.options import command

if TYPE_CHECKING:
    from tokenmill.video.pipeline import Pipeline

DEFAULTS = {"model": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "seed": VideoParams().seed}
SEED = replace(SETTINGS["seed"], help="Same seed, same pixels.")
PANELS = {
    "Output": (SETTINGS["out"], SETTINGS["json"]),
    "Video": (*VIDEO, SETTINGS["negative-prompt"], SEED),
    "Model": video_model(),
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
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
    tokenmill video "noise" --random-weights --model wan-tiny --size 64x64 --frames 33
    """
    from tokenmill.video.video_files import check_target, write_video

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise SettingsError("PROMPT is empty: say what the video is to show")
    target = Path(settings.get("out")).expanduser()
    check_target(target)
    pipeline = load(settings)
    params = settings.build(
        VideoParams,
        seed=settings.get("seed"),
        negative_token_ids=tuple(
            prompt_ids(pipeline, settings.get("negative-prompt") or NEGATIVE_PROMPT)
        ),
    )
    made = make(pipeline, Request("video", prompt_ids(pipeline, text), video=params))
    write_video(made, target)
    report = {"file": str(target), **summary(made, params, pipeline)}
    if settings.get("json"):
        console.print_json(report)
    else:
        console.out.print(str(target), markup=False)
    console.note(sentence(report))


def load(settings: Settings) -> Pipeline:
    """The model of the settings, with a bar."""
    from tokenmill.video.pipeline import load_pipeline

    config = settings.build(ModelConfig)
    with console.progress("Loading weights", size_in_bytes=True) as loaded:
        pipeline = load_pipeline(config, settings.get("offload"), loaded)
    if pipeline.tokenizer is None:
        console.note(f"{pipeline.name}: the video will be noise, whatever the prompt says")
    return pipeline


def prompt_ids(pipeline: Pipeline, text: str) -> list[int]:
    """Token ids of a prompt; models with random weights, which have no tokenizer, get its bytes."""
    from tokenmill.core.specs.wan import TEXT_TOKENS
    from tokenmill.core.video import byte_token_ids, clean_prompt
    from tokenmill.text.tokenizer import load_tokenizer

    if pipeline.tokenizer is None:
        return byte_token_ids(text, pipeline.spec.text.vocab_size)
    ids = load_tokenizer(pipeline.tokenizer).encode(clean_prompt(text))
    return ids if len(ids) <= TEXT_TOKENS else [*ids[: TEXT_TOKENS - 1], ids[-1]]


def make(pipeline: Pipeline, request: Request) -> Video:
    """Run one job to its end, with a bar of its steps."""
    from tokenmill.video.video_engine import VideoEngine

    engine = VideoEngine(pipeline)
    engine.submit(request)
    with console.progress("Denoising and decoding") as update:
        while engine.has_work():
            for output in engine.step():
                if output.finish_reason is not None:
                    return _result(output)
                update(round(1000 * (output.progress or 0.0)), 1000)
    raise AssertionError("a job ends in one terminal output")


def _result(output: RequestOutput) -> Video:
    if output.finish_reason is not FinishReason.STOP or output.video is None:
        raise TokenmillError(output.error or f"the job ended: {output.finish_reason}")
    return output.video


def summary(made: Video, params: VideoParams, pipeline: Pipeline) -> dict[str, object]:
    """What was made, and the seconds of its parts."""
    return {
        "model": pipeline.name,
        "dtype": pipeline.dtype,
        "size": f"{made.width}x{made.height}",
        "num_frames": made.num_frames,
        "fps": made.fps,
        "num_steps": params.num_steps,
        "schedule": params.schedule,
        "seed": params.seed,
        "step_cache": params.step_cache,
        "seconds": {part: round(seconds, 3) for part, seconds in made.seconds.items()},
    }


def sentence(report: dict[str, object]) -> str:
    """One line for people."""
    seconds = report["seconds"]
    assert isinstance(seconds, dict)
    parts = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items() if value >= 0.05)
    exact = "; steps were skipped, not exact" if report["step_cache"] else ""
    return (
        f"{report['num_frames']} frames of {report['size']}, {report['num_steps']} steps, "
        f"{sum(seconds.values()):.1f} s ({parts}){exact}"
    )
