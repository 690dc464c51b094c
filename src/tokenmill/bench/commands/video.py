"""tokenmill bench video: the time of a video and of its parts, beside their least time."""

from __future__ import annotations

import os
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.options import GpuPrice, VideoRuns
from tokenmill.bench.roofline import BYTES, PeakRates
from tokenmill.core.config import ModelConfig
from tokenmill.core.cost import usd_of
from tokenmill.core.specs.wan import TEXT_TOKENS, WanSpec
from tokenmill.core.video import NEGATIVE_PROMPT, VideoParams, byte_token_ids
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.settings import VIDEO, VIDEO_PARALLEL, Settings, without
from tokenmill.settings.shared import JsonOption, VideoModel

if TYPE_CHECKING:
    from tokenmill.core.requests import Request
    from tokenmill.video.measure import VideoTimes
    from tokenmill.video.pipeline import Pipeline

PANELS = {
    "Benchmark": (VideoRuns, GpuPrice, JsonOption),
    "Video": without(VIDEO, "fps", "latent"),
    "Model": VideoModel,
    "Parallelism": VIDEO_PARALLEL,
}
DEFAULTS = {"model": "wan2.2-t2v-a14b"}
PROMPT = "a red fox in snow"
# The share of attention's products that --attention-dtype rounds: queries by keys, or all.
ROUNDED_SHARE = {"auto": 0.0, "int8": 0.5, "int8-fp8": 1.0, "fp8": 1.0}


def video(settings: Settings) -> None:
    """Seconds of a video, of a step and of each part, beside the roofline, and its dollars.

    The settings are MLPerf's unless given. A first step that does not count
    warms up. With --measured-steps only so many denoising steps are run, and
    the others are taken to last as long; the report says so.

    tokenmill bench video --random-weights
    tokenmill bench video --random-weights --measured-steps 6 --dtype fp8
    tokenmill bench video --random-weights --model wan-tiny --size 64x64 --frames 9
    """
    from tokenmill.bench.ceiling import measure_machine, peak_memory_mib
    from tokenmill.video.pipeline import choose_device, open_pipeline
    from tokenmill.video.video_job import check_job
    from tokenmill.video.video_ranks import load_ranks

    config = settings.build(ModelConfig)
    checkpoint = open_pipeline(config)
    request = _request(settings, checkpoint.spec)
    parallel = settings.build(VideoParallel)
    check_job(request, checkpoint.spec, parallel, choose_device(config))
    with console.progress("Loading weights", size_in_bytes=True) as loaded:
        pipeline = load_ranks(checkpoint, config, parallel, settings.get("offload"), loaded)
    console.note("Measuring the machine")
    threads = config.num_threads or os.cpu_count() or 1
    machine = measure_machine(pipeline.spec.transformer, threads, pipeline.device.type)
    runs = _measure(settings, pipeline, request)
    report = {
        "benchmark": "video",
        "model": pipeline.name,
        "device": machine.name,
        "dtype": pipeline.dtype,
        "offload": settings.get("offload"),
        "cfg_parallel": parallel.cfg,
        "ulysses": parallel.ulysses,
        **_job(_params(request)),
        **_times(pipeline, request, machine, runs, settings.get("gpu-price")),
        "peak_memory_mib": peak_memory_mib(pipeline.device.type),
        "software": machine.software,
    }
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


def _request(settings: Settings, spec: WanSpec) -> Request:
    from tokenmill.core.requests import Request
    from tokenmill.core.tasks import Video

    vocab = spec.text.vocab_size
    negative = tuple(byte_token_ids(NEGATIVE_PROMPT, vocab))
    params = settings.build(VideoParams, negative_token_ids=negative)
    return Request("video", Video(byte_token_ids(PROMPT, vocab), params))


def _measure(settings: Settings, pipeline: Pipeline, request: Request) -> list[VideoTimes]:
    """Videos of seeds one after the other, once warm."""
    from tokenmill.video.video_ranks import measure_ranks

    console.note("Warming up: one step and a decode")
    measure_ranks(pipeline, request, 1, _tell)
    console.note("Measuring")
    params, runs = _params(request), []
    for number in range(settings.get("num-videos")):
        other = replace(params, seed=params.seed + number)
        own = request.with_task(params=other)
        runs.append(measure_ranks(pipeline, own, settings.get("measured-steps"), _tell))
    return runs


def _tell(what: str, seconds: float) -> None:
    """A run that is cut off has told what it measured so far."""
    console.note(f"  {what}: {seconds:.3f} s")


def _times(
    pipeline: Pipeline, request: Request, machine: PeakRates, runs: list[VideoTimes], price: float
) -> dict[str, Any]:
    """The mean of the videos' parts, the median of their steps, and dollars."""
    steps = [seconds for run in runs for seconds in run.steps_s]
    names = runs[0].parts_s
    parts = {name: sum(run.parts_s[name] for run in runs) / len(runs) for name in names}
    return {
        "num_videos": len(runs),
        "measured_steps": len(steps) // len(runs),
        "whole_videos": all(run.whole for run in runs),
        **figures(
            *(pipeline.spec, request, pipeline.dtype, machine, parts),
            pipeline.parallel.num_ranks,
        ),
        "s_per_step": round(median(steps), 4),
        "usd_per_video": round(usd_of(sum(parts.values()), price), 6),
        "usd_per_hour": price,
    }


