"""Write recipes/grafana.json from the table of docs/metrics.md: a panel for every metric.

    python scripts/grafana_dashboard.py

In Grafana: Dashboards, New, Import, and choose a Prometheus data source.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
METRICS = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "recipes" / "grafana.json"
ROW = re.compile(r"^\| `(tokenmill_\w+)` \| (gauge|counter|histogram) \| ([^|]*) \| (.*) \|$")
PANEL_WIDTH, PANEL_HEIGHT, PANELS_IN_A_ROW = 8, 7, 3
GROUPS = {  # a title, and what the names of its metrics contain; the first that fits counts
    "Workers": ("tokenmill_worker_", "tokenmill_backend_"),
    "Experts and drafts": ("_mtp_", "_expert_", "_rank_"),
    "Latency": ("_seconds",),
    "KV cache": ("_kv_", "_prefix_cache_", "_preemptions_"),
    "Requests and tokens": ("tokenmill_",),
}
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def group(self) -> str:
        return next(t for t, parts in GROUPS.items() if any(part in self.name for part in parts))


def read_metrics(page: str) -> list[Metric]:
    found = [ROW.match(line) for line in page.splitlines()]
    return [
        Metric(match[1], match[2], tuple(re.findall(r"\w+", match[3])), match[4].replace("`", ""))
        for match in found
        if match
    ]


def queries(metric: Metric) -> list[tuple[str, str]]:
    """PromQL and legend of a panel: values, rates, or percentiles."""
    by = ", ".join(("model_name", *metric.labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels or ("model_name",))
    if metric.kind == "gauge":
        return [(metric.name, legend)]
    if metric.kind == "counter":
        return [(f"sum by ({by}) (rate({metric.name}[$__rate_interval]))", legend)]
    buckets = f"sum by (le, {by}) (rate({metric.name}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99)]


def panel(metric: Metric, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend}
        for index, (expr, legend) in enumerate(queries(metric))
    ]
    rate = " per second" if metric.kind == "counter" else ""
    return {
        "id": number,
        "type": "timeseries",
        "title": metric.name.removeprefix("tokenmill_").removesuffix("_total") + rate,
        "description": metric.meaning,
        "datasource": DATA_SOURCE,
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": _unit(metric), "min": 0}, "overrides": []},
        "targets": targets,
    }


def _unit(metric: Metric) -> str:
    if metric.kind == "histogram" and metric.name.endswith("_seconds"):
        return "s"
    return "Bps" if metric.name.endswith("_bytes_total") else "short"


def dashboard(metrics: list[Metric]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title in reversed(GROUPS):
        position = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": position})
        y += 1
        members = [metric for metric in metrics if metric.group == title]
        for index, metric in enumerate(members):
            column, line = index % PANELS_IN_A_ROW, index // PANELS_IN_A_ROW
            place = (column * PANEL_WIDTH, y + line * PANEL_HEIGHT)
            panels.append(panel(metric, len(panels) + 1, *place))
        y += -(-len(members) // PANELS_IN_A_ROW) * PANEL_HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "title": "tokenmill",
        "uid": "tokenmill",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def render() -> str:
    return json.dumps(dashboard(read_metrics(METRICS.read_text(encoding="utf-8"))), indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(render(), encoding="utf-8")
