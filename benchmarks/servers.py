"""Servers as processes of their own, what asks them, and models of random weights for them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.harness import SHAPES, Report, command, environment
from tokenmill.core.types import TokenmillError

HOST = "127.0.0.1"
START_S, STOP_S = 600.0, 30.0


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    start_s: float = 0.0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self.port, timeout=600)

    def call(self, path: str, body: Any = None, key: str = "") -> http.client.HTTPResponse:
        """The answer to a GET, or to a POST of a body; an error where its status is not 200."""
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {key}"} if key else {}
        connection = self.connect()
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise TokenmillError(f"{path} was answered {answer.status}: {answer.read().decode()}")
        return answer


@contextlib.contextmanager
def served(words: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server of this command line, on a port of its own, once it is healthy."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*words, "--port", str(port)],
            env=environment() if env is None else env,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(process, port)
            begin = time.monotonic()
            while not _is_healthy(server):
                if process.poll() is not None or time.monotonic() - begin > START_S:
                    log.seek(0)
                    end = log.read()[-3000:].decode(errors="replace")
                    raise TokenmillError(f"{' '.join(words[:8])} did not start:\n{end}")
                time.sleep(0.1)
            server.start_s = time.monotonic() - begin
            yield server
        finally:
            _stop(process)


def serve(model: str, *flags: str) -> contextlib.AbstractContextManager[Server]:
    return served(command("serve", model, *flags))


@contextlib.contextmanager
def keyed(model: str, keys: Sequence[str], *flags: str) -> Iterator[Server]:
    """The same with these API keys, each an account of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.txt"
        file.write_text("".join(f"of-{key} = {key}\n" for key in keys))
        file.chmod(0o600)
        with serve(model, "--api-key-file", str(file), *flags) as server:
            yield server


def _is_healthy(server: Server) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException, TokenmillError):
        return server.call("/health").status == 200
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(STOP_S)
            return


class EndpointLoad:
    """`tokenmill bench endpoint` at work; it may run beside another one."""

    def __init__(self, url: str, *flags: str) -> None:
        words = command("bench", "endpoint", "--url", url, "--json", "--no-audit", *flags)
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def point(self) -> Report:
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise TokenmillError(f"bench endpoint ended with status {self._process.returncode}")
        (point,) = json.loads(out.splitlines()[-1])["points"]
        return dict(point)


def shape_config(shape: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a shape of tokenmill, with changes."""
    config: dict[str, Any] = json.loads((SHAPES / f"{shape}.json").read_text(encoding="utf-8"))
    return config | changes


def write_words_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """A model without weights, whose tokenizer has one token for each of the words w0, w1, ..."""
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": f"w{config['eos_token_id']}",
        "unk_token": "w0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
