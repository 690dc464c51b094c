"""The flags of benchmarks: a config for each heading of their help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokenmill.core.flags import (
    IMAGE_SIZE,
    KEYS,
    SECONDS,
    SWITCH,
    count,
    number,
    numbers,
    one_of,
    read_float,
    read_int,
    setting,
    some_of,
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


@dataclass(frozen=True, slots=True)
class UrlOptions:
    url: str | None = setting(None, "Base URL, such as http://127.0.0.1:8000/v1.")
    model: str | None = setting(
        None, "Model name to send; by default the first that the server lists."
    )
    api_key: tuple[str, ...] = setting((), "Key to send.", KEYS, repeated=True, listed=True)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    ignore_eos: bool | None = setting(
        None, "Ask for answers of full length (on; some servers lack it).", SWITCH
    )


@dataclass(frozen=True, slots=True)
class TemperatureOption:
    temperature: float | None = setting(
        None, "Sampling temperature of every call; without it the server's own.", number(0, 100)
    )


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    lengths: str | None = setting(
        None, "CSV of lengths, a name of this package, or uniform:100-1024."
    )
    input_len: int | None = setting(
        None, "Prompt tokens (128) without the chat template's: short words.", count(1)
    )
    output_len: int | None = setting(None, "Output tokens (64, or what the data say).", count(1))


@dataclass(frozen=True, slots=True)
class PromptOptions:
    trace_block_tokens: int = setting(512, "Tokens per hash id of a trace.", count(1))
    seed: int | None = setting(
        None,
        "Seed of arrivals and prompts; drawn for each run and recorded if not given.",
        count(0),
    )


@dataclass(frozen=True, slots=True)
class GpuPrice:
    gpu_price: float = setting(
        3.0,
        "Dollars per hour of the machine; the default is a placeholder for what you pay.",
        number(0, math.inf, "USD"),
    )


@dataclass(frozen=True, slots=True)
class MlperfOptions:
    benchmark: Literal[
        "deepseek-r1",
        "gpt-oss-120b",
        "llama3.1-8b",
        "llama3.1-405b",
        "llama2-70b",
        "qwen3-vl-235b",
        "dlrm-v3",
        "wan-2.2-t2v-a14b",
    ] = setting("llama3.1-8b", "MLPerf benchmark: limits, lengths and sampling.")
    round: Literal["v6.0", "v6.1"] = setting(
        "v6.0", "Round of MLPerf Inference whose benchmarks, seeds and gates hold."
    )
    scenario: Literal["Offline", "Server", "Interactive", "SingleStream"] = setting(
        "Offline", "How queries arrive; Interactive is Server under tighter limits."
    )
    target_qps: float = setting(
        1.0,
        "Queries per second that are scheduled, or expected where nothing is scheduled.",
        number(1e-6, math.inf, "QPS"),
    )
    test_mode: Literal[
        "performance", "accuracy", "submission", "TEST04", "TEST06", "TEST07", "TEST09"
    ] = setting(
        "performance",
        "What to run: accuracy needs --dataset; submission is performance and accuracy; TEST04, "
        "TEST06, TEST07 and TEST09 are single compliance tests.",
    )
    compliance: bool = setting(
        False, "Also run the benchmark's compliance tests, which a closed submission needs."
    )
    compliance_dataset: str | None = setting(
        None, "Dataset of TEST07 (gpt-oss-120b), with targets: 990 GPQA samples."
    )
    dataset: str | None = setting(
        None,
        "Samples of the benchmark, .json or .jsonl; for wan-2.2 a text file with a prompt in each "
        "line. Samples are synthetic if not given.",
    )
    quick: bool = setting(False, "Few queries and little time: not a valid submission.")
    quick_samples: int = setting(64, "Samples of a quick run.", count(1))
    length_scale: float = setting(
        1.0, "Scale of the lengths of synthetic samples in a quick run.", number(0.0001, 1)
    )
    find_peak: bool = setting(False, "Search for the highest valid rate, from --target-qps on.")
    submission_dir: str | None = setting(None, "Write the submission's folders here.")
    division: Literal["closed", "open"] = setting("open", "Division of the submission.")
    submitter: str = setting("tokenmill", "Submitter of the submission.")
    system_name: str = setting("system", "Name of the system in the submission.")


@dataclass(frozen=True, slots=True)
class MlperfServer:
    url: str | None = setting(
        None,
        "An OpenAI-compatible server as the system under test; for dlrm-v3 `serve --task rank`, "
        "for wan-2.2 `serve --task video`.",
    )
    api_key: tuple[str, ...] = setting((), "Key to send.", KEYS, repeated=True, listed=True)
    api: Literal["chat", "completions"] | None = setting(
        None, "Route to call (completions); chat gets texts, not token ids."
    )
    tokenizer: str | None = setting(
        None, "Model whose tokenizer the server has: datasets go as token ids."
    )
    ignore_eos: bool | None = setting(
        None, "Ask for answers of full length (on; some servers lack it).", SWITCH
    )
    timeout_s: float = setting(
        600.0, "Longest time of one request.", number(0.001, math.inf, "SECONDS"), flag="timeout"
    )
    insecure: bool = setting(False, "Do not check the server's certificate.")
    extra_body: str | None = setting(None, "JSON object whose fields are added to every request.")
    max_in_flight: int = setting(
        1024,
        "Most requests sent to --url at once; others wait in the client, and the wait counts.",
        count(1),
    )


@dataclass(frozen=True, slots=True)
class CampaignOptions:
    max_concurrency: int | None = setting(
        None, "C_max, the most users; without it a search finds it.", count(1)
    )
    min_concurrency: int = setting(1, "Lowest point of the curve.", count(1, 32))
    points: int = setting(7, "Points of the curve.", count(7, 32))
    disclosure: str | None = setting(
        None, "TOML file with the facts that only the submitter knows."
    )
    write_disclosure: str | None = setting(None, "Write that file with empty values, then exit.")
    quick: bool = setting(False, "Seconds instead of ten or twenty minutes: no valid submission.")
    duration_s: float | None = setting(
        None,
        "Seconds of a quick point (5); twice as long above 32 users.",
        number(0.001, math.inf, "SECONDS"),
        flag="duration",
    )
    submission_dir: str | None = setting(
        None, "Folder for the files that endpoints-submission-cli checks."
    )


@dataclass(frozen=True, slots=True)
class LadderOptions:
    rungs: str | None = setting(
        None, "Rungs to run, separated by commas; each also has all before it on."
    )
    plot: str | None = setting(None, "Write the bars to this .html file.")


@dataclass(frozen=True, slots=True)
class MtpOptions:
    depths: tuple[int, ...] | None = setting(
        None, "Numbers of drafts to measure (1,2,3).", numbers(read_int, 1, "N[,N...]")
    )
    batch: int = setting(1, "Prompts that are answered at once.", count(1))
    prompt_kind: tuple[str, ...] = setting(
        ("chat",),
        "Sets of prompts: chat, everyday (shorter, of more kinds, with follow-ups), unseen "
        "(everyday ones of forms and topics that the default model's module was not trained on), "
        "or documents that the answers repeat much of.",
        some_of("chat", "everyday", "unseen", "documents"),
    )


@dataclass(frozen=True, slots=True)
class VideoRuns:
    num_videos: int = setting(1, "Videos to make one after another.", count(1))
    measured_steps: int | None = setting(
        None,
        "Denoising steps to run; the others are taken to last as long. All unless given.",
        count(1),
    )


@dataclass(frozen=True, slots=True)
class CompareOptions:
    gpus: tuple[int, ...] | None = setting(
        None,
        "GPUs of each round; by default what its result says.",
        numbers(read_int, 1, "N[,N...]"),
    )
    price_per_gpu_hour: tuple[float, ...] | None = setting(
        None,
        "Dollars per GPU and hour of each round; by default what its result says.",
        numbers(read_float, 1e-6, "X[,X...]"),
    )
    noise: float = setting(
        0.05, "Difference that counts as noise where there is no interval.", number(0, 1)
    )
    html: str | None = setting(None, "Write the comparison to this .html file, too.")
    fail_on: Literal["worse"] | None = setting(
        None, "Exit with status 1 if a round is worse than the first, or cannot be compared."
    )


@dataclass(frozen=True, slots=True)
class PublishedOptions:
    benchmark: str | None = setting(None, "Benchmark of the table, such as deepseek-r1.")
    scenario: str | None = setting(None, "Offline, Server, Interactive or SingleStream.")
    round: str | None = setting(None, "Only this round, such as v6.0.")
    submitter: str | None = setting(None, "Only submitters whose name has this.")
    accelerator: str | None = setting(None, "Only accelerators whose name has this, such as H200.")
    limit: int = setting(20, "Rows to print; the JSON line has all.", count(1))
    result: str | None = setting(
        None, "Your result file or folder, to be ranked among the published ones."
    )
    tok_s: float | None = setting(
        None, "Your result in the benchmark's unit; needs --gpus.", number(0, math.inf, "X")
    )
    gpus: int | None = setting(None, "GPUs of your system.", count(1))


@dataclass(frozen=True, slots=True)
class PriceOptions:
    tok_s: float | None = setting(
        None, "Output tokens per second of all GPUs together.", number(0, math.inf, "X")
    )
    gpus: int | None = setting(None, "GPUs that give them.", count(1))
    price_per_gpu_hour: float | None = setting(
        None, "Dollars per GPU and hour.", number(0, math.inf, "USD")
    )
