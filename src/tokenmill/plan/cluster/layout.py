"""Which workers a system has, and on which racks their GPUs lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.step_cost import Replica

BOTH, PREFILL, DECODE = "both", "prefill", "decode"


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    name: str
    role: str
    replica: Replica
    racks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """How the GPUs are given to workers: so many of each kind."""

    replica: Replica
    count: int  # that decode; all of them where nothing is apart
    prefill: Replica | None = None
    prefill_count: int = 0

    def times(self, factor: int) -> Division:
        return replace(self, count=self.count * factor, prefill_count=self.prefill_count * factor)

    @property
    def gpus(self) -> int:
        before = self.prefill.gpus * self.prefill_count if self.prefill else 0
        return self.replica.gpus * self.count + before


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    gpu: Accelerator
    gpus: int
    racks: int
    workers: tuple[WorkerPlace, ...]


def check_racks(gpu: Accelerator, gpus: int, racks: int) -> int:
    """GPUs of a rack; an error where they cannot be divided or do not share a link."""
    if gpus % racks:
        near = [count for count in range(gpus, 0, -1) if gpus % count == 0]
        nearest = min(near, key=lambda count: abs(count - racks))
        raise PlanError(
            f"--racks {racks}: {gpus} GPUs leave {gpus % racks} over; use --racks {nearest}, or "
            f"--gpus {gpus - gpus % racks or racks}"
        )
    each = gpus // racks
    if each > gpu.domain_gpus:
        raise PlanError(
            f"--racks {racks}: {each} GPUs each, but only {gpu.domain_gpus} x {gpu.name} share "
            f"fast links, which is what a rack is here; use --racks {-(-gpus // gpu.domain_gpus)}"
        )
    return each


def check_replica(replica: Replica, rack_gpus: int, racks: int, flag: str) -> None:
    size, total = replica.gpus, rack_gpus * racks
    fits = rack_gpus % size == 0 if size <= rack_gpus else size % rack_gpus == 0
    if fits and total % size == 0:
        return
    works = [n for n in range(1, total + 1) if total % n == 0]
    works = [n for n in works if (rack_gpus % n if n <= rack_gpus else n % rack_gpus) == 0]
    near = sorted(works, key=lambda n: abs(n - size))[:2]
    over = rack_gpus % size if size < rack_gpus else total % size or size % rack_gpus
    raise PlanError(
        f"{flag} {size}: does not divide the {rack_gpus} GPUs of a rack, {over} would be left "
        f"over; use {flag} {' or '.join(str(n) for n in sorted(near))}"
    )


def place_workers(gpu: Accelerator, gpus: int, racks: int, division: Division) -> WorkerLayout:
    """Workers in racks by turns, the largest first; what does not fit is an error."""
    free = [gpus // racks] * racks
    kinds = [(DECODE if division.prefill else BOTH, division.replica, division.count)]
    if division.prefill:
        kinds.append((PREFILL, division.prefill, division.prefill_count))
    workers: list[WorkerPlace] = []
    for role, replica, count in sorted(kinds, key=lambda kind: -kind[1].gpus):
        word = "worker" if role == BOTH else role
        for number in range(count):
            place = _take(free, replica.gpus, gpus // racks)
            if place is None:
                raise PlanError(_too_many(gpu, gpus, racks, division))
            workers.append(WorkerPlace(f"{word}-{number}", role, replica, place))
    return WorkerLayout(gpu, gpus, racks, tuple(workers))


def _take(free: list[int], size: int, rack_gpus: int) -> tuple[int, ...] | None:
    """Take the GPUs of a worker: from the emptiest rack, or from whole racks."""
    if size <= rack_gpus:
        rack = max(range(len(free)), key=lambda index: (free[index], -index))
        if free[rack] < size:
            return None
        free[rack] -= size
        return (rack,)
    whole = [index for index, left in enumerate(free) if left == rack_gpus][: size // rack_gpus]
    if len(whole) * rack_gpus < size:
        return None
    for index in whole:
        free[index] = 0
    return tuple(whole)


def _too_many(gpu: Accelerator, gpus: int, racks: int, division: Division) -> str:
    needed = division.gpus
    parts = f"{division.count} x {division.replica.gpus}"
    if division.prefill:
        parts += f" and {division.prefill_count} x {division.prefill.gpus}"
    rack = gpus // racks
    by = (
        f"{needed - gpus} too many" if needed > gpus else f"they cannot be cut into racks of {rack}"
    )
    fewer = max(1, division.count - max(1, -(-max(needed - gpus, 1) // division.replica.gpus)))
    return (
        f"--gpus {gpus}: workers of {parts} {gpu.name} need {needed} GPUs, {by}; "
        f"use {fewer} of {division.replica.gpus}, or --gpus {-(-needed // racks) * racks}"
    )
