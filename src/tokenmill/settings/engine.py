"""The settings of engines, servers and floors."""

from __future__ import annotations

import math

from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    FloorConfig,
    ModelConfig,
    ParallelConfig,
    RouteConfig,
    RouterConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenmill.core.types import SamplingParams
from tokenmill.settings.kinds import (
    INTEGER,
    KEYS,
    RELAXED,
    SECONDS,
    SIZE,
    SWITCH,
    TEXT,
    Setting,
    count,
    number,
    of,
    one_of,
)

MODEL = (
    of(
        ModelConfig,
        "model",
        TEXT,
        "Weights: a name of `tokenmill pull`, a folder, a .gguf file or a Hugging Face name.",
    ),
    of(
        ModelConfig,
        "dtype",
        one_of("auto", "fp32", "int8", "bf16", "fp8"),
        "Compute type of the weights; auto: bf16 on a GPU, else the faster of fp32 and int8.",
    ),
    of(ModelConfig, "device", one_of("auto", "cpu", "cuda"), "Where the engine runs."),
    of(ModelConfig, "random-weights", SWITCH, "Random weights: only config.json is read."),
    of(ModelConfig, "weights-seed", count(0), "Seed of the random weights.", field="seed"),
    of(ModelConfig, "max-model-len", count(1), "Longest prompt plus answer, in tokens."),
    of(ModelConfig, "num-threads", count(1, 4096), "CPU threads of the engine; all cores."),
    of(
        ModelConfig,
        "draft",
        TEXT,
        "MTP module or EAGLE head for --mtp: a safetensors file, folder or hub name; the model's "
        "own unless given.",
    ),
)
CACHE = (
    of(
        CacheConfig,
        "kv-cache-memory",
        SIZE,
        "Memory of the KV cache, such as 2GiB; wins over --kv-cache-share.",
        field="memory_bytes",
    ),
    of(
        CacheConfig,
        "kv-cache-share",
        number(0.01, 0.99),
        "Share of the memory that is free after loading; 0.5 on CPU, 0.95 on a GPU.",
        field="memory_share",
    ),
    of(
        CacheConfig,
        "block-size",
        count(1, 1024),
        "Tokens in one block of the KV cache; 16 on CPU, 64 on a GPU.",
    ),
    of(
        CacheConfig,
        "kv-cache-dtype",
        one_of("auto", "fp32", "bf16", "fp8"),
        "Type of the cached keys and values; auto: fp32 on CPU, bf16 on a GPU.",
        field="dtype",
    ),
    of(CacheConfig, "prefix-cache", SWITCH, "Reuse the blocks of prompts that begin alike."),
    of(
        CacheConfig,
        "kv-connector",
        one_of("none", "auto", "nixl", "shm"),
        "How KV moves to and from other engines; auto: shm on one host, nixl to others and GPUs.",
        field="connector",
    ),
)
SCHEDULER = (
    of(
        SchedulerConfig,
        "max-num-seqs",
        count(1),
        "Most requests that run at once; 256 on CPU, on a GPU what its memory has KV for, up to "
        "1024.",
    ),
    of(
        SchedulerConfig,
        "max-num-batched-tokens",
        count(1),
        "Most tokens in one step; 512 on CPU, 2048 to 8192 on a GPU, by the size of the model.",
    ),
    of(
        SchedulerConfig,
        "max-queue",
        count(0),
        "Most requests that wait; more are refused.",
        field="max_waiting",
    ),
    of(SchedulerConfig, "chunked-prefill", SWITCH, "Split long prompts over several steps."),
    of(SchedulerConfig, "policy", one_of("fcfs", "priority"), "Whose turn it is."),
)
EXECUTION = (
    of(
        ExecutionConfig,
        "fused-kernels",
        SWITCH,
        "Compiled kernels; off: torch operations one by one, the readable reference.",
    ),
    of(ExecutionConfig, "cuda-graphs", SWITCH, "Replay decode steps as CUDA graphs."),
    of(
        ExecutionConfig,
        "overlap",
        SWITCH,
        "Prepare a step while the one before it runs; on by default on a GPU.",
    ),
    of(
        ExecutionConfig,
        "batch-invariant",
        SWITCH,
        "Bitwise the same answer whatever a request is batched with; slower on a GPU.",
    ),
    of(
        ExecutionConfig,
        "graph-memory",
        SIZE,
        "Most GPU memory that captured graphs may take.",
        field="graph_memory_bytes",
    ),
    of(
        ExecutionConfig,
        "graph-capture-time",
        SECONDS,
        "Most seconds that the capture of CUDA graphs takes at the start.",
        field="graph_capture_s",
    ),
    of(
        ExecutionConfig,
        "mtp",
        count(0, 8),
        "Multi-token prediction: tokens drafted in a step and verified in the next; 0 is off.",
    ),
    of(
        ExecutionConfig,
        "mtp-adaptive",
        SWITCH,
        "Draft fewer tokens, or none, where they cost more than they give.",
    ),
    of(
        ExecutionConfig,
        "mtp-relaxed",
        RELAXED,
        "Take a draft among the TOP likeliest tokens and at most DELTA in probability behind the "
        "best, such as 10:0.6: more tokens per step, but outputs are not exact.",
    ),
)
PARALLEL = (
    of(
        ParallelConfig,
        "tp",
        count(1, 4096),
        "Ranks, a process each, that divide heads and dense layers; experts, too.",
    ),
    of(
        ParallelConfig,
        "ep",
        count(1, 4096),
        "Ranks that divide the experts; attention is repeated on each, unless --tp or "
        "--attention-dp divides it.",
    ),
    of(
        ParallelConfig,
        "attention-dp",
        SWITCH,
        "With --ep: each rank has requests and KV of its own, experts are shared.",
    ),
    of(
        ParallelConfig,
        "adp-timeout-iters",
        count(0),
        "Most steps that prompts wait for a rank that has none, so that ranks compute theirs "
        "together; 0: they never wait.",
        field="timeout_iters",
    ),
    of(
        ParallelConfig,
        "adp-batching-wait-iters",
        count(0),
        "Steps that they wait when every rank has one, to gather more.",
        field="batching_wait_iters",
    ),
    of(
        ParallelConfig,
        "redundant-experts",
        count(0),
        "Second places for busy experts of a layer; rounded up to equally many on each rank.",
    ),
    of(
        ParallelConfig,
        "rebalance-steps",
        count(0),
        "Steps between two looks at the experts' load, which moves them; 0: they stay.",
    ),
    of(
        ParallelConfig,
        "rebalance-layers",
        count(1),
        "Most layers whose experts move between two steps.",
    ),
    of(
        ParallelConfig,
        "ep-nodes",
        count(1),
        "Machines of the ranks: moved experts of a routing group stay together on one.",
        field="nodes",
    ),
)
SERVER = (
    of(ServerConfig, "host", TEXT, "Address to listen on."),
    of(ServerConfig, "port", count(0, 65535), "Port to listen on; 0 takes a free one."),
    of(
        ServerConfig,
        "api-key",
        KEYS,
        "Key that a client must send; repeat the flag, or separate by commas, for several.",
        field="api_keys",
        repeated=True,
        listed=True,
    ),
    of(ServerConfig, "served-model-name", TEXT, "Name that clients ask for."),
    of(ServerConfig, "max-body-size", SIZE, "Largest request body.", field="max_body_bytes"),
    of(ServerConfig, "max-concurrency", count(1), "Most open requests; more answer 429."),
    of(
        ServerConfig,
        "max-concurrency-per-key",
        count(1),
        "Most open requests of one API key; more answer 429.",
    ),
    of(
        ServerConfig,
        "max-pending",
        count(1),
        "Most requests without a first token, for each worker; more answer 429.",
    ),
    of(
        ServerConfig,
        "control-token",
        TEXT,
        "Token for /floor from other hosts; without it, only this machine may ask.",
    ),
    of(
        ServerConfig,
        "request-timeout",
        SECONDS,
        "Deadline of every request.",
        field="request_timeout_s",
    ),
    of(
        ServerConfig,
        "drain-timeout",
        SECONDS,
        "Time that running requests get after SIGTERM.",
        field="drain_timeout_s",
    ),
    of(
        ServerConfig,
        "tool-parser",
        one_of("auto", "hermes", "llama3_json", "none"),
        "How the model writes tool calls.",
    ),
    of(
        ServerConfig,
        "reasoning-parser",
        one_of("auto", "think", "none"),
        "How the model marks its thinking.",
    ),
    of(ServerConfig, "chat-template", TEXT, "Jinja file that replaces the model's template."),
    of(ServerConfig, "default-max-tokens", count(1), "max_tokens where a request has none."),
    of(
        ServerConfig,
        "log-level",
        one_of("debug", "info", "warning", "error"),
        "How much is logged to stderr.",
    ),
    of(
        ServerConfig,
        "otlp-endpoint",
        TEXT,
        "OpenTelemetry collector for traces (OTLP over HTTP), such as http://127.0.0.1:4318.",
    ),
)
SAMPLING = (
    of(SamplingParams, "max-tokens", count(1), "Most tokens of an answer."),
    of(SamplingParams, "min-tokens", count(0), "Fewest tokens of an answer."),
    of(SamplingParams, "temperature", number(0, 100), "0 takes the likeliest token."),
    of(SamplingParams, "top-p", number(0, 1), "Keep the likeliest tokens up to this sum."),
    of(SamplingParams, "top-k", count(-1), "Keep the k likeliest tokens; 0 keeps all."),
    of(SamplingParams, "min-p", number(0, 1), "Keep tokens above this share of the best."),
    of(SamplingParams, "seed", INTEGER, "Same seed, same tokens."),
    of(SamplingParams, "repetition-penalty", number(0, 100), "Above 1 repeats less."),
    of(SamplingParams, "presence-penalty", number(-2, 2), "Above 0 repeats less."),
    of(SamplingParams, "frequency-penalty", number(-2, 2), "Above 0 repeats less."),
    of(SamplingParams, "stop", TEXT, "Text that ends the answer; repeatable.", repeated=True),
    of(SamplingParams, "ignore-eos", SWITCH, "Go on after the end-of-text token."),
)
FLOOR = (
    of(FloorConfig, "workers", count(1, 4096), "Workers that share the requests."),
    of(
        FloorConfig,
        "prefill",
        count(1, 4096),
        "Workers that compute long prompts and hand their KV over; with --decode.",
    ),
    of(
        FloorConfig,
        "decode",
        count(1, 4096),
        "Workers that generate, for --prefill workers to compute prompts.",
    ),
    of(
        FloorConfig,
        "remote-prefill-tokens",
        count(1),
        "Prompts with fewer uncached tokens are computed where they decode.",
    ),
    of(
        FloorConfig,
        "kv-lease",
        number(0.1, 3600, "SECONDS"),
        "How long computed blocks wait for the worker that decodes.",
        field="kv_lease_s",
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
    of(
        FloorConfig,
        "placement",
        one_of("auto", "process", "ray"),
        "Who starts workers and ranks; auto: Ray where there are several and it is installed.",
    ),
    of(
        FloorConfig,
        "ray-address",
        TEXT,
        "Ray cluster to place workers on, such as 10.0.0.1:6379; a local Ray is started else.",
    ),
    of(
        FloorConfig,
        "max-migrations",
        count(0),
        "How often a request goes on with others when its worker dies; then alone, or is an error.",
    ),
    of(
        FloorConfig,
        "heartbeat",
        number(0.01, 3600, "SECONDS"),
        "Time between two signs of life that a worker is asked for.",
        field="heartbeat_s",
    ),
    of(
        FloorConfig,
        "hang-timeout",
        number(0.01, math.inf, "SECONDS"),
        "A worker without a sign of life for so long is killed; a step must be shorter.",
        field="hang_timeout_s",
    ),
    of(
        FloorConfig,
        "start-timeout",
        number(0.01, math.inf, "SECONDS"),
        "A worker that is not ready within this time is started again.",
        field="start_timeout_s",
    ),
    of(
        FloorConfig,
        "max-restarts",
        count(0),
        "Restarts of one worker in a row before it is given up.",
    ),
)
ROUTER = (
    of(
        RouterConfig,
        "router",
        one_of("kv", "round-robin", "least-loaded", "random"),
        "Who chooses a request's worker; kv: cached prefix against load.",
        field="policy",
    ),
    of(
        RouterConfig,
        "router-prefill-weight",
        number(0, math.inf),
        "Cost of an uncached prompt token.",
        field="prefill_weight",
    ),
    of(
        RouterConfig,
        "router-queued-weight",
        number(0, math.inf),
        "Cost of a token that waits for prefill at a worker.",
        field="queued_weight",
    ),
    of(
        RouterConfig,
        "router-decode-weight",
        number(0, math.inf),
        "Cost of a token of KV in use at a worker.",
        field="decode_weight",
    ),
    of(
        RouterConfig,
        "router-events",
        SWITCH,
        "Workers tell which blocks they hold; off: predicted from what was routed.",
        field="events",
    ),
    of(
        RouterConfig,
        "router-lifetime",
        number(0.01, math.inf, "SECONDS"),
        "How long a prompt is taken for cached where workers do not tell.",
        field="approximate_s",
    ),
    of(
        RouterConfig,
        "router-worker-blocks",
        count(1),
        "KV blocks of 16 tokens that a worker is taken to hold where it does not tell.",
        field="approximate_blocks",
    ),
    of(RouterConfig, "router-seed", count(0), "Seed of the router's ties.", field="seed"),
)
ROUTE = (
    of(
        RouteConfig,
        "backend",
        TEXT,
        "Base URL of an OpenAI-compatible server, such as http://10.0.0.1:8000; repeatable.",
        field="backends",
        repeated=True,
    ),
    of(
        RouteConfig,
        "backend-key",
        TEXT,
        "API key for the backends; without it, they get the Authorization of the client.",
    ),
    of(
        RouteConfig,
        "health-interval",
        number(0.01, 3600, "SECONDS"),
        "Time between two looks at a backend; one that is down is asked sooner, then less often.",
        field="health_interval_s",
    ),
    of(
        RouteConfig,
        "connect-timeout",
        number(0.01, 3600, "SECONDS"),
        "A backend that takes no connection within this time is down.",
        field="connect_timeout_s",
    ),
)
