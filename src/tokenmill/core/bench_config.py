"""The configs of benchmarks. The command line, TOML and the environment fill them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokenmill.core.flags import (
    IMAGE_SIZE,
    SECONDS,
    count,
    number,
    numbers,
    one_of,
    read_float,
    read_int,
    setting,
)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What the offline benchmark runs: three cells, or one workload of many lengths."""

    lengths: str | None = setting(
        None,
        "One workload instead of the cells: a CSV file of input_length,output_length,"
        " one of llama3.1-8b, gpt-oss-120b, deepseek-r1, llama2-70b, or "
        "uniform:100-1024.",
    )
    num_prompts: int | None = setting(
        None,
        "Requests of the batch cell (32), or rows drawn from --lengths (all; uniform: 256).",
        count(1),
    )
    input_len: int | None = setting(None, "Prompt tokens of the batch cell (128).", count(1))
    output_len: int | None = setting(
        None, "Output tokens of the batch cell (64), or of every request of --lengths.", count(1)
    )
    rounds: int | None = setting(
        None, "Measured runs of a cell (3, with --lengths 1); the median counts.", count(1, 100)
    )
    cells: tuple[str, ...] = setting(
        ("batch", "single", "prefill"),
        "Cell to run; repeat the flag for several.",
        one_of("batch", "single", "prefill"),
        flag="cell",
        repeated=True,
    )
    seed: int = setting(0, "Seed of the cells' prompts.", count(0), flag="bench-seed")

    @property
    def num_rounds(self) -> int:
        return self.rounds or (3 if self.lengths is None else 1)


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """What `bench endpoint` sends, when, for how long, and what it makes of it."""

    api: Literal["chat", "completions"] = setting("chat", "Route to call.")
    stream: bool = setting(True, "Ask for streams; if off, only whole answers are timed.")
    timeout_s: float = setting(
        600.0, "Longest time of one request.", number(0.001, math.inf, "SECONDS"), flag="timeout"
    )
    insecure: bool = setting(False, "Do not check the server's certificate.")
    extra_body: str | None = setting(None, "JSON object whose fields are added to every request.")
    concurrency: tuple[int, ...] = setting(
        (),
        "Requests under way at once (16 without --rate); several: a sweep.",
        numbers(read_int, 1, "N[,N...]"),
    )
    rate: tuple[float, ...] = setting(
        (),
        "Requests (with --turns conversations) per second, whatever the server does; "
        "several: a sweep.",
        numbers(read_float, 1e-6, "X[,X...]"),
    )
    arrival: Literal["poisson", "constant", "burst"] = setting(
        "poisson", "How requests arrive; burst without --rate sends all at once."
    )
    burst_size: int = setting(1, "Requests of one burst.", count(1))
    ramp_s: float = setting(
        0.0, "Time in which the load grows from nothing to its full size.", SECONDS, flag="ramp"
    )
    num_requests: int | None = setting(
        None,
        "Requests of a point (100 without --duration; with --prompts and --trace all).",
        count(1),
    )
    duration_s: float | None = setting(
        None,
        "Time after which nothing more is sent; running requests may finish.",
        number(0.001, math.inf, "SECONDS"),
        flag="duration",
    )
    warmup_requests: int = setting(
        8, "Requests before the measured ones; they do not count.", count(0)
    )
    saturate: bool = setting(
        False,
        "Search for the highest load (concurrency; with --arrival a rate) that keeps "
        "--goodput, or for the knee of throughput.",
    )
    slo_percentile: float = setting(
        99.0,
        "Requests that must keep --goodput in --saturate.",
        number(1, 100, "PERCENT"),
    )
    prompts: str | None = setting(
        None,
        'JSONL file of {"prompt": ..., "images": [...]} or {"messages": ...}; '
        "ShareGPT's JSON file; or hf:OWNER/NAME by the package datasets.",
    )
    trace: str | None = setting(None, "Mooncake trace: its times, lengths and shared prefixes.")
    trace_speed: float = setting(
        1.0,
        "Speed of the replay; 2 is twice as fast.",
        number(1e-6, math.inf),
    )
    images: int = setting(0, "Synthetic images of every request (--api chat).", count(0, 1000))
    image_size: tuple[int, int] = setting(
        (1024, 1024), "Width and height of synthetic images.", IMAGE_SIZE
    )
    turns: int = setting(1, "Turns of a conversation; 1: single requests.", count(1))
    shared_prefix: int = setting(0, "Tokens that prompts have in common.", count(0))
    num_prefixes: int = setting(1, "Different shared prefixes.", count(1))
    exact_input_len: bool = setting(
        False, "Shorten prompts by the tokens that the server's chat template adds."
    )
    same_prompts: bool = setting(
        False, "Send the same prompts at every point, and those of --prompts without a salt."
    )
    tokenizer: str | None = setting(None, "Model whose tokenizer checks the server's counts.")
    goodput: tuple[str, ...] = setting(
        (),
        "Limits of a good request in ms, such as ttft:500,tpot:50 (ttft, tpot, e2e).",
        repeated=True,
    )
    max_error_rate: float = setting(
        0.01,
        "Share of a point's requests that may fail; more: exit status 1, files are written.",
        number(0, 1, "SHARE"),
    )
    fail_below_goodput: float | None = setting(
        None,
        "Least share of a point's requests within --goodput; less: exit status 1.",
        number(0, 1, "SHARE"),
    )
    stall_s: float = setting(
        5.0,
        "A stream that pauses longer is listed as a doubt.",
        number(0.001, math.inf, "SECONDS"),
        flag="stall-after",
    )
    gpus: int | None = setting(None, "GPUs behind the endpoint.", count(1))
    price_per_gpu_hour: float | None = setting(
        None,
        "Dollars per GPU and hour: gives dollars per million tokens.",
        number(0, math.inf, "USD"),
    )
    processes: int | None = setting(
        None, "Client processes; by default set by the load.", count(1, 1024)
    )
    audit: bool = setting(True, "Measure what the client itself can do.")
    server_metrics: bool = setting(
        True, "Also read the server's /metrics (tokenmill, vLLM, SGLang)."
    )
    metrics_url: str | None = setting(None, "URL of the server's metrics, if it is not /metrics.")
    output_dir: str | None = setting(
        None, "New folder for report.html, summary.json, CSV, events and manifest."
    )
