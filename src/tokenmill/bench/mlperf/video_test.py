"""One LoadGen test of the video model in this process: Wan 2.2 T2V A14B, Offline and SingleStream.

Every query is one video by MLPerf's settings; a quick run may be smaller. Videos of an accuracy run
are files under the names that VBench, which scores them, looks for.
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.bench.client.datasets import words
from tokenmill.bench.mlperf import loadgen
from tokenmill.bench.mlperf import runs as bench
from tokenmill.bench.mlperf.compliance import NAMES
from tokenmill.bench.mlperf.presets import WAN
from tokenmill.bench.mlperf.submission import VIDEOS
from tokenmill.bench.report.mlperf_report import EVENTS, write_times
from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.cost import usd_of
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import Engine, FinishReason, Request, RequestOutput
from tokenmill.core.video import NEGATIVE_PROMPT, Video, VideoParams
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    SCHEDULER,
    SETTINGS,
    VIDEO_PARALLEL,
    Setting,
    Settings,
    SettingsError,
    video_model,
)

if TYPE_CHECKING:
    from tokenmill.models.checkpoints.diffusers_folder import WanCheckpoint
    from tokenmill.video.pipeline import Pipeline

SHAPE = ("size", "frames", "steps")  # what a quick run may have smaller
LOOSE = ("step-cache", "vae-tiles")  # what is not exact
KEYS = (*SHAPE, "latent", *LOOSE, "attention-dtype", "offload", "gpu-price")
PANEL: tuple[Setting, ...] = (*(SETTINGS[key] for key in KEYS), *VIDEO_PARALLEL)
MODES = ("performance", "accuracy", "submission", "TEST04")
NOT_HERE = (
    *("length-scale", "compliance-dataset"),
    *("api", "tokenizer", "ignore-eos", "extra-body"),  # of a language model's server
)
OF_ENGINE = (*LOOSE, "attention-dtype", "offload", *(s.key for s in VIDEO_PARALLEL))
# The defaults of a quick run on a CPU, where a video of full size would take days.
TINY = {"model": "wan-tiny", "random-weights": True}
TINY_SHAPE = VideoParams(size=(64, 64), num_frames=9, num_steps=4)
WARM_UP_STEPS = 2  # one of each expert
LONGEST_NAME = 240  # bytes of a prompt that names a file
SYNTHETIC = "Prompts are synthetic: random words, not the benchmark's 248 prompts of VBench."
WEIGHTS = "Weights are random: the videos are noise."
NOISE = "Noise is that of seed 42, not the benchmark's: give --latent fixed_latent.pt."
SCORED_BY = (
    "run_evaluation.py of mlcommons/inference (text_to_video/wan-2.2-t2v-a14b) by VBench, with "
    "--videos-path"
)


@dataclass(frozen=True, slots=True)
class VideoSample:
    """One entry of the query sample library."""

    request: Request
    name: str  # of its video's file, without its ending


def check_settings(settings: Settings) -> None:
    """What the video benchmark does not have is refused."""
    if settings.get("scenario") not in ("Offline", "SingleStream"):
        raise SettingsError(f"--benchmark {WAN.name} has --scenario Offline and SingleStream only")
    if settings.get("test-mode") not in MODES:
        raise SettingsError(f"--benchmark {WAN.name} has --test-mode {', '.join(MODES)} only")
    for key in OF_ENGINE if settings.get("url") else ():
        if key in settings:
            raise SettingsError(f"--{key} is for an engine of this process, not for --url")
    for key in NOT_HERE:
        if settings.values.get(key):
            raise SettingsError(f"--{key} does not go with --benchmark {WAN.name}")
    taken = {setting.key for setting in video_model()}
    for setting in (*MODEL, *CACHE, *SCHEDULER, *EXECUTION):
        if setting.key in settings and setting.key not in taken:
            problem = f"is for language models and does not go with --benchmark {WAN.name}"
            raise SettingsError(f"--{setting.key} {problem}")
    _check_shape(settings)
    if settings.get("test-mode") in ("accuracy", "submission") and "submission-dir" not in settings:
        raise SettingsError(
            f"--test-mode {settings.get('test-mode')} needs --submission-dir: the videos to score "
            "are written there"
        )


def _check_shape(settings: Settings) -> None:
    """The rules' videos, unless the run is quick, and exact ones in the closed division."""
    for key in SHAPE:
        if not settings.get("quick") and settings.get(key) != SETTINGS[key].default:
            raise SettingsError(f"--{key} other than MLPerf's is for a quick run: add --quick")
    for key in LOOSE:
        if settings.get(key) and settings.get("division") == "closed":
            problem = "is not exact, which the closed division does not allow: use --division open"
            raise SettingsError(f"--{key} {problem}")


