"""Ranks of attention data parallelism in virtual time, over real schedulers and block pools.

The ranks step together: a step takes what its price says, and whoever has less to do waits. There
are `concurrency` requests at any time; those that find no place wait in one queue and get a rank
when there is one. A run begins as if it had gone on for long: the places are taken by requests
somewhere in their answers, whose KV is there.
"""

from __future__ import annotations

import gc
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.metrics import NS_PER_MS, RequestTimes, summarize
from tokenmill.core.specs.spec import Windows
from tokenmill.core.types import Request, SamplingParams, StepResult, TokenmillError
from tokenmill.plan.cluster.load import begun
from tokenmill.plan.rank_cost import RankWork, mean_work
from tokenmill.routing.attention_dp import ContextPolicy, assign
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

START_NS = NS_PER_MS  # RequestTimes reads 0 as "not yet"
TOKEN = [0]  # what every sampled token is; nothing depends on it
Lengths = Sequence[tuple[int, int]]  # (input, output) of a request


def prompt_budget(lengths: Lengths, max_num_seqs: int, slack: float) -> int:
    """Tokens of a step with which a full rank's prompts keep up, `slack` times over.

    A request takes a place for as many steps as its answer has tokens, and brings its prompt. With
    hardly more than its mean every rank computes a piece of a prompt in almost every step.
    """
    per_step = sum(length for length, _ in lengths) / sum(output for _, output in lengths)
    return max_num_seqs + math.ceil(slack * max_num_seqs * per_step)


