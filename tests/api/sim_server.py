"""Starts the simulated server as a process of its own and talks plain HTTP to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any
from urllib.parse import urlsplit

from api.sim import MAX_MODEL_LEN, MODEL, NUM_BLOCKS, server_argv, worker_argv
from tokenmill.core.config import PoolConfig, RouterConfig, SchedulerConfig, ServerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.core.keys.run_folder import find_own_server

GENEROUS_S = 180.0
KIND = "Content-Type: application/json\r\n"  # in the head of a POST
OPERATORS = ("/workers", "/metrics", "/dashboard/data")
Json = dict[str, Any]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Json:
        """The error, which must have OpenAI's shape."""
        assert set(self.json) == {"error"}, self.body
        error: Json = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of each server-sent event; [DONE] stays a string."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "" and all(p.startswith("data: ") for p in parts)
        texts = [p.removeprefix("data: ") for p in parts]
        return [t if t == "[DONE]" else json.loads(t) for t in texts]


class SimServer:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.address = (parts.hostname, parts.port)

    def call(
        self,
        method: str,
        path: str,
        body: Json | bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """One request on a connection of its own; a body is JSON unless `headers` say.

        What only the operator may do has the control token, unless `headers` have another key.
        """
        given = {} if body is None else {"content-type": "application/json"}
        given |= headers or {}
        others = {"authorization", "Authorization", "x-api-key"}
        if path.startswith(OPERATORS) and not others & given.keys():
            given["authorization"] = f"Bearer {self.token}"
        connection = http.client.HTTPConnection(*self.address, timeout=GENEROUS_S)
        with contextlib.closing(connection):
            data = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            names = {k.lower(): v for k, v in answer.getheaders()}
            return Answer(answer.status, names, answer.read())

    @property
    def token(self) -> str:
        """The control token that the server has made, as commands find it."""
        return (find_own_server(self.url) or ("", ""))[1]

    def chat(self, content: str, **fields: Any) -> Answer:
        """A chat completion with one user message."""
        messages = [{"role": "user", "content": content}]
        call = {"model": MODEL, "messages": messages, **fields}
        return self.call("POST", "/v1/chat/completions", call)

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        return self.call("POST", "/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def open_stream(self, content: str, **fields: Any) -> socket.socket:
        """Send a streamed chat completion and leave the reading to the caller."""
        call = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            **fields,
        }
        return self.open_call("/v1/chat/completions", call)

    def open_call(self, path: str, call: Json, headers: str = "") -> socket.socket:
        body = json.dumps(call).encode()
        connection = socket.create_connection(self.address, timeout=GENEROUS_S)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{KIND}Content-Length: {len(body)}\r\n"
        head += f"{headers}\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def metric(self, name: str, labels: str = "") -> float:
        """The value of a Prometheus sample."""
        text = self.call("GET", "/metrics").body.decode()
        for line in text.splitlines():
            if line.startswith(f"tokenmill_{name}{{") and labels in line:
                return float(line.rpartition(" ")[2])
        return 0.0

    def worker_pids(self) -> list[int]:
        pid = self.process.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def worker_pid(self) -> int:
        (pid,) = self.worker_pids()
        return pid


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll for something that has to become true."""
    deadline_s = monotonic() + GENEROUS_S
    while not condition():
        assert monotonic() < deadline_s, f"not in {GENEROUS_S} s: {what}"
        sleep(0.02)


@contextlib.contextmanager
def sim_server(
    config: ServerConfig | None = None,
    limits: SchedulerConfig | None = None,
    step_ms: float = 0.0,
    pool: PoolConfig | None = None,
    router: RouterConfig | None = None,
    num_blocks: int = NUM_BLOCKS,
    fault_rate: float = 0.0,
    log: IO[str] | None = None,
    vision: VisionConfig | None = None,
    ends_well: bool = True,
) -> Iterator[SimServer]:
    """A running server, which must end well if it `ends_well`; with `vision` it takes images.

    `log` gets its stderr.
    """
    config = config or ServerConfig(port=0)
    limits = limits or SchedulerConfig(max_model_len=MAX_MODEL_LEN)
    worker = worker_argv(limits, step_ms, num_blocks, fault_rate, sees=vision is not None)
    argv = server_argv(config, pool or PoolConfig(), router or RouterConfig(), worker, vision)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield SimServer(process, process.stdout.readline().strip())
        if process.poll() is None:
            process.terminate()
        assert process.wait(GENEROUS_S) == 0 or not ends_well
    finally:
        process.kill()
        process.wait()
