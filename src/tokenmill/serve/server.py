"""The server process: a socket, a worker, the app between them, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from tokenmill.core.config import ServerConfig
from tokenmill.core.types import TokenmillError
from tokenmill.serve.api import create_app
from tokenmill.serve.api_stream import ApiState
from tokenmill.serve.tokenizer import Tokenizer
from tokenmill.serve.wire import EngineClient, ModelFacts

BACKLOG = 2048
KEEP_ALIVE_S = 60  # idle connections; clients pool theirs for a while
CLOSE_S = 5  # what is still being sent when the drain is over gets this long


class ServerError(TokenmillError):
    """The server cannot start or go on; the message says why."""


def serve(
    worker_argv: Sequence[str],
    tokenizer: Tokenizer,
    config: ServerConfig,
    model: str,
    on_listening: Callable[[str, ModelFacts], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    `worker_argv` and "--address ADDRESS" start the worker. `on_listening` gets the URL. Raises
    TokenmillError when the server cannot start or its worker cannot be kept alive.
    """
    listener = _bind(config.host, config.port)
    with contextlib.closing(listener):
        loop_factory = uvicorn.Config(app="", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_Server(worker_argv, tokenizer, config, model, on_listening).run(listener))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling, which would end streams and exit by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self,
        worker_argv: Sequence[str],
        tokenizer: Tokenizer,
        config: ServerConfig,
        model: str,
        on_listening: Callable[[str, ModelFacts], None] | None,
    ) -> None:
        self._worker_argv = worker_argv
        self._tokenizer = tokenizer
        self._config = config
        self._model = model
        self._on_listening = on_listening
        self._signals = 0
        self._signalled = asyncio.Event()

    async def run(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        client = EngineClient(self._spawn)
        try:
            facts = await self._first_of(client.start())
            if facts is not None:
                await self._serve(client, facts, listener)
        finally:
            await client.close()

    def _on_signal(self) -> None:
        self._signals += 1
        self._signalled.set()

    async def _spawn(self, address: str) -> asyncio.subprocess.Process:
        argv = [*self._worker_argv, "--address", address]
        # A session of its own: Ctrl-C in the terminal is for this process to handle.
        return await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )

    async def _first_of[T](self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of some work; None when a signal comes first."""

    async def _serve(
        self, client: EngineClient, facts: ModelFacts, listener: socket.socket
    ) -> None:
        app = create_app(client, self._tokenizer, self._config, self._model)
        server = _Uvicorn(_uvicorn_config(app))
