"""Offline throughput: the same cells for every contestant, round by round, beside their ceiling."""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.core.config import BenchConfig
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.spec import ModelSpec
from tokenmill.core.types import Engine, FinishReason, Request, SamplingParams, TokenmillError

WARMUP_ROUND = -1
WARMUP_OUTPUT_LEN = 8
OURS = "tokenmill"

Prompts = list[list[int]]
Update = Callable[[int, int], None]


class BenchError(TokenmillError):
    """A contestant did not do what the cell asks for."""


@dataclass(frozen=True, slots=True)
class Cell:
    """So many requests at once, each with so many tokens in and out."""

    name: str
    num_prompts: int
    input_len: int
    output_len: int

    @property
    def counts_prompt(self) -> bool:
        """True where the prompt tokens are the figure, not the output tokens."""
        return self.output_len == 1

    @property
    def num_counted_tokens(self) -> int:
        return self.num_prompts * (self.input_len if self.counts_prompt else self.output_len)

    @property
    def shape(self) -> str:
        return f"{self.num_prompts} x ({self.input_len} in, {self.output_len} out)"


@dataclass(slots=True)
class CellRun:
    """One run of a cell; `times` has one entry per request where the contestant stamps them."""

    seconds: float
    times: list[RequestTimes] = field(default_factory=list)


