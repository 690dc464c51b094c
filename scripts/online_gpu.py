"""One model on one GPU online: the cost of launching a step, and the server beside vLLM's.

    python scripts/online_gpu.py steps
    PYTHONPATH=src:WEB python scripts/online_gpu.py serve --vllm-site VLLM

steps: steps that mix prompts and decoding, by graphs of their pieces and operation by operation:
time of a step while the next one is launched, time in which the host launches one, time of its
kernels, and launches. serve: `tokenmill serve` with random weights, prompts of random words that
nobody has sent before, `tokenmill bench endpoint` at each concurrency, then the same with vLLM's
server at its defaults. WEB and VLLM are folders of installed packages; vLLM's is for its own
process alone. Every figure is printed as soon as it is known, the last line is one JSON object.

`--tiny` runs all of it on a CPU with a tiny model; without --vllm-site there is no second server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenmill.bench

SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2000, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
MIXES = ((32, 64), (32, 256), (32, 512), (32, 2048), (256, 512))  # requests that decode, a prompt
CONTEXT, REPEATS = 512, 20
FIRST_WORD = 10  # tokens before it may be special
START_S = 600.0


def say(**fields: Any) -> None:
    """One line of figures."""
    print(json.dumps(fields), flush=True)


# The model: a folder that both servers take.


def config_of(shape: str, tiny: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((SHAPES / f"{shape}.json").read_text())
    return config | TINY if tiny else config


def make_folder(folder: Path, config: dict[str, Any]) -> None:
    """config.json, and a tokenizer whose words w0, w1, ... are one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": f"w{config['eos_token_id']}",
        "unk_token": "w0",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_prompt(source: random.Random, config: dict[str, Any], length: int) -> str:
    last = min(config["vocab_size"], config["eos_token_id"], config["bos_token_id"])
    last = last if last > FIRST_WORD else config["vocab_size"]
    return " ".join(f"w{source.randrange(FIRST_WORD, last)}" for _ in range(length))


# Steps: what launching one costs.


