"""Prometheus metrics of the front and, at scrape time, of the engines behind it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from tokenmill.api.telemetry import figures
from tokenmill.api.telemetry.figures import Figure
from tokenmill.core.cost import usd_of
from tokenmill.core.kv import DISK, HOST
from tokenmill.core.metrics import RequestTimes, acceptance, summarize
from tokenmill.core.types import EngineStats
from tokenmill.workers.accounts import AccountsView, AccountView
from tokenmill.workers.fronts.report import FrontCounts
from tokenmill.workers.pool_view import ImagesView, PoolView

CONTENT_TYPE = CONTENT_TYPE_LATEST
Counts = Mapping[Any, float]  # by the value of a label, or by a tuple of such
RECENT_S = 60.0
NUM_RECENT = 2048  # values at most: an upper bound of what a summary sorts
NUM_SHARED = 256  # of these, what a front sends to the others
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_SECONDS = (*_SECONDS, 60.0, 120.0, 300.0)
_TOKENS = (*(float(step * 10**power) for power in range(6) for step in (1, 2, 5)), 1e6)

# What a front shares with the others, by the names of attributes.
_SINGLE = ("num_prompt_tokens", "num_output_tokens")
_LABELLED = ("finished", "calls", "rejected")
_HISTOGRAMS = tuple(figure.source for figure in figures.LATENCIES)
_RECENT = ("recent_ttft_ms", "recent_tpot_ms")
_BETWEEN = "\0"
_NO_POOL = PoolView("", 0, 0, 0, [], [])
_NO_IMAGES = ImagesView(0, 0, 0, 0, {}, 0, 0, 0, 0)


def _labels(key: str | tuple[str, ...]) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else key


class Histogram:
    """Counts per bucket. `observe` is a bisect: it runs once per streamed token."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """The buckets as Prometheus wants them, each with those before it."""
        labels = [*map(repr, self.bounds), "+Inf"]
        return [(le, float(n)) for le, n in zip(labels, accumulate(self.counts), strict=True)]


class Recent:
    """The values of the last seconds, the latest of them where there are very many."""

    __slots__ = ("_values", "window_s")

    def __init__(self, window_s: float = RECENT_S) -> None:
        self.window_s = window_s
        self._values: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)  # (time, value)

    def add(self, value: float) -> None:
        self._values.append((time.monotonic(), value))

    def values(self) -> list[float]:
        since_s = time.monotonic() - self.window_s
        while self._values and self._values[0][0] < since_s:
            self._values.popleft()
        return [value for _, value in self._values]

    def summary(self) -> dict[str, float]:
        return summarize(self.values())


class CallMetrics:
    """Counts calls, and renders rows of the table whose sources are attributes of this object."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.calls: Counter[tuple[str, str]] = Counter()  # (endpoint, status)
        self.rejected: Counter[str] = Counter()  # by the code of the error
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_call(self, endpoint: str, status: int, error: str | None) -> None:
        """Count the answer to a call; one that was refused also by its error."""
        self.calls[endpoint, str(status)] += 1
        if error is not None and (400 <= status < 500 or status == 503):
            self.rejected[error] += 1

    def collect(self) -> Iterator[Metric]:
        """All families; called by prometheus_client."""
        return self.families(figures.CALLS)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def derived(self) -> dict[str, Any]:
        return {}

    def families(
        self, rows: Iterable[Figure], with_model: bool = True, as_vllm: bool = False
    ) -> Iterator[Metric]:
        """Families of rows, or under vLLM's names of those that have one."""
        derived = self.derived()
        own = {"model_name": self._model} if with_model else {}
        for row in rows:
            name = f"vllm:{row.vllm}" if as_vllm else f"tokenmill_{row.name}"
            if as_vllm and not row.vllm:
                continue
            value = derived[row.source] if row.source in derived else attrgetter(row.source)(self)
            family = _FAMILIES[row.kind](name, row.text, labels=[*own, *row.labels])
            _add_value(family, list(own.values()), value)
            yield family

    def by_worker(self, rows: Iterable[Figure], workers: Iterable[Any]) -> Iterator[Metric]:
        """Families of rows whose sources are attributes of each worker's view."""
        for row in rows:
            labels = ["model_name", "worker"]
            family = _FAMILIES[row.kind](f"tokenmill_{row.name}", row.text, labels=labels)
            for worker in workers:
                _add_value(family, [self._model, worker.name], getattr(worker, row.source))
            yield family


