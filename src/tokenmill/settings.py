"""Settings: one table of what can be set, and one loader for flag, environment and TOML file.

A setting has one name everywhere: `--max-num-seqs` is TOKENMILL_MAX_NUM_SEQS in the environment
and `max-num-seqs` in the file. A flag wins over the environment, the environment over the file,
the file over the default.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.core.config import (
    BenchConfig,
    CacheConfig,
    EndpointConfig,
    ExecutionConfig,
    FloorConfig,
    ModelConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenmill.core.types import SamplingParams, TokenmillError

CONFIG_FILE = "tokenmill.toml"
CONFIG_VARIABLE = "TOKENMILL_CONFIG"

Config = TypeVar("Config")
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class SettingsError(TokenmillError):
    """A flag, variable or file sets something that does not exist or cannot be."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is read: `read` raises ValueError, and `expected` says what would be right."""

    read: Callable[[Any], Any]
    expected: str
    metavar: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set; `owner.field` is the config field that it fills, if any."""

    key: str
    help: str
    kind: Kind
    owner: type | None = None
    field: str = ""
    default: Any = None
    repeated: bool = False  # the flag may be given several times; its value is a tuple

    @property
    def parameter(self) -> str:
        return self.key.replace("-", "_")

    @property
    def variable(self) -> str:
        return "TOKENMILL_" + self.parameter.upper()

    @property
    def is_switch(self) -> bool:
        return self.kind is SWITCH

    @property
    def shown_default(self) -> Any:
        """The default in the words of a flag; None when there is none to show."""
        if self.owner is None:
            return self.default
        spec = next(f for f in fields(self.owner) if f.name == self.field)
        return None if spec.default is MISSING else spec.default


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def _read_switch(value: Any) -> bool:
    return value if isinstance(value, bool) else _BOOLEANS[value.lower()]


def _read_int(value: Any) -> int:
    if isinstance(value, bool | float):
        raise ValueError(value)
    return int(value)


def _read_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def _within(read: Callable[[Any], Any], low: float, high: float) -> Callable[[Any], Any]:
    def bounded(value: Any) -> Any:
        number = read(value)
        if not low <= number <= high:
            raise ValueError(value)
        return number

    return bounded


def parse_size(value: Any) -> int:
    """Bytes of "2GiB", "512 MB" or 1073741824; K, M, G and T alone are powers of 1024."""
    if isinstance(value, bool | float):
        raise ValueError(value)
    match = _SIZE.fullmatch(str(value))
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(value)
    return round(float(match[1]) * _UNITS[match[2].lower()])


def _one_of(*choices: str, but: str = "") -> Kind:
    """`but` says what else one may look for, and why it is not there."""

    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(value)
        return str(value)

    expected = "one of " + ", ".join(choices) + (f" ({but})" if but else "")
    return Kind(read, expected, "NAME", choices)


def _count(low: int, high: float = math.inf) -> Kind:
    limit = f"of at least {low}" if high == math.inf else f"from {low} to {int(high)}"
    return Kind(_within(_read_int, low, high), f"a whole number {limit}", "N")


def _number(low: float, high: float, metavar: str = "X") -> Kind:
    limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    return Kind(_within(_read_float, low, high), f"a number {limit}", metavar)


def _numbers(read: Callable[[Any], Any], low: float, metavar: str) -> Kind:
    """One number or several; a point of a sweep each."""
    bounded = _within(read, low, math.inf)

    def read_all(value: Any) -> tuple[Any, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        items = parts if isinstance(parts, list | tuple) else [parts]
        if not items:
            raise ValueError(value)
        return tuple(bounded(item) for item in items)

    return Kind(read_all, f"numbers of at least {low:g}, separated by commas", metavar)


def _read_polynomial(value: Any) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if len(parts) != 3:
        raise ValueError(value)
    return tuple(_read_float(part) for part in parts)


TEXT = Kind(_read_text, "a text that is not empty", "TEXT")
POLYNOMIAL = Kind(_read_polynomial, "three numbers A,B,C for A x^2 + B x + C", "A,B,C")
SWITCH = Kind(_read_switch, "true or false", "")
SIZE = Kind(parse_size, "a size such as 2GiB or 512MB", "SIZE")
SECONDS = _number(0, math.inf, "SECONDS")
INTEGER = Kind(_read_int, "a whole number", "N")


def _of(owner: type, key: str, kind: Kind, help: str, field: str = "", **more: Any) -> Setting:
    return Setting(key, help, kind, owner, field or key.replace("-", "_"), **more)


MODEL = (
    _of(
        ModelConfig,
        "model",
        TEXT,
        "Weights: a name of `tokenmill pull`, a folder, a .gguf file or a Hugging Face name.",
    ),
    _of(
        ModelConfig,
        "dtype",
        _one_of("auto", "fp32", "int8", "bf16", "fp8"),
        "Compute type of the weights; auto: bf16 on a GPU, else the faster of fp32 and int8.",
    ),
    _of(ModelConfig, "device", _one_of("auto", "cpu", "cuda"), "Where the engine runs."),
    _of(ModelConfig, "random-weights", SWITCH, "Random weights: only config.json is read."),
    _of(ModelConfig, "weights-seed", _count(0), "Seed of the random weights.", field="seed"),
    _of(ModelConfig, "max-model-len", _count(1), "Longest prompt plus answer, in tokens."),
    _of(ModelConfig, "num-threads", _count(1, 4096), "CPU threads of the engine; all cores."),
)
CACHE = (
    _of(
        CacheConfig,
        "kv-cache-memory",
        SIZE,
        "Memory of the KV cache, such as 2GiB; wins over --kv-cache-share.",
        field="memory_bytes",
    ),
    _of(
        CacheConfig,
        "kv-cache-share",
        _number(0.01, 0.99),
        "Share of the memory that is free after loading; 0.5 on CPU, 0.95 on a GPU.",
        field="memory_share",
    ),
    _of(
        CacheConfig,
        "block-size",
        _count(1, 1024),
        "Tokens in one block of the KV cache; 16 on CPU, 64 on a GPU.",
    ),
    _of(
        CacheConfig,
        "kv-cache-dtype",
        _one_of("auto", "fp32", "bf16", "fp8"),
        "Type of the cached keys and values; auto: fp32 on CPU, bf16 on a GPU.",
        field="dtype",
    ),
    _of(CacheConfig, "prefix-cache", SWITCH, "Reuse the blocks of prompts that begin alike."),
    _of(
        CacheConfig,
        "kv-connector",
        _one_of("none", "auto", "nixl", "shm"),
        "How KV moves to and from other engines; auto: nixl where it is installed, else shm.",
        field="connector",
    ),
)
SCHEDULER = (
    _of(SchedulerConfig, "max-num-seqs", _count(1), "Most requests that run at once."),
    _of(
        SchedulerConfig,
        "max-num-batched-tokens",
        _count(1),
        "Most tokens in one step; 512 on CPU, 4096 on a GPU.",
    ),
    _of(
        SchedulerConfig,
        "max-queue",
        _count(0),
        "Most requests that wait; more are refused.",
        field="max_waiting",
    ),
    _of(SchedulerConfig, "chunked-prefill", SWITCH, "Split long prompts over several steps."),
    _of(SchedulerConfig, "policy", _one_of("fcfs", "priority"), "Whose turn it is."),
)
EXECUTION = (
    _of(
        ExecutionConfig,
        "fused-kernels",
        SWITCH,
        "Compiled kernels; off: torch operations one by one, the readable reference.",
    ),
    _of(ExecutionConfig, "cuda-graphs", SWITCH, "Replay decode steps as CUDA graphs."),
    _of(
        ExecutionConfig,
        "overlap",
        SWITCH,
        "Prepare a step while the one before it runs; on by default on a GPU.",
    ),
    _of(
        ExecutionConfig,
        "batch-invariant",
        SWITCH,
        "Bitwise the same answer whatever a request is batched with; slower on a GPU.",
    ),
    _of(
        ExecutionConfig,
        "graph-memory",
        SIZE,
        "Most GPU memory that captured graphs may take.",
        field="graph_memory_bytes",
    ),
)
SERVER = (
    _of(ServerConfig, "host", TEXT, "Address to listen on."),
    _of(ServerConfig, "port", _count(0, 65535), "Port to listen on; 0 takes a free one."),
    _of(
        ServerConfig,
        "api-key",
        TEXT,
        "Key that a client must send; repeat the flag, or separate by commas, for several.",
        field="api_keys",
        repeated=True,
    ),
    _of(ServerConfig, "served-model-name", TEXT, "Name that clients ask for."),
    _of(ServerConfig, "max-body-size", SIZE, "Largest request body.", field="max_body_bytes"),
    _of(ServerConfig, "max-concurrency", _count(1), "Most open requests; more answer 429."),
    _of(
        ServerConfig,
        "max-concurrency-per-key",
        _count(1),
        "Most open requests of one API key; more answer 429.",
    ),
    _of(
        ServerConfig,
        "max-pending",
        _count(1),
        "Most requests without a first token, for each worker; more answer 429.",
    ),
    _of(
        ServerConfig,
        "control-token",
        TEXT,
        "Token for /floor from other hosts; without it, only this machine may ask.",
    ),
    _of(
        ServerConfig,
        "request-timeout",
        SECONDS,
        "Deadline of every request.",
        field="request_timeout_s",
    ),
    _of(
        ServerConfig,
        "drain-timeout",
        SECONDS,
        "Time that running requests get after SIGTERM.",
        field="drain_timeout_s",
    ),
    _of(
        ServerConfig,
        "tool-parser",
        _one_of("auto", "hermes", "llama3_json", "none"),
        "How the model writes tool calls.",
    ),
    _of(
        ServerConfig,
        "reasoning-parser",
        _one_of("auto", "think", "none"),
        "How the model marks its thinking.",
    ),
    _of(ServerConfig, "chat-template", TEXT, "Jinja file that replaces the model's template."),
    _of(ServerConfig, "default-max-tokens", _count(1), "max_tokens where a request has none."),
    _of(
        ServerConfig,
        "log-level",
        _one_of("debug", "info", "warning", "error"),
        "How much is logged to stderr.",
    ),
)
SAMPLING = (
    _of(SamplingParams, "max-tokens", _count(1), "Most tokens of an answer."),
    _of(SamplingParams, "min-tokens", _count(0), "Fewest tokens of an answer."),
    _of(SamplingParams, "temperature", _number(0, 100), "0 takes the likeliest token."),
    _of(SamplingParams, "top-p", _number(0, 1), "Keep the likeliest tokens up to this sum."),
    _of(SamplingParams, "top-k", _count(-1), "Keep the k likeliest tokens; 0 keeps all."),
    _of(SamplingParams, "min-p", _number(0, 1), "Keep tokens above this share of the best."),
    _of(SamplingParams, "seed", INTEGER, "Same seed, same tokens."),
    _of(SamplingParams, "repetition-penalty", _number(0, 100), "Above 1 repeats less."),
    _of(SamplingParams, "presence-penalty", _number(-2, 2), "Above 0 repeats less."),
    _of(SamplingParams, "frequency-penalty", _number(-2, 2), "Above 0 repeats less."),
    _of(SamplingParams, "stop", TEXT, "Text that ends the answer; repeatable.", repeated=True),
    _of(SamplingParams, "ignore-eos", SWITCH, "Go on after the end-of-text token."),
)
BENCH = (
    _of(
        BenchConfig,
        "lengths",
        TEXT,
        "One workload instead of the cells: a CSV file of input_length,output_length, one of "
        "llama3.1-8b, gpt-oss-120b, deepseek-r1, llama2-70b, or uniform:100-1024.",
    ),
    _of(
        BenchConfig,
        "num-prompts",
        _count(1),
        "Requests of the batch cell (32), or rows drawn from --lengths (all; uniform: 256).",
    ),
    _of(BenchConfig, "input-len", _count(1), "Prompt tokens of the batch cell (128)."),
    _of(
        BenchConfig,
        "output-len",
        _count(1),
        "Output tokens of the batch cell (64), or of every request of --lengths.",
    ),
    _of(
        BenchConfig,
        "rounds",
        _count(1, 100),
        "Measured runs of a cell (3, with --lengths 1); the median counts.",
    ),
    _of(
        BenchConfig,
        "cell",
        _one_of("batch", "single", "prefill"),
        "Cell to run; repeat the flag for several.",
        field="cells",
        repeated=True,
    ),
    _of(BenchConfig, "bench-seed", _count(0), "Seed of the cells' prompts.", field="seed"),
    _of(BenchConfig, "peers", SWITCH, "Run the same cells in every peer that is installed."),
    _of(
        BenchConfig,
        "skip-peer",
        TEXT,
        "Peer to leave out; repeat the flag for several.",
        field="skip_peers",
        repeated=True,
    ),
)
LADDER = (
    Setting("rungs", "Rungs to run, separated by commas; each has all before it on.", TEXT),
    Setting(
        "gpu-price",
        "Dollars per hour of the machine: a placeholder, put in what you pay.",
        _number(0, math.inf, "USD"),
        default=3.0,
    ),
    Setting("plot", "Write the bars to this .svg or .html file.", TEXT),
)
ENDPOINT_REQUESTS = (
    _of(EndpointConfig, "api", _one_of("chat", "completions"), "Route to call."),
    _of(EndpointConfig, "stream", SWITCH, "Ask for streams; off: only whole answers are timed."),
    _of(
        EndpointConfig,
        "timeout",
        _number(0.001, math.inf, "SECONDS"),
        "Longest time of one request.",
        field="timeout_s",
    ),
    _of(EndpointConfig, "insecure", SWITCH, "Do not check the server's certificate."),
    _of(EndpointConfig, "extra-body", TEXT, "JSON object whose fields join every request."),
)
ENDPOINT_LOAD = (
    _of(
        EndpointConfig,
        "concurrency",
        _numbers(_read_int, 1, "N[,N...]"),
        "Requests under way at once (16 without --rate); several: a sweep.",
    ),
    _of(
        EndpointConfig,
        "rate",
        _numbers(_read_float, 1e-6, "X[,X...]"),
        "Requests (with --turns conversations) per second, whatever the server does; several: a "
        "sweep.",
    ),
    _of(
        EndpointConfig,
        "arrival",
        _one_of("poisson", "constant", "burst"),
        "How they arrive; burst without --rate: all at once.",
    ),
    _of(EndpointConfig, "burst-size", _count(1), "Requests of one burst."),
    _of(
        EndpointConfig,
        "ramp",
        SECONDS,
        "Time in which the load grows from nothing to its full size.",
        field="ramp_s",
    ),
    _of(
        EndpointConfig,
        "num-requests",
        _count(1),
        "Requests of a point (100 without --duration; with --prompts and --trace all).",
    ),
    _of(
        EndpointConfig,
        "duration",
        _number(0.001, math.inf, "SECONDS"),
        "Nothing is sent later; what is under way may end.",
        field="duration_s",
    ),
    _of(EndpointConfig, "warmup-requests", _count(0), "Requests before, in no figure."),
    _of(
        EndpointConfig,
        "saturate",
        SWITCH,
        "Search for the highest load (concurrency; with --arrival a rate) that keeps --goodput, or "
        "for the knee of throughput.",
    ),
    _of(
        EndpointConfig,
        "slo-percentile",
        _number(1, 100, "PERCENT"),
        "Requests that must keep --goodput in that search.",
    ),
)
ENDPOINT_DATA = (
    _of(EndpointConfig, "prompts", TEXT, 'JSONL file of {"prompt": ...} or {"messages": ...}.'),
    _of(EndpointConfig, "trace", TEXT, "Mooncake trace: its times, lengths and shared prefixes."),
    _of(EndpointConfig, "trace-speed", _number(1e-6, math.inf), "Above 1 replays it faster."),
    _of(EndpointConfig, "turns", _count(1), "Turns of a conversation; 1: single requests."),
    _of(EndpointConfig, "shared-prefix", _count(0), "Tokens that prompts have in common."),
    _of(EndpointConfig, "num-prefixes", _count(1), "Different shared prefixes."),
    _of(EndpointConfig, "tokenizer", TEXT, "Model whose tokenizer checks the server's counts."),
)
ENDPOINT_REPORT = (
    _of(
        EndpointConfig,
        "goodput",
        TEXT,
        "Limits of a good request in ms, such as ttft:500,tpot:50 (ttft, tpot, e2e).",
        repeated=True,
    ),
    _of(EndpointConfig, "gpus", _count(1), "GPUs behind the endpoint."),
    _of(
        EndpointConfig,
        "price-per-gpu-hour",
        _number(0, math.inf, "USD"),
        "Dollars per GPU and hour: gives dollars per million tokens.",
    ),
    _of(EndpointConfig, "processes", _count(1, 1024), "Client processes; as the load needs."),
    _of(EndpointConfig, "audit", SWITCH, "Measure what the client itself can do."),
    _of(
        EndpointConfig,
        "server-metrics",
        SWITCH,
        "Read the server's /metrics beside (tokenmill, vLLM, SGLang).",
    ),
    _of(EndpointConfig, "metrics-url", TEXT, "Where they are, if not at /metrics of the server."),
    _of(
        EndpointConfig,
        "output-dir",
        TEXT,
        "New folder for report.html, summary.json, CSV, events and manifest.",
    ),
)
ENDPOINT = (*ENDPOINT_REQUESTS, *ENDPOINT_LOAD, *ENDPOINT_DATA, *ENDPOINT_REPORT)
CAMPAIGN = (
    Setting("min-concurrency", "Lowest point of the curve.", _count(1, 32), default=1),
    Setting("points", "Points of the curve.", _count(7, 32), default=7),
    Setting("disclosure", "TOML file of what only the submitter knows.", TEXT),
    Setting("write-disclosure", "Write that file with all values open, and end.", TEXT),
)
MLPERF = (
    Setting(
        "benchmark",
        "MLPerf benchmark: limits, lengths and sampling.",
        _one_of(
            *("deepseek-r1", "gpt-oss-120b", "llama3.1-8b", "llama3.1-405b", "llama2-70b"),
            but="qwen3-vl, wan-2.2 and dlrm-v3 need engines that are not here yet",
        ),
        default="llama3.1-8b",
    ),
    Setting(
        "scenario",
        "How queries arrive; Interactive is Server under tighter limits.",
        _one_of("Offline", "Server", "Interactive", "SingleStream"),
        default="Offline",
    ),
    Setting(
        "target-qps",
        "Queries per second: of the schedule, or expected where there is none.",
        _number(1e-6, math.inf, "QPS"),
        default=1.0,
    ),
    Setting(
        "test-mode",
        "What to run; accuracy needs --dataset, submission is both.",
        _one_of("performance", "accuracy", "submission"),
        default="performance",
    ),
    Setting("dataset", "Samples of the benchmark, .json or .jsonl; else synthetic ones.", TEXT),
    Setting("quick", "Few queries and little time: not a valid submission.", SWITCH, default=False),
    Setting("quick-samples", "Samples of a quick run.", _count(1), default=64),
    Setting(
        "length-scale",
        "Scale of the lengths of synthetic samples in a quick run.",
        _number(0.0001, 1),
        default=1.0,
    ),
    Setting(
        "find-peak",
        "Search for the highest valid rate, from --target-qps on.",
        SWITCH,
        default=False,
    ),
    Setting(
        "max-in-flight",
        "Most requests open at --url at once; more wait here, which counts.",
        _count(1),
        default=1024,
    ),
    Setting("submission-dir", "Write the submission's folders here.", TEXT),
    Setting("division", "Division of the submission.", _one_of("closed", "open"), default="open"),
    Setting("submitter", "Submitter of the submission.", TEXT, default="tokenmill"),
    Setting("system-name", "Name of the system in the submission.", TEXT, default="system"),
)
COMPARE = (
    Setting(
        "noise",
        "Where there is no interval: the difference that is still noise.",
        _number(0, 1),
        default=0.05,
    ),
    Setting("html", "Write the comparison to this .html file, too.", TEXT),
)
PUBLISHED = (
    Setting("round", "Only this round, such as v6.0.", TEXT),
    Setting("accelerator", "Only accelerators whose name has this, such as H200.", TEXT),
    Setting("limit", "Rows to print; the JSON line has all.", _count(1), default=20),
    Setting("result", "Result file or folder of yours to place among them.", TEXT),
    Setting(
        "tok-s",
        "Result of yours in the benchmark's unit, with --gpus.",
        _number(0, math.inf, "X"),
    ),
)
FLOOR = (
    _of(FloorConfig, "workers", _count(1, 4096), "Workers that share the requests."),
    _of(
        FloorConfig,
        "prefill",
        _count(1, 4096),
        "Workers that compute long prompts and hand their KV over; with --decode.",
    ),
    _of(
        FloorConfig,
        "decode",
        _count(1, 4096),
        "Workers that generate, for --prefill workers to compute prompts.",
    ),
    _of(
        FloorConfig,
        "remote-prefill-tokens",
        _count(1),
        "Prompts with fewer uncached tokens are computed where they decode.",
    ),
    Setting(
        "prefill-set",
        "Setting of the prefill workers alone, such as max-num-batched-tokens=2048.",
        TEXT,
        repeated=True,
        default=(),
    ),
    Setting(
        "decode-set",
        "Setting of the decode workers alone.",
        TEXT,
        repeated=True,
        default=(),
    ),
    _of(
        FloorConfig,
        "placement",
        _one_of("auto", "process", "ray"),
        "Who starts the workers; auto: Ray where there are several and it is installed.",
    ),
    _of(
        FloorConfig,
        "ray-address",
        TEXT,
        "Ray cluster to place workers on, such as 10.0.0.1:6379; a local Ray is started else.",
    ),
    _of(
        FloorConfig,
        "max-migrations",
        _count(0),
        "How often a request goes on elsewhere when its worker dies; then it is an error.",
    ),
    _of(
        FloorConfig,
        "heartbeat",
        _number(0.01, 3600, "SECONDS"),
        "Time between two signs of life that a worker is asked for.",
        field="heartbeat_s",
    ),
    _of(
        FloorConfig,
        "hang-timeout",
        _number(0.01, math.inf, "SECONDS"),
        "A worker without a sign of life for so long is killed; a step must be shorter.",
        field="hang_timeout_s",
    ),
    _of(
        FloorConfig,
        "start-timeout",
        _number(0.01, math.inf, "SECONDS"),
        "A worker that is not ready within this time is started again.",
        field="start_timeout_s",
    ),
    _of(
        FloorConfig,
        "max-restarts",
        _count(0),
        "Restarts of one worker in a row before it is given up.",
    ),
)
ROUTER = (
    _of(
        RouterConfig,
        "router",
        _one_of("kv", "round-robin", "least-loaded", "random"),
        "Who chooses a request's worker; kv: cached prefix against load.",
        field="policy",
    ),
    _of(
        RouterConfig,
        "router-prefill-weight",
        _number(0, math.inf),
        "Cost of an uncached prompt token.",
        field="prefill_weight",
    ),
    _of(
        RouterConfig,
        "router-queued-weight",
        _number(0, math.inf),
        "Cost of a token that waits for prefill at a worker.",
        field="queued_weight",
    ),
    _of(
        RouterConfig,
        "router-decode-weight",
        _number(0, math.inf),
        "Cost of a token of KV in use at a worker.",
        field="decode_weight",
    ),
    _of(
        RouterConfig,
        "router-events",
        SWITCH,
        "Workers tell which blocks they hold; off: predicted from what was routed.",
        field="events",
    ),
    _of(RouterConfig, "router-seed", _count(0), "Seed of the router's ties.", field="seed"),
)
REPLAY = (
    Setting("trace-block-tokens", "Tokens of a trace's hash id.", _count(1), default=512),
    Setting("num-blocks", "Blocks in a worker's KV cache.", _count(1), default=16384),
    Setting(
        "prefill-ms",
        "Time of a step in its prompt tokens that are not cached; as Dynamo's simulated engine.",
        POLYNOMIAL,
    ),
    Setting("decode-ms", "And in the share of KV in use, where it decodes; as there.", POLYNOMIAL),
)
COMMANDS = (
    Setting("system", "System prompt of the conversation.", TEXT),
    Setting("url", "Talk to a running server, such as http://127.0.0.1:8000/v1.", TEXT),
    Setting("chat", "Put the prompt through the model's chat template.", SWITCH, default=False),
    Setting("json", "Print one JSON object instead of the text.", SWITCH, default=False),
    Setting("json-only", "Print nothing but the JSON line.", SWITCH, default=False),
    Setting("num-running", "Requests that decode at once.", _count(1), default=512),
    Setting("num-steps", "Steps to measure.", _count(1), default=200),
    Setting("kv-tokens", "Tokens whose KV moves.", _count(16), default=2048),
    Setting("num-streams", "Streams at once.", _count(1), default=128),
    Setting("stream-tokens", "Tokens of each stream.", _count(1), default=512),
    Setting("router-workers", "Workers that the router knows.", _count(1), default=64),
    Setting("index-blocks", "Distinct cached blocks.", _count(1), default=1_400_000),
    Setting("query-blocks", "Blocks of a prompt.", _count(1), default=200),
    Setting("num-decisions", "Decisions to measure.", _count(1), default=5000),
    Setting("step-ms", "Time of a step of the simulated engine.", _number(0, 1000), default=4.0),
)
SETTINGS: dict[str, Setting] = {
    s.key: s
    for group in (
        *(MODEL, CACHE, SCHEDULER, EXECUTION, SERVER, SAMPLING),
        *(BENCH, LADDER, ENDPOINT, CAMPAIGN, MLPERF, COMPARE, PUBLISHED),
        *(FLOOR, ROUTER, REPLAY, COMMANDS),
    )
    for s in group
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Values by setting, each from the strongest source that gave one."""

    values: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str) -> Any:
        """The value of a setting, or its default."""
        return self.values.get(key, SETTINGS[key].shown_default)

    def build(self, owner: type[Config], **more: Any) -> Config:
        """The config `owner` with every field that a source gave; `more` fills other fields."""
        given = {
            SETTINGS[key].field: value
            for key, value in self.values.items()
            if SETTINGS[key].owner is owner
        }
        return owner(**(more | given))

    def flags(self, settings: Iterable[Setting]) -> list[str]:
        """Command line that gives these settings again, for a child process."""
        line: list[str] = []
        for setting in settings:
            if setting.key in self.values:
                line += _flag(setting, self.values[setting.key])
        return line


