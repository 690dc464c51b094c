"""Runs two workers, 17 chats, MLPerf, and tiny models that see images, make video, and rank.

Its exit status is 0 if all were answered, KV moved, the server stopped, and each run had a result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai

from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.console import fetch, out, print_table
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import TokenmillError

MODEL = "smollm2"
TOOL = (sys.executable, "-P", "-m", "tokenmill")
RESULTS = Path("results") / "demo"
FOLDER = ("--submission-dir", str(RESULTS))
ROLES = ("--prefill", "1", "--decode", "1", "--router", "kv")
MLPERF = ("bench", "mlperf", "--quick", "--json")
SCENARIOS = ("Offline", "Server", "Interactive")
LOAD = ("--benchmark", "llama2-70b", "--length-scale", "0.03", "--target-qps", "4")
IMAGES = ("--benchmark", "qwen3-vl-235b", "--model", "qwen3-vl-tiny", "--quick-samples", "8")
RANKING = ("--benchmark", "dlrm-v3", "--length-scale", "0.01", "--model", str(RESULTS))
VIDEO = ("video", "a red fox in snow", "--model", "wan-tiny", "--size", "64x64", "--frames", "33")
NOISE = ("--random-weights",)  # of tiny models: the path is the real one, the answers mean nothing
RANKER = HstuSpec(num_items=1000, num_users=100)  # MLPerf's model with small tables
SYSTEM = "You are the guide of a museum. Answer in one or two sentences that a child can follow."
QUESTIONS = (
    *("Why is the sky blue?", "How do birds fly?", "What is gravity?", "What is a volcano?"),
    *("How do fish breathe under water?", "Why do leaves turn red in autumn?"),
    *("Why does the moon change its shape?", "How do bees make honey?", "Why do cats purr?"),
    *("What are clouds made of?", "How old is the Earth?", "What is a fossil?"),
    *("Why is the sea salty?", "How does a magnet work?", "What do plants need to grow?"),
    "Why do we see lightning before we hear thunder?",
)
LAST_QUESTION = "These were today's questions and answers. Which question was about the sea?"
FIRST = """\
1. Chats with SmolLM2-135M (98 MB, fetched once) on a prefill and a decode worker.
2. Quick MLPerf runs of it, and of tiny models with random weights: images, ranking, video.
3. A summary, and what to type next. It takes a few minutes."""
NEXT = """\
What to type next: {0} chat, or {0} serve; beside it
{0} bench endpoint --url http://127.0.0.1:8000/v1 --concurrency 1,4,16"""


def main() -> int:
    out.print(FIRST)
    fetch(MODEL)
    RESULTS.mkdir(parents=True, exist_ok=True)
    parts = {"chats on a prefill and a decode worker": _chats()}
    for scenario in SCENARIOS:
        parts[f"MLPerf {scenario}"] = _measured(*LOAD, "--scenario", scenario, *FOLDER)
    (RESULTS / "config.json").write_text(json.dumps(RANKER.config()), encoding="utf-8")
    parts["a model that sees images"] = _measured(*IMAGES, "--length-scale", "0.1", *NOISE)
    parts["a model that ranks"] = _measured(*RANKING, *NOISE)
    video = subprocess.run([*TOOL, *VIDEO, *NOISE, "--out", str(RESULTS / "noise.mp4")])
    parts["a model that makes videos"] = video.returncode == 0
    for name, well in parts.items():
        out.print(f"{name}: {'went well' if well else 'FAILED'}")
    name = "tokenmill" if shutil.which("tokenmill") else ".venv/bin/tokenmill"
    out.print(f"Files and reports: {RESULTS}\n\n{NEXT.format(name)}")
    return 0 if all(parts.values()) else 1


def _measured(*flags: str) -> bool:
    """A quick run of MLPerf by LoadGen; whether it gave a result."""
    done = subprocess.run([*TOOL, *MLPERF, *flags], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return False
    found = json.loads(done.stdout.splitlines()[-1])
    metric, report = found["metric"], msgspec.convert(found, MlperfReport)
    out.print(f"{report.headline}: {metric['value']:.1f} {metric['unit']}, {report.verdict}")
    return True


def _chats() -> bool:
    """17 chats, the last about all others; whether all went well and KV has moved."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with _server(port) as process:
        begin = time.perf_counter()
        times, texts = asyncio.run(_ask(f"http://127.0.0.1:{port}/v1", list(QUESTIONS)))
        seconds = time.perf_counter() - begin
        said = "\n".join(f"{q} {a}" for q, a in zip(QUESTIONS, texts, strict=True))
        _, last = asyncio.run(_ask(f"http://127.0.0.1:{port}/v1", [f"{said}\n\n{LAST_QUESTION}"]))
        view = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=30))
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    rows = [["question", "TTFT ms", "TPOT ms"]]
    for question, each in zip(QUESTIONS, times, strict=True):
        rows.append([question, f"{each.ttft_ms or 0:.0f}", f"{each.tpot_ms or 0:.1f}"])
    print_table(rows)
    out.print(f"the first answer: {' '.join(texts[0].split())}", markup=False)
    rate = sum(each.num_tokens for each in times) / seconds
    moved = f"{view['transfers']} prompts went on, {view['transferred_bytes'] / 1e6:.1f} MB of KV"
    out.print(f"{rate:.1f} output tokens/s; {moved}; the server ended with status {status}")
    return all([*texts, *last]) and view["transfers"] > 0 and status == 0


@contextlib.contextmanager
def _server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([*TOOL, "serve", MODEL, "--port", str(port), *ROLES])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            time.sleep(0.1)
        yield process
    finally:
        process.kill()


async def _ask(base_url: str, prompts: list[str]) -> tuple[list[RequestTimes], list[str]]:
    """All prompts at once: when tokens came, and the answers; an empty one has failed."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        found = await asyncio.gather(*(_stream(client, model, prompt) for prompt in prompts))
    return [times for times, _ in found], [text for _, text in found]


async def _stream(client: openai.AsyncOpenAI, model: str, prompt: str) -> tuple[RequestTimes, str]:
    times, text = RequestTimes(time.monotonic_ns()), ""
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
    chunks = await client.chat.completions.create(
        model=model, messages=messages, max_tokens=64, temperature=0, stream=True
    )
    async for chunk in chunks:
        if piece := chunk.choices[0].delta.content:
            times.record(time.monotonic_ns(), 1)
            text += piece
    return times, text


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TokenmillError, openai.OpenAIError) as failure:
        sys.exit(f"error: {failure}")
