"""Engines of jobs: a job is bytes in, perhaps progress, and exactly one terminal output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

_COUNTERS = ("_total", "_bucket", "_count", "_sum")  # as Prometheus names what only grows

JobKind = Literal["progress", "restarted", "done", "failed"]


@dataclass(slots=True)
class JobOutput:
    """What became of a job; "done" and "failed" are terminal.

    "restarted" says that the job begins anew, since its worker died or left.
    """

    job_id: str
    kind: JobKind
    payload: bytes = b""
    error: str = ""  # of a failed one: a sentence for the user
    error_kind: str = ""  # such as invalid, deadline, aborted, worker_died, shutdown

    @property
    def is_terminal(self) -> bool:
        return self.kind in ("done", "failed")


class JobEngine(Protocol):
    """An engine in a worker of jobs; one thread calls it."""

    def submit(self, job_id: str, payload: bytes) -> None:
        """Queue a job; ValueError says what is wrong with it, and it fails alone."""

    def abort(self, job_id: str) -> None:
        """End a job between two steps; unknown and finished ids are ignored."""

    def step(self) -> list[JobOutput]:
        """Run one step; what it brought forth."""

    def has_work(self) -> bool:
        """True while a step would do something."""

    def stats(self) -> dict[str, float]:
        """Gauges and counters by name; those of counters end as Prometheus has it: _total.

        A name may have labels: `lookups_total{tier="device"}`. num_running and num_waiting, where
        they are given, are the jobs of now.
        """


def is_counter(name: str) -> bool:
    """True for a figure that adds up over the workers that come one after another."""
    return name.partition("{")[0].endswith(_COUNTERS)


def add_figures(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """The sums of two engines' stats."""
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}