def run_steps(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
    from tokenmill.engine.build import build_engine
    from tokenmill.engine.choices import resolve_setup

    tiny = options.tiny
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(options.shape, tiny)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        begin = time.perf_counter()
        built = build_engine(
            resolve_setup(
                Setup(
                    ModelConfig(
                        folder, "fp32" if tiny else options.dtype, "cpu" if tiny else "cuda",
                        random_weights=True, max_model_len=4096,
                    ),
                    CacheConfig(memory_bytes=(64 << 20) if tiny else (16 << 30)),
                    SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
                )
            )
        )  # fmt: skip
    built_s = round(time.perf_counter() - begin, 1)
    graphs = built.runner.decode.graphs
    captured = None if graphs is None else graphs.report.as_json()
    say(built_s=built_s, graphs=captured)
    pieces = built.runner.plain.graphs
    found = []
    for num_decoding, prompt in ((3, 20),) if tiny else MIXES:
        probe = StepProbe(built.runner, num_decoding, prompt)
        for name, used in (("pieces", pieces), ("operations", None)):
            if name == "pieces" and (pieces is None or pieces.size_for(probe.num_tokens) is None):
                continue
            built.runner.plain.graphs = used
            figures = {"decoding": num_decoding, "prompt": prompt, "way": name, **probe.figures()}
            say(**figures)
            found.append(figures)
    device = "cpu" if tiny else torch.cuda.get_device_name()
    return {"part": "steps", "device": device, "built_s": built_s, "graphs": captured} | {
        "steps": found
    }


class StepProbe:
    """Times one step again and again: requests that decode beside one prompt."""

    def __init__(self, runner: Any, num_decoding: int, prompt: int) -> None:
        from tokenmill.core.types import Request, SamplingParams
        from tokenmill.sched.sequence import Batch, Sequence

        self.runner, source, items, first = runner, random.Random(0), [], 0
        vocab, size = runner.model.spec.vocab_size, runner.block_size
        context = min(CONTEXT, 4 * size)
        counts = [(context, 1)] * num_decoding + [(0, prompt)]
        for slot, (computed, num_new) in enumerate(counts):
            ids = [source.randrange(vocab) for _ in range(computed + num_new)]
            request = Request(str(slot), ids, SamplingParams(temperature=0.0))
            seq = Sequence(request, (0, 0, slot), len(ids) + 2, frozenset())
            count = -(-len(ids) // size)
            seq.block_ids, seq.slot = list(range(first, first + count)), slot
            seq.num_computed_tokens = computed
            first += count
            items.append((seq, num_new))
        self.num_tokens = num_decoding + prompt
        self.batch = Batch(items, self.num_tokens, [(seq, 0) for seq, _ in items])

    def figures(self) -> dict[str, Any]:
        """Milliseconds of a step in a row of them, of its launch, of its kernels; launches."""
        self._run(3)
        begin = time.perf_counter()
        self._run(REPEATS)
        step = (time.perf_counter() - begin) / REPEATS
        launch = min(self._launch() for _ in range(REPEATS))
        found = {"step_ms": round(1e3 * step, 3), "launch_ms": round(1e3 * launch, 3)}
        return found | (self._profiled() if self.runner.builder.device.type == "cuda" else {})

    def _launch(self) -> float:
        begin = time.perf_counter()
        launched = self.runner.launch(self.batch)
        seconds = time.perf_counter() - begin
        launched.wait()
        return seconds

    def _run(self, repeats: int) -> None:
        """As in the overlapped loop, a step is launched before the one before it is over."""
        running = self.runner.launch(self.batch)
        for _ in range(repeats - 1):
            running, last = self.runner.launch(self.batch), running
            last.wait()
        running.wait()

    def _profiled(self) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self._run(1)
        events = profiled.key_averages()
        calls = {e.key: e.count for e in events if "Launch" in e.key and e.key.startswith("cu")}
        kernels = sum(e.self_device_time_total for e in events) * 1e-3
        return {"kernels_ms": round(kernels, 3), "calls": calls}


# Servers: ours, and vLLM's.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def our_server(folder: Path, port: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "tokenmill", "serve", str(folder), "--random-weights"]
    command += ["--port", str(port), *options.serve_flag]
    return [*command, "--kv-cache-memory", "64MiB"] if options.tiny else command


def vllm_server(folder: Path, port: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    return [*command, "--port", str(port), "--load-format", "dummy", *options.vllm_flag]


@contextmanager
def server(command: list[str], env: dict[str, str], log: Path) -> Iterator[None]:
    """A server in a process group of its own, which is ended afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                continue


def first_token_s(url: str, model: str, prompt: str, begin: float, log: Path) -> float:
    """Seconds since `begin` when a server has answered with a token."""
    while time.perf_counter() - begin < START_S:
        try:
            complete(url, model, prompt, 1)
            return time.perf_counter() - begin
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"{url} did not answer in {START_S:.0f} s:\n{log.read_text()[-3000:]}")


def complete(url: str, model: str, prompt: str, count: int) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": count, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def run_servers(options: argparse.Namespace) -> dict[str, Any]:
    begin, found = time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as place:
        folder, config = Path(place) / "model", config_of(options.shape, options.tiny)
        folder.mkdir()
        make_folder(folder, config)
        sides = [("tokenmill", our_server)] * (not options.vllm_alone)
        sides += [("vllm", vllm_server)] * bool(options.vllm_site)
        for name, command in sides:
            env = dict(os.environ)
            if name == "vllm":
                env |= {"PYTHONPATH": options.vllm_site, "VLLM_NO_USAGE_STATS": "1"}
                env |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
            port, log = free_port(), Path(options.logs or place) / f"{name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            try:
                with server(command(folder, port, options), env, log):
                    found[name] = measure(name, folder, port, config, options, log)
            finally:
                say(log=name, end=log.read_text(errors="replace")[-1500:])
    result = {
        "part": "serve",
        "shape": options.shape,
        "seconds": round(time.perf_counter() - begin),
    }
    return result | found | compare(found)


def measure(
    name: str, folder: Path, port: int, config: dict[str, Any], options: argparse.Namespace,
    log: Path,
) -> dict[str, Any]:  # fmt: skip
    url, source = f"http://127.0.0.1:{port}/v1", random.Random()
    model = folder.name if name == "tokenmill" else str(folder)
    prompts = [random_prompt(source, config, options.input_len) for _ in range(17)]
    start_s = first_token_s(url, model, prompts[0], time.perf_counter(), log)
    say(server=name, start_s=round(start_s, 1))
    with ThreadPoolExecutor(16) as pool:  # the first requests of their kind
        list(pool.map(lambda prompt: complete(url, model, prompt, 16), prompts[1:]))
    figures: dict[str, Any] = {"start_s": round(start_s, 1)}
    for load in options.load:
        users, count = (int(part) for part in load.split(":"))
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for _ in range(count):
                prompt = random_prompt(source, config, options.input_len)
                file.write(json.dumps({"prompt": prompt}) + "\n")
            file.flush()
            figures[str(users)] = point(url, file.name, users, options.output_len)
        say(server=name, users=users, **figures[str(users)])
    return figures


def point(url: str, prompts: str, users: int, output_len: int) -> dict[str, Any]:
    """One run of `tokenmill bench endpoint`."""
    command = [sys.executable, "-m", "tokenmill", "bench", "endpoint", "--url", url]
    command += ["--api", "completions", "--prompts", prompts, "--same-prompts"]
    command += ["--concurrency", str(users), "--output-len", str(output_len)]
    command += ["--temperature", "0", "--warmup-requests", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr[-1000:]}
    (found,) = json.loads(done.stdout.splitlines()[-1])["points"]
    times = {
        f"{kind}_{at}_ms": round(found[f"{kind}_ms"][at], 1)
        for kind in ("ttft", "tpot")
        for at in ("mean", "p50", "p99")
    }
    hits, limited = found["prefix_hits"], found["audit"]["client_limited"]
    return {
        "output_tok_s": round(found["output_tok_s"], 1),
        **times,
        "itl_p99_ms": round(found["itl_ms"]["p99"], 1),
        "failed": found["num_failed"],
        "prefix_hits": hits and hits["share"],
        "client_limited": limited,
    }


def compare(found: dict[str, Any]) -> dict[str, Any]:
    """Ours over vLLM's, where both have an answer."""
    ours, theirs = found.get("tokenmill", {}), found.get("vllm", {})
    keys = "output_tok_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms"
    ratios: dict[str, Any] = {}
    for users in ours.keys() & theirs.keys() - {"start_s"}:
        pairs = {key: (ours[users].get(key), theirs[users].get(key)) for key in keys}
        ratios[users] = {key: round(a / b, 3) for key, (a, b) in pairs.items() if a and b}
    if ours and theirs:
        ratios["start_s"] = round(ours["start_s"] / theirs["start_s"], 3)
    return {"ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("part", choices=["steps", "serve"])
    parser.add_argument("--tiny", action="store_true", help="on CPU, to try the script")
    parser.add_argument("--shape", default="llama3.1-8b", help="a file of bench/shapes")
    parser.add_argument("--dtype", default="bf16", help="of the weights, for steps")
    parser.add_argument("--vllm-site", help="folder (or path list) with vLLM for its process")
    parser.add_argument("--vllm-alone", action="store_true", help="leave our server out")
    parser.add_argument("--load", nargs="+", metavar="USERS:REQUESTS", help="(32:600 256:1500)")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--serve-flag", action="append", default=[], help="such as=--fronts=2")
    parser.add_argument("--vllm-flag", action="append", default=[])
    parser.add_argument("--logs", help="folder that keeps the logs of the servers")
    options = parser.parse_args()
    if options.load is None:
        options.load = ["2:4", "4:6"] if options.tiny else ["32:600", "256:1500"]
    if options.tiny:
        options.input_len, options.output_len = 24, 8
    say(**(run_steps if options.part == "steps" else run_servers)(options))


if __name__ == "__main__":
    main()
