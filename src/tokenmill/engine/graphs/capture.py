"""The capture of CUDA graphs at the start: in the order of use, within a time and a memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tokenmill.engine.graphs.graph_sizes import capture_order, most_padding, without_graph

Progress = Callable[[int, int], None]
# The most that a driver is taken to keep for what a job captures: some KiB for each kernel.
DRIVER_BYTES = 2**23
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    seconds: float
    memory_bytes: int

    def reached(self, report: CaptureReport) -> str | None:
        if report.seconds > self.seconds:
            return f"the limit of {self.seconds:g} s"
        if report.memory_bytes > self.memory_bytes:
            return f"the limit of {self.memory_bytes / 2**30:g} GiB"
        return None


@dataclass(frozen=True, slots=True)
class CaptureJob:
    """One graph to capture, or two that belong together."""

    place: int  # in the capture order of its kind; the jobs of several kinds take turns
    capture: Callable[[], None]


@dataclass(slots=True)
class CaptureReport:
    """What was captured, and what it took; the counts go on while the engine runs."""

    planned: int = 0
    captured: int = 0
    seconds: float = 0.0
    memory_bytes: int = 0
    cut_by: str | None = None  # the flag whose limit ended the capture
    decode_sizes: list[int] = field(default_factory=list)
    max_size: int = 0
    piecewise_tokens: int = 0  # of the largest step that is replayed in pieces
    steps: int = 0  # decode steps through a graph
    rows: int = 0  # their sequences
    padded_rows: int = 0
    steps_without: int = 0  # decode steps that no graph took

    def count(self, rows: int, size: int | None) -> None:
        """Note a decode step of so many sequences that took a graph of this size, or none."""
        if size is None:
            if not self.steps_without:
                _log.warning("a decode step of %d requests runs without a CUDA graph", rows)
            self.steps_without += 1
            return
        self.steps += 1
        self.rows += rows
        self.padded_rows += size - rows

    def describe(self) -> str:
        return (
            f"captured {self.captured} of {self.planned} CUDA graphs for decode steps of up to "
            f"{self.max_size} requests and other steps of up to {self.piecewise_tokens} tokens "
            f"in {self.seconds:.1f} s, {self.memory_bytes / 2**30:.2f} GiB"
        )

    def warnings(self) -> list[str]:
        """What a user has to know; empty when all went as planned."""
        found = []
        if self.cut_by is not None:
            line = f"{self.describe()}: {self.cut_by} ended it"
            padding = most_padding(self.decode_sizes)
            line += f"; decode steps are padded by up to {padding:.0%}"
            missing = without_graph(self.decode_sizes, self.max_size)
            if missing:
                spans = ", ".join(f"{r.start}-{r.stop - 1}" for r in missing)
                line += f", and those of {spans} requests run without a graph"
            found.append(line)
        if self.steps_without:
            found.append(
                f"{self.steps_without} decode steps ran without a CUDA graph, which is slower; "
                f"{self.steps} ran with one"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "captured": self.captured,
            "planned": self.planned,
            "capture_s": round(self.seconds, 2),
            "memory_mib": round(self.memory_bytes / 2**20, 1),
            "largest": max(self.decode_sizes, default=0),
            "piecewise_tokens": self.piecewise_tokens,
            "decode_steps": self.steps,
            "decode_steps_without_graph": self.steps_without,
            "padding": round(self.padded_rows / self.rows, 4) if self.rows else 0.0,
            "warnings": self.warnings(),
        }


class Memory(NamedTuple):
    """Bytes of the device: free for any process, and held by this one's tensors and graphs."""

    free: int
    held: int

    @classmethod
    def now(cls) -> Memory:
        return cls(torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved())


def taken(before: Memory, now: Memory, num_captured: int) -> int:
    """Bytes that the capture took, whatever other processes do meanwhile.

    What tensors in graphs take is known. What the driver keeps for them is only seen in the free
    memory, which others change as well: more than DRIVER_BYTES for each job is theirs.
    """
    held = now.held - before.held
    others = before.free - now.free - held
    return held + max(0, min(others, num_captured * DRIVER_BYTES))


def jobs_for(sizes: Sequence[int], capture: Callable[[int], None]) -> list[CaptureJob]:
    """A job for each size, in the order of use."""

    def job(place: int, size: int) -> CaptureJob:
        return CaptureJob(place, lambda: capture(size))

    return [job(place, size) for place, size in enumerate(capture_order(sizes))] if sizes else []


def capture_all(
    jobs: Sequence[CaptureJob],
    limits: CaptureLimits,
    progress: Progress | None = None,
    now: Callable[[], float] = time.monotonic,
    memory: Callable[[], Memory] = Memory.now,
    on_any_rank: Callable[[bool], bool] = bool,
) -> CaptureReport:
    """Capture graphs, those of every kind in turns, until all are or a limit is reached.

    Ranks that have to capture the same ones end together: `on_any_rank` knows of their limits.
    """
    report, begin, before = CaptureReport(planned=len(jobs)), now(), memory()
    for job in sorted(jobs, key=lambda job: job.place):
        job.capture()
        report.captured += 1
        report.seconds = now() - begin
        report.memory_bytes = taken(before, memory(), report.captured)
        if progress is not None:
            progress(report.captured, report.planned)
        if report.captured == report.planned:
            break
        report.cut_by = limits.reached(report)
        if on_any_rank(report.cut_by is not None):
            report.cut_by = report.cut_by or "a limit on another rank"
            break
    return report


@contextmanager
def capturing(capture: torch.cuda.graph) -> Iterator[None]:
    """Capture as `with capture` would, but keep the memory that torch has cached.

    It would be given back before every capture, and the run before the next one would ask the
    driver for it again. A capture in pieces puts other graphs in place of its first.
    """
    with torch.cuda.stream(capture.capture_stream):
        mode = capture.capture_error_mode
        capture.cuda_graph.capture_begin(*capture.pool, capture_error_mode=mode)  # type: ignore[misc]
        try:
            yield
        finally:
            capture.cuda_graph.capture_end()


class Unowned:
    """An address in a graph's memory, as torch.as_tensor() reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{size}",
            "data": (tensor.data_ptr(), False),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "version": 3,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, without keeping their memory from the graphs captured later.

    Graphs that share a pool are replayed one after another, and what one writes is read before the
    next replay. So their largest outputs may lie in the same place: memory that capture frees stays
    the pool's while a graph lives, and is given to the next capture.
    """
    return torch.as_tensor(Unowned(tensor), device=tensor.device).view(tensor.dtype)
