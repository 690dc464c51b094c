"""What large bodies cost the streams beside them: the longest gap between two tokens.

    python scripts/body_gaps.py --mib 15

A server with a simulated engine streams to a few clients, a token every `--step-ms` to each. One
body after the other arrives meanwhile, sent by a process of its own. A line has the longest gap
between two reads of any stream while the body was sent and answered, for how long that was, and
the answer's status. The first line is of a time without bodies: gaps of the machine itself.
With `--route` all of it passes a `tokenmill route` before the server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

COMMAND = (sys.executable, "-P", "-m", "tokenmill", "bench", "frontend-server")
ROUTE = (sys.executable, "-P", "-m", "tokenmill", "route")
MODEL = "simulated"
NUM_STREAMS = 8
CONTEXT = 150_000
QUIET_S = 2.0
READ_BYTES = 1 << 16
WORDS = "the quick brown fox jumps over the lazy dog and the dog does not mind at all "

Body = tuple[str, bytes]  # path and content


def bodies(mib: float) -> dict[str, Callable[[], Body]]:
    """What is sent, by name; each is made when its turn comes."""
    size = int(mib * 2**20)
    words = WORDS * (size // len(WORDS))
    fitting = WORDS * (100_000 // 17)

    def chat(content: str, **more: object) -> Body:
        call = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
        return "/v1/chat/completions", json.dumps(call).encode()

    def messages() -> Body:
        turns = [{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(size // 50)]
        return "/v1/chat/completions", json.dumps({"messages": turns}).encode()

    def completion(prompt: object) -> Body:
        return "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": 1}).encode()

    def schema() -> Body:
        rows = {f"field_{i}": {"type": "string", "enum": ["a", "b"]} for i in range(size // 60)}
        schema = {"type": "object", "properties": rows}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return chat("hi", response_format=form)

    def image() -> Body:
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
        turns = [{"role": "user", "content": [part]}]
        return "/v1/chat/completions", json.dumps({"messages": turns}).encode()

    def response() -> Body:
        return "/v1/responses", json.dumps({"input": fitting, "max_output_tokens": 16}).encode()

    def message() -> Body:
        turns = [{"role": "user", "content": words}]
        call = {"model": MODEL, "max_tokens": 1, "messages": turns}
        return "/v1/messages", json.dumps(call).encode()

    return {
        "chat of 100,000 tokens": lambda: chat(fitting),
        "100,000 token ids": lambda: completion([7] * 100_000),
        "response of 100,000 tokens": response,
        "one string": lambda: chat("x" * size),
        "words": lambda: chat(words),
        "messages of Anthropic's": message,
        "many messages": messages,
        "token ids": lambda: completion([7] * (size // 3)),
        "strings": lambda: completion(["hi"] * (size // 6)),
        "schema": schema,
        "image": image,
        "not JSON": lambda: ("/v1/chat/completions", b'{"messages": [' + b"1," * (size // 2)),
        "/tokenize": lambda: ("/tokenize", json.dumps({"prompt": words}).encode()),
        "/detokenize": lambda: ("/detokenize", json.dumps({"tokens": [7] * (size // 3)}).encode()),
    }


def send_bodies(address: tuple[str, int], mib: float, names: list[str], pipe: Connection) -> None:
    """Send one body for each word of the pipe, and tell the status of its answer."""
    made = bodies(mib)
    for name in names:
        path, content = made[name]()
        pipe.recv()
        connection = http.client.HTTPConnection(*address, timeout=120)
        connection.request("POST", path, content, {"content-type": "application/json"})
        answer = connection.getresponse()
        length = len(answer.read())
        connection.close()
        pipe.send((answer.status, len(content), length))
    pipe.recv()


@contextlib.contextmanager
def server(step_ms: float) -> Iterator[tuple[str, int]]:
    """A simulated server in a process of its own."""
    flags = ["--num-streams", str(NUM_STREAMS + 1), "--stream-tokens", str(CONTEXT)]
    process = subprocess.Popen(
        [*COMMAND, *flags, "--step-ms", str(step_ms)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
        yield host, int(port)
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def router(backend: tuple[str, int], model: str) -> Iterator[tuple[str, int]]:
    """A router before a server, with a tokenizer."""
    host, port = backend
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()[1]
    flags = ["--backend", f"http://{host}:{port}", "--tokenizer", model, "--port", str(own)]
    process = subprocess.Popen([*ROUTE, *flags], stdout=subprocess.DEVNULL)
    try:
        _wait_for(own)
        yield "127.0.0.1", own
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise SystemExit("the router did not start")


class Streams:
    """Streams that are read here, and the longest gap between two reads of one."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._selector = selectors.DefaultSelector()
        self._last_s: dict[socket.socket, float] = {}
        for _ in range(NUM_STREAMS):
            self._begin(address)
        self.longest_s = 0.0

    def _begin(self, address: tuple[str, int]) -> None:
        turns = [{"role": "user", "content": "hi"}]
        call = {"messages": turns, "stream": True, "ignore_eos": True, "max_tokens": CONTEXT // 2}
        body = json.dumps(call).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        connection = socket.create_connection(address)
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        self._selector.register(connection, selectors.EVENT_READ)
        self._last_s[connection] = time.monotonic()

    def close(self) -> None:
        """Hang up on all."""
        for connection in self._last_s:
            connection.close()

    def read_until(self, is_over: Callable[[], bool]) -> float:
        """Read all until then; returns the longest gap in seconds."""
        self.longest_s = 0.0
        while not is_over():
            for key, _ in self._selector.select(0.05):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if not connection.recv(READ_BYTES):
                    raise SystemExit("a stream ended")
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, now_s - self._last_s[connection])
                self._last_s[connection] = now_s
        return self.longest_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=float, default=15.0, help="size of the large bodies")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--only", help="send only the bodies whose name has this in it")
    parser.add_argument("--route", metavar="MODEL", help="before it a router with its tokenizer")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    names = [name for name in bodies(0.01) if not args.only or args.only in name] * args.rounds
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with contextlib.ExitStack() as running:
        address = running.enter_context(server(args.step_ms))
        if args.route:
            address = running.enter_context(router(address, args.route))
        sender = context.Process(target=send_bodies, args=(address, args.mib, names, theirs))
        sender.start()
        streams = running.enter_context(contextlib.closing(Streams(address)))
        _pause(streams, QUIET_S)
        print(f"{'no body':30} {1e3 * _pause(streams, QUIET_S):7.1f} ms")
        for name in names:
            began_s = time.monotonic()
            ours.send(None)
            gap_s = streams.read_until(ours.poll)
            status, size, length = ours.recv()
            taken_s = time.monotonic() - began_s
            print(
                f"{name:30} {1e3 * gap_s:7.1f} ms, over {taken_s:5.2f} s; {size / 2**20:.1f} MiB, "
                f"answered {status} with {length} bytes",
                flush=True,
            )
            _pause(streams, 0.5)
        ours.send(None)
        sender.join()


def _pause(streams: Streams, seconds: float) -> float:
    end_s = time.monotonic() + seconds
    return streams.read_until(lambda: time.monotonic() > end_s)


if __name__ == "__main__":
    main()
