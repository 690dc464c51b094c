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
# Settings of SERVER and POOL that servers of ranking and video models refuse.
TEXT_SERVER_ONLY = frozenset(
    (
        *("fronts", "stream-interval", "max-pending", "tool-parser", "reasoning-parser"),
        *("chat-template", "template-date", "default-max-tokens", "max-stored-responses"),
        *("max-stored-response-size", "stored-response-age", "log-stats", "otlp-endpoint"),
        *("prefill", "decode", "encoder", "remote-prefill-tokens", "kv-lease"),
        *("prefill-set", "decode-set"),
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
        "Table outside the model's folder: item=PATH of a file, folder or database; repeat the "
        "flag for user=PATH.",
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
RANK_TRAIN = (
    Setting("users", "Users of the data set.", count(1), default=200),
    Setting("items", "Items of the data set, a multiple of 16.", count(16), default=2048),
    Setting("candidates", "Candidates of a request.", count(1), default=64),
    Setting("train-steps", "Batches of 16 requests to train on.", count(1), default=300),
)
FRONT = (Setting("join", "Server to join, as HOST:PORT of one of its fronts.", TEXT),)
LADDER = (
    Setting("rungs", "Rungs to run, separated by commas; each also has all before it on.", TEXT),
    Setting(
        "gpu-price",
        "Dollars per hour of the machine; the default is a placeholder for what you pay.",
        number(0, math.inf, "USD"),
        default=3.0,
    ),
    Setting("plot", "Write the bars to this .svg or .html file.", TEXT),
)
MTP = (
    Setting("depths", "Numbers of drafts to measure (1,2,3).", numbers(read_int, 1, "N[,N...]")),
    Setting("batch", "Prompts that are answered at once.", count(1), default=1),
    Setting(
        "prompt-kind",
        "Sets of prompts: chat, everyday (shorter, of more kinds, with follow-ups), unseen "
        "(everyday ones that share no form and no topic with the questions of train_mtp.py), or "
        "documents that the answers repeat much of.",
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
)
LOADS = (
    Setting(
        "loads",
        "Run every policy on all kinds of load, instead of a trace, with costs of a GPU and a CPU.",
        SWITCH,
        default=False,
    ),
    Setting("load-requests", "Requests of a load.", count(24), default=256),
    Setting("load-seeds", "Draws of each load, whose requests are pooled.", count(1), default=3),
)
ATTENTION_DP = (
    Setting("ranks", "Ranks of attention data and expert parallelism.", count(1), default=8),
    Setting(
        "gpu",
        "GPU of the system: h200, gb300 or another of plan/hardware.toml.",
        TEXT,
        default="h200",
    ),
    Setting(
        "max-output-len",
        "Longer answers of --lengths are cut; MLPerf cuts DeepSeek-R1's here.",
        count(2),
        default=20_000,
    ),
    Setting(
        "balance", "Also run with prompts held back; off: never hold them.", SWITCH, default=True
    ),
    Setting(
        "timeout-iters",
        "Most steps that prompts wait for ranks without a prompt.",
        count(0),
        default=50,
    ),
    Setting(
        "batching-wait-iters",
        "Steps that prompts wait for more prompts once every rank has one.",
        count(0),
        default=10,
    ),
    Setting(
        "compare-policies",
        "Also run vLLM's rule (every n-th step), SGLang's rule (wait while ranks differ), and "
        "steps so small that prompts are always spread over many.",
        SWITCH,
        default=False,
    ),
    Setting(
        "search",
        "Try several waits and sizes of a step, and name the fastest within --ttft-limit-ms.",
        SWITCH,
        default=False,
    ),
    Setting(
        "ttft-limit-ms",
        "Limit of --search on the p99 time from a slot on a rank to the first token.",
        number(0, math.inf, "MS"),
        default=2000.0,
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
    Setting("json", "Print one JSON object instead of the text.", SWITCH, default=False),
    Setting("json-only", "Print nothing but the JSON line.", SWITCH, default=False),
    Setting("latest", "Latest requests to show one by one.", count(0), default=0),
    Setting("num-running", "Requests that decode at once.", count(1), default=512),
    Setting("num-steps", "Steps to measure.", count(1), default=200),
    Setting("starts", "Measured starts with warm kernels; the median counts.", count(1), default=3),
    Setting(
        "cold-kernels",
        "Measure one start with empty caches of compiled kernels, too.",
        SWITCH,
        default=False,
    ),
    Setting(
        "random-folder",
        "Shape or config.json of a model that is written to disk with random weights.",
        TEXT,
    ),
    Setting("kv-tokens", "Tokens whose KV moves.", count(16), default=2048),
    Setting(
        "conversations",
        "Conversations, which take turns; with a trace, those that have several turns.",
        count(1),
        default=32,
    ),
    Setting("conversation-turns", "Turns of each conversation.", count(1), default=4),
    Setting(
        "turn-tokens",
        "Tokens that a user adds in a turn; by default 112 on a CPU and 992 on a GPU.",
        count(1),
    ),
    Setting(
        "answer-tokens",
        "Tokens of each answer, or of a trace's longest; by default 16 on a CPU and 32 on a GPU.",
        count(1),
    ),
    Setting(
        "num-users", "Requests in flight at a time; by default 2 on a CPU and 4 on a GPU.", count(1)
    ),
    Setting(
        "trace-scale",
        "Share of a trace's tokens that is replayed: 0.1 makes a prompt of 5,000 tokens 500 long.",
        number(1e-3, 1),
        default=1.0,
    ),
    Setting(
        "time-limit",
        "Seconds for all runs: only as many requests run as fit, the same in every run.",
        number(1, 86400),
    ),
    Setting(
        "working-set",
        "KV of all conversations, as a multiple of the device's KV cache.",
        number(0.1, 1000),
        default=4.0,
    ),
    Setting(
        "decode-batch",
        "Sequences of a step; several sizes are measured one after another.",
        numbers(read_int, 1, "N[,N...]"),
        default=(32, 64, 128, 256),
    ),
    Setting("context", "Tokens that each sequence has in the cache.", count(1), default=4096),
    Setting("fusions", "Also leave out one fused kernel after another.", SWITCH, default=False),
    Setting(
        "eplb-ranks",
        "Ranks that share the experts of synthetic loads; several are run one after another.",
        numbers(read_int, 1, "N[,N...]"),
        default=(8, 32, 72),
    ),
    Setting(
        "live-ranks",
        "Ranks on this machine that run a small model; 0 runs none.",
        count(0, 32),
        default=4,
    ),
    Setting("table-rows", "Rows of the embedding table (65,536; on a GPU 4,194,304).", count(16)),
    Setting("table-columns", "Columns of the embedding table, float16.", count(1), default=512),
    Setting(
        "table-dtype",
        "Type of the table's values (float16, or that of the file).",
        one_of("float16", "bfloat16", "float32"),
    ),
    Setting("database", "Keep the rows on disk, in LMDB.", SWITCH, default=False),
    Setting("tensor", "Tensor of the safetensors file that is the table.", TEXT),
    Setting("lookup-keys", "Keys of one lookup (8,192; on a GPU 1,048,576).", count(1)),
    Setting("zipf", "Exponent of the keys' Zipf distribution.", number(0, 4), default=1.05),
    Setting(
        "hit-rate", "Share of the keys that the cache should hold.", number(0.01, 1), default=0.9
    ),
    Setting("tier-seconds", "Time that each tier is measured for.", number(0.001, 60), default=1.0),
    Setting(
        "num-streams",
        "Streams at once; several numbers are measured one after another.",
        numbers(read_int, 1, "N[,N...]"),
        default=(1, 128, 2000),
    ),
    Setting("stream-tokens", "Tokens of each stream.", count(1), default=512),
    Setting("router-workers", "Workers that the router knows.", count(1), default=64),
    Setting("index-blocks", "Distinct cached blocks.", count(1), default=1_400_000),
    Setting("query-blocks", "Blocks of a prompt.", count(1), default=200),
    Setting("num-decisions", "Decisions to measure.", count(1), default=5000),
    Setting(
        "offered-tok-s",
        "Tokens per second of the simulated engine, over all streams.",
        number(1, math.inf),
        default=80_000.0,
    ),
    Setting(
        "step-ms",
        "Time of a step of the simulated engine, instead of --offered-tok-s; 0 does not wait.",
        number(0, 1000),
    ),
    Setting("client-processes", "Processes that the streams' client has.", count(1), default=1),
)
