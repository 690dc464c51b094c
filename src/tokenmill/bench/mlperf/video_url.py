"""A video server under LoadGen's test: every query is one POST /v1/videos/sync.

The answer is the whole mp4 file. Before the test a short video shows that the server has the
model and makes what the benchmark asks for. A server that is full is asked again when a video ends.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenmill.bench.client.connections import route_url
from tokenmill.bench.client.records import Record, Target
from tokenmill.bench.mlperf import loadgen
from tokenmill.bench.mlperf import runs as bench
from tokenmill.bench.mlperf.compliance import NAMES
from tokenmill.bench.mlperf.loadgen_url import GivenUp
from tokenmill.bench.mlperf.post_url import OK, Answer, Caller, PostUnderTest, failures
from tokenmill.bench.mlperf.presets import WAN
from tokenmill.bench.mlperf.submission import VIDEOS
from tokenmill.bench.mlperf.video_test import (
    LOOSE,
    WARM_UP_STEPS,
    file_names,
    notices,
    price_of,
    read_samples,
    unscored,
)
from tokenmill.bench.report.mlperf_report import EVENTS, write_times
from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.bench.workload import BenchError
from tokenmill.core.video import NEGATIVE_PROMPT, VideoParams
from tokenmill.settings import Settings

ROUTE, MODELS, SYNC = "/videos", "/models", "/videos/sync"
VIDEO_ID = b"x-video-id"
FULL = 429
RETRY_S = 1.0  # while a server is full with the videos of others
Data = Callable[[int, bytes], array]  # of LoadGen, from a sample's index and its mp4 file


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


class VideoServerUnderTest(PostUnderTest):
    """A server of a video model; --timeout is the longest time in which no video ends."""

    def __init__(
        self, target: Target, bodies: Sequence[bytes], data: Data, max_in_flight: int
    ) -> None:
        super().__init__(replace(target, url=target.url + SYNC), max_in_flight)
        self._bodies, self._data_of, self._most = bodies, data, max_in_flight
        self._deadlines: set[asyncio.Timeout] = set()
        self._since_s = self._loop.time()  # when the last video ended

    def _body(self, index: int) -> bytes:
        return self._bodies[index]

    def _data(self, index: int, body: bytes) -> array:
        self._since_s = self._loop.time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(self._since_s + self._target.timeout_s)
        self._grow()
        if not body:
            raise ValueError("the answer is empty, not an mp4 file")
        return self._data_of(index, body)

    async def _answer(self, body: bytes) -> Answer:
        async with asyncio.timeout(self._target.timeout_s) as deadline:
            self._deadlines.add(deadline)
            try:
                return await self._caller.ask("POST", body=body)
            finally:
                self._deadlines.discard(deadline)

    def _waits(self, query_id: int, record: Record, answer: Answer) -> bool:
        """A server that is full has as many videos as it takes: those that are open now."""
        others = len(self._open) - 1
        waited_s = self._loop.time() - self._since_s
        if answer.status != FULL or (not others and waited_s > self._target.timeout_s):
            return False
        self._waiting.appendleft((query_id, record.session, record.planned_ns))
        self._max_in_flight = others
        if not others:
            self._loop.call_later(RETRY_S, self._grow)
        return True

    def _grow(self) -> None:
        """Send one more: the server may take it by now."""
        self._max_in_flight = min(self._most, self._max_in_flight + 1)
        self._fill()


def check_server(target: Target, asked: dict[str, Any], model: str | None, quick: bool) -> str:
    """The model's name there, after a short video; BenchError where a run would not be right."""
    try:
        return asyncio.run(_check(target, asked, model, quick))
    except TimeoutError:
        problem = f"no answer within {target.timeout_s:g} s (--timeout)"
        raise BenchError(f"{target.url} does not answer: {problem}") from None
    except OSError as error:
        raise BenchError(f"{target.url} does not answer: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        why = f"its answers are others, {type(error).__name__}: {error}"
        raise BenchError(f"{target.url} is no server of videos: {why}") from None


async def _check(target: Target, asked: dict[str, Any], model: str | None, quick: bool) -> str:
    caller = Caller(target)
    try:
        async with asyncio.timeout(target.timeout_s):
            found = await _told(caller, target, "GET", MODELS)
            names = [card["id"] for card in json.loads(found.body)["data"]]
            name = choose_model(target.url, names, model, quick)
            wanted = asked | {"model": name, "num_inference_steps": WARM_UP_STEPS}
            body = json.dumps(wanted | {"prompt": "warm-up"}).encode()
            made = await _told(caller, target, "POST", SYNC, body)
            video_id = dict(made.headers).get(VIDEO_ID, b"").decode()
            job = await _told(caller, target, "GET", f"{ROUTE}/{video_id}")
        check_job(target.url, wanted, json.loads(job.body))
        await _told(caller, target, "DELETE", f"{ROUTE}/{video_id}")
        return name
    finally:
        caller.close()


async def _told(
    caller: Caller, target: Target, method: str, below: str, body: bytes = b""
) -> Answer:
    answer = await caller.ask(method, below, body)
    if answer.status != OK:
        raise BenchError(f"{method} {target.url}{below} was refused, {answer.problem}")
    return answer


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
    if loose := {f"--{key}" for key in LOOSE}.intersection(told.get("approximations", ())):
        flags = " and ".join(sorted(loose))
        raise BenchError(f"{url} makes videos that are not exact: start it without {flags}")


def server_report(settings: Settings, run: bench.Run) -> MlperfReport:
    """Run the test; its logs are in --submission-dir afterwards, and videos below them."""
    params, mode = settings.build(VideoParams), settings.get("test-mode")
    folder, accuracy = Path(settings.get("submission-dir")), mode == "accuracy"
    target = Target(
        url=base_url(settings.get("url")),
        model="",
        api_key=next(iter(settings.values.get("api-key", ())), None),
        timeout_s=settings.get("timeout"),
        insecure=settings.get("insecure"),
    )
    prompts = read_samples(settings, run)
    given = settings.values.get("model")
    model = check_server(target, fields_of("", params), given, run.quick)
    asked = fields_of(model, params)
    bodies = [json.dumps({**asked, "prompt": prompt}).encode() for prompt in prompts]
    data = keep_files(folder / VIDEOS, file_names(prompts)) if accuracy else _as_it_is
    sut = VideoServerUnderTest(target, bodies, data, settings.get("max-in-flight"))
    facts = _facts(settings, run, params, len(prompts)) | {"model": model, "url": target.url}
    try:
        bench.execute(sut, len(prompts), run, folder, accuracy, mode if mode in NAMES else "")
    except GivenUp as error:
        return facts | bench.given_up_report(run, str(error), sut.times)
    write_times(folder / EVENTS, sut.times)
    facts |= {"num_failed": sut.tally.num_failed, "errors": sut.tally.errors}
    facts["client_cpu_share"] = round(sut.cpu_share, 3)
    reasons = failures(target.url, sut.tally)
    if accuracy:
        report = unscored(run, len(prompts) - sut.tally.num_failed)
        return facts | report | {"reasons": [*reasons, *report["reasons"]]}
    values, errors = loadgen.read_detail(folder)
    report = bench.performance_report(run, values, errors, sut.times)
    report |= {"ttft_ms": {}, "tpot_ms": {}, "num_output_tokens": 0}
    priced = report | price_of(run, report, settings.get("gpu-price"))
    return facts | bench.with_reasons(priced, reasons)


def _as_it_is(index: int, body: bytes) -> array:
    return array("B", body)


def keep_files(folder: Path, names: Sequence[str]) -> Data:
    """Videos as files; LoadGen's log of answers has their names and hashes."""
    folder.mkdir()

    def keep(index: int, body: bytes) -> array:
        name = f"{names[index]}.mp4"
        (folder / name).write_bytes(body)
        found = {"file": name, "sha256": sha256(body).hexdigest()}
        return array("B", json.dumps(found).encode())

    return keep


def _facts(
    settings: Settings, run: bench.Run, params: VideoParams, num_samples: int
) -> MlperfReport:
    asked = fields_of("", params)
    return {
        "api": "videos",
        "dtype": "as served",
        "device": "remote",
        "accelerator": {},
        "num_samples": num_samples,
        "synthetic": "dataset" not in settings,
        "quick": run.quick,
        "video": {
            "size": asked["size"],
            "num_frames": params.num_frames,
            "num_steps": params.num_steps,
            "schedule": params.schedule,
        },
        "notices": notices(settings, run, params, random=False),
    }
