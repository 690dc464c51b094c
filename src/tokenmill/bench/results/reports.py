"""The JSON reports that one module writes and others read, field by field.

A field that a run does not have is ABSENT: false, and not in the JSON. A latency is a summary by
statistic: mean, p50, p90, p99, max, and ci95 with bounds where there are enough requests; {} where
there is none.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET

from tokenmill.core.metrics import Acceptance

Latency = dict[str, Any]
LatencyName = Literal[
    "ttft_ms", "ttft_from_schedule_ms", "tpot_ms", "tpot_n1_ms", "itl_ms", "e2e_ms"
]
LimitName = Literal["ttft_ms", "tpot_ms", "e2e_ms"]
LIMITS: tuple[LimitName, ...] = ("ttft_ms", "tpot_ms", "e2e_ms")
OccurrenceName = Literal["errors", "doubts"]
OCCURRENCES: tuple[OccurrenceName, ...] = ("errors", "doubts")


ABSENT: Any = UNSET


class Report(msgspec.Struct):
    """A part of a JSON line; what older versions did not write has a default."""


class Occurrence(Report, kw_only=True):
    """One class of errors or of doubts."""

    count: int = 1
    first: str  # what the first one said


class TooFew(Report, kw_only=True):
    num_values: int
    percentiles: list[str]


class GoodputReport(Report, kw_only=True):
    """The requests that kept their limits."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    num_good: int
    good_share: float
    request_s: float
    output_tok_s: float


class PriceReport(Report, kw_only=True):
    gpus: int
    usd_per_gpu_hour: float
    output_tok_s_gpu: float
    usd_per_million_output: float | None
    usd_per_million_total: float | None
    usd_per_million_good_output: float | None = ABSENT


class BaselineReport(Report, kw_only=True):
    """The client alone, against a server that answers at once."""

    request_s: float
    outputs_s: float
    latency_ms: Latency


class AuditReport(Report, kw_only=True):
    """The client's own figures; `floor` is its baseline."""

    num_processes: int
    scheduled: bool
    lag_ms: Latency
    cpu_share: float
    num_stalls: int
    max_stall_ms: float
    floor: BaselineReport | None = None
    warnings: list[str] = []
    client_limited: bool = False


class ServerReport(Report, kw_only=True):
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


class HitsReport(Report, kw_only=True):
    """Shares of the prompt tokens that were hits of the server's prefix cache."""

    share: float | None
    explained: float
    by: str | None  # "usage" or "server"
    num_unexplained: int | None


class PointReport(Report, kw_only=True):
    """One load of a run against an endpoint."""

    load: str
    concurrency: int | None = None
    rate: float | None = None
    seconds: float = 0.0
    num_completed: int
    num_failed: int = 0
    num_unfinished: int = 0
    num_retried: int = 0
    errors: dict[str, Occurrence] = {}
    doubts: dict[str, Occurrence] = {}
    finish_reasons: dict[str, int] = {}
    num_prompt_tokens: int = 0
    num_asked_tokens: int = ABSENT  # of the prompts, by --input-len, --lengths or --trace
    num_image_tokens: int = ABSENT  # of the prompts, as the server counts them
    num_output_tokens: int = 0
    request_s: float = 0.0
    output_tok_s: float = 0.0
    total_tok_s: float = 0.0
    outputs_s: float = 0.0
    tokens_per_output: float = 0.0
    output_tok_s_ci95: list[float] = ABSENT
    e2e_ms: Latency = {}
    ttft_ms: Latency = ABSENT
    tpot_ms: Latency = ABSENT
    tpot_n1_ms: Latency = ABSENT
    itl_ms: Latency = ABSENT
    tok_s_user: float | None = ABSENT
    ttft_from_schedule_ms: Latency = ABSENT
    too_few: dict[str, TooFew] = {}
    goodput: GoodputReport = ABSENT
    price: PriceReport = ABSENT
    server: ServerReport = ABSENT
    prefix_hits: HitsReport | None = ABSENT
    audit: AuditReport = ABSENT
    # Of a campaign, in the words of MLPerf Endpoints.
    region: str | None = ABSENT
    on_front: bool = ABSENT
    system_tps: float | None = ABSENT
    tps_per_user: float | None = ABSENT
    ttft_p90_ms: float | None = ABSENT
    tpot_p90_ms: float | None = ABSENT


class PromptsReport(Report, kw_only=True):
    seed: int
    seed_drawn: bool
    same_at_every_point: bool
    salt: str | None


class MetricsSource(Report, kw_only=True):
    url: str
    fault: str | None


class TriedLoad(Report, kw_only=True):
    """One load of a search, over all the points that were measured at it."""

    load: float
    num_points: int
    output_tok_s: float
    good_share: float
    client_limited: bool


class SaturationReport(Report, kw_only=True):
    """How a search for the highest load ended, and the load that it found."""

    by: Literal["rate", "concurrency"]
    criterion: str  # "throughput" or "goodput"
    required_share: float | None
    found: float | None
    above: float | None
    stopped: str
    client_limited: bool
    tried: list[TriedLoad]
    doubts: list[str] = ABSENT
    duration_s: float = ABSENT


