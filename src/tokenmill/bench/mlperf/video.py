"""The video benchmark, Wan 2.2 T2V A14B: its samples for an engine and for a server.

Every query is one video by MLPerf's settings; a quick run may be smaller. Videos of an accuracy run
are files under the names that VBench, which scores them, looks for. A server gets one
POST /v1/videos/sync for each and answers with the whole mp4 file.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError

from tokenmill.bench.client.connections import call_once, route_url
from tokenmill.bench.client.datasets import words
from tokenmill.bench.client.records import Endpoint, error_text
from tokenmill.bench.mlperf.presets import INEXACT_VIDEOS, WAN
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.mlperf.submission import VIDEOS
from tokenmill.bench.mlperf.under_test import (
    BenchmarkTask,
    EngineUnderTest,
    Query,
    UrlUnderTest,
    target_of,
)
from tokenmill.bench.results.mlperf_reports import Fields
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.cost import usd_of
from tokenmill.core.requests import Engine, Request, RequestOutput
from tokenmill.core.tasks import Video, VideoFrames
from tokenmill.core.video import NEGATIVE_PROMPT, VideoParams
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.settings import Settings, settings_of

if TYPE_CHECKING:
    from tokenmill.models.checkpoints.diffusers_folder import WanCheckpoint

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
ROUTE, MODELS, SYNC = "/videos", "/models", "/videos/sync"


class VideoTask(BenchmarkTask):
    """What both systems have in common: prompts, files of an accuracy run, prices."""

    def __init__(
        self, settings: Settings, run: MlperfRun, mode: str, folder: Path, params: VideoParams
    ) -> None:
        self._settings, self._run, self._params = settings, run, params
        self._prompts = load_prompts(settings, run, mode)
        self.num_samples, self._names = len(self._prompts), file_names(self._prompts)
        self._keep = folder / VIDEOS if mode == "accuracy" else None
        if self._keep is not None:
            self._keep.mkdir()

    def _sample_facts(self, random_weights: bool = False) -> Fields:
        width, height = self._params.size
        own = notices(self._settings, self._params, random_weights)
        return {
            "num_samples": self.num_samples,
            "synthetic": "dataset" not in self._settings,
            "video": {
                "size": f"{width}x{height}",
                "num_frames": self._params.num_frames,
                "num_steps": self._params.num_steps,
                "schedule": self._params.schedule,
            },
            "notices": self._run.notices(own),
        }

    def figures(self, fields: Fields) -> Fields:
        return price_fields(self._run, fields, self._settings.get("gpu-price"))

    def score(self, folder: Path) -> Fields:
        """No score: VBench is not part of this package."""
        num_failed = self.sut.tally.num_failed if isinstance(self.sut, UrlUnderTest) else 0
        least = self._run.preset.accuracy_share * self._run.preset.accuracy["vbench_score"]
        reason = (
            f"{self.num_samples - num_failed} videos are not scored here: vbench_score, which must "
            f"be at least {least:.4f}, is computed by {SCORED_BY}"
        )
        return {"accuracy": {"vbench_score": None}, "accuracy_gates": {}, "reasons": [reason]}


class EngineVideo(VideoTask):
    def __init__(self, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
        from tokenmill.video.pipeline import choose_device, open_pipeline
        from tokenmill.video.video_job import check_job
        from tokenmill.video.video_ranks import load_ranks, make_engine

        config, params = job_of(settings)
        super().__init__(settings, run, mode, folder, params)
        checkpoint = open_pipeline(config)
        self._requests = make_requests(self._prompts, checkpoint, params)
        parallel = settings.build(VideoParallel)
        check_job(self._requests[0], checkpoint.spec, parallel, choose_device(config))
        self._pipeline = load_ranks(checkpoint, config, parallel, settings.get("offload"))
        engine = make_engine(self._pipeline)
        warm_up(engine, self._requests[0])
        self.sut = EngineUnderTest(engine, self)

    def request(self, name: str, query: Query) -> Request:
        now_ns = query.times.arrival_ns
        return replace(self._requests[query.sample], request_id=name, arrival_ns=now_ns)

    def take(self, query: Query, output: RequestOutput) -> tuple[int, bool]:
        if output.finish_reason is None:
            return 0, False
        query.answer = frames_of(output)
        return 1, True

    def data(self, query: Query) -> array[int]:
        """All pixels; in an accuracy run, whose log would be 100 GB of them, file and hash."""
        if self._keep is None:
            return array("B", query.answer.data)
        from tokenmill.video.video_files import can_write_mp4, write_video

        name = self._names[query.sample] + ".mp4" * can_write_mp4()
        write_video(query.answer, self._keep / name)
        return file_and_hash(name, query.answer.data)

    def facts(self) -> Fields:
        from tokenmill.bench.ceiling import accelerator

        pipeline = self._pipeline
        found = accelerator(pipeline.device.type)
        if pipeline.device.type == "cuda":
            found["accelerators_per_node"] = str(pipeline.parallel.num_ranks)
        facts = self._sample_facts(random_weights=pipeline.tokenizer is None)
        ranks = {"cfg_parallel": pipeline.parallel.cfg, "ulysses": pipeline.parallel.ulysses}
        return {
            "model": pipeline.name,
            "dtype": pipeline.dtype,
            "device": pipeline.device.type,
            "accelerator": found,
            **facts,
            "video": facts["video"] | ranks,
        }


def file_and_hash(name: str, data: bytes) -> array[int]:
    found = {"file": name, "sha256": sha256(data).hexdigest()}
    return array("B", json.dumps(found).encode())


def frames_of(output: RequestOutput) -> VideoFrames:
    """The video of a job's end; BenchError where it has none."""
    if not isinstance(output.delta, VideoFrames):
        reason = output.error or output.finish_reason
        raise BenchError(f"{output.request_id} was not answered: {reason}")
    return output.delta


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
    given = {s.field: settings.get(s.key) for s in settings_of(VideoParams) if s.key in settings}
    small = replace(TINY_SHAPE, **given)
    return (settings | TINY).build(ModelConfig), small


