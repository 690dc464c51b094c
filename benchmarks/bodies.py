"""What large bodies cost the streams beside them: the longest gap between two tokens."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks import frontend
from benchmarks.front_client import Address, address_of
from benchmarks.harness import Benchmark, Report, command
from benchmarks.servers import HOST, served
from tokenmill import console
from tokenmill.core.flags import count, number, setting
from tokenmill.core.types import TokenmillError

NUM_STREAMS = 8
CONTEXT = 150_000
QUIET_S = 2.0
READ_BYTES = 1 << 16
WORDS = "the quick brown fox jumps over the lazy dog and the dog does not mind at all "
Body = tuple[str, bytes]  # path and content


@dataclass(frozen=True)
class Options:
    mib: float = setting(15.0, "Size of the large bodies.", number(0.01, 1000))
    step_ms: float = setting(5.0, "Time of a step of the simulated engine.", number(0.1, 1000))
    only: str = setting("", "Send only the bodies whose name has this in it.")
    route: bool = setting(False, "A router with a tokenizer before the server.")
    model: str = setting("smollm2", "Model whose tokenizer server and router have.")
    rounds: int = setting(1, "Times that each body is sent.", count(1))


def run(options: Options) -> Report:
    """Longest gap between two reads of any stream while a body is sent and answered.

    A server with a simulated engine streams to a few clients, a token every --step-ms to each. One
    body after the other arrives meanwhile, sent by a process of its own. The first gap is of a time
    without bodies: it is the machine's.

    python -m benchmarks.bodies --mib 15
    """
    names = [name for name in bodies(0.01) if options.only in name] * options.rounds
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rows: list[Report] = []
    with contextlib.ExitStack() as running:
        simulated = frontend.Options(
            model=options.model,
            num_streams=(NUM_STREAMS + 1,),
            stream_tokens=CONTEXT,
            step_ms=options.step_ms,
        )
        url, _ = running.enter_context(frontend.simulated_server(simulated))
        address = address_of(url)
        if options.route:
            route = command("route", "--backend", url, "--tokenizer", options.model)
            address = HOST, running.enter_context(served(route)).port
        sender = context.Process(target=send_bodies, args=(address, options.mib, names, theirs))
        sender.start()
        streams = running.enter_context(contextlib.closing(Streams(address)))
        _pause(streams, QUIET_S)
        quiet_ms = 1e3 * _pause(streams, QUIET_S)
        for name in names:
            began_s = time.monotonic()
            ours.send(None)
            gap_s = streams.read_until(ours.poll)
            status, size, length = ours.recv()
            seconds = time.monotonic() - began_s
            row = {"body": name, "gap_ms": 1e3 * gap_s, "seconds": seconds, "status": status}
            rows.append(row | {"mib": size / 2**20, "answer_bytes": length})
            _pause(streams, 0.5)
        ours.send(None)
        sender.join()
    return {"quiet_ms": quiet_ms, "rows": rows}


def show(report: Report) -> None:
    rows = [["body", "gap ms", "over s", "MiB", "status", "answer bytes"]]
    rows.append(["no body", f"{report['quiet_ms']:.1f}", "", "", "", ""])
    for row in report["rows"]:
        figures = f"{row['gap_ms']:.1f}", f"{row['seconds']:.2f}", f"{row['mib']:.1f}"
        rows.append([row["body"], *figures, str(row["status"]), str(row["answer_bytes"])])
    console.print_table(rows)


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
        call = {"model": frontend.NAME, "max_tokens": 1, "messages": turns}
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


def send_bodies(address: Address, mib: float, names: list[str], pipe: Connection) -> None:
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


class Streams:
    """Streams that are read here, and the longest gap between two reads of one."""

    def __init__(self, address: Address) -> None:
        self._selector = selectors.DefaultSelector()
        self._last_s: dict[socket.socket, float] = {}
        for _ in range(NUM_STREAMS):
            self._begin(address)
        self.longest_s = 0.0

    def _begin(self, address: Address) -> None:
        turns = [{"role": "user", "content": "hi"}]
        call = {"messages": turns, "stream": True, "ignore_eos": True, "max_tokens": CONTEXT // 2}
        body = json.dumps(call).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}"
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
                    raise TokenmillError("a stream ended")
                now_s = time.monotonic()
                self.longest_s = max(self.longest_s, now_s - self._last_s[connection])
                self._last_s[connection] = now_s
        return self.longest_s


def _pause(streams: Streams, seconds: float) -> float:
    end_s = time.monotonic() + seconds
    return streams.read_until(lambda: time.monotonic() > end_s)


BENCHMARK = Benchmark("bodies", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
