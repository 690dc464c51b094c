"""The workers of a server of jobs, as its views and metrics show them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from tokenmill.workers.pool import WorkerPool


class JobWorkerView(msgspec.Struct, frozen=True):
    """One worker, now and since the start of the server."""

    name: str
    state: str
    num_open: int  # tasks that it has
    routed: int  # tasks that were sent to it
    ended: int  # of these, those that it has ended
    restarts: int
    failures: int
    hangs: int
    last_failure: str
    busy: float  # share of the last minute with something to compute
    figures: dict[str, float]  # what its engine says of itself
    warnings: list[str] = []
    pid: int | None = None  # on its machine; None while it has no process

    @property
    def up(self) -> bool:
        return self.state == "ready"


def worker_views(pool: WorkerPool) -> list[JobWorkerView]:
    """The workers as data, for /workers, `tokenmill status` and the dashboard."""
    num_open = Counter(entry.slot for entry in pool.open_requests.values())
    return [
        JobWorkerView(
            name=slot.name,
            state=slot.state,
            num_open=num_open[slot],
            routed=slot.num_routed,
            ended=slot.num_ended,
            restarts=slot.num_restarts,
            failures=slot.num_failures,
            hangs=slot.num_hangs,
            last_failure=slot.last_failure,
            busy=round(slot.busy(), 3),
            figures=slot.latest_stats.figures,
            warnings=[] if slot.facts is None else slot.facts.warnings,
            pid=slot.pid,
        )
        for slot in pool.slots.values()
    ]


def facts_of(pool: WorkerPool) -> dict[str, Any]:
    return {} if pool.facts is None else pool.facts.about
