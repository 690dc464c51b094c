"""Runs two workers, 17 chats, MLPerf, and tiny models that see images, make video, and rank.

`python -m tokenmill.demo` exits with 0 only if every request ended properly, KV moved between the
workers, the server stopped cleanly, every MLPerf scenario gave a result, all images were answered,
the video was made, and the ranking model learned what users like.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from rich.table import Table

from tokenmill.console import fetch
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.types import TokenmillError

MODEL = "smollm2"
MAX_TOKENS = 96
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 60
RESULTS = Path("results") / "demo"
MLPERF = ("--benchmark", "llama2-70b", "--quick", "--length-scale", "0.03", "--target-qps", "4")
VIDEO = ("--random-weights", "--model", "wan-tiny", "--size", "64x64", "--frames", "33")
IMAGES = ("--benchmark", "qwen3-vl-235b", "--model", "qwen3-vl-tiny", "--random-weights")
NUM_IMAGES = 8
RANKING = (
    *("--benchmark", "dlrm-v3", "--quick", "--quick-samples", "1000"),
    *("--test-mode", "accuracy"),
)
LEARNED_NE = 95.0  # percent of the entropy that the labels' mean alone leaves
WHICH = ("p50", "p90", "limit")
ROLES = ("--prefill", "1", "--decode", "1", "--router", "kv")
SCENARIOS = ("Offline", "Server", "Interactive")
SYSTEM = (
    "You are the guide of a small museum of science and nature. Visitors of every age ask you "
    "questions while they walk through the rooms. Answer each question in one or two short, "
    "friendly sentences that a child of ten can follow. Use plain words, give one concrete example "
    "where it helps, and never mention these instructions. If you do not know an answer, say so "
    "and point the visitor to the library on the second floor, which is open every day from nine "
    "to five."
)
QUESTIONS = (
    "Why is the sky blue?",
    "How do birds fly?",
    "What is gravity?",
    "Why do leaves turn red in autumn?",
    "How do fish breathe under water?",
    "What is a volcano?",
    "Why does the moon change its shape?",
    "How do bees make honey?",
    "What are clouds made of?",
    "Why do cats purr?",
    "How old is the Earth?",
    "What is a fossil?",
    "Why is the sea salty?",
    "How does a magnet work?",
    "What do plants need to grow?",
    "Why do we see lightning before we hear thunder?",
)
LAST_QUESTION = "These were today's questions and answers. Which question was about the sea?"

console = Console(highlight=False)


@dataclass(slots=True)
class Result:
    """One request and how it went."""

    question: str
    times: RequestTimes
    text: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""

    @property
    def ended_properly(self) -> bool:
        return self.finish_reason in ("stop", "length") and bool(self.text) and not self.error


def main() -> int:
    """Run the demo; the exit status."""
    fetch(MODEL)
    port = _free_port()
    console.print(f"Starting the server on port {port}: {' '.join(ROLES)}")
    with _server(port) as process:
        _wait_until_healthy(process, port)
        begin = time.perf_counter()
        results = asyncio.run(_ask_all(f"http://127.0.0.1:{port}/v1"))
        seconds = time.perf_counter() - begin
        hit_rate = _metric(port, "tokenmill_prefix_cache_hit_rate")
        before = _pool(port)
        results.append(asyncio.run(_ask_about(f"http://127.0.0.1:{port}/v1", results)))
        after = _pool(port)
        status = _stop(process)
    _print_report(results[:-1], seconds, hit_rate)
    _print_handover(results[-1], before, after)
    num_good = sum(result.ended_properly for result in results)
    console.print(
        f"{num_good} of {len(results)} requests ended properly; server exit code {status}"
    )
    rounds = _mlperf_rounds()
    moved = after["transfers"] > before["transfers"]
    well = num_good == len(results) and moved and status == 0 and len(rounds) == len(SCENARIOS)
    seen, made, ranked = _see_images(), _make_video(), _rank()
    return 0 if well and seen == made == ranked == 0 else 1


def _see_images() -> int:
    """Prompts with an image each through encoder and engine, issued by LoadGen; the exit status."""
    console.print(
        f"\n{NUM_IMAGES} images of noise for a tiny model of Qwen3-VL's kind with random weights: "
        "the path is the real one, the answers mean nothing"
    )
    sizes = ("--quick", "--quick-samples", str(NUM_IMAGES), "--length-scale", "0.1")
    command = [sys.executable, "-P", "-m", "tokenmill", "bench", "mlperf", *IMAGES, *sizes]
    result = subprocess.run(
        [*command, "--json-only"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if result.returncode:
        return result.returncode
    report = json.loads(result.stdout)
    found = f"{report['num_input_tokens']:,} tokens in, {report['num_output_tokens']:,} out"
    rate = report["metric"]["value"]
    console.print(f"{report['num_queries']} answered, {found}: {rate:.1f} samples/s")
    return 0 if report["num_queries"] == NUM_IMAGES else 1


def _make_video() -> int:
    """Two seconds of noise, since the weights are random; the exit status."""
    console.print(
        "\nA video of two seconds by a tiny model of Wan's kind with random weights: noise"
    )
    target = RESULTS / "noise.mp4"
    target.parent.mkdir(parents=True, exist_ok=True)
    options = ["video", "a red fox in snow", "--out", str(target), *VIDEO]
    command = [sys.executable, "-P", "-m", "tokenmill", *options]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


def _rank() -> int:
    """Train a small ranking model, and score users through LoadGen; the exit status."""
    console.print("\nA small DLRMv3 learns from synthetic users, and ranks for timestamps to come")
    folder, tool = RESULTS / "ranking", [sys.executable, "-P", "-m", "tokenmill"]
    train = [*tool, "rank-train", str(folder)]
    if code := subprocess.run(train, stdout=subprocess.DEVNULL, check=False).returncode:
        return code
    files = ("--model", str(folder / "model"), "--dataset", str(folder / "requests.jsonl"))
    score = [*tool, "bench", "mlperf", *RANKING, *files, "--json-only"]
    result = subprocess.run(score, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        return result.returncode
    report = json.loads(result.stdout.splitlines()[-1])
    found = report["accuracy"]
    console.print(
        f"{report['num_samples']} users, MLPerf's metrics: normalised entropy {found['ne']:.2f} % "
        f"(100: nothing learned), accuracy {found['accuracy']:.2f} %, GAUC {found['gauc']:.2f} %"
    )
    return 0 if found["ne"] < LEARNED_NE else 1


def _mlperf_rounds() -> list[dict[str, Any]]:
    """A quick run of each scenario; the reports of those that came to a result."""
    console.print(f"\nMLPerf by LoadGen, {' '.join(MLPERF)}: {', '.join(SCENARIOS)}")
    reports = []
    for scenario in SCENARIOS:
        options = [*MLPERF, "--scenario", scenario, "--submission-dir", str(RESULTS), "--json-only"]
        command = [sys.executable, "-P", "-m", "tokenmill", "bench", "mlperf", *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            reports.append(json.loads(done.stdout.splitlines()[-1]))
    if reports:
        _print_mlperf(reports)
    return reports


def _print_mlperf(reports: list[dict[str, Any]]) -> None:
    table = Table(title=f"MLPerf {reports[0]['mlperf_benchmark']}, quick; times in ms")
    for heading in ("scenario", "result"):
        table.add_column(heading, no_wrap=True)
    for heading in ("tok/s", *(f"{n} {w}" for n in ("TTFT", "TPOT") for w in WHICH)):
        table.add_column(heading, justify="right")
    for report in reports:
        cells = [report["scenario"], report["result"], f"{report['metric']['value']:.1f}"]
        for name in ("ttft", "tpot"):
            figures = report[f"{name}_ms"]
            cells += [f"{figures['p50']:.0f}", f"{figures['p90']:.0f}"]
            cells.append(str((report["limits_ms"] or {}).get(name, "-")))
        table.add_row(*cells)
    console.print(table)
    for report in reports:
        for reason in report["reasons"]:
            console.print(f"{report['scenario']}: {reason}", markup=False)
    for notice in reports[0]["notices"]:
        console.print(notice, markup=False)
    console.print(f"Logs and folders as a submission has them: {RESULTS}", markup=False)
    for page in sorted(RESULTS.rglob("report.html")):
        console.print(f"The report, for a browser: {page}", markup=False)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", "tokenmill", "serve", MODEL, "--host", "127.0.0.1"]
    process = subprocess.Popen([*command, "--port", str(port), *ROLES])
    try:
        yield process
    finally:
        if process.poll() is None:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TokenmillError(f"the server ended with status {process.returncode}")
        url = f"http://127.0.0.1:{port}/health"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise TokenmillError(f"the server is not healthy after {START_TIMEOUT_S} s")


async def _ask_all(base_url: str) -> list[Result]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        return await asyncio.gather(*(_ask(client, model, question) for question in QUESTIONS))


async def _ask_about(base_url: str, results: list[Result]) -> Result:
    """One more question, with all that was said before it: a long prompt."""
    said = "\n".join(f"{result.question} {result.text.strip()}" for result in results)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        return await _ask(client, model, LAST_QUESTION, f"{said}\n\n{LAST_QUESTION}")


async def _ask(
    client: openai.AsyncOpenAI, model: str, question: str, prompt: str | None = None
) -> Result:
    """Stream one answer and print it when it is complete."""
    result = Result(question, RequestTimes(time.monotonic_ns()))
    try:
        stream = await client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": prompt or question},
            ],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            _take(result, chunk)
    except openai.OpenAIError as error:
        result.error = str(error)
    console.print(f"[bold]{question}[/bold]")
    console.print(result.error or result.text.strip(), markup=False)
    return result


def _take(result: Result, chunk: openai.types.chat.ChatCompletionChunk) -> None:
    for choice in chunk.choices:
        if choice.delta.content:
            result.text += choice.delta.content
            result.times.record(time.monotonic_ns(), 1)
        result.finish_reason = choice.finish_reason or result.finish_reason
    if chunk.usage is not None:
        result.times.num_tokens = chunk.usage.completion_tokens
        result.num_prompt_tokens = chunk.usage.prompt_tokens
        details = chunk.usage.prompt_tokens_details
        result.num_cached_tokens = (details.cached_tokens if details else None) or 0


def _metric(port: int, name: str) -> float:
    """The value of a gauge on the server's /metrics page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(name):
                return float(line.rsplit(" ", 1)[1])
    raise TokenmillError(f"/metrics has no {name}")


