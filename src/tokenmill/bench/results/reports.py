"""The JSON reports that one module writes and others read, field by field.

Fields that only some runs have are NotRequired. A latency is a summary by statistic: mean, p50,
p90, p99, max, and ci95 with bounds where there are enough requests; {} where there is none.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from tokenmill.core.metrics import Acceptance

Latency = dict[str, Any]
LatencyName = Literal[
    "ttft_ms", "ttft_from_schedule_ms", "tpot_ms", "tpot_n1_ms", "itl_ms", "e2e_ms"
]
LimitName = Literal["ttft_ms", "tpot_ms", "e2e_ms"]
LIMITS: tuple[LimitName, ...] = ("ttft_ms", "tpot_ms", "e2e_ms")
OccurrenceName = Literal["errors", "doubts"]
OCCURRENCES: tuple[OccurrenceName, ...] = ("errors", "doubts")


class Occurrence(TypedDict):
    """One class of errors or of doubts."""

    count: int
    first: str  # what the first one said


class TooFew(TypedDict):
    """Percentiles for which there are too few values."""

    num_values: int
    percentiles: list[str]


class GoodputReport(TypedDict):
    """The requests that kept their limits."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    num_good: int
    good_share: float
    request_s: float
    output_tok_s: float


class PriceReport(TypedDict):
    """What tokens cost."""

    gpus: int
    usd_per_gpu_hour: float
    output_tok_s_gpu: float
    usd_per_million_output: float | None
    usd_per_million_total: float | None
    usd_per_million_good_output: NotRequired[float | None]


class BaselineReport(TypedDict):
    """The client alone, against a server that answers at once."""

    request_s: float
    outputs_s: float
    latency_ms: Latency


class AuditReport(TypedDict):
    """The client's own figures; `floor` is its baseline."""

    num_processes: int
    scheduled: bool
    lag_ms: Latency
    cpu_share: float
    num_stalls: int
    max_stall_ms: float
    floor: BaselineReport | None
    warnings: list[str]
    client_limited: bool


class ServerReport(TypedDict):
    """What the server says of a point; None: it does not say."""

    num_readings: int
    num_readings_during: int
    num_requests: int | None
    num_output_tokens: int | None
    num_prompt_tokens: int | None
    num_preemptions: int | None
    peak_running: float | None
    peak_waiting: float | None
    peak_kv_cache_usage: float | None
    prefix_hit_rate: float | None
    acceptance_length: float | None
    acceptance_positions: list[float]
    ttft_mean_ms: float | None
    queue_mean_ms: float | None


class HitsReport(TypedDict):
    """Shares of the prompt tokens that were hits of the server's prefix cache."""

    share: float | None
    explained: float
    by: str | None  # "usage" or "server"
    num_unexplained: int | None


class PointReport(TypedDict):
    """One load of a run against an endpoint."""

    load: str
    concurrency: int | None
    rate: float | None
    seconds: float
    num_completed: int
    num_failed: int
    num_unfinished: int
    num_retried: int
    errors: dict[str, Occurrence]
    doubts: dict[str, Occurrence]
    finish_reasons: dict[str, int]
    num_prompt_tokens: int
    num_asked_tokens: NotRequired[int]  # of the prompts, by --input-len, --lengths or --trace
    num_image_tokens: NotRequired[int]  # of the prompts, as the server counts them
    num_output_tokens: int
    request_s: float
    output_tok_s: float
    total_tok_s: float
    outputs_s: float
    tokens_per_output: float
    output_tok_s_ci95: NotRequired[list[float]]
    e2e_ms: Latency
    ttft_ms: NotRequired[Latency]
    tpot_ms: NotRequired[Latency]
    tpot_n1_ms: NotRequired[Latency]
    itl_ms: NotRequired[Latency]
    tok_s_user: NotRequired[float | None]
    ttft_from_schedule_ms: NotRequired[Latency]
    too_few: dict[str, TooFew]
    goodput: NotRequired[GoodputReport]
    price: NotRequired[PriceReport]
    server: NotRequired[ServerReport]
    prefix_hits: NotRequired[HitsReport | None]
    audit: NotRequired[AuditReport]
    # Of a campaign, in the words of MLPerf Endpoints.
    region: NotRequired[str | None]
    on_front: NotRequired[bool]
    system_tps: NotRequired[float | None]
    tps_per_user: NotRequired[float | None]
    ttft_p90_ms: NotRequired[float | None]
    tpot_p90_ms: NotRequired[float | None]


class PromptsReport(TypedDict):
    """Where the prompts of a run came from."""

    seed: int
    seed_drawn: bool
    same_at_every_point: bool
    salt: str | None


class MetricsSource(TypedDict):
    """Where the server's metrics were read, and why there are none."""

    url: str
    fault: str | None


class TriedLoad(TypedDict):
    """One load of a search, over all the points that were measured at it."""

    load: float
    num_points: int
    output_tok_s: float
    good_share: float
    client_limited: bool


class OutcomeReport(TypedDict):
    """How a search for the highest load ended."""

    found: float | None
    above: float | None
    stopped: str
    client_limited: bool
    tried: list[TriedLoad]


class SaturationReport(OutcomeReport):
    """The load that a search found."""

    by: Literal["rate", "concurrency"]
    criterion: str  # "throughput" or "goodput"
    required_share: float | None
    doubts: NotRequired[list[str]]
    duration_s: NotRequired[float]


class SubmissionReport(TypedDict):
    """Where a campaign's submission was written."""

    folder: str
    num_files: int