def _job(params: VideoParams) -> dict[str, Any]:
    width, height = params.size
    return {
        "size": f"{width}x{height}",
        "num_frames": params.num_frames,
        "num_steps": params.num_steps,
        "branches": 1 + params.guided,
        "schedule": params.schedule,
        "step_cache": params.step_cache,
        "attention_dtype": params.attention_dtype,
        "vae_tiles": params.vae_tiles,
        "exact": not params.approximations,
    }


def figures(
    spec: WanSpec,
    request: Request,
    dtype: str,
    machine: PeakRates,
    parts: dict[str, float],
    num_ranks: int = 1,
) -> dict[str, Any]:
    """Seconds and shares of the parts, beside their roofline; ranks divide all but the text."""
    total, least = sum(parts.values()), least_seconds(spec, request, dtype, machine)
    least |= {name: least[name] / num_ranks for name in ("denoise", "decode")}
    params = _params(request)
    return {
        "s_per_video": round(total, 3),
        "videos_per_hour": round(3600 / total, 3),
        "parts_s": {name: round(seconds, 4) for name, seconds in parts.items()},
        "parts_share": {name: round(seconds / total, 4) for name, seconds in parts.items()},
        "least_s": {name: round(seconds, 4) for name, seconds in least.items()},
        "share_of_ceiling": round(sum(least.values()) / total, 4),
        "tflop_s": round(_flops(spec, params) / parts["denoise"] / 1e12, 6),
        "gemm_tflop_s": {name: round(r / 1e12, 3) for name, r in machine.gemm_flops.items()},
    }


def _flops(spec: WanSpec, params: VideoParams) -> int:
    """Of all denoising steps."""
    width, height = params.size
    grid = spec.grid(params.num_frames, height, width)
    return params.num_steps * spec.step_flops(grid, 1 + params.guided)


def _params(request: Request) -> VideoParams:
    params: VideoParams = request.task.params
    return params


def least_seconds(
    spec: WanSpec, request: Request, dtype: str, machine: PeakRates
) -> dict[str, float]:
    """The roofline of each part: arithmetic at the best measured rate, or reading the weights.

    fp8 is the type of the linears; attention that is rounded is counted at the rate of fp8 as far
    as it is, and all else at the rate of bf16 on a GPU, of fp32 on CPU.
    """
    params = _params(request)
    width, height = params.size
    grid, branches = spec.grid(params.num_frames, height, width), 1 + params.guided
    prompts = [len(request.task.prompt_token_ids), len(params.negative_token_ids)][:branches]
    tokens, model = spec.transformer.num_tokens(grid), spec.transformer
    plain = machine.flops_per_s("bf16" if "bf16" in machine.gemm_flops else "fp32")
    arithmetic = branches * (
        model.linear_flops(tokens) / machine.flops_per_s(dtype)
        + model.attention_flops(tokens) * _attention_cost(params, plain, machine)
    )
    reading = model.num_block_params() * BYTES[dtype] / machine.read_bytes_per_s
    return {
        "text": sum(spec.text.flops(min(length, TEXT_TOKENS)) for length in prompts) / plain,
        "denoise": params.num_steps * max(arithmetic, reading),
        "decode": spec.vae.decode_flops(grid) / plain,
    }


def _attention_cost(params: VideoParams, plain: float, machine: PeakRates) -> float:
    """Seconds per FLOP; int8 and fp8 products have the same peak on a GPU."""
    rounded = ROUNDED_SHARE[params.attention_dtype]
    return rounded / machine.gemm_flops.get("fp8", plain) + (1 - rounded) / plain


def _print(report: dict[str, Any]) -> None:
    out = console.out.print
    rates = ", ".join(f"{name} {rate:,.2f}" for name, rate in report["gemm_tflop_s"].items())
    out(f"{report['model']} in {report['dtype']}; {report['device']}: GEMM {rates} TFLOP/s")
    asked = f"{report['num_frames']} frames of {report['size']}, {report['num_steps']} steps"
    if not report["whole_videos"]:
        asked += f", of which {report['measured_steps']} were run and the others taken as long"
    loose = [key for key in ("step_cache", "vae_tiles") if report[key]]
    loose += ["attention_dtype"] if report["attention_dtype"] != "auto" else []
    flags = " and ".join("--" + key.replace("_", "-") for key in loose)
    num_ranks = report["cfg_parallel"] * report["ulysses"]
    out(
        asked
        + (f"; not exact, by {flags}" if loose else "")
        + (f"; on {num_ranks} ranks" if num_ranks > 1 else "")
    )
    out(
        f"{report['s_per_video']:,.2f} s a video, {report['s_per_step']:.3f} s a step, "
        f"{report['tflop_s']:,.2f} TFLOP/s, {report['share_of_ceiling']:.0%} of its ceiling"
    )
    for name, seconds in report["parts_s"].items():
        least = report["least_s"].get(name)
        beside = "" if least is None else f", at least {least:,.3f} s"
        out(f"  {name:8s} {seconds:10,.3f} s  {report['parts_share'][name]:6.1%}{beside}")
    price = f"${report['usd_per_video']:,.4f} a video at ${report['usd_per_hour']:g} an hour"
    out(price + " (--gpu-price)")


COMMANDS = (BenchCommand("video", video, PANELS, DEFAULTS),)
