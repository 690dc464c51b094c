"""The neutral form of a round: points of one tool's result in the same names and units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.results.intervals import Estimate, from_interval, from_runs, from_samples

Json = Mapping[str, Any]

STATISTICS: dict[str, float | None] = {"mean": None, "p50": 50.0, "p90": 90.0, "p99": 99.0}


@dataclass(slots=True)
class ResultPoint:
    """One load of a round; values are named "output_tok_s" or "ttft_ms.p50"."""

    load: str
    key: tuple[str, Any]  # points of two rounds with the same key are compared
    values: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)  # in the order they occurred
    runs: dict[str, list[float]] = field(default_factory=dict)  # whole runs behind a value
    facts: dict[str, float] = field(default_factory=dict)  # requests, tokens in and out of one
    slo: str = ""  # limits that good requests keep

    def add(self, name: str, summary: Json | None, scale: float = 1.0) -> None:
        """Take over mean and percentiles, and intervals where there are any."""
        for statistic in STATISTICS:
            value = (summary or {}).get(statistic)
            if isinstance(value, int | float):
                self.values[f"{name}.{statistic}"] = value * scale
        for statistic, (low, high) in (summary or {}).get("ci95", {}).items():
            self.intervals[f"{name}.{statistic}"] = (low * scale, high * scale)

    def estimate(self, name: str) -> Estimate | None:
        """The value and how well it is known; None where nothing tells."""
        base, _, statistic = name.partition(".")
        value = self.values[name]
        if base in self.samples:
            # A closed loop's batch holds all its slots.
            slots = self.key[1] if self.key[0] == "concurrency" and statistic else 1
            found = from_samples(self.samples[base], STATISTICS.get(statistic), int(slots))
            if found is not None:
                return found
        if name in self.runs:
            return from_runs(value, self.runs[name])
        if name in self.intervals:
            return from_interval(value, *self.intervals[name])
        return None


@dataclass(slots=True)
class ToolResult:
    source: str
    tool: str
    points: list[ResultPoint]
    config: dict[str, Any]  # flat
    gpus: int | None = None
    usd_per_gpu_hour: float | None = None
    notices: list[str] = field(default_factory=list)  # what a reader must know of it


def load_key(concurrency: Any, rate: Any, name: str) -> tuple[str, tuple[str, Any]]:
    if concurrency is not None:
        return f"concurrency {concurrency:g}", ("concurrency", float(concurrency))
    if rate is not None:
        return f"{rate:g} requests/s", ("rate", round(float(rate), 6))
    return name, ("load", name)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts and lists of dicts as one dict with dotted keys; without what is None."""
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        items = enumerate(value)
    else:
        return {} if value is None or not prefix else {prefix: value}
    found: dict[str, Any] = {}
    for key, item in items:
        found |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return found


def present(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def per_request(total: Any, count: Any) -> float | None:
    return total / count if total is not None and count else None