def _flag(setting: Setting, value: Any) -> list[str]:
    name = "--" + setting.key
    if setting.is_switch:
        return [name if value else "--no-" + setting.key]
    values = value if setting.repeated else (value,)
    return [f"{name}={item}" for item in values]


def load(
    flags: Mapping[str, Any],
    *,
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    defaults: Mapping[str, Any] | None = None,
    offered: Iterable[Setting] = (),
) -> Settings:
    """Join flags (by key; None is not given), environment, TOML file and a command's defaults.

    `config` is the --config flag. Only keys of `flags` are taken: a file or an environment may
    also set what other commands read. `offered` are settings that a command reads in a way of its
    own, such as several numbers where others take one.
    """
    table = SETTINGS | {setting.key: setting for setting in offered}
    values = dict(defaults or {})
    path = config_path(config, environ)
    for source in (_from_file(path, table), _from_environment(environ, table)):
        values |= {key: value for key, value in source.items() if key in flags}
    for key, value in flags.items():
        if value is not None and value != () and value != []:
            values[key] = read_value(table[key], value, "--" + key)
    return Settings(values)


def config_path(flag: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file of --config, of TOKENMILL_CONFIG, or ./tokenmill.toml where there is one."""
    if flag is not None:
        return flag
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    return Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None


def read_value(setting: Setting, value: Any, source: str) -> Any:
    """`value` as the setting's kind; SettingsError names the source and what it expects."""
    try:
        if not setting.repeated:
            return setting.kind.read(value)
        items: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
        return tuple(setting.kind.read(item) for item in items)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise SettingsError(f"{source} must be {setting.kind.expected}, got {value!r}") from None


def _from_environment(environ: Mapping[str, str], table: Mapping[str, Setting]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in table.values():
        for name, negated in _names(setting, setting.variable, "TOKENMILL_NO_"):
            text: str | list[str] = environ.get(name, "")
            if not text:
                continue
            if setting.repeated:
                text = [part for part in str(text).split(",") if part]
            _put(values, setting, text, name, negated)
    return values


def _names(setting: Setting, name: str, no: str) -> list[tuple[str, bool]]:
    """The names of a setting in one source; a switch also has a negated one."""
    negated = no + name.removeprefix("TOKENMILL_")
    return [(name, False), (negated, True)] if setting.is_switch else [(name, False)]


def _put(values: dict[str, Any], setting: Setting, raw: Any, source: str, negated: bool) -> None:
    if setting.key in values:
        raise SettingsError(f"{source} sets {setting.key}, which is already set beside it")
    value = read_value(setting, raw, source)
    values[setting.key] = not value if negated else value


def _from_file(path: Path | None, table: Mapping[str, Setting]) -> dict[str, Any]:
    if path is None:
        return {}
    known = {
        name: (setting, negated)
        for setting in table.values()
        for name, negated in _names(setting, setting.key, "no-")
    }
    values: dict[str, Any] = {}
    for key, raw in _read_toml(path).items():
        name = key.replace("_", "-")
        if name not in known:
            raise SettingsError(f"{path}: unknown key {key!r}{_suggestion(name, known)}")
        setting, negated = known[name]
        _put(values, setting, raw, f"{path}: {key}", negated)
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the settings: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file: {error}") from None


def _suggestion(name: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else "; keys are the flags, such as max-num-seqs"
