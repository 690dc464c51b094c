"""How fast and how exact is the client, beside AIPerf and guidellm, in one run on one machine.

    python scripts/client_peers.py speed   --tokenizer DIR --aiperf BIN --guidellm BIN
    python scripts/client_peers.py latency --tokenizer DIR --aiperf BIN --guidellm BIN

`speed`: requests/s against a server that answers at once, not streamed and streamed (32 tokens).
`latency`: TTFT and TPOT of a server that waits for known times, beside the server's own stamps.
The tools take turns, each with a server process of its own, and the median of the rounds counts.
AIPerf and guidellm live in virtual environments of their own; BIN is their command there, and DIR
a Hugging Face folder with a tokenizer. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from tokenmill.bench.client.client_process import loop_factory
from tokenmill.bench.client.null_server import (
    NUM_TOKENS,
    STREAM_HEAD,
    NullProtocol,
    answer_of,
    stream_chunks,
)
from tokenmill.bench.results.reading import read_round
from tokenmill.core.metrics import summarize

OURS, MODEL = "tokenmill", "any"
INPUT_LEN = 128
TIMEOUT_S = 300
SPAWN = multiprocessing.get_context("spawn")
FIGURES = ("request_s", "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "tpot_ms.p99")


@dataclass(frozen=True)
class Plan:
    """What the server does: the times are those of the first token and between two."""

    stream: bool
    num_tokens: int = NUM_TOKENS
    first_s: float = 0.0
    gap_s: float = 0.0

    @property
    def name(self) -> str:
        if self.first_s:
            return f"{self.first_s * 1e3:g} ms + {self.num_tokens} x {self.gap_s * 1e3:g} ms"
        return f"streamed, {self.num_tokens} tokens" if self.stream else "not streamed"


class StampedProtocol(NullProtocol):
    """Answers by plan and keeps (arrived, first token written, last token written) in ns."""

    def __init__(self, plan: Plan, stamps: list[tuple[int, int, int]]) -> None:
        super().__init__(answer_of("chat", plan.stream))
        self._plan = plan
        self._stamps = stamps
        self._chunks = stream_chunks("chat", plan.num_tokens)

    def answer(self) -> None:
        now_ns = time.monotonic_ns()
        if self._plan.first_s:
            self._later(0, asyncio.get_running_loop().time(), now_ns, 0)
            return
        super().answer()
        self._stamps.append((now_ns, now_ns, now_ns))

    def _later(self, index: int, begin_s: float, arrived_ns: int, first_ns: int) -> None:
        due_s = begin_s + self._plan.first_s + index * self._plan.gap_s
        loop = asyncio.get_running_loop()
        loop.call_at(due_s, self._token, index, begin_s, arrived_ns, first_ns)

    def _token(self, index: int, begin_s: float, arrived_ns: int, first_ns: int) -> None:
        if self.transport.is_closing():
            return
        chunks, now_ns = self._chunks, time.monotonic_ns()
        is_last = index == self._plan.num_tokens - 1
        head = b"" if index else STREAM_HEAD
        self.transport.write(head + chunks[index] + (chunks[-1] if is_last else b""))
        if is_last:
            self._stamps.append((arrived_ns, first_ns, now_ns))
        else:
            self._later(index + 1, begin_s, arrived_ns, first_ns or now_ns)


def serve(plan: Plan, pipe: Pipe) -> None:
    """A process: sends its port; at the end sends the stamps."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(plan, pipe))


async def _serve(plan: Plan, pipe: Pipe) -> None:
    stamps: list[tuple[int, int, int]] = []
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), ended.set)
    server = await loop.create_server(lambda: StampedProtocol(plan, stamps), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await ended.wait()
    loop.remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)  # the loop had made it non-blocking
    pipe.send(stamps)


