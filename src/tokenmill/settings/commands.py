"""The settings of single commands that belong to no config."""

from __future__ import annotations

import math

from tokenmill.core.flags import (
    DURATION_MS,
    POLYNOMIAL,
    SWITCH,
    TEXT,
    count,
    number,
    numbers,
    one_of,
    read_float,
    read_int,
    some_of,
)
from tokenmill.settings.setting import Setting

POOL = (
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
)
JOIN = (
    Setting(
        "join",
        "HOST:PORT of the server, as its --join-listen; by default LWS_LEADER_ADDRESS, port 7001.",
        TEXT,
    ),
)
# Settings of SERVER and POOL that servers of ranking and video models refuse.
TEXT_SERVER_ONLY = frozenset(
    (
        *("fronts", "stream-interval", "max-pending", "tool-parser", "reasoning-parser"),
        *("chat-template", "template-date", "default-max-tokens", "max-stored-responses"),
        *("max-stored-response-size", "stored-response-age", "log-stats", "otlp-endpoint"),
        *("prefill", "decode", "remote-prefill-tokens", "kv-lease"),
        *("prefill-set", "decode-set", "join-listen", "token-file"),
        *("kv-events", "kv-events-replay"),
    )
)
TASK = (
    Setting(
        "task",
        "What the model does; auto finds out from its folder.",
        one_of("auto", "generate", "rank", "video"),
        default="auto",
    ),
)
VIDEO_JOB = (
    Setting("out", "File to write (.mp4), or a folder for PNG frames.", TEXT, default="video.mp4"),
    Setting(
        "offload",
        "Keep the experts in host memory, and the one in use on the GPU.",
        SWITCH,
        default=False,
    ),
    Setting("negative-prompt", "What the video is not to be (MLPerf's unless given).", TEXT),
    Setting(
        "measured-steps",
        "Denoising steps to run; the others are taken to last as long. All unless given.",
        count(1),
    ),
    Setting("num-videos", "Videos to make one after another.", count(1), default=1),
)
RANK = (
    Setting(
        "max-batch-tokens",
        "Rows of a batch of ranking requests: histories and candidates.",
        count(1),
        default=160_000,
    ),
    Setting("candidate-chunk", "Most candidates in the layers at a time; exact.", count(1)),
)
RANK_COMPARED = (
    Setting(
        "compare-dtype",
        "Score every line in this type too, and print how far scores and quality are apart.",
        one_of("fp32", "bf16"),
    ),
)
RANK_SERVER = (
    Setting(
        "latency-limit",
        "Time that a request may take, queue and step: batches are made so that it holds.",
        number(0.1, math.inf, "MS"),
        default=80.0,
    ),
)
RANK_TABLES = (
    Setting(
        "table",
        "Table outside the model's folder: item=PATH of a file or folder; repeat the flag for "
        "user=PATH.",
        TEXT,
        repeated=True,
        default=(),
    ),
    Setting(
        "cache-rows",
        "Rows of such a table that the device caches (on a GPU a tenth; on a CPU none).",
        count(0),
        default=0,
    ),
)
LADDER = (
    Setting("rungs", "Rungs to run, separated by commas; each also has all before it on.", TEXT),
    Setting(
        "gpu-price",
        "Dollars per hour of the machine; the default is a placeholder for what you pay.",
        number(0, math.inf, "USD"),
        default=3.0,
    ),
    Setting("plot", "Write the bars to this .html file.", TEXT),
)
MTP = (
    Setting("depths", "Numbers of drafts to measure (1,2,3).", numbers(read_int, 1, "N[,N...]")),
    Setting("batch", "Prompts that are answered at once.", count(1), default=1),
    Setting(
        "prompt-kind",
        "Sets of prompts: chat, everyday (shorter, of more kinds, with follow-ups), unseen "
        "(everyday ones of forms and topics that the default model's module was not trained on), "
        "or documents that the answers repeat much of.",
        some_of("chat", "everyday", "unseen", "documents"),
        default=("chat",),
    ),
)
CAMPAIGN = (
    Setting("min-concurrency", "Lowest point of the curve.", count(1, 32), default=1),
    Setting("points", "Points of the curve.", count(7, 32), default=7),
    Setting("disclosure", "TOML file with the facts that only the submitter knows.", TEXT),
    Setting("write-disclosure", "Write that file with empty values, then exit.", TEXT),
)
MLPERF = (
    Setting(
        "benchmark",
        "MLPerf benchmark: limits, lengths and sampling.",
        one_of(
            *("deepseek-r1", "gpt-oss-120b", "llama3.1-8b", "llama3.1-405b", "llama2-70b"),
            *("qwen3-vl-235b", "dlrm-v3", "wan-2.2-t2v-a14b"),
        ),
        default="llama3.1-8b",
    ),
    Setting(
        "round",
        "Round of MLPerf Inference whose benchmarks, seeds and gates hold.",
        one_of("v6.0", "v6.1"),
        default="v6.0",
    ),
    Setting(
        "scenario",
        "How queries arrive; Interactive is Server under tighter limits.",
        one_of("Offline", "Server", "Interactive", "SingleStream"),
        default="Offline",
    ),
    Setting(
        "target-qps",
        "Queries per second that are scheduled, or expected where nothing is scheduled.",
        number(1e-6, math.inf, "QPS"),
        default=1.0,
    ),
    Setting(
        "test-mode",
        "What to run: accuracy needs --dataset; submission is performance and accuracy; TEST04, "
        "TEST06, TEST07 and TEST09 are single compliance tests.",
        one_of("performance", "accuracy", "submission", "TEST04", "TEST06", "TEST07", "TEST09"),
        default="performance",
    ),
    Setting(
        "compliance",
        "Also run the benchmark's compliance tests, which a closed submission needs.",
        SWITCH,
        default=False,
    ),
    Setting(
        "compliance-dataset",
        "Dataset of TEST07 (gpt-oss-120b), with targets: 990 GPQA samples.",
        TEXT,
    ),
    Setting(
        "dataset",
        "Samples of the benchmark, .json or .jsonl; for wan-2.2 a text file with a prompt in each "
        "line. Samples are synthetic if not given.",
        TEXT,
    ),
    Setting("quick", "Few queries and little time: not a valid submission.", SWITCH, default=False),
    Setting("quick-samples", "Samples of a quick run.", count(1), default=64),
    Setting(
        "length-scale",
        "Scale of the lengths of synthetic samples in a quick run.",
        number(0.0001, 1),
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
        "Most requests sent to --url at once; others wait in the client, and the wait counts.",
        count(1),
        default=1024,
    ),
    Setting("submission-dir", "Write the submission's folders here.", TEXT),
    Setting("division", "Division of the submission.", one_of("closed", "open"), default="open"),
    Setting("submitter", "Submitter of the submission.", TEXT, default="tokenmill"),
    Setting("system-name", "Name of the system in the submission.", TEXT, default="system"),
)
COMPARE = (
    Setting(
        "noise",
        "Difference that counts as noise where there is no interval.",
        number(0, 1),
        default=0.05,
    ),
    Setting("html", "Write the comparison to this .html file, too.", TEXT),
    Setting(
        "fail-on",
        "Exit with status 1 if a round is worse than the first, or cannot be compared.",
        one_of("worse"),
    ),
)
PUBLISHED = (
    Setting("accelerator", "Only accelerators whose name has this, such as H200.", TEXT),
    Setting("limit", "Rows to print; the JSON line has all.", count(1), default=20),
    Setting("result", "Your result file or folder, to be ranked among the published ones.", TEXT),
    Setting(
        "tok-s",
        "Your result in the benchmark's unit; needs --gpus.",
        number(0, math.inf, "X"),
    ),
)
REPLAY = (
    Setting(
        "trace-block-tokens",
        "Tokens per hash id of a trace.",
        count(1),
        default=512,
    ),
    Setting("num-blocks", "Blocks in a worker's KV cache.", count(1), default=16384),
    Setting(
        "prefill-ms",
        "Time of a step by its uncached prompt tokens, as in Dynamo's simulated engine.",
        POLYNOMIAL,
    ),
    Setting(
        "decode-ms",
        "Time of a decode step by the share of KV in use.",
        POLYNOMIAL,
    ),
)
FRONTS = (
    Setting(
        "report-delay",
        "How late the workers' reports of load and cached blocks reach the fronts.",
        DURATION_MS,
        default=0.0,
    ),
    Setting(
        "by-events",
        "Replay twice: as in serve, and with a router that knows of caches by published events, "
        "as `tokenmill route` does; compare hits and TTFT.",
        SWITCH,
        default=False,
    ),
)
SIMULATED_SYSTEM = (
    Setting(
        "gpu",
        "GPU of the system: h200, gb300 or another of plan/hardware.toml.",
        TEXT,
        default="h200",
    ),
    Setting("balance", "Prompts wait until every rank has one.", SWITCH, default=True),
    Setting(
        "timeout-iters",
        "Most steps that prompts wait for ranks without a prompt.",
        count(0),
        default=6,
    ),
    Setting(
        "batching-wait-iters",
        "Steps that prompts wait for more prompts once every rank has one.",
        count(0),
        default=2,
    ),
)
PLAN = (
    Setting(
        "hardware", "TOML file with your own GPUs; its tables win over the shipped ones.", TEXT
    ),
    Setting(
        "efficiencies",
        "TOML file of `plan calibrate` with efficiencies; its tables win over the shipped ones.",
        TEXT,
    ),
    Setting(
        "precision",
        "Type of the weights; the narrowest that the GPU computes in, if not given.",
        one_of("bf16", "int8", "fp8", "fp4", "mxfp4"),
    ),
    Setting(
        "acceptance",
        "Share of drafts that are accepted if all drafts before them were; by default the share "
        "measured for the model's family.",
        number(0, 1),
    ),
    Setting("ttft", "Most milliseconds to the first token.", number(1, 1e7), default=2000.0),
    Setting("tpot", "Most milliseconds per output token.", number(0.01, 1e6), default=80.0),
    Setting(
        "percentile", "Share of the requests that keep both limits.", number(50, 99.9), default=99.0
    ),
    Setting(
        "cache-hits",
        "Share of prompt tokens that a prefix cache has; a trace's own, if not given.",
        number(0, 0.99),
    ),
    Setting("start-s", "Seconds that a worker takes to start.", number(0, 1e5), default=120.0),
    Setting("alternatives", "Systems to show.", count(1, 32), default=3),
    Setting("write", "File for the settings of `serve`.", TEXT, default="plan.toml"),
    Setting(
        "interactivity",
        "Tokens/s that a user must get; each value is a point of the curves.",
        numbers(read_float, 0.1, "X[,X...]"),
        default=(5, 8, 16, 20, 25, 33, 40, 50, 80, 100, 125, 160, 200, 250),
    ),
    Setting("csv", "File for the table.", TEXT, default="pareto.csv"),
    Setting("rows", "Print every row, not only the summary.", SWITCH, default=False),
    Setting("markdown", "Write the table to this Markdown file.", TEXT),
)
SIMULATE = (
    Setting("racks", "Racks that the GPUs lie on, in equal parts.", count(1, 1024), default=1),
    Setting(
        "prefill-ep",
        "GPUs of a prefill worker, each with requests of its own; as --ep, if not given.",
        count(1, 4096),
    ),
    Setting(
        "fail",
        "T:WORKER, a worker that dies after T seconds and starts again; several may be given.",
        TEXT,
        repeated=True,
        default=(),
    ),
    Setting(
        "start",
        "T or T:WORKER, a worker that is missing and begins to start after T seconds.",
        TEXT,
        repeated=True,
        default=(),
    ),
    Setting(
        "ladder", "Also run with and without each technique, on one rack.", SWITCH, default=False
    ),
    Setting(
        "scale-out", "Also run one rack alone, to show what several cost.", SWITCH, default=True
    ),
)
COMMANDS = (
    Setting("system", "System prompt of the conversation.", TEXT),
    Setting(
        "image",
        "Image file, or its URL with --url, for the first message; repeatable.",
        TEXT,
        repeated=True,
        default=(),
    ),
    Setting("url", "Talk to a running server, such as http://127.0.0.1:8000.", TEXT),
    Setting("chat", "Put the prompt through the model's chat template.", SWITCH, default=False),
    Setting(
        "json",
        "Print one JSON line instead of text.",
        SWITCH,
        default=False,
    ),
    Setting("latest", "Latest requests to show one by one.", count(0), default=0),
    Setting("table-rows", "Rows of the embedding table (65,536; on a GPU 4,194,304).", count(16)),
    Setting("table-columns", "Columns of the embedding table, float16.", count(1), default=512),
    Setting(
        "table-dtype",
        "Type of the table's values (float16, or that of the file).",
        one_of("float16", "bfloat16", "float32"),
    ),
    Setting("tensor", "Tensor of the safetensors file that is the table.", TEXT),
)
