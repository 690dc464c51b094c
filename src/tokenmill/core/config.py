"""Small frozen configs, one per owner. The command line, TOML and the environment fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.core.kv import LEASE_S

GIB = 2**30
DEFAULT_BLOCK_SIZE, GPU_BLOCK_SIZE = 16, 64
MEMORY_SHARE, GPU_MEMORY_SHARE = 0.5, 0.95  # of what is free after loading
DEFAULT_BUDGET, DEFAULT_NUM_SEQS = 512, 256  # tokens and requests of a step, where nothing says


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which type, on which device."""

    model: str = "smollm2"  # a pull name, a folder, a .gguf file or a hub name
    dtype: Literal["auto", "fp32", "int8", "bf16", "fp8"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    random_weights: bool = False  # shapes from config.json alone, for benchmarks
    seed: int = 0
    max_model_len: int | None = None  # None: what the checkpoint says
    num_threads: int | None = None  # CPU threads of the engine; None: all cores
    draft: str | None = None  # file or folder of an MTP module; None: the model's own


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = None  # None: 16 on CPU, 64 on a GPU
    dtype: Literal["auto", "fp32", "bf16", "fp8"] = "auto"  # auto: fp32 on CPU, bf16 on a GPU
    memory_bytes: int | None = None  # None: memory_share of what is free after loading
    memory_share: float | None = None  # None: 0.5 on CPU, 0.95 on a GPU
    num_blocks: int | None = None  # exact size, for tests and simulations
    prefix_cache: bool = True
    connector: Literal["none", "auto", "nixl", "shm"] = "none"  # auto: shm on one host, else nixl


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """One token budget per step and the limits around it."""

    max_num_batched_tokens: int | None = None  # None: 512 on CPU, else from model and GPU
    max_num_seqs: int | None = None  # None: 256 on CPU, else what the GPU has KV for
    max_waiting: int = 1024  # a longer queue answers REJECT
    max_model_len: int = 8192
    chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "priority"

    @property
    def num_seqs(self) -> int:
        """The limit in force."""
        return DEFAULT_NUM_SEQS if self.max_num_seqs is None else self.max_num_seqs


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """How a step is executed; the first three are rungs of `bench ladder`."""

    fused_kernels: bool = True  # off: torch operations one by one, the readable reference
    cuda_graphs: bool = True
    overlap: bool | None = None  # prepare a step while the last one runs; None: on a GPU
    batch_invariant: bool = False  # bitwise the same answer whatever a request is batched with
    graph_memory_bytes: int = 2 * GIB  # what captured graphs may take
    graph_capture_s: float = 30.0  # and how long their capture may last
    mtp: int = 0  # most tokens that a step drafts for the next one
    mtp_adaptive: bool = True  # fewer, or none, where drafts cost more than they give
    mtp_relaxed: str | None = None  # TOP:DELTA: also likely drafts are taken, outputs are not exact


RouterPolicy = Literal["kv", "round-robin", "least-loaded", "random"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many processes run one model together, and what is divided between them."""

    tp: int = 1  # ranks that divide heads and dense MLPs
    ep: int = 1  # ranks that divide experts
    attention_dp: bool = False  # each rank has requests of its own; experts are shared
    timeout_iters: int = 0  # steps that prompts of such ranks wait for one that has none; 0: never
    batching_wait_iters: int = 0  # and how many more once every rank has one
    redundant_experts: int = 0  # more places for experts than experts, in each layer
    rebalance_steps: int = 0  # between two looks at the experts' load; 0: experts stay
    rebalance_layers: int = 2  # whose experts may move between two steps
    nodes: int = 1  # machines that the ranks are spread over, equally many on each

    @property
    def num_ranks(self) -> int:
        return max(self.tp, self.ep)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How to choose a worker, and how long to believe in what was routed."""

    policy: RouterPolicy = "kv"
    block_size: int = 16
    prefill_weight: float = 2.0  # of uncached prompt tokens: this request waits, and the next one
    decode_weight: float = 1.0  # of slower answers against time to first token
    stall_weight: float = 0.1  # of the time in which requests there get no token
    events: bool = True  # workers publish their blocks; else they are predicted
    predict_s: float = 5.0  # lifetime of a prediction beside events
    approximate_s: float = 120.0  # and without them
    approximate_blocks: int = 16384  # a worker's memory, where nothing tells
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The workers behind the front, and what happens when one of them fails."""

    workers: int = 1
    prefill: int = 0  # with decode, instead of workers: those that compute prompts for others
    decode: int = 0
    remote_prefill_tokens: int = 128  # shorter prompts are computed where they decode
    kv_lease_s: float = LEASE_S  # computed blocks wait so long for the worker that decodes
    ranks: int = 1  # processes of each worker, where others than the worker start them
    prefill_ranks: int = 1  # the same of those that compute prompts for others
    placement: Literal["auto", "process", "ray"] = "auto"  # auto: ray for several processes
    ray_address: str | None = None  # of a cluster; None: a local Ray is started
    max_migrations: int = 2  # of one request with others; then it is tried alone
    heartbeat_s: float = 1.0
    hang_timeout_s: float = 60.0  # without a sign of life for so long, a worker is killed
    start_timeout_s: float = 1800.0  # to load the model
    max_restarts: int = 5  # of one worker in a row, then its place is given up
    backoff_s: float = 0.5  # before the first restart; doubles with each
    stable_s: float = 60.0  # a worker that lived this long starts the count anew

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode or self.workers

    @property
    def num_processes(self) -> int:
        return self.prefill * self.prefill_ranks + (self.decode or self.workers) * self.ranks


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    max_body_bytes: int = 16 * 2**20
    max_concurrency: int = 1024  # open requests over all connections; more answer 429
    max_concurrency_per_key: int | None = None  # the same for each API key
    max_pending: int | None = None  # requests without a first token, per worker; more answer 429
    control_token: str | None = None  # lets callers from elsewhere see and change the pool
    request_timeout_s: float | None = None  # deadline given to every request
    drain_timeout_s: float = 30.0
    header_timeout_s: float = 20.0  # for the head of a request, from its first byte
    body_timeout_s: float = 300.0  # for the body of a request
    body_idle_timeout_s: float = 30.0  # between two pieces of a body
    send_timeout_s: float = 300.0  # in which a client takes nothing of its answer
    keep_alive_timeout_s: float = 60.0  # without a request; clients pool connections
    max_connections: int = 8192  # more: those that wait are closed, then new ones get a 503
    cors_origins: tuple[str, ...] = ()  # pages that may call the API from a browser; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names of this server for /workers, beside loopback's
    log_requests: bool = False
    log_stats: bool = True
    tool_parser: Literal["auto", "hermes", "llama3_json", "none"] = "auto"
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    chat_template: str | None = None  # a file that replaces the model's own
    default_max_tokens: int | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = None  # OpenTelemetry collector that gets traces


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """The servers that `tokenmill route` stands in front of."""

    backends: tuple[str, ...] = ()  # base URLs
    backend_key: str | None = None  # sent instead of the client's own
    health_interval_s: float = 5.0
    connect_timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What the offline benchmark runs: three cells, or one workload of many lengths."""

    lengths: str | None = None  # a CSV file, a shipped name or uniform:LOW-HIGH
    num_prompts: int | None = None  # None: 32, or all rows of lengths
    input_len: int | None = None  # None: 128
    output_len: int | None = None  # None: 64, or what lengths say
    rounds: int | None = None  # measured runs of a cell, the median counts; None: 3, lengths 1
    cells: tuple[str, ...] = ("batch", "single", "prefill")
    seed: int = 0
    peers: bool = False
    skip_peers: tuple[str, ...] = ()

    @property
    def num_rounds(self) -> int:
        return self.rounds or (3 if self.lengths is None else 1)


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """What `bench endpoint` sends, when, for how long, and what it makes of it."""

    api: Literal["chat", "completions"] = "chat"
    stream: bool = True
    timeout_s: float = 600.0
    insecure: bool = False
    extra_body: str | None = None  # JSON object that joins every request
    concurrency: tuple[int, ...] = ()  # several: a sweep
    rate: tuple[float, ...] = ()
    arrival: Literal["poisson", "constant", "burst"] = "poisson"
    burst_size: int = 1
    ramp_s: float = 0.0
    num_requests: int | None = None
    duration_s: float | None = None
    warmup_requests: int = 8
    saturate: bool = False  # search for the load instead of running given ones
    slo_percentile: float = 99.0  # percent of the requests that must keep the limits of goodput
    prompts: str | None = None
    trace: str | None = None
    trace_speed: float = 1.0
    turns: int = 1
    shared_prefix: int = 0
    num_prefixes: int = 1
    same_prompts: bool = False  # at every point, and given prompts without a salt
    tokenizer: str | None = None
    goodput: tuple[str, ...] = ()
    max_error_rate: float = 0.01  # of a point's requests; more: exit status 1
    stall_s: float = 5.0  # a stream that pauses longer is a doubt
    gpus: int | None = None
    price_per_gpu_hour: float | None = None
    processes: int | None = None
    audit: bool = True
    server_metrics: bool = True
    metrics_url: str | None = None  # None: /metrics of the server
    output_dir: str | None = None
