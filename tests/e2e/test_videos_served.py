"""tokenmill serve --task video with a tiny random model, by the official openai client."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import openai
import pytest
from openai import OpenAI

from tokenmill.__main__ import run
from tokenmill.api.videos import video_server
from tokenmill.cli.serve_video import HANG_TIMEOUT_S

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
SERVE = ("serve", "wan-tiny", "--random-weights", "--task", "video", "--num-threads", "1")
GENEROUS_S = 120.0


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    """The URL of a server over a folder of jobs, and its process id."""
    command = [sys.executable, "-P", "-m", "tokenmill", *SERVE, "--port", "0"]
    command += ["--video-dir", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            line = next(line for line in lines if "/v1/videos" in line)
            yield line.split(" is served at ")[1].split("/videos")[0], process.pid
        finally:
            process.terminate()
            process.stderr.close()


def pixels(client: OpenAI, video_id: str) -> bytes:
    """The frames of a video, as a player shows them."""
    content = client.videos.download_content(video_id)
    assert content.response.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(content.read())) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 17 and frames[0].shape == (32, 48, 3)
    return b"".join(frame.tobytes() for frame in frames)


def only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_the_openai_client_and_a_worker_that_is_killed(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"prompt": "a red fox", "size": "48x32", "seconds": "1"}
    with served(tmp_path) as (url, pid), OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        extra = {"seed": 7, "num_inference_steps": 50}
        reference = client.videos.create_and_poll(
            **asked, model="wan-tiny", poll_interval_ms=20, extra_body=extra
        )
        assert (reference.status, reference.progress) == ("completed", 100)
        assert (reference.size, reference.seconds, reference.model) == ("48x32", "1", "wan-tiny")
        killed = client.videos.create(**asked, extra_body=extra)
        while client.videos.retrieve(killed.id).progress < 5:
            time.sleep(0.01)
        os.kill(only_child(pid), signal.SIGKILL)
        ended = client.videos.poll(killed.id, poll_interval_ms=50)
        assert ended.status == "completed", ended.error
        assert pixels(client, killed.id) == pixels(client, reference.id)
        other = client.videos.create_and_poll(
            **asked, poll_interval_ms=20, extra_body=extra | {"seed": 8}
        )
        assert pixels(client, other.id) != pixels(client, reference.id)
        names = [video.id for video in client.videos.list(limit=2, order="asc")]
        assert names == [reference.id, killed.id, other.id]  # two pages
        picture = client.videos.download_content(other.id, variant="thumbnail")
        assert picture.read().startswith(b"\x89PNG")
        assert client.videos.delete(other.id).deleted
        with pytest.raises(openai.NotFoundError) as unknown:
            client.videos.retrieve(other.id)
        assert unknown.value.param == "video_id"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.videos.create(**asked | {"size": "50x32"})  # type: ignore[arg-type]
        assert wrong.value.param == "size" and wrong.value.code == "invalid_value"


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
    assert (
        run(["serve", str(folder), "--workers", "2", "--offload", "--video-storage", "1GiB"]) == 0
    )
    argv, _, videos, name, _, pool = started[0]
    assert (name, videos.video_storage_bytes) == ("my-wan", 2**30)
    assert (pool.workers, pool.hang_timeout_s) == (2, HANG_TIMEOUT_S)
    assert {"--task=video", f"--model={folder}", "--offload"} <= set(argv)
    assert run(["serve", str(folder), "--task", "generate"]) != 0  # no language model
    assert len(started) == 1
