"""tokenmill serve --task video with a tiny random model: the openai client, MLPerf's LoadGen."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import openai
import pytest
from openai import OpenAI

from light_processes import light_processes
from open_ports import descendants, elsewhere
from tokenmill.__main__ import run
from tokenmill.api.videos import video_server
from tokenmill.bench.client.records import Endpoint
from tokenmill.bench.mlperf import loadgen_tests
from tokenmill.bench.mlperf.loadgen import ACCURACY
from tokenmill.bench.mlperf.presets import WAN
from tokenmill.bench.mlperf.video import check_job, check_server, fields_of
from tokenmill.bench.workload import BenchError
from tokenmill.cli.serve_video import HANG_TIMEOUT_S
from tokenmill.core.video import VideoParams

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
SERVE = ("serve", "wan-tiny", "--random-weights", "--task", "video", "--num-threads", "1")
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A server that takes two videos at a time."""
    command = [sys.executable, "-P", "-m", "tokenmill", *SERVE, "--port", "0"]
    command += [
        "--max-concurrency-per-key",
        "2",
        "--video-dir",
        str(tmp_path_factory.mktemp("videos")),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process
        finally:
            process.terminate()
            process.stderr.close()


@pytest.fixture(scope="module")
def server(process: subprocess.Popen[str]) -> str:
    """Its URL."""
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    line = next(line for line in lines if "/v1/videos" in line)
    assert elsewhere(descendants(process.pid)) == set()
    return line.split(" is served at ")[1].split("/videos")[0]


def pixels(client: OpenAI, video_id: str) -> bytes:
    """The frames of a video, as a player shows them."""
    content = client.videos.download_content(video_id)
    assert content.response.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(content.read())) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 17 and frames[0].shape == (32, 48, 3)
    return b"".join(frame.tobytes() for frame in frames)


def test_the_openai_client(server: str) -> None:
    asked: dict[str, Any] = {"prompt": "a red fox", "size": "48x32", "seconds": "1"}
    with OpenAI(base_url=server, api_key="x", max_retries=0) as client:
        extra = {"seed": 7, "num_inference_steps": 4}
        reference = client.videos.create_and_poll(
            **asked, model="wan-tiny", poll_interval_ms=20, extra_body=extra
        )
        assert (reference.status, reference.progress) == ("completed", 100)
        assert (reference.size, reference.seconds, reference.model) == ("48x32", "1", "wan-tiny")
        again = client.videos.create(**asked, extra_body=extra)
        assert client.videos.poll(again.id, poll_interval_ms=20).status == "completed"
        assert pixels(client, again.id) == pixels(client, reference.id)
        other = client.videos.create_and_poll(
            **asked, poll_interval_ms=20, extra_body=extra | {"seed": 8}
        )
        assert pixels(client, other.id) != pixels(client, reference.id)
        names = [video.id for video in client.videos.list(limit=2, order="asc")]
        assert names == [reference.id, again.id, other.id]  # two pages
        picture = client.videos.download_content(other.id, variant="thumbnail")
        assert picture.read().startswith(b"\x89PNG")
        assert client.videos.delete(other.id).deleted
        with pytest.raises(openai.NotFoundError) as unknown:
            client.videos.retrieve(other.id)
        assert unknown.value.param == "video_id"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.videos.create(**asked | {"size": "50x32"})  # type: ignore[arg-type]
        assert wrong.value.param == "size" and wrong.value.code == "invalid_value"


def test_a_job_whose_worker_is_killed_keeps_its_id_and_pixels(
    server: str, process: subprocess.Popen[str]
) -> None:
    asked: dict[str, Any] = {"prompt": "a red fox", "size": "48x32", "seconds": "1"}
    asked["extra_body"] = {"num_inference_steps": 500, "seed": 7}
    with OpenAI(base_url=server, api_key="x", max_retries=0) as client:
        reference = client.videos.create_and_poll(**asked, poll_interval_ms=20)
        video = client.videos.create(**asked)
        deadline = time.monotonic() + 60
        while (seen := client.videos.retrieve(video.id)).progress == 0:
            assert time.monotonic() < deadline, seen
            time.sleep(0.005)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        (worker,) = map(int, children.split())
        os.kill(worker, signal.SIGSTOP)  # so that the job is in progress until the kill
        try:
            assert client.videos.retrieve(video.id).status == "in_progress"
        finally:
            os.kill(worker, signal.SIGKILL)
        ended = client.videos.poll(video.id, poll_interval_ms=20)
        assert (ended.id, ended.status, ended.progress) == (video.id, "completed", 100)
        assert pixels(client, video.id) == pixels(client, reference.id)
    with urllib.request.urlopen(server.removesuffix("/v1") + "/metrics") as answer:
        assert re.search(r"request_migrations_total\S* 1\.0", answer.read().decode())


