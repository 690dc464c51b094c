"""Small frozen configs, one per owner. The command line, TOML and the environment fill them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenmill.core.flags import (
    EVENTS,
    KEYS,
    SECONDS,
    SIZE,
    TEXT,
    URL_PATH,
    count,
    number,
    setting,
)
from tokenmill.core.kv import LEASE_S, OFFLOADING

GIB = 2**30
MAX_MIGRATIONS = 2
DEFAULT_BLOCK_SIZE, GPU_BLOCK_SIZE = 16, 64
PROGRESS = "TOKENMILL_PROGRESS"  # tells a worker what to add to its progress, or to show none
SILENT = "silent"
MEMORY_SHARE, GPU_MEMORY_SHARE = 0.5, 0.95  # of what is free after loading
KV_CACHE_SHARE = "TOKENMILL_KV_CACHE_SHARE"  # what a server tells each of several CPU workers
NGRAM = "ngram"  # drafts that are looked up in the request's own tokens
DEFAULT_BUDGET, DEFAULT_NUM_SEQS = 512, 256  # tokens and requests of a step, where nothing says


def default_share(device: str) -> float:
    """Of the memory that is free after loading; CPU workers of one machine divide it."""
    if device == "cuda":
        return GPU_MEMORY_SHARE
    return float(os.environ.get(KV_CACHE_SHARE, MEMORY_SHARE))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which type, on which device."""

    model: str = setting(
        "smollm2",
        "Weights: a name of `tokenmill pull`, a folder, a .gguf file or a Hugging Face name.",
    )
    dtype: Literal["auto", "fp32", "int8", "bf16", "fp8"] = setting(
        "auto",
        "Compute type of the weights; auto: bf16 on a GPU, int8 on a CPU (fp32 without AVX2).",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the engine runs.")
    share_gpus: bool = setting(
        False, "Let workers and ranks share GPUs, to try a layout; by default each has its own."
    )
    random_weights: bool = setting(
        False, "Random weights: only config.json is read; tokens choose experts about evenly."
    )
    seed: int = setting(0, "Seed of the random weights.", count(0), flag="weights-seed")
    max_model_len: int | None = setting(None, "Longest prompt plus answer, in tokens.", count(1))
    num_threads: int | None = setting(None, "CPU threads; by default all cores.", count(1, 4096))
    draft: str | None = setting(
        None,
        "What drafts for --mtp: an MTP module, EAGLE or EAGLE-3 head (a safetensors file, folder "
        "or hub name), or ngram, which needs no model; the model's own module unless given.",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int | None = setting(
        None, "Tokens in one block of the KV cache; 16 on CPU, 64 on a GPU.", count(1, 1024)
    )
    dtype: Literal["auto", "fp32", "fp16", "bf16", "fp8"] = setting(
        "auto",
        "Type of cached keys and values; auto: bf16 on a GPU, on CPU fp16 with int8, else fp32.",
        flag="kv-cache-dtype",
    )
    memory_bytes: int | None = setting(
        None,
        "Memory of the KV cache, such as 2GiB; wins over other limits.",
        SIZE,
        flag="kv-cache-memory",
    )
    memory_share: float | None = None  # of what is free after loading; 0.5 on CPU, 0.95 on a GPU
    gpu_share: float | None = setting(
        None,
        "Share of a GPU's memory that an engine may take in all, weights included; workers that "
        "share a GPU divide 0.95 of it unless told otherwise.",
        number(0.01, 0.99),
        flag="gpu-memory-utilization",
    )
    num_blocks: int | None = None  # exact size, for tests and simulations
    prefix_cache: bool = setting(True, "Reuse the blocks of prompts that begin alike.")
    connector: Literal["none", "auto", "cuda-ipc", "nixl", "shm"] = setting(
        "none",
        "How KV moves to and from other engines; auto: on one host shm, between its GPUs cuda-ipc, "
        "and nixl to other hosts.",
        flag="kv-connector",
    )
    offloading: str | None = setting(
        None,
        "Keep KV blocks that leave the device, such as host=8GiB,disk=/var/kv:100GiB: in host "
        "memory of each worker, then in tokenmill-kv in a folder that workers share.",
        OFFLOADING,
        flag="kv-offloading",
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """One token budget per step and the limits around it."""

    max_num_batched_tokens: int | None = setting(
        None,
        "Most tokens in one step; 512 on CPU, 2048 to 8448 on a GPU, by the size of the model.",
        count(1),
    )
    max_num_seqs: int | None = setting(
        None,
        "Most requests that run at once; 256 on CPU, on a GPU what its memory has KV "
        "for, up to 1024.",
        count(1),
    )
    max_waiting: int = setting(
        1024, "Most requests that wait; more are refused.", count(0), flag="max-queue"
    )
    max_model_len: int = 8192
    chunked_prefill: bool = True  # long prompts are split over several steps
    policy: Literal["fcfs", "priority"] = "priority"
    encoder_patches: int | None = None  # of a step; None: half as long as its tokens

    # Patches, or prompt tokens that take as long, that a step has for images while others decode.
    encoder_share: int | None = None
    image_tokens: int | None = None
    # Tokens of a step while requests decode beside prompts and few are here; None: as always.
    least_shared_tokens: int | None = None

    @property
    def num_seqs(self) -> int:
        return DEFAULT_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def budget(self) -> int:
        given = self.max_num_batched_tokens
        return DEFAULT_BUDGET if given is None else given

    @property
    def encoder_budget(self) -> int:
        """The patches of a step in force; four of them become a token."""
        return 4 * self.budget if self.encoder_patches is None else self.encoder_patches

    @property
    def most_new_tokens(self) -> int:
        return min(self.budget, self.max_model_len) if self.chunked_prefill else self.max_model_len


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """How a step is executed; the first three are rungs of `bench ladder`."""

    fused_kernels: bool = setting(
        True, "Compiled kernels; off: torch operations one by one, the readable reference."
    )
    cuda_graphs: bool = setting(
        True, "Replay decode steps as CUDA graphs, and other steps in pieces between attentions."
    )
    overlap: bool | None = setting(
        None, "Prepare a step while the one before it runs; on by default on a GPU."
    )
    batch_invariant: bool = setting(
        False, "Bitwise the same answer whatever a request is batched with; slower on a GPU."
    )
    graph_memory_bytes: int = 2 * GIB
    graph_capture_s: float = 30.0  # at the start
    mtp: int = setting(
        0,
        "Multi-token prediction: tokens drafted in a step and verified in the next; 0 is off.",
        count(0, 8),
    )
    mtp_adaptive: bool = True  # draft fewer tokens where they cost more than they give
    record_path: str | None = setting(
        None,
        "Record arrivals, batches and step times in this file, for `plan replay`; no text.",
        flag="record",
    )
    record_bytes: int = GIB // 4  # then it becomes FILE.old


RouterPolicy = Literal["kv", "round-robin", "least-loaded", "random"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes run one model together, and what is divided between them."""

    tp: int = setting(
        1,
        "Ranks, a process each, that divide heads and dense layers; experts, too.",
        count(1, 4096),
    )
    ep: int = setting(
        1,
        "Ranks that divide the experts; each computes all of attention, unless --tp or"
        " --attention-dp divides it.",
        count(1, 4096),
    )
    attention_dp: bool = setting(
        False, "Each rank has its own requests and KV, and all share the experts; needs --ep."
    )
    timeout_iters: int = setting(
        0,
        "Most steps that prompts wait for ranks without a prompt, so that all ranks compute"
        " prompts in the same step; 0: they never wait.",
        count(0),
        flag="adp-timeout-iters",
    )
    batching_wait_iters: int = 0  # that prompts wait for more prompts
    redundant_experts: int = setting(
        0,
        "Extra copies of a layer's busy experts, rounded up to the same number on each rank.",
        count(0),
    )
    rebalance_steps: int = setting(
        0, "Steps after which experts move to balance their load; 0: they never move.", count(0)
    )
    rebalance_layers: int = 2  # that move between two steps
    nodes: int = 1  # experts of a routing group stay on one

    @property
    def num_ranks(self) -> int:
        return max(self.tp, self.ep)


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine is built from; engine/choices.py resolves it, and all ranks have the same."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How to choose a worker, and how long to believe in what was routed."""

    policy: RouterPolicy = setting(
        "kv",
        "Policy that chooses a worker; kv weighs cached prefix against load.",
        flag="router",
    )
    block_size: int = 16
    prefill_weight: float = setting(
        1.0,
        "kv: weight of the time to compute uncached prompt tokens.",
        number(0, math.inf),
        flag="router-prefill-weight",
    )
    decode_weight: float = setting(
        0.5,
        "kv: weight of slower answers against time to first token.",
        number(0, math.inf),
        flag="router-decode-weight",
    )
    events: bool = setting(
        True,
        "Workers report which blocks they cache; off: the router predicts it from what it sent.",
        flag="router-events",
    )
    predict_s: float = 5.0  # lifetime of a prediction beside events
    approximate_s: float = setting(
        120.0,
        "How long the router assumes that a prompt stays cached, without reports.",
        number(0.01, math.inf, "SECONDS"),
        flag="router-lifetime",
    )
    approximate_blocks: int = setting(
        16384,
        "KV blocks of 16 tokens that the router assumes a worker can cache, without reports.",
        count(1),
        flag="router-worker-blocks",
    )
    seed: int = setting(0, "Seed of the router's ties.", count(0), flag="router-seed")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The workers behind the front, and what happens when one of them fails."""

    workers: int = setting(
        1,
        "Workers that share the requests; 0 waits for those that join (--join-listen).",
        count(0, 4096),
    )
    prefill: int = setting(
        0,
        "Workers that only compute long prompts and pass the KV on; needs --decode.",
        count(1, 4096),
    )
    decode: int = setting(0, "Workers that generate the answers; needs --prefill.", count(1, 4096))
    kv_events: str | None = setting(
        None,
        "Publish over ZeroMQ, bound at this address, which KV blocks the workers cache, as vLLM "
        "does; for routers. Events contain the tokens of prompts and are not encrypted. Behind "
        "it may stand ,replay=tcp://*:PORT, where earlier events are sent again.",
        EVENTS,
    )
    remote_prefill_tokens: int = setting(
        128,
        "The decode worker computes prompts with fewer uncached tokens itself.",
        count(1),
    )
    kv_lease_s: float = LEASE_S  # how long computed blocks wait for the worker that decodes
    join_listen: str | None = setting(
        None,
        "HOST:PORT to listen at for workers of other machines, which `tokenmill worker` starts.",
    )
    token_file: str | None = setting(
        None,
        "File with the token that a server and the workers that join it share; of mode 0600.",
    )
    join_settings: dict[str, Any] = field(default_factory=dict)  # of workers that join, by flag
    join_model: dict[str, str] = field(default_factory=dict)  # what tells their model from others
    ranks: int = 1  # processes of each worker, where others than the worker start them
    prefill_ranks: int = 1  # the same of those that compute prompts for others
    device: Literal["auto", "cpu", "cuda"] = "cpu"  # of the workers, as asked
    share_gpus: bool = False
    placement: Literal["process", "ray"] = setting(
        "process", "Who starts workers and ranks: this server, on its own machine, or Ray."
    )
    ray_address: str | None = setting(
        None,
        "Ray cluster to place workers on, such as 10.0.0.1:6379; with it Ray starts them.",
    )
    spread_ranks: bool = setting(
        False, "With Ray: spread a worker's ranks over nodes, though one node could hold them."
    )
    wait_s: float = setting(
        600.0,
        "How long to wait for free GPUs of Ray, for workers to join, or for a server to join.",
        number(0.0, math.inf, "SECONDS"),
    )
    max_migrations: int = MAX_MIGRATIONS
    heartbeat_s: float = 1.0
    hang_timeout_s: float = 60.0  # without a heartbeat
    start_timeout_s: float = 1800.0
    max_restarts: int = 5  # in a row
    backoff_s: float = 0.5  # before the first restart; doubles with each
    stable_s: float = 60.0  # a worker that lived this long starts the count anew

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode or self.workers

    @property
    def num_processes(self) -> int:
        decoding = (self.decode or self.workers) * self.ranks
        return self.prefill * self.prefill_ranks + decoding


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 takes a free one.", count(0, 65535))
    fronts: int = setting(1, "API processes that share the port.", count(1, 1024))
    api_keys: tuple[str, ...] = setting(
        (),
        "Key that a client must send; repeat the flag, or separate by commas, for several.",
        KEYS,
        flag="api-key",
        repeated=True,
        listed=True,
    )
    api_key_file: str | None = setting(
        None,
        "File with lines of `name = key`: more keys, each with the name that metrics show.",
    )
    tls_cert: str | None = setting(
        None, "PEM file of a certificate and those that it follows from: clients then call https."
    )
    tls_key: str | None = setting(
        None, "PEM file of the certificate's private key; by default in the file of --tls-cert."
    )
    served_model_name: str | None = setting(None, "Name that clients ask for.")
    max_body_bytes: int = setting(16 * 2**20, "Largest request body.", SIZE, flag="max-body-size")
    max_body_memory_bytes: int = 512 * 2**20  # of long bodies and images of all calls
    stream_interval: int = 1  # tokens between two events of a stream
    max_concurrency: int = setting(1024, "Most requests at once; further ones get a 429.", count(1))
    max_concurrency_per_key: int | None = setting(
        None, "Most requests at once of one API key; further ones get a 429.", count(1)
    )
    control_token: str | None = setting(
        None,
        "Secret for calls that change the server, or that show what all keys do; without it one is "
        "made, which the commands of the same user find.",
    )
    request_timeout_s: float | None = None  # deadline of every request
    drain_timeout_s: float = setting(
        30.0, "Time that running requests get after SIGTERM.", SECONDS, flag="drain-timeout"
    )
    header_timeout_s: float = 20.0  # slower clients get a 408
    body_timeout_s: float = 300.0
    body_idle_timeout_s: float = 30.0  # between two parts of a body
    send_timeout_s: float = 300.0  # then a client that does not read is disconnected
    keep_alive_timeout_s: float = 60.0  # of an idle connection
    max_connections: int = 8192  # then idle ones are closed, and new ones get a 503
    share_prefix_cache: bool = setting(
        False, "Let all API keys share cached prefixes: times and usage then tell of other keys."
    )
    client_priority: bool = setting(False, "Take the priority that clients give their requests.")
    client_chat_templates: bool = setting(
        False, "Render chats with the templates that clients send; a slow one holds up the server."
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin of web pages that may call the API, such as https://chat.example; * for all.",
        flag="cors-origin",
        repeated=True,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Name by which clients may call a server without API keys, beside localhost and "
        "addresses; * for any. Repeat the flag, or separate by commas, for several.",
        TEXT,
        repeated=True,
        listed=True,
    )
    price_per_gpu_hour: float | None = setting(
        None,
        "Dollars per GPU and hour: receipts then have dollars.",
        number(0, math.inf, "USD"),
    )
    log_requests: bool = setting(
        False, "Log a line per request: id, endpoint, status, tokens, times, worker."
    )
    log_stats: bool = True  # a line of throughput every ten seconds
    tool_parser: Literal["auto", "hermes", "llama3_json", "harmony", "none"] = setting(
        "auto", "How the model writes tool calls."
    )
    reasoning_parser: Literal["auto", "think", "harmony", "none"] = setting(
        "auto", "How the model marks its thinking."
    )
    chat_template: str | None = setting(None, "Jinja file that replaces the model's template.")
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "Whether generation_config.json says temperature, top_p, top_k, min_p and "
        "repetition_penalty of calls that leave them out; none: it does not.",
    )
    template_date: str | None = setting(
        None, "Date (YYYY-MM-DD) that chat templates write instead of today's."
    )
    max_thinking_tokens: int | None = setting(
        None, "Most tokens of reasoning of any answer; then the answer itself follows.", count(0)
    )
    max_stored_responses: int = 4096
    max_stored_response_bytes: int = 256 * 2**20
    stored_response_age_s: float = 86_400.0
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "How much is logged to stderr."
    )
    otlp_endpoint: str | None = setting(
        None, "OpenTelemetry collector for traces (OTLP over HTTP), such as http://127.0.0.1:4318."
    )


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """The servers that `tokenmill route` stands in front of."""

    backends: tuple[str, ...] = setting(
        (),
        "Base URL of an OpenAI-compatible server, such as http://10.0.0.1:8000; repeatable. Behind "
        "it may stand ,events=tcp://HOST:PORT[,replay=tcp://HOST:PORT]: where it publishes its KV "
        "cache events.",
        flag="backend",
        repeated=True,
    )
    backend_key: str | None = setting(
        None, "API key for the backends; without it, they get the Authorization of the client."
    )
    forward: tuple[str, ...] = setting(
        (),
        "Path that is passed on beside the usual routes, by any method; one that ends in / has all "
        "below it. Repeat the flag, or separate by commas, for several.",
        URL_PATH,
        repeated=True,
        listed=True,
    )
    health_interval_s: float = setting(
        5.0,
        "Time between two health checks of a backend; one that is down is checked sooner at first.",
        number(0.01, 3600, "SECONDS"),
        flag="health-interval",
    )
    connect_timeout_s: float = setting(
        5.0,
        "A backend that takes no connection within this time is down.",
        number(0.01, 3600, "SECONDS"),
        flag="connect-timeout",
    )
    max_migrations: int = setting(
        MAX_MIGRATIONS,
        "Backends that may be lost with a call, or answer 500; then it runs alone, then fails.",
        count(0),
    )
