"""Calls by which one key could hold up another: each alone was a fault of a server once."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vision.pictures import gif

Json = dict[str, Any]
CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
LEAVE_S = 2.0  # clients do not wait longer for their answer


@dataclass(frozen=True)
class Noise:
    """A call, how many clients repeat it, and an ordinary call of as many tokens."""

    name: str
    path: str
    body: bytes
    ordinary: Json
    clients: int = 4
    stalls: bool = False  # the end of the body is never sent


def chat(content: Any = "say: qabcabcabc", **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def noise(
    name: str,
    call: Json | bytes,
    ordinary: Json | None = None,
    path: str = CHAT,
    clients: int = 4,
    stalls: bool = False,
) -> Noise:
    body = call if isinstance(call, bytes) else json.dumps(call).encode()
    return Noise(name, path, body, ordinary or chat(), clients, stalls)


def nested(depth: int) -> str:
    """A short regex whose masks take long."""
    return "q" + "(" * depth + "[a-z]*" + ")*" * depth


def slow_to_compile(depth: int = 1000) -> str:
    return "(" * depth + "[a-z]*)*" * depth


BOMB = "data:image/gif;base64," + base64.b64encode(gif(65_535, 65_535)).decode()
LETTERS = "".join(chr(97 + i % 26) for i in range(60_000))
MANY = {str(token): 1.0 for token in range(300)}


def noises(megabytes: int) -> list[Noise]:
    """All of them; long bodies have this size, which --max-body-size allows."""
    size, text = megabytes * 2**20, "word " * (megabytes * 2**20 // 5)
    messages = {"messages": chat(text)["messages"]}
    return [
        noise("a stop of 60 kB", chat(stop=LETTERS)),
        noise("64 stops", chat(stop=[f"{n:0>64}" for n in range(64)], n=16), chat(n=16)),
        noise("nested regex", chat(guided_regex=nested(249), n=128), chat(n=128)),
        noise("regex that is slow to compile", chat(guided_regex=slow_to_compile())),
        noise("deep schema", chat(guided_json=json.loads('{"items":' * 60 + "{}" + "}" * 60))),
        noise("GIF bomb", chat([{"type": "image_url", "image_url": {"url": BOMB}}])),
        noise("long prompt", chat(text)),
        noise("long /tokenize", {"prompt": text}, path=TOKENIZE, clients=6),
        noise("long count_tokens", messages, path="/v1/messages/count_tokens"),
        noise("long input_tokens", {"input": text}, path="/v1/responses/input_tokens"),
        noise("brackets", b"[" * size),
        noise("body without an end", chat(text), clients=20, stalls=True),
        noise("logit_bias", chat(logit_bias=MANY, n=64), chat(n=64)),
        noise("JSON mode", chat(response_format={"type": "json_object"}, n=64), chat(n=64)),
        noise("log-probabilities", chat(logprobs=True, top_logprobs=20, n=64), chat(n=64)),
        noise("penalties", chat(frequency_penalty=1, repetition_penalty=1.1, n=64), chat(n=64)),
        noise("128 choices", chat(n=128), chat(n=128)),
    ]


def head(path: str, key: str, size: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {size}", "Connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Crowd:
    """Clients of a key, each of which sends a call again and again, and leaves before long."""

    def __init__(self, address: tuple[str, int], key: str, path: str, body: bytes) -> None:
        self._address, self._data = address, head(path, key, len(body)) + body
        self._over = threading.Event()
        self.statuses: list[int] = []  # 0: the client left without one

    @contextlib.contextmanager
    def calling(self, clients: int, stalls: bool = False) -> Iterator[None]:
        """While the block runs; every client has sent a call when it begins."""
        begun = threading.Semaphore(0)
        arguments = (self._data[:-1] if stalls else self._data, begun)
        threads = [threading.Thread(target=self._repeat, args=arguments) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                begun.acquire()
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _repeat(self, data: bytes, begun: threading.Semaphore) -> None:
        while not self._over.is_set():
            answer = b""
            with contextlib.suppress(OSError):
                answer = self._once(data, begun)
            begun.release()
            self.statuses.append(int(answer.split()[1]) if answer[:5] == b"HTTP/" else 0)

    def _once(self, data: bytes, begun: threading.Semaphore) -> bytes:
        with socket.create_connection(self._address, timeout=LEAVE_S) as connection:
            connection.sendall(data)
            begun.release()
            answer = connection.recv(65_536)
            while connection.recv(65_536):
                pass
            return answer