@pytest.fixture
def loadgen(
    server: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs the benchmark over videos of 5 frames in 2 steps; its report."""
    monkeypatch.setattr(loadgen_tests, "SPAWN", light_processes())

    def report(*flags: str) -> Any:
        line = ["bench", "mlperf", "--benchmark", WAN.name, "--quick", "--url", server, *flags]
        line += ["--quick-samples", "4", "--size", "32x16", "--frames", "5", "--steps", "2"]
        assert run(line) == 0
        found = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert (found["num_failed"], found["model"], found["url"]) == (0, "wan-tiny", server)
        return found

    return report


def test_loadgen_has_more_videos_open_than_the_server_takes(
    server: str, loadgen: Callable[..., Any]
) -> None:
    """Offline sends four at once, of which the server takes two: the others wait for these."""
    report = loadgen("--scenario", "Offline")
    assert report["num_queries"] == 4 and report["metric"]["unit"] == "samples/s"
    assert report["latency_ms"]["p99.9"] > report["latency_ms"]["p50"] > 0
    with urllib.request.urlopen(server.removesuffix("/v1") + "/metrics") as answer:
        refused = re.search(
            r"rejected_total.*max_concurrency_per_key.* ([0-9.]+)", answer.read().decode()
        )
    assert refused is not None and float(refused[1]) >= 2


def test_a_submission_has_the_servers_own_files(
    server: str, loadgen: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a red fox\na red fox\n")
    flags = ["--scenario", "SingleStream", "--test-mode", "submission"]
    flags += ["--dataset", str(tmp_path / "prompts.txt"), "--submission-dir", str(tmp_path / "s")]
    report = loadgen(*flags)
    assert report["num_queries"] >= 2 and report["metric"]["unit"] == "s"
    assert report["accuracy"] == {"vbench_score": None}
    results = tmp_path / f"s/open/tokenmill/results/system/{WAN.name}/SingleStream"
    assert (results / "performance/run_1/mlperf_log_summary.txt").stat().st_size
    answers = json.loads((results / "accuracy" / ACCURACY).read_text())
    logged = [json.loads(bytes.fromhex(answer["data"])) for answer in answers]
    asked = fields_of("wan-tiny", VideoParams((32, 16), 5, num_steps=2))
    body = json.dumps(asked | {"prompt": "a red fox"}).encode()
    call = urllib.request.Request(f"{server}/videos/sync", body, JSON)
    with urllib.request.urlopen(call) as answer:
        expected = hashlib.sha256(answer.read()).hexdigest()
    assert {each["sha256"] for each in logged} == {expected}
    videos = tmp_path / "s" / "videos" / f"system_{WAN.name}_SingleStream"
    assert {hashlib.sha256(file.read_bytes()).hexdigest() for file in videos.iterdir()} == {
        expected
    }
    assert len(list(videos.iterdir())) == 2


@pytest.mark.parametrize(
    ("params", "model", "quick", "says"),
    [
        (VideoParams((32, 16), 5), None, False, r"serves wan-tiny, not Wan-AI/Wan2.2-T2V-A14B"),
        (VideoParams((32, 16), 5), "other", True, "does not serve --model other: it has wan-tiny"),
        (VideoParams((33, 16), 5), None, True, r"/videos/sync was refused, http_400: .*16"),
        (
            VideoParams((32, 16), 5, latent="n.pt"),
            None,
            True,
            "http_400: latent_path: .*in the folder latents",
        ),
    ],
)
def test_a_server_that_cannot_make_the_videos_is_named(
    server: str, params: VideoParams, model: str | None, quick: bool, says: str
) -> None:
    with pytest.raises(BenchError, match=rf"{re.escape(server)}.*{says}"):
        check_server(Endpoint(server, ""), fields_of("", params), model, quick)


def test_a_server_that_is_not_there_or_makes_other_videos_is_named() -> None:
    asked = fields_of("wan-tiny", VideoParams())
    with pytest.raises(BenchError, match=r"http://127.0.0.1:1/v1 does not answer: .*refused"):
        check_server(Endpoint("http://127.0.0.1:1/v1", ""), asked, None, True)
    told = asked | {"num_inference_steps": 4}
    with pytest.raises(BenchError, match=r"http://s .*: num_inference_steps 4 instead of 20"):
        check_job("http://s", asked, told)
    told = asked | {"schedule": "diffusers"}
    with pytest.raises(BenchError, match=r"http://s .*: schedule 'diffusers' instead of 'mlperf'"):
        check_job("http://s", asked, told)
    told = asked | {"approximations": ["--step-cache", "--attention-dtype"]}
    with pytest.raises(BenchError, match=r"http://s .* not exact: start it without --step-cache$"):
        check_job("http://s", asked, told)
    del told["size"]
    with pytest.raises(BenchError, match="http://s does not say the size of a video"):
        check_job("http://s", asked, told)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--task", "video", "--tp", "2"), "--tp has no effect with --task video"),
        (("--task", "video", "--prefill", "1"), "--prefill has no effect with --task video"),
        (("--task", "video", "--max-num-seqs", "4"), "--max-num-seqs has no effect"),
        (
            ("--task", "video", "--ulysses", "2", "--placement", "ray"),
            "--placement ray: a video worker has its ranks on one machine",
        ),
        (("--video-storage", "1GiB"), "--video-storage needs --task video"),
        (("--step-cache", "0.1"), "--step-cache needs --task video"),
        (("--task", "audio"), "one of auto, generate"),
    ],
)
def test_flags_of_other_tasks_are_refused(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *flags]) != 0
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_folder_of_diffusers_is_served_as_a_video_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(video_server, "serve_videos", lambda *args: started.append(args))
    folder = tmp_path / "my-wan"
    folder.mkdir()
    (folder / "model_index.json").write_text("{}")
    flags = ["--workers", "2", "--offload", "--video-storage", "1GiB"]
    assert run(["serve", str(folder), *flags, "--attention-dtype", "int8-fp8"]) == 0
    argv, _, videos, name, _, pool, num_ranks = started[0]
    assert (name, videos.video_storage_bytes) == ("my-wan", 2**30)
    assert (pool.workers, pool.hang_timeout_s) == (2, HANG_TIMEOUT_S)
    assert num_ranks == 1
    assert videos.job == VideoParams(attention_dtype="int8-fp8")
    flag = "--attention-dtype=int8-fp8"
    assert {"--task=video", f"--model={folder}", "--offload", flag} <= set(argv)
    assert run(["serve", str(folder), "--task", "generate"]) != 0  # no language model
    assert len(started) == 1