def make_requests(
    prompts: Sequence[str], checkpoint: WanCheckpoint, params: VideoParams
) -> list[Request]:
    """The benchmark's prompts as jobs, all with the same noise and the same negative prompt."""
    from tokenmill.text.video_prompts import video_prompt_ids

    vocab_size = checkpoint.spec.text.vocab_size
    negative, *ids = video_prompt_ids(checkpoint.tokenizer, vocab_size, [NEGATIVE_PROMPT, *prompts])
    job = replace(params, negative_token_ids=tuple(negative))
    return [Request("", Video(own, job)) for own in ids]


def load_prompts(settings: Settings, run: MlperfRun, mode: str) -> list[str]:
    """The prompts of a run, synthetic ones without --dataset."""
    if "dataset" not in settings:
        rng = random.Random(run.seeds["qsl_rng_seed"])
        count = run.quick_samples or run.preset.num_samples
        return [words("wan", number, rng.randint(4, 16)) for number in range(count)]
    path = Path(settings.get("dataset")).expanduser()
    found = read_prompts(path, as_files=mode == "accuracy")
    run.check_count(str(path), len(found), "prompts")
    return found[: run.quick_samples]


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
    task: Video = request.task
    few = replace(task.params, num_steps=min(WARM_UP_STEPS, task.params.num_steps))
    warm = Video(task.prompt_token_ids, few)
    engine.submit(replace(request, request_id="warm-up", task=warm))
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                frames_of(output)


def price_fields(run: MlperfRun, fields: Fields, usd_per_hour: float) -> Fields:
    """Seconds and dollars of a video: by the rate in Offline, by the mean latency of a stream."""
    if run.scenario == "Offline":
        seconds = 1 / fields["samples_per_s"]
    else:
        seconds = fields["latency_ms"]["mean"] / 1000
    return {
        "s_per_video": round(seconds, 4),
        "usd_per_video": round(usd_of(seconds, usd_per_hour), 8),
        "usd_per_hour": usd_per_hour,
    }


def notices(settings: Settings, params: VideoParams, random_weights: bool) -> list[str]:
    """Sentences about the samples that every output of a run carries."""
    shape, wanted = _shape(params), _shape(VideoParams())
    found = []
    if shape != wanted:
        found.append(f"Videos are scaled down: {shape} instead of MLPerf's {wanted}.")
    found += [WEIGHTS] * random_weights + [SYNTHETIC] * ("dataset" not in settings)
    found += [NOISE] * (params.latent is None)
    if loose := [f"--{key}" for key in INEXACT_VIDEOS if settings.get(key)]:
        found.append(f"Videos are not exact, by {' and '.join(loose)}.")
    return found


def _shape(params: VideoParams) -> str:
    width, height = params.size
    return f"{params.num_frames} frames of {width}x{height} in {params.num_steps} steps"


