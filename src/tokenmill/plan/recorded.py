"""A recorded run, replayed over the real scheduler: the same batches, then with other settings.

`reproduce` drives a scheduler with the calls of the file (sched/recording.py) and compares every
batch that it chooses with the recorded one. `simulate` plays the same arrivals in virtual time: a
step takes what a formula fitted to the recorded steps says, which is the one thing that a replay
can be wrong about; any setting of the scheduler may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.cost import Cost
from tokenmill.core.kv_groups import Sliding
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams, StepResult, TokenmillError
from tokenmill.routing.step_rates import StepRates, StepSums, fit_rates
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.recording import VERSION
from tokenmill.sched.scheduler import Batch, Scheduler, Sequence
from tokenmill.sched.sequence import PENDING

STOP = 1  # the token that ends a request
DRAFT = 2  # a guess: only the number of accepted ones decides
KNOWN, UNKNOWN = 1 << 40, 1 << 61  # where the tokens of hashed and of other blocks begin
MAX_BLOCK = 1 << 20


class RecordError(TokenmillError):
    """A file is not a record, or not one that can be replayed."""


@dataclass(slots=True)
class RecordedRequest:
    """What is known of a request: its lengths, and the salted hashes of its full blocks."""

    number: int
    arrival_ns: int
    deadline_ns: int | None
    priority: int
    num_prompt: int
    num_given: int  # output tokens that another worker had made
    max_tokens: int | None
    min_tokens: int
    prompt_logprobs: bool
    reason: str | None = None  # None while it had not ended
    num_output: int = 0
    hashes: list[str] = field(default_factory=list)
    cost: Cost | None = None  # None while it had not ended, or was not recorded

    def tokens(self, start: int, end: int, block_size: int, known: Mapping[str, int]) -> list[int]:
        """Tokens [start, end) that make blocks equal where their hashes are."""
        found = []
        for index in range(start, end):
            block, offset = divmod(index, block_size)
            if block < len(self.hashes):
                found.append(KNOWN + known[self.hashes[block]] * MAX_BLOCK + offset)
            else:
                found.append(UNKNOWN + (self.number << 32) + index)
        last = self.num_prompt + self.num_output - 1
        if self.reason == FinishReason.STOP.value and start <= last < end:
            found[last - start] = STOP
        return found


@dataclass(slots=True)
class RunRecord:
    """A file: the scheduler that was recorded, its requests, and its events in order."""

    path: Path
    config: SchedulerConfig
    num_blocks: int
    block_size: int
    prefix_cache: bool
    sliding: Sliding
    progress: tuple[int, int]  # of the recorded scheduler at the beginning
    requests: list[RecordedRequest]
    events: list[list[Any]]
    known: dict[str, int]  # a number of each hash
    num_gpus: int = 1

    def scheduler(self, config: SchedulerConfig, num_blocks: int) -> Scheduler:
        pool = BlockPool(num_blocks, self.block_size, self.prefix_cache, self.sliding)
        return Scheduler(config, pool, frozenset({STOP}))

    def request(self, recorded: RecordedRequest, arrival_ns: int, free: bool = False) -> Request:
        """A request of made-up tokens; a `free` one has no deadline and ends as it did."""
        num_known = recorded.num_prompt + recorded.num_given
        tokens = recorded.tokens(0, num_known, self.block_size, self.known)
        sampling = SamplingParams(
            max_tokens=recorded.max_tokens,
            min_tokens=0 if free else recorded.min_tokens,
            prompt_logprobs=0 if recorded.prompt_logprobs else None,
        )
        if free:
            sampling = replace(
                sampling,
                max_tokens=max(recorded.num_output, recorded.num_given + 1),
                ignore_eos=True,
            )
        return Request(
            str(recorded.number),
            Generate(
                tokens[: recorded.num_prompt],
                sampling,
                output_token_ids=tokens[recorded.num_prompt :],
            ),
            priority=recorded.priority,
            arrival_ns=arrival_ns,
            deadline_ns=None if free else recorded.deadline_ns,
        )

    def next_tokens(self, seq: Sequence, count: int) -> list[int]:
        recorded = self.requests[int(seq.request_id)]
        start = len(seq.token_ids) - (seq.token_ids[-1] == PENDING)
        return recorded.tokens(start, start + count, self.block_size, self.known)


def read_record(path: Path) -> RunRecord:
    """Read a file; RecordError says what is wrong with it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        header = json.loads(lines[0])
        version, config = header["version"], header["scheduler"]
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise RecordError(f"{path}: is not a record of serve --record: {error}") from None
    if version != VERSION:
        raise RecordError(f"{path}: has version {version}; this program reads version {VERSION}")
    names = {each.name for each in fields(SchedulerConfig)}
    record = RunRecord(
        path,
        SchedulerConfig(**{name: value for name, value in config.items() if name in names}),
        header["num_blocks"],
        header["block_size"],
        header["prefix_cache"],
        Sliding(*header["sliding"]),
        header["progress"],
        [],
        list(_events(path, lines[1:])),
        {},
        header.get("num_gpus", 1),
    )
    for event in record.events:
        if event[0] == "add":
            record.requests.append(RecordedRequest(*event[1:]))
        elif event[0] == "end":
            request = record.requests[event[1]]
            request.reason, request.num_output, request.hashes = event[2:5]
            request.cost = Cost(*event[5]) if len(event) > 5 else None
            for block_hash in request.hashes:
                record.known.setdefault(block_hash, len(record.known))
    if not record.requests:
        raise RecordError(f"{path}: holds no request")
    return record