class VideoUnderTest(loadgen.SteppedSystem):
    """A video engine; with `keep` its videos are files there."""

    def __init__(
        self, engine: Engine, samples: Sequence[VideoSample], keep: Path | None = None
    ) -> None:
        super().__init__(engine)
        self._engine, self._samples, self._keep = engine, samples, keep
        self._open: dict[str, tuple[int, int, RequestTimes]] = {}

    def _submit(self, request_id: str, arrival: loadgen.Arrival) -> None:
        query_id, index, now_ns = arrival
        self._open[request_id] = query_id, index, RequestTimes(now_ns)
        request = self._samples[index].request
        self._engine.submit(replace(request, request_id=request_id, arrival_ns=now_ns))

    def _report(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is None:
                continue
            made = video_of(output)
            query_id, index, times = self._open.pop(output.request_id)
            data = self._data(index, made)
            times.record(time.monotonic_ns(), 1)
            self.times.append(times)
            complete = self._library.QuerySamplesComplete
            loadgen.respond(self._library, complete, [(query_id, data, 1)])

    def _data(self, index: int, made: Video) -> array[int]:
        """All pixels; in an accuracy run, whose log would be 100 GB of them, file and hash."""
        if self._keep is None:
            return array("B", made.data)
        from tokenmill.video.video_files import can_write_mp4, write_video

        name = self._samples[index].name + ".mp4" * can_write_mp4()
        write_video(made, self._keep / name)
        found = {"file": name, "sha256": sha256(made.data).hexdigest()}
        return array("B", json.dumps(found).encode())


def video_of(output: RequestOutput) -> Video:
    """The video of a job's end; BenchError where it has none."""
    if output.finish_reason is not FinishReason.STOP or output.video is None:
        reason = output.error or output.finish_reason
        raise BenchError(f"{output.request_id} was not answered: {reason}")
    return output.video


def child_report(settings: Settings, run: bench.Run) -> MlperfReport:
    """Run the test; its logs are in --submission-dir afterwards, and videos below them."""
    from tokenmill.video.pipeline import choose_device, open_pipeline
    from tokenmill.video.video_job import check_job
    from tokenmill.video.video_ranks import load_ranks, make_engine

    config, params = job_of(settings)
    checkpoint = open_pipeline(config)
    samples = make_samples(settings, run, checkpoint, params)
    parallel = settings.build(VideoParallel)
    check_job(samples[0].request, checkpoint.spec, parallel, choose_device(config))
    pipeline = load_ranks(checkpoint, config, parallel, settings.get("offload"))
    engine = make_engine(pipeline)
    warm_up(engine, samples[0].request)
    mode, folder = settings.get("test-mode"), Path(settings.get("submission-dir"))
    keep = folder / VIDEOS if mode == "accuracy" else None
    if keep is not None:
        keep.mkdir()
    sut = VideoUnderTest(engine, samples, keep)
    test = mode if mode in NAMES else ""
    bench.execute(sut, len(samples), run, folder, mode == "accuracy", test)
    write_times(folder / EVENTS, sut.times)
    facts = _facts(settings, run, pipeline, params, len(samples))
    if mode == "accuracy":
        return facts | unscored(run, len(samples))
    values, errors = loadgen.read_detail(folder)
    report = bench.performance_report(run, values, errors, sut.times)
    report |= {"ttft_ms": {}, "tpot_ms": {}, "num_output_tokens": 0}
    return facts | report | price_of(run, report, settings.get("gpu-price"))


def job_of(settings: Settings) -> tuple[ModelConfig, VideoParams]:
    """Model and job: MLPerf's unless given, and tiny ones in a quick run on a CPU."""
    from tokenmill.video.pipeline import choose_device

    config = settings.build(ModelConfig, model=WAN.model)
    params = settings.build(VideoParams)
    if choose_device(config).type == "cuda" or "model" in settings:
        return config, params
    if not settings.get("quick"):
        raise BenchError(
            f"{WAN.name} takes days on a CPU: add --quick for a tiny pipeline of random weights, "
            "or give --model"
        )
    given = {
        key: settings.get(key) for key in settings.values if SETTINGS[key].owner is VideoParams
    }
    small = replace(TINY_SHAPE, **{SETTINGS[key].field: value for key, value in given.items()})
    return Settings(settings.values | TINY).build(ModelConfig), small


def make_samples(
    settings: Settings, run: bench.Run, checkpoint: WanCheckpoint, params: VideoParams
) -> list[VideoSample]:
    """The benchmark's prompts as jobs, all with the same noise and the same negative prompt."""
    from tokenmill.text.video_prompts import video_prompt_ids

    prompts = read_samples(settings, run)
    vocab_size = checkpoint.spec.text.vocab_size
    negative, *ids = video_prompt_ids(checkpoint.tokenizer, vocab_size, [NEGATIVE_PROMPT, *prompts])
    job = replace(params, negative_token_ids=tuple(negative))
    requests = (Request("", own, video=job) for own in ids)
    return [
        VideoSample(request, name)
        for request, name in zip(requests, file_names(prompts), strict=True)
    ]


def read_samples(settings: Settings, run: bench.Run) -> list[str]:
    """The prompts of a run, synthetic ones without --dataset."""
    if "dataset" not in settings:
        rng = random.Random(run.seeds["qsl_rng_seed"])
        count = run.quick_samples or run.preset.num_samples
        return [words("wan", number, rng.randint(4, 16)) for number in range(count)]
    path = Path(settings.get("dataset")).expanduser()
    found = read_prompts(path, as_files=settings.get("test-mode") == "accuracy")
    if run.quick_samples:
        return found[: run.quick_samples]
    if len(found) != run.preset.num_samples:
        raise BenchError(
            f"{path} has {len(found)} prompts, but {run.preset.name} has {run.preset.num_samples}; "
            "--quick runs on the prompts that there are"
        )
    return found


def read_prompts(path: Path, as_files: bool) -> list[str]:
    """The lines of a text file that are not empty; `as_files`: each is to name a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--dataset {path}: cannot be read as a text file: {error}") from None
    for number, line in enumerate(lines, 1):
        if as_files and ("/" in line or len(line.encode()) > LONGEST_NAME):
            problem = f"VBench names videos by their prompts: no / and {LONGEST_NAME} bytes at most"
            raise BenchError(f"--dataset {path}, line {number}: {problem}")
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise BenchError(f"--dataset {path}: there is no prompt in this file")
    return found


def file_names(prompts: Sequence[str]) -> list[str]:
    """VBench's names: the prompt, and the number of its video."""
    seen: Counter[str] = Counter()
    names = []
    for prompt in prompts:
        names.append(f"{prompt}-{seen[prompt]}")
        seen[prompt] += 1
    return names


def warm_up(engine: Engine, request: Request) -> None:
    """A video of two steps: kernels are compiled, and both experts have run."""
    assert request.video is not None
    few = replace(request.video, num_steps=min(WARM_UP_STEPS, request.video.num_steps))
    engine.submit(replace(request, request_id="warm-up", video=few))
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                video_of(output)


def price_of(run: bench.Run, report: MlperfReport, usd_per_hour: float) -> MlperfReport:
    """Seconds and dollars of a video: by the rate in Offline, by the mean latency of a stream."""
    if run.scenario == "Offline":
        rate = report["samples_per_s"]
        assert rate is not None
        seconds = 1 / rate
    else:
        seconds = report["latency_ms"]["mean"] / 1000
    return {
        "s_per_video": round(seconds, 4),
        "usd_per_video": round(usd_of(seconds, usd_per_hour), 8),
        "usd_per_hour": usd_per_hour,
    }


def _facts(
    settings: Settings, run: bench.Run, pipeline: Pipeline, params: VideoParams, num_samples: int
) -> MlperfReport:
    width, height = params.size
    return {
        "model": pipeline.name,
        "dtype": pipeline.dtype,
        "device": pipeline.device.type,
        "accelerator": _accelerators(pipeline),
        "num_samples": num_samples,
        "synthetic": "dataset" not in settings,
        "quick": run.quick,
        "video": {
            "size": f"{width}x{height}",
            "num_frames": params.num_frames,
            "num_steps": params.num_steps,
            "schedule": params.schedule,
            "cfg_parallel": pipeline.parallel.cfg,
            "ulysses": pipeline.parallel.ulysses,
        },
        "notices": notices(settings, run, params, random=pipeline.tokenizer is None),
    }


def _accelerators(pipeline: Pipeline) -> dict[str, str]:
    from tokenmill.bench.ceiling import accelerator

    found = accelerator(pipeline.device.type)
    if pipeline.device.type == "cuda":
        found["accelerators_per_node"] = str(pipeline.parallel.num_ranks)
    return found


def notices(settings: Settings, run: bench.Run, params: VideoParams, random: bool) -> list[str]:
    """Sentences that every output of a run carries."""
    found = []
    full = VideoParams()
    shape, wanted = _shape(params), _shape(full)
    if shape != wanted:
        found.append(f"Videos are scaled down: {shape} instead of MLPerf's {wanted}.")
    found += [WEIGHTS] * random + [SYNTHETIC] * ("dataset" not in settings)
    found += [NOISE] * (params.latent is None)
    loose = [f"--{key}" for key in LOOSE if settings.get(key)]
    if loose:
        found.append(f"Videos are not exact, by {' and '.join(loose)}.")
    return [*found, *bench.notices(run, False, 1.0)]


def _shape(params: VideoParams) -> str:
    width, height = params.size
    return f"{params.num_frames} frames of {width}x{height} in {params.num_steps} steps"


def unscored(run: bench.Run, num_videos: int) -> MlperfReport:
    """No score: VBench is not part of this package."""
    least = run.preset.accuracy_share * run.preset.accuracy["vbench_score"]
    reason = (
        f"{num_videos} videos are not scored here: vbench_score, which must be at least "
        f"{least:.4f}, is computed by {SCORED_BY}"
    )
    return {"accuracy": {"vbench_score": None}, "accuracy_gates": {}, "reasons": [reason]}
