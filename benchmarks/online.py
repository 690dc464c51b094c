"""A model served to several users, beside vLLM's server: throughput, TTFT and TPOT."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark, Report, command, environment
from benchmarks.servers import EndpointLoad, Server, served, shape_config, write_words_model
from tokenmill import console
from tokenmill.core.flags import count, numbers, read_int, setting

FIRST_WORD = 10  # tokens before it may be special
WARM_UP = 16  # requests at once, the first of their kind
COMPARED = ("output_tok_s", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
VLLM = ("vllm.entrypoints.openai.api_server", "--load-format", "dummy")
VLLM_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
}


@dataclass(frozen=True)
class Options:
    shape: str = setting("llama3.1-8b", "Shape of the model, whose weights are random.")
    site: str = setting("", "Folder that vLLM is imported from, in its own process alone.")
    users: tuple[int, ...] = setting((32, 256), "Users at once.", numbers(read_int, 1, "N,N"))
    requests: tuple[int, ...] = setting(
        (600, 1500), "Requests of each load.", numbers(read_int, 1, "N,N")
    )
    input_len: int = setting(512, "Tokens of a prompt.", count(1))
    output_len: int = setting(128, "Tokens of an answer.", count(1))
    rest: tuple[str, ...] = ()


def run(options: Options) -> Report:
    """`tokenmill serve`, then with --site vLLM's server at its defaults, under the same loads.

    Prompts are random words that nobody has sent before; `tokenmill bench endpoint` sends them.
    Flags after -- go to tokenmill's server.

    python -m benchmarks.online --site VLLM
    """
    found: Report = {}
    with tempfile.TemporaryDirectory() as place:
        config = shape_config(options.shape)
        folder = str(write_words_model(Path(place), config))
        ours = command("serve", folder, "--random-weights", *options.rest)
        sides = {"tokenmill": (ours, environment())}
        if options.site:
            words = [sys.executable, "-m", VLLM[0], "--model", folder, *VLLM[1:]]
            sides["vllm"] = (words, environment(PYTHONPATH=options.site, **VLLM_ENV))
        for name, (words, env) in sides.items():
            with served(words, env) as server:
                found[name] = measure(server, config, options)
            console.note(f"{name}: {found[name]}")
    return {"shape": options.shape, **found, "ratios": ratios(found)}


def show(report: Report) -> None:
    rows = [["server", "users", *COMPARED]]
    for name in ("tokenmill", "vllm"):
        for users, point in report.get(name, {}).get("points", {}).items():
            rows.append([name, users, *(f"{point[key]:.1f}" for key in COMPARED)])
    console.print_table(rows)


def measure(server: Server, config: Mapping[str, Any], options: Options) -> Report:
    source = random.Random()
    begin = time.monotonic()
    name = json.load(server.call("/v1/models"))["data"][0]["id"]
    complete(server, name, prompt(source, config, options.input_len), 1)
    start_s = server.start_s + time.monotonic() - begin
    prompts = [prompt(source, config, options.input_len) for _ in range(WARM_UP)]
    with ThreadPoolExecutor(WARM_UP) as pool:
        list(pool.map(lambda text: complete(server, name, text, 16), prompts))
    points: Report = {}
    for users, num_requests in zip(options.users, options.requests, strict=True):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for _ in range(num_requests):
                text = prompt(source, config, options.input_len)
                file.write(json.dumps({"prompt": text}) + "\n")
            file.flush()
            points[str(users)] = point(server.url, file.name, users, options.output_len)
    return {"start_s": round(start_s, 1), "points": points}


def prompt(source: random.Random, config: Mapping[str, Any], length: int) -> str:
    last = min(config["vocab_size"], config["eos_token_id"], config["bos_token_id"])
    last = last if last > FIRST_WORD else config["vocab_size"]
    return " ".join(f"w{source.randrange(FIRST_WORD, last)}" for _ in range(length))


def complete(server: Server, model: str, text: str, max_tokens: int) -> None:
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
    server.call("/v1/completions", body).read()


def point(url: str, prompts: str, users: int, output_len: int) -> Report:
    found = EndpointLoad(
        *(url, "--api", "completions", "--prompts", prompts, "--same-prompts"),
        *("--concurrency", str(users), "--output-len", str(output_len)),
        *("--temperature", "0", "--warmup-requests", "0"),
    ).point()
    times = {
        f"{kind}_{at}_ms": round(found[f"{kind}_ms"][at], 1)
        for kind in ("ttft", "tpot")
        for at in ("mean", "p50", "p99")
    }
    hits = found["prefix_hits"]
    return {
        "output_tok_s": round(found["output_tok_s"], 1),
        **times,
        "itl_p99_ms": round(found["itl_ms"]["p99"], 1),
        "failed": found["num_failed"],
        "prefix_hits": hits and hits["share"],
    }


def ratios(found: Report) -> Report:
    """Ours over vLLM's, where both have an answer."""
    if "vllm" not in found:
        return {}
    ours, theirs = found["tokenmill"], found["vllm"]
    by_users = {
        users: {
            key: round(mine[key] / theirs["points"][users][key], 3)
            for key in COMPARED
            if theirs["points"][users][key]
        }
        for users, mine in ours["points"].items()
    }
    return {"start_s": round(ours["start_s"] / theirs["start_s"], 3), **by_users}


BENCHMARK = Benchmark("online", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
