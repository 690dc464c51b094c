"""Offline throughput: cells of requests, round by round, beside their ceiling."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.bench.options import BenchConfig
from tokenmill.bench.roofline import PeakRates, Roofline
from tokenmill.bench.workload import BenchError, Cell, Prompts, make_prompts
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from tokenmill.bench.results.reports import CellReport
    from tokenmill.core.requests import Engine

WARMUP_ROUND = -1
OURS = "tokenmill"

Update = Callable[[int, int], None]


@dataclass(slots=True)
class CellRun:
    """One run of a cell; `times` has one entry per request."""

    seconds: float
    times: list[RequestTimes] = field(default_factory=list)
    num_accepted: int = 0  # drafts that came true


class OurEngine:
    name = OURS

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_runs = 0

    def run(self, cell: Cell, prompts: Prompts) -> CellRun:
        """Submit all prompts at once and step until every one has its tokens."""
        from tokenmill.core.requests import Generate, Request

        self._num_runs += 1
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
            for length in cell.output_lens
        ]
        num_accepted = sum(self._engine.stats().num_accepted)
        begin = time.monotonic_ns()
        times: dict[str, RequestTimes] = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{cell.name}-{self._num_runs}-{index}"
            times[request_id] = RequestTimes(begin)
            self._engine.submit(
                Request(request_id, Generate(prompt, sampling[index]), arrival_ns=begin)
            )
        self._step_until_done(set(times), times)
        seconds = (time.monotonic_ns() - begin) / 1e9
        _check_counts(cell, [t.num_tokens for t in times.values()])
        num_accepted = sum(self._engine.stats().num_accepted) - num_accepted
        return CellRun(seconds, list(times.values()), num_accepted)

    def _step_until_done(self, open_ids: set[str], times: dict[str, RequestTimes]) -> None:
        while open_ids:
            for output in self._engine.step():
                now_ns = time.monotonic_ns()
                if output.token_ids:
                    times[output.request_id].record(now_ns, len(output.token_ids))
                if output.num_cached_tokens:
                    raise BenchError(f"{output.request_id} was answered from the prefix cache")
                if output.finish_reason is not None:
                    open_ids.discard(output.request_id)
                    if output.finish_reason != FinishReason.LENGTH:
                        reason = output.error or output.finish_reason
                        raise BenchError(f"{output.request_id} did not run: {reason}")


def _check_counts(cell: Cell, counts: Sequence[int]) -> None:
    if list(counts) != cell.output_lens:
        wrong = [pair for pair in zip(cell.output_lens, counts, strict=True) if pair[0] != pair[1]]
        raise BenchError(
            f"{cell.name}: {len(wrong)} of {cell.num_prompts} requests have other lengths than "
            f"asked for, the first {wrong[0][1]} tokens for {wrong[0][0]}"
        )


def measure(
    engine: OurEngine,
    cells: Sequence[Cell],
    config: BenchConfig,
    vocab_size: int,
    progress: Update = lambda done, total: None,
) -> dict[str, list[CellRun]]:
    """The runs of every cell: a short one to warm up, then `config.num_rounds` that count."""
    measured: dict[str, list[CellRun]] = {cell.name: [] for cell in cells}
    total = len(cells) * (config.num_rounds + 1)
    done = 0
    for cell in cells:
        for round_index in range(WARMUP_ROUND, config.num_rounds):
            this = cell.warmup() if round_index == WARMUP_ROUND else cell
            prompts = make_prompts(this, round_index, config.seed, vocab_size)
            run = engine.run(this, prompts)
            if round_index != WARMUP_ROUND:
                measured[cell.name].append(run)
            done += 1
            progress(done, total)
    return measured


def cell_report(cell: Cell, runs: Sequence[CellRun]) -> CellReport:
    """Figures of one cell; the median run counts."""
    from tokenmill.bench.results.reports import CellReport

    seconds = statistics.median(run.seconds for run in runs)
    times = [t for run in runs for t in run.times]
    num_tokens = cell.num_input_tokens + cell.num_output_tokens
    rates = [round(cell.num_counted_tokens / run.seconds, 2) for run in runs]
    report = CellReport(
        tok_s=round(cell.num_counted_tokens / seconds, 2),
        tok_s_runs=rates,
        output_tok_s=round(cell.num_output_tokens / seconds, 2),
        total_tok_s=round(num_tokens / seconds, 2),
        seconds=round(seconds, 4),
        num_prompts=cell.num_prompts,
        num_input_tokens=cell.num_input_tokens,
        num_output_tokens=cell.num_output_tokens,
    )
    if times:
        report.ttft_ms = summarize((t.ttft_ms for t in times), 2)
        report.tpot_ms = summarize((t.tpot_ms for t in times), 2)
    return report


def tokens_per_step(cell: Cell, runs: Sequence[CellRun]) -> float:
    """What a sequence gained in a decode step: one token, and the drafts that came true."""
    num_decoded = (cell.num_output_tokens - cell.num_prompts) * len(runs)
    num_drawn = num_decoded - sum(run.num_accepted for run in runs)
    return num_decoded / num_drawn if num_drawn > 0 else 1.0


def with_ceiling(
    report: CellReport, cell: Cell, roof: Roofline, machine: PeakRates, dtype: str
) -> CellReport:
    """Add both bounds of the cell, and how near to the serial one the report is."""
    from msgspec.structs import replace

    seconds = report.seconds
    return replace(
        report,
        ceiling_tok_s=round(cell.num_counted_tokens / roof.serial_s, 2),
        overlap_ceiling_tok_s=round(cell.num_counted_tokens / roof.overlap_s, 2),
        share_of_ceiling=round(roof.serial_s / seconds, 3),
        mfu=round(roof.flops / seconds / machine.flops_per_s(dtype), 3),
        mbu=round(roof.bytes_read / seconds / machine.read_bytes_per_s, 3),
    )


def peak_rss_mib() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the process that forked this one, too
        return round(int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)
