"""Many clients at once, and a worker killed in the middle of its steps: nothing may be lost.

    python scripts/gpu_faults.py --device cuda --clients 1000
    python scripts/gpu_faults.py --device cuda --clients 200 -- --prefill 1 --decode 1

A server with two workers of one small random model, on one GPU where there is one, answers some
prompts undisturbed. Then as many clients as asked for stream the same prompts at once, and again
while a worker is killed as soon as a tenth of the tokens has come. Every answer must be that of
the undisturbed run, and both workers must come back. Flags after `--` go to the server, in the
place of `--workers 2`. The last line is one JSON object. It needs what a server needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
    "eos_token_id": 0,
}
COMMON = ("--random-weights", "--share-gpus", "--port", "0")
NUM_PROMPTS = 16
DEADLINE_S = 100.0


def main() -> None:
    args = _arguments()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    queue = ("--device", args.device, "--max-queue", str(2 * args.clients))
    flags = ("--batch-invariant", *queue, *(args.flags or ("--workers", "2")))
    with (
        tempfile.TemporaryDirectory() as folder,
        served(write_model(Path(folder)), flags) as server,
    ):
        began_s = time.monotonic()
        report = asyncio.run(asyncio.wait_for(_run(server, args), DEADLINE_S))
        report |= {"start_s": round(server.start_s, 1), "run_s": round(_since(began_s), 1)}
    print(json.dumps(report))
    if not report["passed"]:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("flags", nargs="*", help="of the server, after --")
    return parser.parse_args()


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """A model without weights, whose tokens are words, one each."""
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    host: str
    port: int
    start_s: float

    def workers(self) -> list[int]:
        """The process ids of its workers."""
        pid, found = self.process.pid, []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if "worker-process" in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
                    found.append(int(child))
        return found


@contextlib.contextmanager
def served(folder: Path, flags: Sequence[str]) -> Iterator[Server]:
    """A server as a process of its own, once it is ready."""
    command = [sys.executable, "-P", "-m", "tokenmill", "serve", str(folder), *COMMON, *flags]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if found := re.search(r"http://(127\.0\.0\.1):(\d+)/v1;", line):
                break
        else:
            sys.exit("the server did not start")
        # Nobody reads its log from here on: it may not fill the pipe.
        log = subprocess.Popen(["cat"], stdin=process.stderr, stdout=sys.stderr)
        yield Server(process, found[1], int(found[2]), _since(began_s))
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        with contextlib.suppress(UnboundLocalError):
            log.wait(5)


@dataclass
class Answer:
    """What a stream brought."""

    text: str = ""
    finish: list[str] = field(default_factory=list)
    num_chunks: int = 0
    ttft_s: float = 0.0
    gap_s: float = 0.0  # the longest between two chunks
    error: str = ""

    def words(self) -> tuple[str, list[str]]:
        return self.text, self.finish


class Clients:
    """Streams of prompts, and how many tokens they have brought so far."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self._server, self.num_tokens = server, 0
        self.wanted_tokens, self._output_tokens = 0, args.output_tokens
        source = random.Random(7)
        self.prompts = [
            " ".join(f"w{source.randrange(1, 2048)}" for _ in range(args.prompt_tokens))
            for _ in range(NUM_PROMPTS)
        ]

    async def stream_all(self, count: int) -> list[Answer]:
        """So many streams at once, of all prompts in turn."""
        self.num_tokens, self.wanted_tokens = 0, count * self._output_tokens
        return await asyncio.gather(*(self._stream(i % NUM_PROMPTS) for i in range(count)))

    async def _stream(self, number: int) -> Answer:
        answer = Answer()
        try:
            await self._read(number, answer)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            answer.error = repr(error)
        return answer

    async def _read(self, number: int, answer: Answer) -> None:
        body = {
            "prompt": self.prompts[number],
            "max_tokens": self._output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began_s = time.monotonic()
        reader, writer = await post(self._server, "/v1/completions", body)
        try:
            last_s = began_s
            async for line in reader:
                if not line.startswith(b"data: "):
                    if line.startswith(b"HTTP") and b" 200 " not in line:
                        raise ValueError(line.decode().strip())
                    continue
                now_s = time.monotonic()
                if line.strip() == b"data: [DONE]":
                    return
                self._take(json.loads(line[6:]), answer)
                if answer.num_chunks == 1:
                    answer.ttft_s = now_s - began_s
                else:
                    answer.gap_s = max(answer.gap_s, now_s - last_s)
                last_s = now_s
            raise ValueError("the stream was broken off")
        finally:
            writer.close()

    def _take(self, event: dict[str, Any], answer: Answer) -> None:
        if "error" in event:
            raise ValueError(str(event["error"]))
        for choice in event["choices"]:
            answer.text += choice["text"]
            answer.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            self.num_tokens += choice["text"].count("w")
        answer.num_chunks += 1


async def post(
    server: Server, path: str, body: dict[str, Any] | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Call the server, by GET where there is no body."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: {server.host}\r\n"
    head += (
        f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + data)
    await writer.drain()
    return reader, writer


async def workers(server: Server) -> dict[str, Any]:
    """What /workers says."""
    reader, writer = await post(server, "/workers", None)
    data = await reader.read()
    writer.close()
    found: dict[str, Any] = json.loads(data[data.index(b"{") : data.rindex(b"}") + 1])
    return found


async def _run(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    clients = Clients(server, args)
    expected = [answer.words() for answer in await clients.stream_all(NUM_PROMPTS)]
    calm = await _phase(clients, args.clients, expected)
    killing = asyncio.create_task(_kill_one(server, clients))
    killed = await _phase(clients, args.clients, expected)
    was_killed = killing.done()
    killing.cancel()
    while any(worker["state"] != "ready" for worker in (await workers(server))["workers"]):
        await asyncio.sleep(0.1)
    after, view = await _phase(clients, NUM_PROMPTS, expected), await workers(server)
    return {
        "benchmark": "gpu-faults",
        "device": args.device,
        "flags": args.flags,
        "clients": args.clients,
        "calm": calm,
        "killed": killed,
        "after": after,
        **{name: view[name] for name in ("migrations", "transfers", "failed_transfers")},
        "passed": was_killed and not any(p["lost"] or p["changed"] for p in (calm, killed, after)),
    }


async def _kill_one(server: Server, clients: Clients) -> None:
    """Kill a worker once a tenth of the tokens is there."""
    await asyncio.sleep(0)
    while clients.num_tokens < clients.wanted_tokens / 10:
        await asyncio.sleep(0.001)
    os.kill(server.workers()[-1], signal.SIGKILL)


async def _phase(
    clients: Clients, count: int, expected: list[tuple[str, list[str]]]
) -> dict[str, Any]:
    began_s = time.monotonic()
    answers = await clients.stream_all(count)
    seconds = _since(began_s)
    whole = [answer for answer in answers if not answer.error]
    wrong = [
        a for i, a in enumerate(answers) if not a.error and a.words() != expected[i % NUM_PROMPTS]
    ]
    ttft_ms = [1e3 * answer.ttft_s for answer in whole] or [0.0]
    return {
        "lost": len(answers) - len(whole),
        "changed": len(wrong),
        "errors": sorted({answer.error for answer in answers} - {""})[:3],
        "seconds": round(seconds, 2),
        "output_tok_s": round(clients.wanted_tokens / seconds, 1),
        "ttft_ms_p50": round(statistics.median(ttft_ms), 1),
        "ttft_ms_p99": round(sorted(ttft_ms)[int(0.99 * (len(ttft_ms) - 1))], 1),
        "worst_gap_s": round(max((a.gap_s for a in whole), default=0.0), 2),
    }


def _since(began_s: float) -> float:
    return time.monotonic() - began_s


if __name__ == "__main__":
    main()