_FAMILIES: dict[str, Callable[..., Any]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _add_value(family: Any, labels: list[str], value: Any) -> None:
    """Add a number, a mapping by labels, or a histogram; None adds nothing."""
    match value:
        case None:
            return
        case Histogram():
            family.add_metric(labels, value.cumulative(), value.total)
        case Mapping():
            ordered = sorted(value.items()) if isinstance(value, Counter) else value.items()
            for key, count in ordered:
                family.add_metric([*labels, *_labels(key)], float(count))
        case _:
            family.add_metric(labels, float(value))


class ServerMetrics(CallMetrics):
    """What the front sees of each request, with the engine's own counters."""

    SUCCESSES: tuple[str, ...] = ("stop", "length")  # finish reasons of whole answers
    FAILURES: tuple[str, ...] = ("abort", "error", "reject")

    def __init__(self, model: str, price_per_gpu_hour: float | None = None) -> None:
        super().__init__(model)
        self._price = price_per_gpu_hour
        # Of when it is rendered.
        self.accounts = AccountsView(0, 0.0, 0.0, [], [])
        self.stats, self.num_worker_restarts = EngineStats(), 0
        self.pool, self.images = _NO_POOL, _NO_IMAGES
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
        self.stored: Callable[[], tuple[int, int]] = lambda: (0, 0)  # responses, their bytes

    def output(self, times: RequestTimes, now_ns: int, num_tokens: int) -> None:
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
        self.finished[reason] += 1
        if reason in self.SUCCESSES:
            self.prompt_tokens.observe(num_prompt_tokens)
            self.generation_tokens.observe(times.num_tokens)
        if times.e2e_ms is not None:
            self.e2e_s.observe(times.e2e_ms / 1e3)
        if times.tpot_ms is not None:
            self.tpot_s.observe(times.tpot_ms / 1e3)
            self.recent_tpot_ms.add(times.tpot_ms)

    def counts(self) -> FrontCounts:
        return FrontCounts(
            single={name: getattr(self, name) for name in _SINGLE},
            labelled={
                name: {_BETWEEN.join(_labels(key)): n for key, n in getattr(self, name).items()}
                for name in _LABELLED
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
        for name in _LABELLED:
            counter = getattr(total, name)
            for labels, count in counts.labelled.get(name, {}).items():
                key = tuple(labels.split(_BETWEEN))
                counter[key if _BETWEEN in labels else labels] = int(count)
        for name, values in counts.buckets.items():
            histogram = getattr(total, name)
            histogram.counts, histogram.total = [int(n) for n in values[:-1]], values[-1]
        for name, values in counts.recent.items():
            for value in values:
                getattr(total, name).add(value)
        total.stored = self.stored  # one store has the responses of all fronts
        return total

    def render(self, stats: EngineStats, num_worker_restarts: int, pool: PoolView) -> bytes:
        self.stats, self.num_worker_restarts = stats, num_worker_restarts
        self.pool, self.images = pool, pool.images or _NO_IMAGES
        return self.exposition()

    def collect(self) -> Iterator[Metric]:
        front = (*figures.CALLS, *figures.ANSWERS, *figures.LATENCIES)
        yield from self.families((*figures.ENGINE, *front, *figures.POOL))
        yield from self.by_worker(figures.WORKERS, self.pool.workers)
        yield from self.families((*figures.ENGINE, *front), as_vllm=True)

    def derived(self) -> dict[str, Any]:
        stats, pool = self.stats, self.pool
        num_stored, num_stored_bytes = self.stored()
        return {
            "kv_cache_usage": _share(stats.num_kv_blocks_used, stats.num_kv_blocks),
            "prefix_cache_hit_rate": _share(stats.prefix_hit_tokens, stats.prefix_query_tokens),
            "acceptance_length": acceptance(stats.num_drafted, stats.num_accepted)["length"] or 0,
            "num_draft_runs": sum(stats.num_drafted[:1]),
            "drafted": {str(place): n for place, n in enumerate(stats.num_drafted, 1)},
            "accepted": {str(place): n for place, n in enumerate(stats.num_accepted, 1)},
            "num_stored": num_stored,
            "num_stored_bytes": num_stored_bytes,
            "successes": {reason: self.finished[reason] for reason in self.SUCCESSES},
            "failures": {reason: self.finished[reason] for reason in self.FAILURES},
            "transfers": {"received": pool.transfers, "failed": pool.failed_transfers},
            **_tiers(stats.tiers),
            **_of_keys(self.accounts.accounts, self._price),
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _tiers(counts: Mapping[str, float]) -> dict[str, Counts]:
    """What `--kv-offloading` holds, copies and finds; zeros without it."""
    names = {
        "tier_blocks": {HOST: "host_blocks", DISK: "disk_blocks"},
        "tier_hits": {HOST: "host_hit_tokens", DISK: "disk_hit_tokens"},
        "tier_bytes": {
            **{"save": "saved_bytes", "load": "loaded_bytes"},
            **{"disk_write": "disk_written_bytes", "disk_read": "disk_read_bytes"},
        },
        "tier_seconds": {"save": "save_s", "load": "load_s"},
        "tier_lost": {"dropped": "dropped", "corrupt": "disk_corrupt"},
    }
    return {
        source: {label: counts.get(name, 0.0) for label, name in by_label.items()}
        for source, by_label in names.items()
    }


def _of_keys(accounts: Sequence[AccountView], price: float | None) -> dict[str, Counts]:
    return {
        "gpu_seconds": {
            (each.name, part): getattr(each.cost, f"{part}_s")
            for each in accounts
            for part in ("prefill", "decode", "drafts")
        },
        "gpu_saved": {each.name: each.cost.saved_s for each in accounts},
        "gpu_usd": {
            each.name: usd_of(each.cost.spent_s, price) for each in accounts if price is not None
        },
        "key_requests": {each.name: each.num_requests for each in accounts},
    }