class StepCost(Protocol):
    """How long the ranks take for a step."""

    def step_s(self, ranks: Sequence[RankWork]) -> float: ...


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """The ranks, their load, and how long they are watched."""

    num_ranks: int
    concurrency: int  # requests of all ranks, those that wait included
    max_num_seqs: int  # of a rank
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int = 64
    num_steps: int = 1000
    num_warmup_steps: int = 100  # before these
    seed: int = 0
    windows: Windows = (None,)  # of the model's layers, whose positions a work counts


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has no rank yet."""

    num_input: int
    num_output: int
    arrival_ns: int | None  # None: before the run


@dataclass(slots=True)
class Tally:
    """What the measured steps were, and the first tokens in them."""

    num_steps: int = 0
    num_held: int = 0
    num_mixed: int = 0  # steps with prompts on some ranks and none on others
    elapsed_ns: int = 0
    balance: float = 0.0  # mean over max tokens of the ranks, summed over steps
    balanced_ns: float = 0.0  # the same, times the time of the step
    even_ns: int = 0  # time of the steps, had every rank the mean work
    num_context_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    ttft_ms: list[float | None] = field(default_factory=list)
    placed_ms: list[float] = field(default_factory=list)  # from a place on a rank to first token

    def count(self, works: Sequence[RankWork], step_ns: int, even_ns: int, held: bool) -> None:
        tokens = [work.num_tokens for work in works]
        balance = sum(tokens) / len(tokens) / max(tokens)
        num_with_context = sum(work.num_context_tokens > 0 for work in works)
        self.num_steps += 1
        self.num_held += held
        self.num_mixed += 0 < num_with_context < len(works)
        self.elapsed_ns += step_ns
        self.even_ns += even_ns
        self.balance += balance
        self.balanced_ns += balance * step_ns
        self.num_context_tokens += sum(work.num_context_tokens for work in works)

    def report(self) -> dict[str, Any]:
        """Figures of the measured steps.

        even_tok_s prices the same steps with even ranks. sol_tok_s is TensorRT-LLM's: it takes all
        time for proportional to the fullest rank's tokens, so that it is far above the other.
        """
        duration_s = self.elapsed_ns / 1e9
        tok_s = self.num_output_tokens / duration_s
        by_time = self.balanced_ns / self.elapsed_ns
        return {
            "output_tok_s": round(tok_s, 1),
            "even_tok_s": round(self.num_output_tokens / self.even_ns * 1e9, 1),
            "sol_tok_s": round(tok_s / by_time, 1),
            "balance": round(self.balance / self.num_steps, 4),
            "balance_by_time": round(by_time, 4),
            "step_ms": round(duration_s * 1e3 / self.num_steps, 3),
            "ttft_ms": summarize(self.ttft_ms, 2),
            "placed_to_first_token_ms": summarize(self.placed_ms, 2),
            "duration_s": round(duration_s, 3),
            "num_steps": self.num_steps,
            "held_steps": round(self.num_held / self.num_steps, 4),
            "mixed_steps": round(self.num_mixed / self.num_steps, 4),
            "num_context_tokens": self.num_context_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_finished": self.num_finished,
        }


class Ranks:
    """One run: a load, a policy, and a price for every step."""

    def __init__(
        self, lengths: Lengths, config: RanksConfig, cost: StepCost, policy: ContextPolicy
    ) -> None:
        longest = max(sum(both) for both in lengths)
        if longest > config.num_blocks * config.block_size:
            raise TokenmillError(
                f"a request of {longest} tokens does not fit into the KV cache of a rank, "
                f"which holds {config.num_blocks * config.block_size}"
            )
        self._lengths, self._config = lengths, config
        self._cost, self._policy = cost, policy
        self._rng = random.Random(config.seed)
        limits = SchedulerConfig(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.concurrency,
            max_model_len=longest + 1,
        )
        self.ranks = [
            Scheduler(
                limits,
                BlockPool(config.num_blocks, config.block_size, prefix_cache=False),
                frozenset(),
            )
            for _ in range(config.num_ranks)
        ]
        self._num_places = config.num_ranks * config.max_num_seqs
        self._prompts: dict[int, list[int]] = {}  # by length
        self._queue: deque[Arrival] = deque()
        # Requests without a first token: when they arrived, and when they got a rank.
        self._placed: dict[str, tuple[int | None, int]] = {}
        self._num_requests = 0
        self._now_ns = START_NS
        self._tally = Tally()

    def run(self) -> dict[str, Any]:
        """Fill the ranks, warm up, and watch; the report."""
        self._fill()
        self._steps(self._config.num_warmup_steps)
        self._tally = Tally()
        self._steps(self._config.num_steps)
        stats = [rank.stats() for rank in self.ranks]
        num_blocks = sum(s.num_kv_blocks for s in stats)
        return self._tally.report() | {
            "num_preemptions": sum(s.num_preemptions for s in stats),
            "kv_share": round(sum(s.num_kv_blocks_used for s in stats) / num_blocks, 4),
        }

    # Requests come.

    def _fill(self) -> None:
        """Take the places with requests in the middle of their answers; the others wait."""
        num_places = min(self._config.concurrency, self._num_places)
        under_way = begun(self._lengths, num_places, self._rng)
        totals = [length + count for length, _, count in under_way]
        loads = [rank.load() for rank in self.ranks]
        for one, index in zip(under_way, assign(loads, totals), strict=True):
            self.ranks[index].add(self._request(*one))
        for rank in self.ranks:
            rank.schedule(self._now_ns, hold_context=True)
            self._receive(rank)
        for _ in range(self._config.concurrency - len(under_way)):
            self._arrive(None)

    def _arrive(self, arrival_ns: int | None) -> None:
        self._queue.append(Arrival(*self._rng.choice(self._lengths), arrival_ns))

    def _request(self, num_input: int, num_output: int, known: int | None = None) -> Request:
        """A prompt to compute; with `known`, one that has so many tokens, and KV to receive."""
        self._num_requests += 1
        prompt = self._prompts.get(num_input)
        if prompt is None:
            prompt = self._prompts[num_input] = TOKEN * num_input
        return Request(
            str(self._num_requests),
            prompt,
            SamplingParams(max_tokens=num_output, ignore_eos=True),
            arrival_ns=self._now_ns,
            output_token_ids=TOKEN * (known or 0),
            kv_from=None if known is None else "before the run",
        )

    def _place(self) -> None:
        """Give queued requests to ranks as far as there are places."""
        loads = [rank.load() for rank in self.ranks]
        num_free = self._num_places - sum(num_requests for num_requests, _ in loads)
        new = [self._queue.popleft() for _ in range(min(num_free, len(self._queue)))]
        chosen = assign(loads, [arrival.num_input for arrival in new])
        for arrival, rank in zip(new, chosen, strict=True):
            request = self._request(arrival.num_input, arrival.num_output)
            self._placed[request.request_id] = arrival.arrival_ns, self._now_ns
            self.ranks[rank].add(request)

    # All ranks step.

    def _steps(self, count: int) -> None:
        """No cycles are made here, and looking for them would walk all tokens again and again."""
        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(count):
                self._step()
        finally:
            if collects:
                gc.enable()

    def _step(self) -> None:
        self._place()
        held = self._policy.hold([rank.outlook() for rank in self.ranks])
        batches = [rank.schedule(self._now_ns, held) for rank in self.ranks]
        works = [RankWork.of(batch, self._config.windows) for batch in batches]
        step_ns = round(self._cost.step_s(works) * 1e9)
        even_ns = round(self._cost.step_s([mean_work(works)] * len(works)) * 1e9)
        self._now_ns += step_ns
        self._tally.count(works, step_ns, even_ns, held)
        for rank, batch in zip(self.ranks, batches, strict=True):
            self._finish(rank, batch)

    def _finish(self, rank: Scheduler, batch: Batch) -> None:
        """Whoever has all its known tokens computed gets one more."""
        sampled = [
            TOKEN if seq.num_computed_tokens + num_new == len(seq.token_ids) else []
            for seq, num_new in batch.items
        ]
        outputs = rank.update(batch, StepResult(sampled))
        self._tally.num_output_tokens += len(outputs)
        placed = self._placed
        for output in outputs:
            if output.request_id in placed:
                self._record_first(*placed.pop(output.request_id))
            if output.finish_reason is not None:
                self._tally.num_finished += 1
                self._arrive(self._now_ns)
        self._receive(rank)

    def _receive(self, rank: Scheduler) -> None:
        """The KV of requests that began before the run is there at once."""
        for seq in rank.receiving.take_started():
            rank.receiving.received(seq, TOKEN[0])

    def _record_first(self, arrival_ns: int | None, placed_ns: int) -> None:
        self._tally.placed_ms.append((self._now_ns - placed_ns) / NS_PER_MS)
        if arrival_ns is not None:
            times = RequestTimes(arrival_ns)
            times.record(self._now_ns, 1)
            self._tally.ttft_ms.append(times.ttft_ms)
