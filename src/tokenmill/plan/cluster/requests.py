"""A simulated request that has not ended, with all that another worker needs to continue it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.plan.cluster.rank_work import OUTPUT_TOKEN, TokenCount
from tokenmill.plan.cluster.worker import Worker
from tokenmill.sched.sequence import Sequence


@lru_cache(1 << 16)
def _sampling(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True)


@dataclass(slots=True, eq=False)
class SimulatedHandover:
    """A prompt that another worker computes than the one that decodes."""

    request: Request  # as the worker that decodes will see it
    source: Worker
    told: bool = False  # the worker that decodes has the request and waits for its KV
    num_blocks: int = 0  # that are computed
    num_last: int = 0  # of these, those that were announced last
    is_ready: bool = False  # all are computed
    receiver: tuple[int, Sequence] | None = None  # rank and sequence that get the KV
    began_late: bool = False  # the receiver had no room before all was computed
    is_moving: bool = False


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    number: int
    num_prompt: int
    num_output: int
    times: RequestTimes
    prompt: list[int] | None = None  # token ids, where prompts share some
    num_known: int = 0  # output tokens when it was last sent to a worker
    num_before: int = 0  # of these, those before the run
    worker: Worker | None = None  # who generates; None: held until one can take it
    handover: SimulatedHandover | None = None
    num_sent: int = 0
    sent_as: str = ""
    num_deaths: int = 0
    num_tokens_at_death: int = 0
    prefill_locally: bool = False  # its prompt is computed where it decodes
    is_measured: bool = False

    def __post_init__(self) -> None:
        self.sent_as = str(self.number)

    @property
    def token_ids(self) -> range:
        """As many as are known; what they are does not matter."""
        return range(self.num_known)

    @property
    def may_hand_over(self) -> bool:
        return not self.num_known and not self.prefill_locally

    def routed_tokens(self) -> list[int]:
        """What the router hashes: prompts share what the trace says, else nothing."""
        if self.prompt is not None:
            return self.prompt + self._output()
        return [self.number] * (self.num_prompt + self.num_known)

    def _output(self) -> list[int]:
        if self.prompt is None:
            return TokenCount(self.num_known)
        return [OUTPUT_TOKEN + self.number] * self.num_known

    def request(self, kv_from: str | None = None) -> Request:
        prompt = TokenCount(self.num_prompt) if self.prompt is None else self.prompt
        return Request(
            self.sent_as,
            Generate(
                prompt, _sampling(self.num_output), output_token_ids=self._output(), kv_from=kv_from
            ),
            arrival_ns=self.times.arrival_ns,
        )

    def take_back(self) -> None:
        """Take the request off its worker; its new id tells late answers from new ones."""
        self.worker, self.handover = None, None
        self.num_sent += 1
        self.sent_as = f"{self.number}~{self.num_sent}"


LEAST_TOKENS = 16  # of a request that still runs, for its time per token to count


@dataclass(slots=True)
class SimulationOutcome:
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