def _events(path: Path, lines: list[str]) -> Iterator[list[Any]]:
    for number, line in enumerate(lines, 2):
        try:
            yield json.loads(line)
        except ValueError:
            if number <= len(lines):  # only the last line may be torn
                raise RecordError(f"{path}, line {number}: is not JSON") from None


@dataclass(frozen=True, slots=True)
class StepSample:
    """One recorded step: what it computed, and the milliseconds that it took."""

    num_prefill: int
    num_decodes: int
    num_kv_tokens: int
    time_ms: float

    def predicted_ms(self, rates: StepRates) -> float:
        mixed = rates.mixed if self.num_prefill else 0.0
        variable = rates.prefill * self.num_prefill + rates.sequence * self.num_decodes
        return rates.base + mixed + variable + rates.kv * self.num_kv_tokens


@dataclass(slots=True)
class Reproduction:
    """How far the batches agree, and what was recorded of steps and requests."""

    num_steps: int = 0
    num_equal: int = 0
    first_difference: str | None = None
    steps: list[StepSample] = field(default_factory=list)
    times: dict[int, RequestTimes] = field(default_factory=dict)
    num_preemptions: int = 0

    def rates(self) -> StepRates:
        sums = StepSums()
        for step in self.steps:
            sums.add(step.num_prefill, step.num_decodes, step.num_kv_tokens, step.time_ms)
        return fit_rates(sums.values)