@contextlib.contextmanager
def server(plan: Plan, truth: dict[str, float]) -> Iterator[str]:
    """Its URL; what it saw is in `truth` afterwards."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve, args=(plan, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
        ours.send("end")
        truth |= seen(ours.recv(), plan)
    finally:
        ours.close()
        process.kill()
        process.join()


def seen(stamps: list[tuple[int, int, int]], plan: Plan) -> dict[str, float]:
    """The server's figures; the rate is that of the middle 80 % of the requests."""
    if not stamps:
        return {}
    ends = sorted(end for *_, end in stamps)
    low, high = ends[len(ends) // 10], ends[-1 - len(ends) // 10]
    rate = 0.8 * len(ends) / ((high - low) / 1e9) if high > low else 0.0
    found = {"request_s": rate, "requests": float(len(ends))}
    if not plan.first_s:
        return found
    ttft = summarize((first - arrived) / 1e6 for arrived, first, _ in stamps)
    tpot = summarize((last - first) / 1e6 / (plan.num_tokens - 1) for _, first, last in stamps)
    for name, summary in (("ttft_ms", ttft), ("tpot_ms", tpot)):
        found |= {f"{name}.{p}": summary[p] for p in ("p50", "p99")}
    return found


def command_of(tool: str, args: argparse.Namespace, plan: Plan, url: str, out: Path) -> list[str]:
    """The tool's own command line for the same load."""
    if tool == OURS:
        return [
            *(sys.executable, "-m", "tokenmill", "bench", "endpoint", "--json", "--no-audit"),
            *("--url", url, "--model", MODEL, "--stream" if plan.stream else "--no-stream"),
            *("--concurrency", str(args.concurrency), "--duration", str(args.seconds)),
            *("--input-len", str(INPUT_LEN), "--output-len", str(plan.num_tokens)),
            *("--no-server-metrics", "--output-dir", str(out)),
        ]
    if tool == "aiperf":
        return [
            *(args.aiperf, "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat"),
            *(("--streaming",) if plan.stream else ()),
            *("--concurrency", str(args.concurrency), "--benchmark-duration", str(args.seconds)),
            *("--isl", str(INPUT_LEN), "--osl", str(plan.num_tokens)),
            *("--tokenizer", args.tokenizer, "--ui", "None", "--artifact-dir", str(out)),
        ]
    data = f"kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={plan.num_tokens}"
    stream = str(plan.stream).lower()
    return [
        *(args.guidellm, "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL},stream={stream}"),
        *("--profile", f"kind=concurrent,streams={args.concurrency}"),
        *("--constraint", f"kind=max_duration,seconds={args.seconds}"),
        *("--tokenizer", f"kind=hf_auto,model={args.tokenizer}"),
        *("--data", data, "--output", f"kind=json,path={out / 'benchmarks.json'}"),
    ]


def run_once(tool: str, args: argparse.Namespace, plan: Plan) -> dict[str, float]:
    """One run: the tool's own figures, and the server's under "server."."""
    truth: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix=f"{tool}-") as folder:
        with server(plan, truth) as url:
            command = command_of(tool, args, plan, url, Path(folder))
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise SystemExit(
                f"{tool} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            )
        own = read_round(Path(folder)).points[0].values
    figures = {name: own[name] for name in FIGURES if name in own}
    return figures | {f"server.{name}": value for name, value in truth.items()}


def measure(tools: list[str], plans: list[Plan], args: argparse.Namespace) -> dict[str, Any]:
    """All rounds, interleaved; medians by plan and tool."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(args.rounds):
        for plan in plans:
            for tool in tools:
                figures = run_once(tool, args, plan)
                runs.setdefault((plan.name, tool), []).append(figures)
                print(f"round {number + 1}, {plan.name}, {tool}: {text_of(figures)}", flush=True)
    report: dict[str, Any] = {}
    for (name, tool), rounds in runs.items():
        keys = set.intersection(*(set(figures) for figures in rounds))
        medians = {key: statistics.median(f[key] for f in rounds) for key in sorted(keys)}
        report.setdefault(name, {})[tool] = {k: round(v, 3) for k, v in medians.items()}
    return report


def text_of(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.2f}" for name, value in sorted(figures.items()))


def print_ratios(report: dict[str, Any]) -> None:
    """Ours over theirs, by the requests that the server answered."""
    for name, tools in report.items():
        for tool in tools:
            if tool != OURS:
                ours, theirs = (tools[t]["server.request_s"] for t in (OURS, tool))
                tools[tool]["ours_over_theirs"] = round(ours / theirs, 2)
                print(f"{name}: {ours:,.0f} requests/s, {tool} {theirs:,.0f}: {ours / theirs:.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("speed", "latency"))
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer")
    parser.add_argument("--aiperf", help="its command; left out without")
    parser.add_argument("--guidellm", help="its command; left out without")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=8, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--tpot-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=50, help="of an answer, for `latency`")
    args = parser.parse_args()
    tools = [OURS, *(tool for tool in ("aiperf", "guidellm") if getattr(args, tool))]
    plans = [Plan(False), Plan(True)]
    if args.what == "latency":
        plans = [Plan(True, args.tokens, args.ttft_ms / 1e3, args.tpot_ms / 1e3)]
    report = measure(tools, plans, args)
    if args.what == "speed":
        print_ratios(report)
    settings = {name: getattr(args, name) for name in ("concurrency", "seconds", "rounds")}
    print(json.dumps({"what": args.what, **settings, "figures": report}))


if __name__ == "__main__":
    main()
