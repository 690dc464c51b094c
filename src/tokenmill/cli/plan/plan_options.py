"""The flags of the plan commands: a config for each heading of their help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokenmill.core.config import RouterConfig
from tokenmill.core.flags import (
    DURATION_MS,
    POLYNOMIAL,
    count,
    number,
    numbers,
    one_of,
    read_float,
    setting,
)
from tokenmill.settings.setting import only

SHARE = number(0, 0.99)
WEIGHTS = ("bf16", "int8", "fp8", "fp4", "mxfp4")
LENGTHS = (
    "Lengths: an MLPerf benchmark, a CSV file of input_length,output_length, or uniform:1-2; "
    "in place of a benchmark's."
)
ROUTER = only(
    RouterConfig,
    *("router", "router-prefill-weight", "router-decode-weight", "router-events"),
    *("router-lifetime", "router-worker-blocks", "router-seed"),
)


@dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    benchmark: str = setting("llama3.1-8b", "MLPerf benchmark: its model, lengths and limits.")
    scenario: Literal["Offline", "Server", "Interactive", "SingleStream"] = setting(
        "Offline", "How queries arrive; Interactive is Server under tighter limits."
    )
    round: str = setting(
        "v6.0",
        "Whose software: that of the best submissions of v5.1, v6.0 or v6.1 (efficiencies of v6.0) "
        "by the round's rules, or tokenmill.",
    )


@dataclass(frozen=True, slots=True)
class WorkOptions:
    model: str | None = setting(
        None,
        "A shipped shape such as deepseek-r1, a config.json, or its folder; in place of a "
        "benchmark's.",
    )
    lengths: str | None = setting(None, LENGTHS)
    output_len: int | None = setting(
        None, "Tokens of every answer, whatever --lengths say.", count(1)
    )


@dataclass(frozen=True, slots=True)
class TraceOptions:
    trace: str | None = setting(None, "Mooncake trace: its times, lengths and shared prefixes.")
    trace_block_tokens: int = setting(512, "Tokens per hash id of a trace.", count(1))
    trace_speed: float = setting(
        1.0, "Speed of the replay; 2 is twice as fast.", number(1e-6, math.inf)
    )


@dataclass(frozen=True, slots=True)
class DemandOptions:
    rate: float | None = setting(
        None,
        "Requests per second; plan simulate takes the highest within the limits, if not given.",
        number(1e-6, 1e9, "X"),
    )
    ttft: float = setting(2000.0, "Most milliseconds to the first token.", number(1, 1e7))
    tpot: float = setting(80.0, "Most milliseconds per output token.", number(0.01, 1e6))


@dataclass(frozen=True, slots=True)
class SystemOptions:
    gpu: str = setting(
        "h200",
        "GPU: h100, h200, b200, b300, gb200, gb300, mi300x, mi325x, mi355x, or one of --hardware.",
    )
    gpus: int | None = setting(None, "GPUs of the system, at most.", count(1))
    hardware: str | None = setting(
        None, "TOML file with your own GPUs; its tables win over the shipped ones."
    )
    efficiencies: str | None = setting(
        None,
        "TOML file of `plan calibrate` with efficiencies; its tables win over the shipped ones.",
    )


@dataclass(frozen=True, slots=True)
class CostOptions:
    price_per_gpu_hour: float | None = setting(
        None,
        "Dollars per GPU and hour; if not given, those of the GPU's table.",
        number(0, math.inf, "USD"),
    )
    round: str = setting(
        "tokenmill",
        "Whose efficiencies: tokenmill, v5.1, v6.0 or v6.1 (the best submissions of that round).",
    )


@dataclass(frozen=True, slots=True)
class StartOptions:
    start_s: float = setting(120.0, "Seconds that a worker takes to start.", number(0, 1e5))


@dataclass(frozen=True, slots=True)
class ConfigurationOptions:
    """What of a system is given; the rest is searched for."""

    precision: str | None = setting(
        None,
        "Type of the weights; the narrowest that the GPU computes in, if not given.",
        one_of(*WEIGHTS),
    )
    tp: int | None = setting(None, "GPUs of a replica that divide every layer.", count(1, 4096))
    ep: int | None = setting(None, "With --attention-dp: GPUs of a replica.", count(1, 4096))
    attention_dp: bool = setting(
        False, "Every GPU of a replica has requests of its own, experts lie over all."
    )
    mtp: int | None = setting(None, "Tokens drafted in a step.", count(0, 8))
    acceptance: float | None = setting(
        None,
        "Share of drafts that are accepted if all drafts before them were; by default the share "
        "measured for the model's family.",
        number(0, 1),
    )
    max_num_seqs: int | None = setting(None, "Most requests that a rank runs at once.", count(1))


@dataclass(frozen=True, slots=True)
class TableOptions:
    rows: bool = setting(False, "Print every row, not only the summary.")
    markdown: str | None = setting(None, "Write the table to this Markdown file.")
    efficiencies: str | None = setting(None, "TOML file of `plan calibrate` with efficiencies.")


@dataclass(frozen=True, slots=True)
class SizeOptions:
    cache_hits: float | None = setting(
        None, "Share of prompt tokens that a prefix cache has; a trace's own, if not given.", SHARE
    )
    percentile: float = setting(
        99.0, "Share of the requests that keep both limits.", number(50, 99.9)
    )
    alternatives: int = setting(3, "Systems to show.", count(1, 32))
    write: str = setting("plan.toml", "File to write, which --config of `serve` takes.")


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    write: str = setting(
        "efficiencies.toml", "File for the efficiencies, which --efficiencies takes."
    )


@dataclass(frozen=True, slots=True)
class ParetoOptions:
    interactivity: tuple[float, ...] = setting(
        (5, 8, 16, 20, 25, 33, 40, 50, 80, 100, 125, 160, 200, 250),
        "Tokens/s that a user must get; each value is a point of the curves.",
        numbers(read_float, 0.1, "X[,X...]"),
    )
    ttft: float | None = setting(
        None,
        "Most milliseconds to the first token; the benchmark's own, or 2000.",
        number(1, 1e7),
    )
    percentile: float = setting(
        99.0, "Share of the requests that keep both limits.", number(50, 99.9)
    )


@dataclass(frozen=True, slots=True)
class ParetoSystems:
    gpu: str = setting(
        "h200,b200,gb300", "GPUs to compare, separated by commas; those of --hardware, too."
    )
    gpus: int | None = setting(
        None, "GPUs of each system; if not given, one NVLink domain.", count(1)
    )
    precision: str | None = setting(
        None,
        "Types of the weights, separated by commas; the narrowest and fp8, if not given.",
    )


@dataclass(frozen=True, slots=True)
class ParetoFiles:
    html: str = setting("pareto.html", "File for the page.")
    csv: str = setting("pareto.csv", "File for the table.")


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    num_requests: int = setting(10_000, "Requests that are measured.", count(1))
    seed: int = setting(0, "Same seed, same run.", count(0))


@dataclass(frozen=True, slots=True)
class SimulatedWorkers:
    prefill: int = setting(0, "Workers that only compute prompts.", count(1, 4096))
    decode: int = setting(0, "Workers that generate the answers.", count(1, 4096))
    prefill_ep: int | None = setting(
        None,
        "GPUs of a prefill worker, each with requests of its own; as --ep, if not given.",
        count(1, 4096),
    )
    max_num_batched_tokens: int | None = setting(
        None, "Most tokens of a rank in one step.", count(1)
    )
    block_size: int = setting(64, "Tokens of a KV block.", count(1, 1024))
    racks: int = setting(1, "Racks that the GPUs lie on, in equal parts.", count(1, 1024))


@dataclass(frozen=True, slots=True)
class TechniqueOptions:
    balance: bool = setting(True, "Prompts wait until every rank has one.")
    timeout_iters: int = setting(6, "Most steps that prompts wait for ranks without one.", count(0))
    batching_wait_iters: int = setting(
        2, "Steps that prompts wait for more prompts once every rank has one.", count(0)
    )
    redundant_experts: int = setting(32, "Extra copies of a layer's busy experts.", count(0))


@dataclass(frozen=True, slots=True)
class FaultOptions:
    fail: tuple[str, ...] = setting(
        (),
        "T:WORKER, a worker that dies after T seconds and starts again; several may be given.",
        repeated=True,
    )
    start: tuple[str, ...] = setting(
        (),
        "T or T:WORKER, a worker that is missing and begins to start after T seconds.",
        repeated=True,
    )


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    ladder: bool = setting(False, "Also run with and without each technique, on one rack.")
    scale_out: bool = setting(True, "Also run one rack alone, to show what several cost.")


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Of a record, beside the file's: what if the scheduler were another."""

    record: str | None = setting(None, "File of `serve --record`; other flags say what if.")
    policy: Literal["fcfs", "priority"] = setting("priority", "Order of the waiting requests.")
    chunked_prefill: bool = setting(True, "Split long prompts over several steps.")


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    workers: int = setting(8, "Workers that share the requests.", count(0, 4096))
    num_blocks: int = setting(16384, "Blocks in a worker's KV cache.", count(1))
    prefill_ms: tuple[float, ...] | None = setting(
        None,
        "Time of a step by its uncached prompt tokens, as in Dynamo's simulated engine.",
        POLYNOMIAL,
    )
    decode_ms: tuple[float, ...] | None = setting(
        None, "Time of a decode step by the share of KV in use.", POLYNOMIAL
    )
    block_size: int | None = setting(None, "As in serve; 64 where not given.", count(1, 1024))
    max_num_batched_tokens: int | None = setting(
        None, "As in serve; 8192 where not given.", count(1)
    )
    max_num_seqs: int | None = setting(None, "As in serve; 256 where not given.", count(1))


@dataclass(frozen=True, slots=True)
class FrontOptions:
    fronts: int = setting(
        1,
        "API processes, each with a router of its own; a request comes to any of them.",
        count(1, 1024),
    )
    report_delay: float = setting(
        0.0,
        "How late the workers' reports of load and cached blocks reach the fronts.",
        DURATION_MS,
    )
    by_events: bool = setting(
        False,
        "Replay twice: as in serve, and with a router that knows of caches by published events, "
        "as `tokenmill route` does; compare hits and TTFT.",
    )