class UrlVideo(VideoTask):
    """A server that makes the videos; a short one shows before the test that it has the model."""

    def __init__(self, settings: Settings, run: MlperfRun, mode: str, folder: Path) -> None:
        params = settings.build(VideoParams)
        super().__init__(settings, run, mode, folder, params)
        target = target_of(settings, base_url(settings.get("url")))
        asked = fields_of("", params)
        self._model = check_server(target, asked, settings.values.get("model"), run.quick)
        self._url, self._asked = target.url, asked | {"model": self._model}
        route = replace(target, url=target.url + SYNC)
        self.sut = self._server = UrlUnderTest(
            route, self, settings.get("max-in-flight"), self.read, patient=True
        )

    def body(self, sample: int) -> bytes:
        return json.dumps({**self._asked, "prompt": self._prompts[sample]}).encode()

    def read(self, sample: int, body: bytes) -> array[int]:
        """The mp4 file; in an accuracy run it is kept, and LoadGen gets its name and hash."""
        if not body:
            raise ValueError("the answer is empty, not an mp4 file")
        if self._keep is None:
            return array("B", body)
        name = f"{self._names[sample]}.mp4"
        (self._keep / name).write_bytes(body)
        return file_and_hash(name, body)

    def facts(self) -> Fields:
        named = {"model": self._model, "api": "videos"}
        return {**named, **self._sample_facts(), **self._server.facts(self._url)}


def base_url(url: str) -> str:
    """The address below which a server has its routes, however it was given."""
    given = url.rstrip("/").removesuffix(SYNC).removesuffix(ROUTE)
    return route_url(given, "chat").removesuffix("/chat/completions")


def fields_of(model: str, params: VideoParams) -> dict[str, Any]:
    """What a call asks for beside its prompt."""
    width, height = params.size
    asked = {
        "model": model,
        "negative_prompt": NEGATIVE_PROMPT,
        "size": f"{width}x{height}",
        "num_frames": params.num_frames,
        "fps": params.fps,
        "num_inference_steps": params.num_steps,
        "guidance_scale": params.guidance_scale,
        "guidance_scale_2": params.guidance_scale_2,
        "seed": params.seed,
    }
    return asked | ({} if params.latent is None else {"latent_path": params.latent})


def check_server(target: Endpoint, asked: dict[str, Any], model: str | None, quick: bool) -> str:
    """The model's name there, after a short video; BenchError where a run would not be right."""
    try:
        cards = json.loads(_call(target, "GET", MODELS)[1])["data"]
        name = choose_model(target.url, [card["id"] for card in cards], model, quick)
        wanted = asked | {"model": name, "num_inference_steps": WARM_UP_STEPS}
        body = json.dumps(wanted | {"prompt": "warm-up"}).encode()
        video = f"{ROUTE}/{_call(target, 'POST', SYNC, body)[0]}"
        check_job(target.url, wanted, json.loads(_call(target, "GET", video)[1]))
        _call(target, "DELETE", video)
        return name
    except TimeoutError:
        problem = f"no answer within {target.timeout_s:g} s (--timeout)"
        raise BenchError(f"{target.url} does not answer: {problem}") from None
    except (OSError, HTTPException) as error:
        raise BenchError(f"{target.url} does not answer: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        why = f"its answers are others, {type(error).__name__}: {error}"
        raise BenchError(f"{target.url} is no server of videos: {why}") from None


def _call(
    target: Endpoint, method: str, below: str, body: bytes | None = None
) -> tuple[str, bytes]:
    """(the id of a new video, the body of the answer)."""
    try:
        headers, answer = call_once(target, target.url + below, method, body)
        return headers.get("x-video-id", ""), answer
    except HTTPError as error:
        problem = f"http_{error.code}: {error_text(error.read())}"
        raise BenchError(f"{method} {target.url}{below} was refused, {problem}") from None
    except URLError as error:
        if isinstance(error.reason, Exception):
            raise error.reason from None
        raise


def choose_model(url: str, names: Sequence[str], given: str | None, quick: bool) -> str:
    """The model to ask for: --model, or the only one, which is the benchmark's unless quick."""
    served = ", ".join(names) or "no model"
    if given is not None:
        if given not in names:
            raise BenchError(f"{url} does not serve --model {given}: it has {served}")
        return given
    own = WAN.model.rpartition("/")[2].removesuffix("-Diffusers").lower()
    for name in names:
        if quick or own in name.lower():
            return name
    raise BenchError(
        f"{url} serves {served}, not {WAN.model}: give --model NAME if it has this model under "
        "another name, or --quick to try another model"
    )


def check_job(url: str, asked: dict[str, Any], told: dict[str, Any]) -> None:
    """BenchError where a server made another video than it was asked for."""
    for name in ("size", "num_frames", "num_inference_steps"):
        if name not in told:
            raise BenchError(f"{url} does not say the {name} of a video (GET {ROUTE}/ID)")
    for name, value in (asked | {"schedule": VideoParams().schedule}).items():
        if told.get(name, value) != value:
            problem = f"{name} {told[name]!r} instead of {value!r}"
            raise BenchError(f"{url} makes another video than it is asked for: {problem}")
    if loose := {f"--{key}" for key in INEXACT_VIDEOS}.intersection(told.get("approximations", ())):
        flags = " and ".join(sorted(loose))
        raise BenchError(f"{url} makes videos that are not exact: start it without {flags}")
