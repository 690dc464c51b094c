"""What happens to workers while a simulation runs: one dies, or one starts."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.plan.cluster.layout import WorkerLayout
from tokenmill.plan.hardware import PlanError


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """At a time since the begin, in seconds."""

    kind: str  # "fail" or "start"
    after_s: float
    worker: str


def read_fault_events(
    fails: tuple[str, ...], starts: tuple[str, ...], layout: WorkerLayout
) -> tuple[FaultEvent, ...]:
    """Of `T:WORKER`; where a start names none it is the last worker that is not spoken for."""
    names = [place.name for place in layout.workers]
    found = [_read("fail", text, names, names) for text in fails]
    left = list(names)
    for text in starts:
        if not left:
            raise PlanError(f"--start {text}: all {len(names)} workers start later already")
        one = _read("start", text, names, left)
        if one.worker not in left:
            raise PlanError(f"--start {text}: {one.worker} starts later already")
        left.remove(one.worker)
        found.append(one)
    if starts and not left:
        raise PlanError(f"--start: one of the {len(names)} workers must be there from the begin")
    return tuple(sorted(found, key=lambda one: one.after_s))


def _read(kind: str, text: str, names: list[str], left: list[str]) -> FaultEvent:
    after, colon, worker = text.partition(":")
    try:
        after_s = float(after)
    except ValueError:
        after_s = -1.0
    if not 0 <= after_s < 1e7:
        raise PlanError(
            f"--{kind} {text}: expected seconds of at least 0, such as --{kind} 10:{names[0]}"
        )
    if not colon and kind == "fail":
        raise PlanError(f"--fail {text}: names no worker; use --fail {after}:{names[0]}")
    if colon and worker not in names:
        last = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        raise PlanError(
            f"--{kind} {text}: there is no worker {worker!r}; there are {len(names)}, {last}"
        )
    return FaultEvent(kind, after_s, worker if colon else left[-1])
