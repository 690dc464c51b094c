"""A connection of the server without a socket, fed with bytes."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from api.framing_cases import Call
from tokenmill.api.connection import ConnectionLimits, ServerConnection
from tokenmill.core.config import ServerConfig

LIMITS = ConnectionLimits.of(ServerConfig(), 99)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.written.split(b"HTTP/1.1 ")[1:]]


class App:
    """Reads each call to its end, and answers 204."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            body, more = body + message["body"], message["more_body"]
        self.calls.append((scope["method"], scope["path"], body))
        self.headers.append(scope["headers"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


def feed(*parts: bytes) -> tuple[App, Transport]:
    """What comes of bytes that arrive in these parts."""
    app, transport = App(), Transport()

    async def run() -> None:
        config = uvicorn.Config(app, lifespan="off", log_level="critical")
        state = ServerState()
        connection = ServerConnection(LIMITS, config=config, server_state=state, app_state={})
        connection.connection_made(transport)
        for part in parts:
            if not transport.is_closing():
                connection.data_received(part)
            for _ in range(8):
                await asyncio.sleep(0)
        for task in state.tasks:
            task.cancel()

    asyncio.run(run())
    return app, transport