class Reproducer:
    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._scheduler = record.scheduler(record.config, record.num_blocks)
        self._scheduler.resume(*record.progress)
        self._batches: dict[int, tuple[Batch, StepSample]] = {}
        self._num_chosen = 0
        self._singles: list[int] = []
        self._last_ns = 0  # when the last step ended
        self.found = Reproduction()

    def run(self) -> Reproduction:
        """All events in order; stops at the first batch that differs."""
        calls = {name: getattr(self, f"_{name}") for name in ("add", "abort", "schedule")}
        calls |= {name: getattr(self, f"_{name}") for name in ("advance", "update", "end")}
        calls |= {"preempt": self._preempt, "fail": self._fail, "unsampled": self._unsampled}
        calls["hold"] = lambda numbers: self._scheduler.hold(set(map(str, numbers)))
        for event in self._record.events:
            calls[event[0]](*event[1:])
            if self.found.first_difference is not None:
                break
        self.found.num_preemptions = self._scheduler.stats().num_preemptions
        return self.found

    def _add(self, number: int, arrival_ns: int, *_: Any) -> None:
        self._scheduler.add(self._record.request(self._record.requests[number], arrival_ns))
        self.found.times[number] = RequestTimes(arrival_ns)

    def _abort(self, number: int) -> None:
        self._scheduler.abort(str(number))

    def _end(self, *_: Any) -> None:
        self._scheduler.take_finished()

    def _schedule(
        self, now_ns: int, hold: int, singles: list[int] | None, chunks: list[list[int]]
    ) -> None:
        batch = self._scheduler.schedule(now_ns, bool(hold))
        self._scheduler.take_finished()
        self._singles = self._singles if singles is None else singles
        recorded = [[number, 1] for number in self._singles] + chunks
        chosen = [[int(seq.request_id), num_new] for seq, num_new in batch.items]
        number, self._num_chosen = self._num_chosen, self._num_chosen + 1
        if batch.items or recorded:
            self.found.num_steps += 1
            self.found.num_equal += chosen == recorded
            if chosen != recorded:
                self.found.first_difference = (
                    f"step {number}: recorded {_short(recorded)}, replayed {_short(chosen)}"
                )
        num_decodes, num_kv = batch.num_singles(), self._scheduler.pool.num_used_tokens
        sample = StepSample(batch.num_tokens - num_decodes, num_decodes, num_kv, 0.0)
        self._batches[number] = batch, sample

    def _advance(self, number: int) -> None:
        self._scheduler.advance(self._batches[number][0])

    def _unsampled(self, number: int, indexes: list[int]) -> None:
        self._batches[number][0].unsampled = indexes

    def _update(
        self,
        number: int,
        began_ns: int,
        ended_ns: int,
        counts: list[int],
        drafts: list[int] | None,
    ) -> None:
        batch, sample = self._batches.pop(number)
        time_ms = (ended_ns - max(began_ns, self._last_ns)) / 1e6
        self.found.steps.append(replace(sample, time_ms=time_ms))
        self._last_ns = ended_ns
        pairs = zip(batch.items, counts, strict=True)
        tokens = [self._record.next_tokens(seq, max(count, 0)) for (seq, _), count in pairs]
        errors = {index: "recorded" for index, count in enumerate(counts) if count < 0}
        guessed = None if drafts is None else [[DRAFT] * count for count in drafts]
        result = StepResult(tokens, draft_ids=guessed, errors=errors)
        for output in self._scheduler.update(batch, result):
            if output.token_ids:
                self.found.times[int(output.request_id)].record(ended_ns, len(output.token_ids))

    def _preempt(self, number: int) -> None:
        self._scheduler.preempt(self._batches.pop(number)[0], "recorded")

    def _fail(self, number: int) -> None:
        self._scheduler.fail(self._batches.pop(number)[0], "recorded")


def _short(items: list[list[int]]) -> str:
    return str(items) if len(items) <= 8 else f"{str(items[:8])[:-1]}, ... {len(items)} in all]"


def simulate(
    record: RunRecord, rates: StepRates, config: SchedulerConfig, num_blocks: int
) -> dict[int, RequestTimes]:
    """The recorded arrivals in virtual time under another configuration; requests by number.

    Requests end after as many tokens as they did; aborts and deadlines are left out.
    """
    scheduler = record.scheduler(config, num_blocks)
    times: dict[int, RequestTimes] = {}
    waiting = sorted(record.requests, key=lambda r: (r.arrival_ns, r.number))
    now_ns = waiting[0].arrival_ns
    index = 0
    while index < len(waiting) or scheduler.has_work():
        if not scheduler.has_work():
            now_ns = max(now_ns, waiting[index].arrival_ns)
        while index < len(waiting) and waiting[index].arrival_ns <= now_ns:
            request = record.request(waiting[index], waiting[index].arrival_ns, free=True)
            times[waiting[index].number] = RequestTimes(request.arrival_ns)
            scheduler.add(request)
            index += 1
        now_ns = _step(record, scheduler, rates, now_ns, times)
    return times


def _step(
    record: RunRecord,
    scheduler: Scheduler,
    rates: StepRates,
    now_ns: int,
    times: dict[int, RequestTimes],
) -> int:
    """One step; returns when it ends."""
    batch = scheduler.schedule(now_ns)
    num_decodes, num_kv = batch.num_singles(), scheduler.pool.num_used_tokens
    step = StepSample(batch.num_tokens - num_decodes, num_decodes, num_kv, 0.0)
    ends_ns = now_ns + round(step.predicted_ms(rates) * 1e6) if batch.items else now_ns
    tokens = []
    for seq, num_new in batch.items:
        samples = seq.num_computed_tokens + num_new == len(seq.token_ids)
        tokens.append(record.next_tokens(seq, 1) if samples else [])
    outputs: list[RequestOutput] = (
        scheduler.update(batch, StepResult(tokens)) if batch.items else []
    )
    for output in outputs + scheduler.take_finished():
        if output.token_ids:
            times[int(output.request_id)].record(ends_ns, len(output.token_ids))
    return ends_ns
