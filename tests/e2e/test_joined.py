"""tokenmill serve without workers of its own, and tokenmill worker: one model over processes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from open_ports import listening
from tiny_configs import write_config
from tiny_tokenizers import byte_level, save_folder
from tokenmill.__main__ import run

GENEROUS_S = 180.0
TOKENMILL = [sys.executable, "-P", "-m", "tokenmill"]
ENGINE = ["--random-weights", "--dtype", "fp32", "--num-threads", "1", "--kv-cache-memory", "4MiB"]
PROMPTS = [f"{text} {i}" for i in range(3) for text in ("Hello world", "def add")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("joined") / "tiny"
    save_folder(byte_level(), folder, eos_token="<|im_end|>")
    return write_config(folder, vocab_size=422, hidden_size=64, intermediate_size=96)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("0123456789abcdef" * 2)
    return path


@contextmanager
def started(*arguments: str, log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs, with what it says in a file."""
    with log.open("wb") as file:
        command = [*TOKENMILL, *arguments]
        process = subprocess.Popen(command, stderr=file, env=os.environ | environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def found_in(log: Path, pattern: str) -> re.Match[str]:
    """What a command has said, once it has."""
    deadline_s = time.monotonic() + GENEROUS_S
    while not (found := re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)
    return found


def url_of(log: Path) -> str:
    return found_in(log, r"served at (http\S+)/v1")[1]


def call(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=GENEROUS_S) as answer:
        return json.load(answer)


def complete(url: str, prompt: str) -> tuple[str, list[float]]:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    choice = call(url, "/v1/completions", body | {"logprobs": 0})["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def open_stream(url: str, prompt: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=GENEROUS_S)
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), head)
    return connection.getresponse()


def rest_of(answer: http.client.HTTPResponse) -> str:
    lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_workers_that_join_answer_as_those_of_the_server(
    model: Path, token_file: Path, tmp_path: Path
) -> None:
    where, token = f"127.0.0.1:{free_port()}", ["--token-file", str(token_file)]
    serve = ["serve", str(model), "--port", "0", *ENGINE]
    logs = [tmp_path / f"{name}.log" for name in ("own", "server", "w0", "w1", "w2")]
    with started(*serve, "--workers", "2", log=logs[0]):
        url = url_of(logs[0])
        expected = [complete(url, prompt) for prompt in PROMPTS]
        texts = [rest_of(open_stream(url, prompt)) for prompt in PROMPTS]
    group = {"LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": where}
    serve += ["--workers", "0", "--join-listen", where, *token]
    with (
        started(*serve, log=logs[1], LWS_WORKER_INDEX="0", **group) as server,
        started("worker", *token, log=logs[2], LWS_WORKER_INDEX="1", **group) as first,
        started("worker", *token, log=logs[3], LWS_WORKER_INDEX="2", **group) as second,
    ):
        url = url_of(logs[1])
        workers = call(url, "/workers")["workers"]
        assert [worker["state"] for worker in workers] == ["ready", "ready"]
        assert {address for address, _ in listening([server.pid])} == {"127.0.0.1"}
        ports = {port for _, port in listening([server.pid])}
        assert len(ports) == 2 + len(workers)  # HTTP, --join-listen, and a link of each
        assert {int(url.rpartition(":")[2]), int(where.rpartition(":")[2])} < ports
        assert listening([first.pid, second.pid]) == set()
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            assert list(threads.map(complete, [url] * len(PROMPTS), PROMPTS)) == expected
        streams = [open_stream(url, prompt) for prompt in PROMPTS]
        second.kill()
        assert [rest_of(stream) for stream in streams] == texts
        for flags, why in (
            (["--weights-seed", "5"], "weights: the pool at .* has .*, this worker has "),
            (["--dtype", "int8"], "dtype: the other workers have fp32, the new one has int8"),
        ):
            with started("worker", "--join", where, *token, *flags, log=logs[4]) as other:
                assert other.wait(GENEROUS_S) == 1
            assert re.search(f"error: {why}", logs[4].read_text()), logs[4].read_text()
            assert found_in(logs[1], f"did not join: {why}")
        with started("worker", "--join", where, *token, log=logs[4]) as last:
            assert found_in(logs[4], "joined the pool")
            stream = open_stream(url, PROMPTS[0])
            first.send_signal(signal.SIGTERM)
            assert rest_of(stream) == texts[0]
            assert first.wait(GENEROUS_S) == 0
            (left,) = call(url, "/workers")["workers"]
            assert left["state"] == "ready" and complete(url, PROMPTS[0]) == expected[0]
            server.kill()
            assert last.wait(GENEROUS_S) == 1
            assert f"the server at {where} is gone" in logs[4].read_text()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--workers", "0"], "--workers 0 needs --join-listen"),
        (["--token-file", "x"], "--token-file needs --join-listen"),
        (["--join-listen", "127.0.0.1:0"], "--token-file is needed"),
        (["--join-listen", ":7001", "--token-file", "FILE"], "--join-listen must be HOST:PORT"),
        (
            ["--join-listen", "127.0.0.1:0", "--prefill", "1", "--decode", "1"],
            "--join-listen does not go with --prefill",
        ),
        (
            ["--join-listen", "[::]:0", "--token-file", "FILE", "--fronts", "2"],
            "--join-listen [::]:0: with --fronts it must be an address of this machine",
        ),
    ],
)
def test_flags_that_do_not_go_together(
    model: Path, token_file: Path, flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(token_file) if flag == "FILE" else flag for flag in flags]
    assert run(["serve", str(model), *given]) != 0
    assert f"error: {why}" in capsys.readouterr().err
