"""What a simulation saw, and the figures of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.metrics import summarize
from tokenmill.core.types import FinishReason
from tokenmill.plan.cluster.entry import SimulatedRequest
from tokenmill.plan.cluster.worker import Worker

LEAST_TOKENS = 16  # of a request that still runs, for its time per token to count


@dataclass(slots=True)
class SimulationOutcome:
    """Counts of a run."""

    elapsed_s: float = 0.0
    num_arrived: int = 0
    num_finished: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    measured: list[SimulatedRequest] = field(default_factory=list)
    ended_entries: list[SimulatedRequest] = field(default_factory=list)
    running: list[SimulatedRequest] = field(default_factory=list)  # at the end
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_migrations: int = 0
    num_recomputed: int = 0  # tokens of requests that moved
    happened: list[tuple[int, str, str, int]] = field(default_factory=list)

    def ended(self, entry: SimulatedRequest, reason: FinishReason) -> None:
        self.num_finished += 1
        self.finished[reason.value] = self.finished.get(reason.value, 0) + 1
        self.ended_entries.append(entry)

    def report(self, workers: Iterable[Worker], gpus: int) -> dict[str, Any]:
        """The figures."""
        there = list(workers)
        tokens = sum(worker.tally.num_output_tokens for worker in there)
        computed = sum(worker.tally.num_prompt_tokens for worker in there)
        computed += self.num_cached_tokens - self.num_recomputed
        elapsed_s = self.elapsed_s
        tok_s = tokens / elapsed_s if elapsed_s else 0.0
        return {
            "output_tok_s": round(tok_s, 1),
            "tok_s_per_gpu": round(tok_s / gpus, 1),
            "samples_s": round(self.num_finished / elapsed_s, 3) if elapsed_s else None,
            "duration_s": round(elapsed_s, 3),
            "num_requests": self.num_arrived,
            "num_finished": self.finished,
            "num_running": len(self.running),
            "ttft_ms": summarize((entry.times.ttft_ms for entry in self.measured), 2),
            "tpot_ms": summarize(self._tpots(), 2),
            "itl_ms": gap_percentiles([gap for w in there for gap in w.tally.gaps]),
            "prompts_computed": round(computed / max(1, self.num_prompt_tokens), 4),
            "prefix_reuse": round(self.num_cached_tokens / max(1, self.num_prompt_tokens), 4),
            "num_preemptions": sum(
                rank.scheduler.stats().num_preemptions for w in there for rank in w.ranks
            ),
            "num_migrations": self.num_migrations,
            "num_recomputed_tokens": self.num_recomputed,
        }

    def _tpots(self) -> list[float | None]:
        some = [e for e in self.running if e.times.num_tokens - e.num_sent >= LEAST_TOKENS]
        return [entry.times.tpot_ms for entry in [*self.ended_entries, *some]]


def gap_percentiles(gaps: list[tuple[float, int]]) -> dict[str, float]:
    """Of the time between two tokens: each step counts for every sequence that decodes in it."""
    ordered = sorted(gap for gap in gaps if gap[1])
    total = sum(count for _, count in ordered)
    if not total:
        return {}
    found = {"mean": 1e3 * sum(gap * count for gap, count in ordered) / total}
    for percent in (50, 90, 99):
        seen = 0
        for gap, count in ordered:
            seen += count
            if seen >= total * percent / 100:
                found[f"p{percent}"] = 1e3 * gap
                break
    found["max"] = 1e3 * ordered[-1][0]
    return {name: round(value, 2) for name, value in found.items()}
