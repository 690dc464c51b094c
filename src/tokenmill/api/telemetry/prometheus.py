"""Prometheus metrics of the frontend and, at scrape time, of the engine behind it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from tokenmill.core.cost import usd_of
from tokenmill.core.kv import DISK, HOST
from tokenmill.core.metrics import RequestTimes, acceptance, summarize
from tokenmill.core.types import EngineStats
from tokenmill.workers.accounts import AccountsView
from tokenmill.workers.fronts.report import FrontCounts
from tokenmill.workers.pool_view import ImagesView, PoolView

CONTENT_TYPE = CONTENT_TYPE_LATEST
Counts = Mapping[tuple[str, ...], float]  # by the values of labels
RECENT_S = 60.0
NUM_RECENT = 2048  # values at most: an upper bound of what a summary sorts
NUM_SHARED = 256  # of these, what a front sends to the others
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_SECONDS = (*_SECONDS, 60.0, 120.0, 300.0)
_TOKENS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)
# (name, help, attribute of WorkerView)
_WORKER_GAUGES = (
    ("up", "1 while the worker takes requests.", "up"),
    ("requests", "Requests routed there that have not ended.", "num_requests"),
    ("queued_tokens", "Tokens of prompts that wait for prefill there.", "queued_tokens"),
    ("busy", "Share of the last minute with something to compute.", "busy"),
    ("tokens_per_second", "Tokens sent by the worker, over ten seconds.", "tokens_per_s"),
    (
        "prompt_tokens_per_second",
        "Prompt tokens computed there, over ten seconds.",
        "prompt_tokens_per_s",
    ),
    ("cached_blocks", "KV blocks that it has cached, by its events.", "cached_blocks"),
)
_WORKER_COUNTERS = (
    ("routed_requests", "Requests routed there.", "routed"),
    ("routed_tokens", "Tokens of the prompts routed there.", "routed_tokens"),
    ("overlap_tokens", "Of these, tokens that the router knew to be cached.", "overlap_tokens"),
    ("output_tokens", "Tokens sent by the worker.", "output_tokens"),
    ("failures", "Times that it died, hung or could not be reached.", "failures"),
)


# What a front shares with the others, by the names of attributes.
_SINGLE = ("num_prompt_tokens", "num_output_tokens")
_HISTOGRAMS = (
    *("ttft_s", "inter_token_s", "tpot_s", "e2e_s", "queue_s"),
    *("prompt_tokens", "generation_tokens"),
)
_RECENT = ("recent_ttft_ms", "recent_tpot_ms")
_LABELS = "\0"  # between the labels of one count


def _labels(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


NO_IMAGES = ImagesView(0, 0, 0, 0, {}, 0, 0, 0, 0)


class Histogram:
    """Counts per bucket. `observe` is a bisect: it runs once per streamed token."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """The cumulative buckets as Prometheus wants them."""
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        cumulative = 0
        buckets = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += count
            label = "+Inf" if bound == float("inf") else repr(bound)
            buckets.append((label, float(cumulative)))
        family.add_metric([model], buckets, self.total)
        return family


class Recent:
    """The values of the last seconds, the latest of them where there are very many."""

    __slots__ = ("_values", "window_s")

    def __init__(self, window_s: float = RECENT_S) -> None:
        self.window_s = window_s
        self._values: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)  # (time, value)

    def add(self, value: float) -> None:
        """Note a value of now."""
        self._values.append((time.monotonic(), value))

    def values(self) -> list[float]:
        """Those of the window, the oldest first."""
        since_s = time.monotonic() - self.window_s
        while self._values and self._values[0][0] < since_s:
            self._values.popleft()
        return [value for _, value in self._values]

    def summary(self) -> dict[str, float]:
        """Mean and percentiles; {} when there is no value."""
        return summarize(self.values())


class ServerMetrics:
    """What the frontend sees of each request, with the engine's own counters."""

    SUCCESSES: tuple[str, ...] = ("stop", "length")  # finish reasons of whole answers
    FAILURES: tuple[str, ...] = ("abort", "error", "reject")
    LABELLED: tuple[str, ...] = ("finished", "calls", "rejected")  # counters by label

    def __init__(self, model: str, price_per_gpu_hour: float | None = None) -> None:
        self._model = model
        self._price = price_per_gpu_hour
        self.accounts = AccountsView(0, 0.0, 0.0, [], [])  # of when it is rendered
        self._stats = EngineStats()
        self._pool: PoolView | None = None
        self.num_worker_restarts = 0
        self.ttft_s = Histogram(_LONG_SECONDS)
        self.inter_token_s = Histogram(_SECONDS)
        self.tpot_s = Histogram(_SECONDS)
        self.e2e_s = Histogram(_LONG_SECONDS)
        self.queue_s = Histogram(_LONG_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.recent_ttft_ms = Recent()
        self.recent_tpot_ms = Recent()
        self.num_prompt_tokens = 0  # of requests that have a first token
        self.num_output_tokens = 0
        self._gap_ns, self._gap_s, self._gap_bucket = -1, 0.0, 0  # the last one of later_output
        self.finished: Counter[str] = Counter()
        self.calls: Counter[tuple[str, ...]] = Counter()  # (endpoint, status)
        self.rejected: Counter[str] = Counter()  # by the code of the error
        self.stored: Callable[[], tuple[int, int]] = lambda: (0, 0)  # responses, their bytes
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def output(self, times: RequestTimes, now_ns: int, num_tokens: int) -> None:
        """Count one output of a request."""
        gap_ms = times.record(now_ns, num_tokens)
        self.num_output_tokens += num_tokens
        if gap_ms is not None:
            self.inter_token_s.observe(gap_ms / 1e3)
        elif times.ttft_ms is not None:
            self.ttft_s.observe(times.ttft_ms / 1e3)
            self.recent_ttft_ms.add(times.ttft_ms)

    def later_output(self, times: RequestTimes, now_ns: int, num_tokens: int) -> None:
        """Count an output that is not the first, as `output` does, in one call."""
        gap_ns = now_ns - times.last_ns
        times.last_ns = now_ns
        times.num_tokens += num_tokens
        self.num_output_tokens += num_tokens
        gaps = self.inter_token_s
        if gap_ns != self._gap_ns:  # streams of one step have the same gap
            self._gap_ns, self._gap_s = gap_ns, gap_ns / 1e9
            self._gap_bucket = bisect_left(gaps.bounds, self._gap_s)
        gaps.counts[self._gap_bucket] += 1
        gaps.total += self._gap_s

    def finish(self, times: RequestTimes, num_prompt_tokens: int, reason: str) -> None:
        """Count the end of a request."""
        self.finished[reason] += 1
        if reason in self.SUCCESSES:
            self.prompt_tokens.observe(num_prompt_tokens)
            self.generation_tokens.observe(times.num_tokens)
        if times.e2e_ms is not None:
            self.e2e_s.observe(times.e2e_ms / 1e3)
        if times.tpot_ms is not None:
            self.tpot_s.observe(times.tpot_ms / 1e3)
            self.recent_tpot_ms.add(times.tpot_ms)

    def count_call(self, endpoint: str, status: int, error: str | None) -> None:
        """Count the answer to a call; one that was refused also by its error."""
        self.calls[endpoint, str(status)] += 1
        if error is not None and (400 <= status < 500 or status == 503):
            self.rejected[error] += 1

    def counts(self) -> FrontCounts:
        """All that was counted here, to be added to what other fronts have counted."""
        return FrontCounts(
            single={name: getattr(self, name) for name in _SINGLE},
            labelled={
                name: {_LABELS.join(_labels(key)): n for key, n in getattr(self, name).items()}
                for name in self.LABELLED
            },
            buckets={
                name: [*map(float, histogram.counts), histogram.total]
                for name in _HISTOGRAMS
                for histogram in [getattr(self, name)]
            },
            recent={name: getattr(self, name).values()[-NUM_SHARED:] for name in _RECENT},
        )

    def total(self, counts: FrontCounts | None) -> ServerMetrics:
        """Metrics of all fronts; without counts there is one front, and its own are meant."""
        if counts is None:
            return self
        total = ServerMetrics(self._model, self._price)
        for name in _SINGLE:
            setattr(total, name, int(counts.single.get(name, 0)))
        for name in self.LABELLED:
            counter = getattr(total, name)
            for labels, count in counts.labelled.get(name, {}).items():
                key = tuple(labels.split(_LABELS))
                counter[key if _LABELS in labels else labels] = int(count)
        for name, values in counts.buckets.items():
            histogram = getattr(total, name)
            histogram.counts, histogram.total = [int(n) for n in values[:-1]], values[-1]
        for name, values in counts.recent.items():
            for value in values:
                getattr(total, name).add(value)
        total.stored = self.stored  # one store has the responses of all fronts
        return total

    def render(self, stats: EngineStats, num_worker_restarts: int, pool: PoolView) -> bytes:
        """The exposition text with the engines' counters of now."""
        self._stats = stats
        self._pool = pool
        self.num_worker_restarts = num_worker_restarts
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """All families; called by prometheus_client."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._gpu_time()
        yield from self.latencies()
        yield from self.workers()

    def _gauges(self) -> Iterator[Metric]:
        s = self._stats
        rate = s.prefix_hit_tokens / s.prefix_query_tokens if s.prefix_query_tokens else 0.0
        usage = s.num_kv_blocks_used / s.num_kv_blocks if s.num_kv_blocks else 0.0
        length = acceptance(s.num_drafted, s.num_accepted)["length"] or 0.0
        num_stored, num_stored_bytes = self.stored()
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", s.num_running),
            ("num_requests_waiting", "Requests waiting to run.", s.num_waiting),
            ("num_requests_receiving", "Requests whose KV is on its way.", s.num_receiving),
            ("num_requests_loading", "Requests whose KV comes from a tier.", s.num_loading),
            ("kv_leases", "Prompts whose KV is held for another engine.", s.num_leases),
            ("kv_cache_usage", "Share of KV blocks held by running requests, 0 to 1.", usage),
            ("prefix_cache_hit_rate", "Prompt tokens found in the cache / looked up.", rate),
            (
                "rank_imbalance",
                "Busiest rank / mean of experts' rows; 0: not counted.",
                s.rank_imbalance,
            ),
            (
                "rank_imbalance_before",
                "The same before experts were last moved.",
                s.rank_imbalance_before,
            ),
            ("mtp_acceptance_length", "Tokens of a step that verified drafts; 0: none.", length),
            ("kv_branch_points", "Kept starts inside cached prefixes.", s.num_branch_points),
            ("stored_responses", "Responses kept for later calls.", num_stored),
            ("stored_response_bytes", "Their size, contexts included.", num_stored_bytes),
        ):
            family = GaugeMetricFamily(f"tokenmill_{name}", text, labels=["model_name"])
            family.add_metric([self._model], float(value))
            yield family

    def _counters(self) -> Iterator[Metric]:
        s = self._stats
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up.", s.prefix_query_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", s.prefix_hit_tokens),
            ("num_preemptions", "Preemptions.", s.num_preemptions),
            ("kv_blocks_received", "KV blocks from other engines.", s.num_kv_blocks_received),
            ("kv_read_seconds", "Time in which these were copied.", s.kv_read_s),
            ("kv_blocks_slid", "KV blocks freed behind a window.", s.num_kv_blocks_slid),
            ("kv_leases_expired", "Leases that nobody released.", s.num_leases_expired),
            ("engine_steps", "Steps the engine ran.", s.num_steps),
            ("mtp_runs", "Runs of drafts verified.", s.num_drafted[0] if s.num_drafted else 0),
            ("expert_rebalances", "Times that experts were moved.", s.num_rebalances),
            (
                "expert_bytes_moved",
                "Bytes of experts moved between ranks.",
                s.num_expert_bytes_moved,
            ),
            ("expert_rebalance_seconds", "Time that steps waited for experts.", s.rebalance_s),
            ("thinking_budgets_spent", "Answers that ran out of reasoning.", s.num_budgets_spent),
            ("loops_ended", "Answers that a repetition ended.", s.num_loops_ended),
            ("worker_restarts", "Times the worker was restarted.", self.num_worker_restarts),
        ):
            yield self._counter(name, text, value)
        for name, text, counts in (
            ("drafted", "Drafts verified, by position.", s.num_drafted),
            ("accepted", "Drafts accepted, by position.", s.num_accepted),
        ):
            labels = ["model_name", "position"]
            drafts = CounterMetricFamily(f"tokenmill_mtp_{name}_tokens", text, labels=labels)
            for position, count in enumerate(counts, 1):
                drafts.add_metric([self._model, str(position)], float(count))
            yield drafts
        yield from self._tiers()
        yield from self._images()
        yield from self.own_counters()

    def _tiers(self) -> Iterator[Metric]:
        """What `--kv-offloading` holds, copies and finds; zeros without it."""
        counts = self._stats.tiers
        labels = ["model_name", "tier"]
        held = GaugeMetricFamily("tokenmill_kv_tier_blocks", "KV blocks in a tier.", labels=labels)
        for tier in (HOST, DISK):
            held.add_metric([self._model, tier], counts.get(f"{tier}_blocks", 0.0))
        yield held
        hits: Counts = {(tier,): counts.get(f"{tier}_hit_tokens", 0.0) for tier in (HOST, DISK)}
        yield self._labelled("kv_tier_hit_tokens", "Prompt tokens from a tier.", ["tier"], hits)
        ways = {"save": "saved", "load": "loaded", "disk_write": "disk_written"}
        ways["disk_read"] = "disk_read"
        copied: Counts = {(way,): counts.get(f"{key}_bytes", 0.0) for way, key in ways.items()}
        yield self._labelled("kv_tier_bytes", "Bytes of KV that were copied.", ["way"], copied)
        seconds: Counts = {(way,): counts.get(f"{way}_s", 0.0) for way in ("save", "load")}
        yield self._labelled("kv_tier_copy_seconds", "Time that copies took.", ["way"], seconds)
        lost: Counts = {
            ("dropped",): counts.get("dropped", 0.0),
            ("corrupt",): counts.get("disk_corrupt", 0.0),
        }
        yield self._labelled("kv_tier_lost_blocks", "Blocks that tiers lost.", ["why"], lost)

    def _images(self) -> Iterator[Metric]:
        """Images on their way from a call to a step."""
        view = self._pool.images if self._pool is not None else None
        view = view or NO_IMAGES
        for name, text, value in (
            ("images", "Images of calls.", view.images),
            ("image_cache_hits", "Images that were ready or being made.", view.cached),
            ("images_fetched", "Images fetched over the network.", view.fetched),
            ("images_decoded", "Images decoded and resized.", view.decoded),
            ("image_tokens", "Tokens of prompts that are images.", view.tokens),
            ("images_encoded", "Images that a vision encoder ran on.", view.encoded),
            ("image_patches", "Patches of these.", view.patches),
            ("encoder_cache_hits", "Images whose features were there.", view.encoder_hits),
        ):
            yield self._counter(name, text, value)
        refused: Counts = {(stage,): count for stage, count in view.refused.items()}
        yield self._labelled("images_refused", "Images that were not taken.", ["stage"], refused)

    def _gpu_time(self) -> Iterator[Metric]:
        """What requests took by API key, and all GPU time."""
        view, price = self.accounts, self._price
        yield self._counter("gpu_wall_seconds", "Time that passed, times GPUs.", view.gpu_s)
        yield self._counter("gpu_idle_seconds", "Of it, without a request.", view.idle_s)
        costs = [(account.name, account.cost) for account in view.accounts]
        parts: Counts = {
            (name, part): getattr(cost, f"{part}_s")
            for name, cost in costs
            for part in ("prefill", "decode", "drafts")
        }
        saved: Counts = {(name,): cost.saved_s for name, cost in costs}
        usd: Counts = (
            {} if price is None else {(n,): usd_of(cost.spent_s, price) for n, cost in costs}
        )
        ended: Counts = {(account.name,): account.num_requests for account in view.accounts}
        for name, text, labels, counts in (
            ("gpu_seconds", "GPU time by API key and part.", ["key", "part"], parts),
            ("gpu_saved_seconds", "What cached tokens would have taken.", ["key"], saved),
            ("gpu_usd", "Dollars of GPU time, where there is a price.", ["key"], usd),
            ("key_requests", "Requests that ended, by API key.", ["key"], ended),
        ):
            yield self._labelled(name, text, labels, counts)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"tokenmill_{name}", text, labels=["model_name"])
        family.add_metric([self._model], float(value))
        return family

    def own_counters(self) -> Iterator[Metric]:
        """What the front itself has counted."""
        prompt, output = self.num_prompt_tokens, self.num_output_tokens
        yield self._counter("prompt_tokens", "Prompt tokens of begun answers.", prompt)
        yield self._counter("generation_tokens", "Tokens sent to clients.", output)
        finished = ["finished_reason"]
        whole: Counts = {(name,): self.finished[name] for name in self.SUCCESSES}
        failed: Counts = {(name,): self.finished[name] for name in self.FAILURES}
        rejected: Counts = {(code,): count for code, count in self.rejected.items()}
        for name, text, labels, counts in (
            ("request_success", "Whole answers by finish reason.", finished, whole),
            ("request_failure", "Requests without a whole answer.", finished, failed),
            ("requests", "HTTP calls by status.", ["endpoint", "status"], self.calls),
            ("requests_rejected", "HTTP calls refused, by error code.", ["reason"], rejected),
        ):
            yield self._labelled(name, text, labels, counts)

    def _labelled(self, name: str, text: str, labels: list[str], counts: Counts) -> Metric:
        names = ["model_name", *labels]
        family = CounterMetricFamily(f"tokenmill_{name}", text, labels=names)
        for values, count in sorted(counts.items()):
            family.add_metric([self._model, *values], float(count))
        return family

    def workers(self) -> Iterator[Metric]:
        """The pool, with one sample for each worker."""
        pool = self._pool
        if pool is None:
            return
        migrations = CounterMetricFamily(
            "tokenmill_request_migrations",
            "Times a request went on at another worker.",
            labels=["model_name"],
        )
        migrations.add_metric([self._model], float(pool.migrations))
        yield migrations
        transfers = CounterMetricFamily(
            "tokenmill_kv_transfers",
            "Prompts that a prefill worker computed, by what became of their KV.",
            labels=["model_name", "result"],
        )
        transfers.add_metric([self._model, "received"], float(pool.transfers))
        transfers.add_metric([self._model, "failed"], float(pool.failed_transfers))
        yield transfers
        moved = CounterMetricFamily(
            "tokenmill_kv_transfer_bytes", "Bytes of KV that moved.", labels=["model_name"]
        )
        moved.add_metric([self._model], float(pool.transferred_bytes))
        yield moved
        kinds: tuple[tuple[type[Metric], tuple[tuple[str, str, str], ...]], ...] = (
            (GaugeMetricFamily, _WORKER_GAUGES),
            (CounterMetricFamily, _WORKER_COUNTERS),
        )
        for family_type, rows in kinds:
            for name, text, attribute in rows:
                labels = ["model_name", "worker"]
                family: Any = family_type(f"tokenmill_worker_{name}", text, labels=labels)  # type: ignore[call-arg,arg-type]
                for worker in pool.workers:
                    value = getattr(worker, attribute)
                    if value is not None:
                        family.add_metric([self._model, worker.name], float(value))
                yield family

    def latencies(self) -> Iterator[Metric]:
        """The histograms."""
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token.", self.ttft_s),
            ("inter_token_latency_seconds", "Gap between successive outputs.", self.inter_token_s),
            (
                "request_time_per_output_token_seconds",
                "Mean per token after the first.",
                self.tpot_s,
            ),
            ("e2e_request_latency_seconds", "Arrival to last token.", self.e2e_s),
            ("request_queue_time_seconds", "Arrival to first step.", self.queue_s),
            ("request_prompt_tokens", "Prompt tokens of whole answers.", self.prompt_tokens),
            ("request_generation_tokens", "Tokens of whole answers.", self.generation_tokens),
        ):
            yield histogram.family(f"tokenmill_{name}", text, self._model)
