"""Decides from the client's own figures whether the client, not the server, was the limit."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tokenmill.bench.client.load_run import ClientBaseline, Run
from tokenmill.bench.client.summary import rounded, summarize_point
from tokenmill.bench.results.reports import AuditReport, BaselineReport, PointReport
from tokenmill.core.metrics import NS_PER_MS, summarize

BUSY_SHARE = 0.8  # of one core by one client process
NEAR_BASELINE = 0.5  # of the rate that the client reaches against the null server
LATE_MS, LATE_SHARE = 10.0, 0.1  # of the median latency
STALL_MS = 100.0


def audit(run: Run, point: PointReport) -> AuditReport:
    """Lag, CPU and stalls of the client, with a sentence for each that is too much."""
    lag = summarize((r.sent_ns - r.planned_ns) / NS_PER_MS for r in run.records if r.sent_ns)
    report = AuditReport(
        num_processes=len(run.health),
        scheduled=run.load.rate is not None or run.load.arrival == "trace",
        lag_ms=lag,
        cpu_share=max((h.cpu_s / h.wall_s for h in run.health if h.wall_s), default=0.0),
        num_stalls=sum(h.num_stalls for h in run.health),
        max_stall_ms=max((h.max_stall_ms for h in run.health), default=0.0),
    )
    return _judged(report, point)


def add_client_baseline(
    report: AuditReport, point: PointReport, baseline: ClientBaseline, stream: bool
) -> AuditReport:
    return _judged(replace(report, floor=baseline_report(baseline, stream)), point)


def _judged(report: AuditReport, point: PointReport) -> AuditReport:
    found = warnings(report, point)
    return rounded(replace(report, warnings=found, client_limited=bool(found)))


def baseline_report(baseline: ClientBaseline, stream: bool) -> BaselineReport:
    """The highest rate of this client on this machine, and the time that it adds to a latency."""
    full = summarize_point(baseline.full.load, baseline.full.records, stream=stream)
    alone = summarize_point(baseline.alone.load, baseline.alone.records, stream=stream)
    return BaselineReport(
        request_s=full.request_s,
        outputs_s=full.outputs_s,
        latency_ms=alone.ttft_ms if stream else alone.e2e_ms,
    )


def warnings(report: AuditReport, point: PointReport) -> list[str]:
    found = []
    if report.cpu_share > BUSY_SHARE:
        found.append(
            f"a client process was busy {report.cpu_share:.0%} of the time: the client may be "
            "the limit; more --processes or a machine of its own would tell"
        )
    latency = _median_latency(point)
    late_ms = max(LATE_MS, LATE_SHARE * latency)
    if report.scheduled and report.lag_ms.get("p99", 0.0) > late_ms:
        found.append(
            f"1 % of the requests left {report.lag_ms['p99']:.1f} ms or more after their time: "
            "the load was not the one asked for"
        )
    if report.max_stall_ms > max(STALL_MS, latency):
        found.append(f"the client stood still for {report.max_stall_ms:.0f} ms")
    return found + (_near_baseline(report.floor, point) if report.floor else [])


def _near_baseline(baseline: BaselineReport, point: PointReport) -> list[str]:
    found = []
    for unit, most, came in (
        ("requests/s", baseline.request_s, point.request_s),
        ("outputs/s", baseline.outputs_s, point.outputs_s),
    ):
        if most and came > NEAR_BASELINE * most:
            found.append(
                f"{came:,.0f} {unit} came, and this client reaches {most:,.0f} "
                "against a server that answers at once: the client may be the limit"
            )
    own, latency = baseline.latency_ms.get("p50", 0.0), _median_latency(point)
    if latency and own > LATE_SHARE * latency:
        found.append(
            f"of a median latency of {latency:.2f} ms the client's own part is {own:.2f} ms"
        )
    return found


def _median_latency(point: PointReport) -> float:
    summary = point.ttft_ms or point.e2e_ms
    return float(summary.get("p50", 0.0))


def all_warnings(points: Sequence[PointReport]) -> list[str]:
    """The warnings of all points, each with the point's name if there are several."""
    return [
        f"{point.load}: {text}" if len(points) > 1 else text
        for point in points
        for text in point.audit.warnings
    ]
