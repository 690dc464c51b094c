from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from api.sim import MODEL
from api.sim_server import GENEROUS_S, KIND, SimServer, sim_server
from tokenmill.core.config import ServerConfig

TEXT = 'say: naïve café 数字 😀 👍, "quoted" \\ and so on to the end'
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "n": 2}),
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": [TEXT, TEXT], "stop": ["the end"]}),
    ("/v1/completions", {"prompt": TEXT, "logprobs": 1}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with sim_server(step_ms=1.0) as running:
        yield running


def streamed(server: SimServer, path: str, call: dict[str, Any], version: str) -> list[Any]:
    """The choices of all events; HTTP/1.0 has no chunks, so there all of them pass ASGI."""
    body = json.dumps({"model": MODEL, "stream": True, "temperature": 0, "max_tokens": 60} | call)
    with socket.create_connection(server.address, timeout=GENEROUS_S) as connection:
        head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"{KIND}Content-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    head_bytes, _, rest = data.partition(b"\r\n\r\n")
    assert b" 200 " in head_bytes.splitlines()[0]
    assert (b"chunked" in head_bytes) == (version == "1.1")
    if version == "1.1":
        rest = dechunk(rest)
    events = rest.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2]]


def dechunk(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        parts.append(data[: int(size, 16)])
        assert data[int(size, 16) :].startswith(b"\r\n")
        data = data[int(size, 16) + 2 :]
    assert parts[-1] == b""
    return b"".join(parts)


def joined(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in [choice for choices in events for choice in choices]:
        delta = choice.get("delta", {}).get("content") or choice.get("text") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + delta
    return texts


@pytest.mark.parametrize(("path", "call"), CALLS)
def test_direct_events_are_those_of_asgi(
    server: SimServer, path: str, call: dict[str, Any]
) -> None:
    ours, plain = (streamed(server, path, call, version) for version in ("1.1", "1.0"))
    assert joined(ours) == joined(plain)
    whole = server.call("POST", path, {"model": MODEL, "max_tokens": 60, "temperature": 0} | call)
    texts = [
        c["message"]["content"] if "message" in c else c["text"] for c in whole.json["choices"]
    ]
    assert list(dict(sorted(joined(ours).items())).values()) == texts
    # Events may be merged, but each has the same fields.
    shapes = [{json.dumps(blank(c)) for cs in events for c in cs} for events in (ours, plain)]
    assert shapes[0] == shapes[1]


def blank(value: Any) -> Any:
    """A choice without what differs from event to event: strings, numbers and lists of them."""
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    if isinstance(value, list):
        return []
    return value if value is None or isinstance(value, bool) else type(value).__name__


def test_stream_interval_makes_fewer_events() -> None:
    call = {"messages": [{"role": "user", "content": "count: 40"}]}
    with sim_server(ServerConfig(port=0, stream_interval=8), step_ms=1.0) as server:
        whole = server.chat("count: 40").json["choices"][0]["message"]["content"]
        for fields in ({}, {"logprobs": True}):
            events = streamed(server, "/v1/chat/completions", call | fields, "1.1")
            assert joined(events)[0] == whole
            num_events = sum("content" in c["delta"] for choices in events for c in choices)
            # The role, a first token, one event for every 8 of the 39 that follow, and the rest.
            assert num_events <= 1 + 1 + 39 // 8 + 1