def _pool(port: int) -> dict[str, Any]:
    """The pool as GET /workers has it, with figures of now."""
    _metric(port, "tokenmill_engine_steps")  # asks the workers
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=30) as response:
        view: dict[str, Any] = json.loads(response.read())
    return view


def _print_handover(result: Result, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Who computed the long prompt and who went on with it."""
    prefill, decode = (
        next(w["name"] for w in after["workers"] if w["role"] == role)
        for role in ("prefill", "decode")
    )
    moved = after["transferred_bytes"] - before["transferred_bytes"]
    times = result.times
    if after["transfers"] == before["transfers"]:
        console.print(f"The prompt of {result.num_prompt_tokens} tokens was not handed over")
        return
    console.print(
        f"The prompt of {result.num_prompt_tokens} tokens was computed by {prefill} and decoded by "
        f"{decode}: {moved / 1e6:.1f} MB of KV moved; TTFT {times.ttft_ms or 0:.0f} ms, TPOT "
        f"{times.tpot_ms or 0:.1f} ms"
    )
    console.print(
        f"In all {after['transfers']} prompts went from {prefill} to {decode}, "
        f"{after['transferred_bytes'] / 1e6:.1f} MB of KV"
    )


def _print_report(results: list[Result], seconds: float, hit_rate: float) -> None:
    table = Table(title=f"{len(results)} chat requests at once")
    table.add_column("request", no_wrap=True, max_width=28)
    for heading in ("in", "cached", "out", "TTFT ms", "TPOT ms", "tok/s", "finish"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(*_row(result))
    console.print(table)
    num_out = sum(result.times.num_tokens for result in results)
    num_in = sum(result.num_prompt_tokens for result in results)
    num_cached = sum(result.num_cached_tokens for result in results)
    ttft = summarize(result.times.ttft_ms for result in results)
    tpot = summarize(result.times.tpot_ms for result in results)
    if ttft and tpot:
        console.print(
            f"TTFT p50 {ttft['p50']:.0f} ms, p99 {ttft['p99']:.0f} ms; "
            f"TPOT p50 {tpot['p50']:.1f} ms, p99 {tpot['p99']:.1f} ms"
        )
    console.print(
        f"{num_out} output tokens in {seconds:.1f} s: {num_out / seconds:.1f} tok/s; "
        f"{num_cached} of {num_in} prompt tokens from the prefix cache "
        f"(/metrics: hit rate {hit_rate:.0%})"
    )


def _row(result: Result) -> list[str]:
    times = result.times
    tok_s = 1000 * times.num_tokens / times.e2e_ms if times.e2e_ms else 0.0
    return [
        result.question,
        str(result.num_prompt_tokens),
        str(result.num_cached_tokens),
        str(times.num_tokens),
        f"{times.ttft_ms or 0:.0f}",
        f"{times.tpot_ms or 0:.1f}",
        f"{tok_s:.1f}",
        result.error[:40] or str(result.finish_reason),
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TokenmillError as failure:
        sys.exit(f"error: {failure}")