class SubmissionReport(Report, kw_only=True):
    folder: str
    num_files: int


class EndpointReport(Report, kw_only=True):
    """The JSON line of `bench endpoint` and `bench campaign`."""

    benchmark: str
    url: str = ABSENT
    model: str = ABSENT
    api: str = ABSENT
    stream: bool = True
    interrupted: bool = False
    server_metrics: MetricsSource | None = None
    prompts: PromptsReport = ABSENT
    points: list[PointReport]
    config: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    saturation: SaturationReport = ABSENT
    # Of a campaign.
    quick: bool = ABSENT
    valid_submission: bool = ABSENT
    not_valid_because: list[str] = ABSENT
    max_concurrency: int = ABSENT
    max_concurrency_source: str = ABSENT
    search: SaturationReport | None = ABSENT
    regions: dict[str, list[int]] = ABSENT
    submission: SubmissionReport | None = ABSENT


class Facts(Report, kw_only=True):
    """A manifest but for its files: what ran, on what, how and when."""

    format: int
    benchmark: str
    started_at: str
    ended_at: str
    software: dict[str, str]
    hardware: dict[str, Any]
    configuration: dict[str, Any]


class VerifyReport(Report, kw_only=True):
    ok: bool
    num_files: int
    changed: list[str]
    missing: list[str]
    extra: list[str]


class RowReport(Report, kw_only=True):
    """One metric of two points."""

    metric: str
    label: str
    baseline: float
    other: float
    change: float
    speedup: float
    ci95: list[float] | None
    verdict: str | None  # None: it does not decide


class PointComparison(Report, kw_only=True):
    """One load of two rounds."""

    load: str
    rows: list[RowReport]


class Comparison(Report, kw_only=True):
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


class RoundReport(Report, kw_only=True):
    name: str
    source: str
    tool: str
    gpus: int | None
    usd_per_gpu_hour: float | None
    loads: list[str]
    notices: list[str]


class CompareReport(Report, kw_only=True):
    """The JSON line of `bench compare`."""

    benchmark: str = "compare"
    rounds: list[RoundReport]
    noise_threshold: float
    comparisons: list[Comparison]


class CellReport(Report, kw_only=True):
    """One cell of `bench throughput`; the median run counts."""

    tok_s: float
    tok_s_runs: list[float]
    output_tok_s: float
    total_tok_s: float
    seconds: float = 0.0
    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    ttft_ms: dict[str, float] = ABSENT
    tpot_ms: dict[str, float] = ABSENT
    # Beside its roofline.
    ceiling_tok_s: float = ABSENT
    overlap_ceiling_tok_s: float = ABSENT
    share_of_ceiling: float = ABSENT
    mfu: float = ABSENT
    mbu: float = ABSENT


class ThroughputReport(Report, kw_only=True):
    """The JSON line of `bench throughput`; `cells` is by cell and engine."""

    benchmark: str = "throughput"
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
    mtp: dict[str, Acceptance] = ABSENT  # what multi-token prediction gained
    cuda_graphs: dict[str, Any] = ABSENT
    peak_rss_mib: float
    peak_gpu_mib: dict[str, float]
    ranks: dict[str, Any] = ABSENT  # their count, and the settings that are not the defaults


class RungReport(Report, kw_only=True):
    """One rung of `bench ladder`: its figures, or why there are none."""

    rung: str
    name: str
    skipped: str = ABSENT
    error: str = ABSENT
    tok_s: float = ABSENT
    speedup: float = ABSENT
    cumulative: float = ABSENT
    usd_per_million: float = ABSENT
    ceiling_tok_s: float = ABSENT
    share_of_ceiling: float = ABSENT
    mfu: float = ABSENT
    mbu: float = ABSENT


class LadderReport(Report, kw_only=True):
    """The JSON line of `bench ladder`."""

    benchmark: str = "ladder"
    model: str
    device: str
    workload: str
    usd_per_hour: float
    rungs: list[RungReport]


class PublishedEntry(Report, kw_only=True):
    """One published row of MLPerf Inference."""

    round: str
    id: str
    division: str
    submitter: str
    availability: str
    system: str
    accelerator: str
    nodes: int
    accelerators: int  # 0: a system without
    benchmark: str
    scenario: str
    result: float
    unit: str
    weights: str
    software: str
    per_accelerator: float | None = None  # of a rate, where there is an accelerator


class PlacedReport(Report, kw_only=True):
    result: float
    accelerators: int | None
    per_accelerator: float | None
    rank: int
    of: int
    share_of_best: float
    notices: list[str]


class PublishedReport(Report, kw_only=True):
    """The JSON line of `bench published` for one benchmark."""

    benchmark: str = "published"
    mlperf_benchmark: str
    scenario: str
    unit: str
    filters: dict[str, str]
    rows: list[PublishedEntry]
    placed: PlacedReport = ABSENT


def as_json(report: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found