class EndpointReport(TypedDict):
    """The JSON line of `bench endpoint` and `bench campaign`."""

    benchmark: str
    url: str
    model: str
    api: str
    stream: bool
    interrupted: bool
    server_metrics: MetricsSource | None
    prompts: PromptsReport
    points: list[PointReport]
    config: dict[str, Any]
    settings: dict[str, Any]
    saturation: NotRequired[SaturationReport]
    # Of a campaign.
    quick: NotRequired[bool]
    valid_submission: NotRequired[bool]
    not_valid_because: NotRequired[list[str]]
    max_concurrency: NotRequired[int]
    max_concurrency_source: NotRequired[str]
    search: NotRequired[SaturationReport | None]
    regions: NotRequired[dict[str, list[int]]]
    submission: NotRequired[SubmissionReport | None]


class FileDigest(TypedDict):
    """One file of a result folder."""

    sha256: str
    bytes: int


class Facts(TypedDict):
    """A manifest but for its files: what ran, on what, how and when."""

    format: int
    benchmark: str
    started_at: str
    ended_at: str
    software: dict[str, str]
    hardware: dict[str, Any]
    configuration: dict[str, Any]


class Manifest(Facts):
    """manifest.json of a result folder."""

    files: dict[str, FileDigest]
    digest: str


class VerifyReport(TypedDict):
    """Which files of a result folder are not as its manifest has them."""

    ok: bool
    num_files: int
    changed: list[str]
    missing: list[str]
    extra: list[str]


class RowReport(TypedDict):
    """One metric of two points."""

    metric: str
    label: str
    baseline: float
    other: float
    change: float
    speedup: float
    ci95: list[float] | None
    verdict: str | None  # None: it does not decide


class PointComparison(TypedDict):
    """One load of two rounds."""

    load: str
    rows: list[RowReport]


class Comparison(TypedDict):
    """One round against the baseline."""

    baseline: str
    other: str
    confidence: float
    verdict: str
    headline: dict[str, list[str]]
    doubts: list[str]
    changed: dict[str, list[Any]]
    warnings: list[str]
    only_baseline: list[str]
    only_other: list[str]
    points: list[PointComparison]


class RoundReport(TypedDict):
    """One of the results that are compared."""

    name: str
    source: str
    tool: str
    gpus: int | None
    usd_per_gpu_hour: float | None
    loads: list[str]
    notices: list[str]


class CompareReport(TypedDict):
    """The JSON line of `bench compare`."""

    benchmark: str
    rounds: list[RoundReport]
    noise_threshold: float
    comparisons: list[Comparison]


class CellReport(TypedDict):
    """One cell of `bench throughput`; the median run counts."""

    tok_s: float
    tok_s_runs: list[float]
    output_tok_s: float
    total_tok_s: float
    seconds: float
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    ttft_ms: NotRequired[dict[str, float]]
    tpot_ms: NotRequired[dict[str, float]]
    # Beside its roofline.
    ceiling_tok_s: NotRequired[float]
    overlap_ceiling_tok_s: NotRequired[float]
    share_of_ceiling: NotRequired[float]
    mfu: NotRequired[float]
    mbu: NotRequired[float]


class DraftsReport(TypedDict):
    """What multi-token prediction gained in a run."""

    acceptance: Acceptance


class ThroughputReport(TypedDict):
    """The JSON line of `bench throughput`; `cells` is by cell and engine."""

    benchmark: str
    model: str
    dtype: str
    kv_dtype: str
    device: str
    num_threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tokens: int
    weight_mib: float
    machine: dict[str, Any]  # its name, its software, and a rate for each data type
    cells: dict[str, dict[str, CellReport]]
    mtp: NotRequired[DraftsReport]
    cuda_graphs: NotRequired[dict[str, Any]]
    peak_rss_mib: float
    peak_gpu_mib: dict[str, float]
    ranks: NotRequired[dict[str, Any]]  # their count, and the settings that are not the defaults


class RungReport(TypedDict):
    """One rung of `bench ladder`: its figures, or why there are none."""

    rung: str
    name: str
    skipped: NotRequired[str]
    error: NotRequired[str]
    tok_s: NotRequired[float]
    speedup: NotRequired[float]
    cumulative: NotRequired[float]
    usd_per_million: NotRequired[float]
    ceiling_tok_s: NotRequired[float]
    share_of_ceiling: NotRequired[float]
    mfu: NotRequired[float]
    mbu: NotRequired[float]


class LadderReport(TypedDict):
    """The JSON line of `bench ladder`."""

    benchmark: str
    model: str
    device: str
    workload: str
    usd_per_hour: float
    rungs: list[RungReport]


class EntryReport(TypedDict):
    """One published row of MLPerf Inference."""

    round: str
    id: str
    division: str
    submitter: str
    availability: str
    system: str
    accelerator: str
    nodes: int
    accelerators: int
    benchmark: str
    scenario: str
    result: float
    unit: str
    weights: str
    software: str
    per_accelerator: float | None


class PlacedReport(TypedDict):
    """Where a result stands among the published rows."""

    result: float
    accelerators: int | None
    per_accelerator: float | None
    rank: int
    of: int
    share_of_best: float
    notices: list[str]


class PublishedReport(TypedDict):
    """The JSON line of `bench published` for one benchmark."""

    benchmark: str
    mlperf_benchmark: str
    scenario: str
    unit: str
    filters: dict[str, str]
    rows: list[EntryReport]
    placed: NotRequired[PlacedReport]
