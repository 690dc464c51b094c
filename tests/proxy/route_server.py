"""A router as a process of its own, and backends in this one that do what a test wants."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

from api.sim_server import GENEROUS_S, SimServer
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig

MODEL = "scripted"
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "%d "}}]}\n\n'
Behaviour = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers as its server's behaviour says."""

    protocol_version = "HTTP/1.1"
    server: Scripted
    body = b""

    def do_DELETE(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.gets is not None:
            return self.server.gets(self)
        card = {"id": self.server.model, "object": "model"}
        self.reply(200, json.dumps({"object": "list", "data": [card]}).encode())

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers["content-length"]))
        self.server.calls.append((self.path, dict(self.headers.items()), self.body))
        self.server.behaviour(self)

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def cut(self) -> None:
        """Drop the connection as a killed process does."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_args: Any) -> None:
        pass


def count_to(number: int, gap_s: float = 0.0) -> Behaviour:
    """A stream of so many events."""

    def behave(handler: Handler) -> None:
        handler.start_stream()
        for each in range(number):
            handler.chunk(EVENT % each)
            time.sleep(gap_s)
        handler.chunk(b"data: [DONE]\n\n")
        handler.chunk(b"")

    return behave


def say(status: int, body: bytes, **headers: str) -> Behaviour:
    return lambda handler: handler.reply(status, body, **headers)


class Scripted(ThreadingHTTPServer):
    """A backend in a thread."""

    daemon_threads = True

    def __init__(self, model: str = MODEL, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model
        self.behaviour: Behaviour = say(200, b"{}")
        self.gets: Behaviour | None = None  # instead of naming the model
        self.calls: list[tuple[str, dict[str, str], bytes]] = []
        self._connections: list[socket.socket] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.name}/v1"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_args: Any) -> None:
        pass  # clients go away on purpose

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in self._connections:
            with contextlib.suppress(OSError):  # closed long ago
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def router_process(
    backends: tuple[str, ...],
    config: ServerConfig | None = None,
    router: RouterConfig | None = None,
    route: RouteConfig | None = None,
    log: IO[str] | None = None,
) -> Iterator[SimServer]:
    """A running router; it must still end well when the caller is done. `log` gets its stderr."""
    parts = {
        "config": replace(config or ServerConfig(), port=0),
        "router": router or RouterConfig(),
        "route": replace(route or RouteConfig(health_interval_s=0.2), backends=backends),
    }
    options = json.dumps({name: asdict(part) for name, part in parts.items()})
    argv = [sys.executable, "-m", "proxy.route_process", options]
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(argv, cwd=tests, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield SimServer(process, process.stdout.readline().strip())
        process.terminate()
        assert process.wait(GENEROUS_S) == 0
    finally:
        process.kill()
        process.wait()


def ask(router: SimServer, **fields: Any) -> Any:
    return router.call("POST", "/v1/chat/completions", {"model": MODEL, "messages": [], **fields})
