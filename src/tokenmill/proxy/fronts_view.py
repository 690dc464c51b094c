"""What the fronts of a router have sent to the backends, as reports and as sums."""

from __future__ import annotations

import msgspec

from tokenmill.core.types import EngineStats
from tokenmill.workers.fronts.control import Totals
from tokenmill.workers.fronts.report import IN_VIEW, AtWorker, FrontCounts, FrontReport
from tokenmill.workers.pool_view import PoolView, WorkerView


def report_of(view: PoolView, counts: FrontCounts) -> FrontReport:
    """What one front has counted."""
    return FrontReport(
        counts=counts,
        workers={worker.name: _at(worker) for worker in view.workers},
        num_open=view.num_open,
        num_pending=sum(worker.num_waiting for worker in view.workers),
        migrations=view.migrations,
        decisions=view.decisions,
    )


def _at(worker: WorkerView) -> AtWorker:
    sent = {name: getattr(worker, name) for name in IN_VIEW}
    return AtWorker(num_pending=worker.num_waiting, **sent)


def summed_view(own: PoolView, totals: Totals) -> PoolView:
    """The backends as a front sees them, with the sums of all; failures are the owner's checks."""
    report = totals.report
    checked = {worker.name: worker for worker in totals.pool.workers}
    return msgspec.structs.replace(
        own,
        num_open=report.num_open,
        migrations=report.migrations,
        workers=[_summed(worker, checked[worker.name], report) for worker in own.workers],
        decisions=(report.decisions or own.decisions) if own.decisions else [],
        fronts=totals.fronts,
    )


def _summed(own: WorkerView, checked: WorkerView, report: FrontReport) -> WorkerView:
    at = report.workers.get(own.name, AtWorker())
    return msgspec.structs.replace(
        own,
        num_running=at.num_requests - at.num_pending,
        num_waiting=at.num_pending,
        restarts=checked.restarts,
        failures=checked.failures,
        **{name: getattr(at, name) for name in IN_VIEW},
    )


def stats_of(report: FrontReport) -> EngineStats:
    """What all fronts know of the engines behind the backends."""
    return EngineStats(
        num_running=report.num_open,
        prefix_query_tokens=sum(at.routed_tokens for at in report.workers.values()),
        prefix_hit_tokens=sum(at.overlap_tokens for at in report.workers.values()),
    )