class Contestant(Protocol):
    """Something that can run a cell: this engine or a peer."""

    @property
    def name(self) -> str: ...

    def run(self, cell: Cell, prompts: Prompts) -> CellRun:
        """Generate exactly `cell.output_len` tokens for each prompt; raise BenchError if not."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine does at best, measured in the same run."""

    gemm_flops: dict[str, float]  # FLOP/s by compute type
    read_bytes_per_s: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The least a cell can cost: linear layers at GEMM rate, decode weights and KV at read rate."""

    seconds: float
    flops: float
    bytes_read: float


def make_cells(config: BenchConfig) -> list[Cell]:
    """The cells that a config asks for."""
    cells = (
        Cell("batch", config.num_prompts, config.input_len, config.output_len),
        Cell("single", 1, 128, 128),
        Cell("prefill", 1, 2048, 1),
    )
    return [cell for cell in cells if cell.name in config.cells]


def make_prompts(cell: Cell, round_index: int, seed: int, vocab_size: int) -> Prompts:
    """Random tokens, different in every request and round: no prefix cache can help.

    The ends of a vocabulary hold the special tokens; they are left out.
    """
    rng = random.Random(f"{seed}/{cell.name}/{round_index}")
    low, high = vocab_size // 32, vocab_size - vocab_size // 8
    return [
        [rng.randrange(low, high) for _ in range(cell.input_len)] for _ in range(cell.num_prompts)
    ]


class OurEngine:
    """An Engine as a contestant."""

    name = OURS

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_runs = 0

    def run(self, cell: Cell, prompts: Prompts) -> CellRun:
        """Submit all prompts at once and step until every one has its tokens."""
        self._num_runs += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=cell.output_len, ignore_eos=True)
        begin = time.monotonic_ns()
        times: dict[str, RequestTimes] = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{cell.name}-{self._num_runs}-{index}"
            times[request_id] = RequestTimes(begin)
            self._engine.submit(Request(request_id, prompt, sampling, arrival_ns=begin))
        self._step_until_done(set(times), times)
        seconds = (time.monotonic_ns() - begin) / 1e9
        _check_counts(cell, [t.num_tokens for t in times.values()])
        return CellRun(seconds, list(times.values()))

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
    if list(counts) != [cell.output_len] * cell.num_prompts:
        raise BenchError(
            f"{cell.name}: expected {cell.output_len} tokens for each of {cell.num_prompts} "
            f"prompts, got {sorted(set(counts))} for {len(counts)}"
        )


@dataclass(slots=True)
class Measured:
    """Runs by cell and contestant, and why a contestant has none."""

    runs: dict[str, dict[str, list[CellRun]]]
    failures: dict[str, str]


def measure(
    contestants: Sequence[Contestant],
    cells: Sequence[Cell],
    config: BenchConfig,
    vocab_size: int,
    progress: Update = lambda done, total: None,
) -> Measured:
    """Warm up, then `config.rounds` rounds of every cell; in a round each contestant runs once.

    Drift of a shared machine so hits all alike. Only our own failure is an error.
    """
    measured = Measured({cell.name: {} for cell in cells}, {})
    total = len(cells) * (config.rounds + 1) * len(contestants)
    done = 0
    for cell in cells:
        for round_index in range(WARMUP_ROUND, config.rounds):
            prompts = make_prompts(cell, round_index, config.seed, vocab_size)
            for contestant in contestants:
                if contestant.name not in measured.failures:
                    _run_once(contestant, cell, prompts, round_index, measured)
                done += 1
                progress(done, total)
    return measured


def _run_once(
    contestant: Contestant, cell: Cell, prompts: Prompts, round_index: int, measured: Measured
) -> None:
    if round_index == WARMUP_ROUND:
        output_len = min(cell.output_len, WARMUP_OUTPUT_LEN)
        cell = Cell(cell.name, cell.num_prompts, cell.input_len, output_len)
    try:
        run = contestant.run(cell, prompts)
    except BenchError as error:
        if contestant.name == OURS:
            raise
        measured.failures[contestant.name] = str(error)
        return
    if round_index != WARMUP_ROUND:
        measured.runs[cell.name].setdefault(contestant.name, []).append(run)


def ceiling(cell: Cell, spec: ModelSpec, dtype: str, machine: Machine) -> Ceiling:
    """The time of a cell if nothing but linear layers and the reading of memory took any."""
    width, kv_width = {"fp32": (4, 4), "int8": (1, 4), "bf16": (2, 2)}[dtype]
    gemm = machine.gemm_flops[dtype]
    head = 2 * spec.vocab_size * spec.hidden_size
    token = spec.flops_per_token(0)
    prefill_flops = cell.num_prompts * (cell.input_len * (token - head) + head)
    num_steps = cell.output_len - 1
    step_flops = cell.num_prompts * token
    mean_context = cell.input_len + cell.output_len / 2
    step_bytes = token / 2 * width
    step_bytes += cell.num_prompts * mean_context * spec.kv_bytes_per_token(kv_width)
    step_seconds = max(step_flops / gemm, step_bytes / machine.read_bytes_per_s)
    return Ceiling(
        seconds=prefill_flops / gemm + num_steps * step_seconds,
        flops=prefill_flops + num_steps * step_flops,
        bytes_read=num_steps * step_bytes,
    )


def cell_report(cell: Cell, runs: Sequence[CellRun]) -> dict[str, Any]:
    """Figures of one contestant in one cell; the median run counts."""
    seconds = statistics.median(run.seconds for run in runs)
    times = [t for run in runs for t in run.times]
    num_tokens = cell.num_prompts * (cell.input_len + cell.output_len)
    rates = [round(cell.num_counted_tokens / run.seconds, 2) for run in runs]
    report: dict[str, Any] = {
        "tok_s": round(cell.num_counted_tokens / seconds, 2),
        "tok_s_runs": rates,
        "output_tok_s": round(cell.num_prompts * cell.output_len / seconds, 2),
        "total_tok_s": round(num_tokens / seconds, 2),
        "seconds": round(seconds, 4),
    }
    if times:
        report["ttft_ms"] = _rounded(summarize(t.ttft_ms for t in times))
        report["tpot_ms"] = _rounded(summarize(t.tpot_ms for t in times))
    return report


def with_ceiling(
    report: dict[str, Any], cell: Cell, spec: ModelSpec, dtype: str, machine: Machine
) -> dict[str, Any]:
    """Add the ceiling of the cell, and how near to it the report is."""
    roof = ceiling(cell, spec, dtype, machine)
    seconds = report["seconds"]
    return report | {
        "ceiling_tok_s": round(cell.num_counted_tokens / roof.seconds, 2),
        "share_of_ceiling": round(roof.seconds / seconds, 3),
        "mfu": round(roof.flops / seconds / machine.gemm_flops[dtype], 3),
        "mbu": round(roof.bytes_read / seconds / machine.read_bytes_per_s, 3),
    }


def ratios(reports: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float | None]:
    """Ours over the best peer by cell; None where no peer ran."""
    result: dict[str, float | None] = {}
    for name, by_contestant in reports.items():
        peers = [r["tok_s"] for who, r in by_contestant.items() if who != OURS]
        result[name] = round(by_contestant[OURS]["tok_s"] / max(peers), 3) if peers else None
    return result


def peak_rss_mib() -> float:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def _rounded(summary: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in summary.items()}
