"""What sessions find of their prompts in a prefix cache whose layers have windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, SchedulerConfig
from tokenmill.core.flags import number, setting
from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch

MODELS = {"Gemma": Sliding(1024, 5), "GPT-OSS": Sliding(128, 1), "Llama": NONE_SLIDE}
LIVE_SHARES = (0.25, 0.4, 0.5, 0.7, 0.9)
BUDGET = 2048  # tokens of a step
_SIZE, _VOCAB = DEFAULT_BLOCK_SIZE, 100_000


@dataclass(frozen=True, slots=True)
class Load:
    """Sessions that take turns; each turn adds an answer, and a message behind it."""

    num_sessions: int = 6
    own_tokens: int = 21_000  # of a first prompt, behind what it shares
    message_tokens: int = 288
    answer_tokens: int = 32
    num_rounds: int = 5
    # What first prompts share, by level: (how many different ones there are, tokens of each).
    shared: tuple[tuple[int, int], ...] = ()
    anew: bool = False  # each round has new sessions, which share no more than that

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for _, tokens in self.shared)

    @property
    def last_tokens(self) -> int:
        """Tokens of a session when its last answer ends."""
        turns = 1 if self.anew else self.num_rounds
        new = self.message_tokens + self.answer_tokens
        return self.shared_tokens + self.own_tokens + turns * new - self.message_tokens

    def num_pages(self, sliding: Sliding) -> int:
        """Pages from which the sessions of a round can go on, and others can branch."""
        end, levels, points = self.shared_tokens // _SIZE, 0, self.num_sessions
        for count, tokens in self.shared:
            levels += count * tokens // _SIZE
            points += count
        last = self.last_tokens // _SIZE
        seen = last - sliding.first_block(last * _SIZE, _SIZE)
        own = self.num_sessions * (last - end)
        return levels + own + points * seen * sliding.num_groups


_ONE_PROMPT = Load(64, 1000, num_rounds=4, shared=((1, 2000),))
_TWO_LEVELS = Load(64, 1000, num_rounds=4, shared=((1, 2000), (8, 3000)))
BRANCHING = {
    "one system prompt": _ONE_PROMPT,
    "one system prompt, new sessions": replace(_ONE_PROMPT, anew=True),
    "system prompt, then document": _TWO_LEVELS,
    "system prompt, then document, new sessions": replace(_TWO_LEVELS, anew=True),
}


class Sessions:
    """Runs the turns of a load, one after another, over a real scheduler and block pool."""

    def __init__(self, load: Load, sliding: Sliding, live_share: float) -> None:
        self.load = load
        pool = BlockPool(round(load.num_pages(sliding) / live_share), _SIZE, True, sliding)
        config = SchedulerConfig(max_num_batched_tokens=BUDGET, max_model_len=load.last_tokens + 1)
        self.scheduler = Scheduler(config, pool, frozenset())
        self._histories: list[list[int]] = []
        self._num_turns = 0

    def round(self) -> list[int]:
        """A turn of each session; returns how many tokens of each prompt were cached."""
        load = self.load
        if load.anew or not self._histories:
            self._histories = [self._first_prompt(number) for number in range(load.num_sessions)]
        return [self._turn(history) for history in self._histories]

    def _first_prompt(self, number: int) -> list[int]:
        prompt: list[int] = []
        for level, (count, tokens) in enumerate(self.load.shared):
            prompt += _text(1 + level * 1000 + number % count, tokens)
        return prompt + _text(10**6 + self._num_turns + number, self.load.own_tokens)

    def _turn(self, history: list[int]) -> int:
        """Ask with what was said so far, and add the answer and the next message to it."""
        scheduler, sampling = self.scheduler, SamplingParams(max_tokens=self.load.answer_tokens)
        self._num_turns += 1
        scheduler.add(Request(f"turn-{self._num_turns}", Generate(list(history), sampling)))
        num_cached = 0
        while scheduler.has_work():
            batch = scheduler.schedule(0)
            for output in scheduler.update(batch, self._answer(batch)):
                history += output.token_ids
                num_cached = output.num_cached_tokens
        history += _text(10**9 + self._num_turns, self.load.message_tokens)
        return num_cached

    def _answer(self, batch: Batch) -> StepResult:
        ends = [seq.num_computed_tokens + new == len(seq.token_ids) for seq, new in batch.items]
        return StepResult([[self._num_turns % _VOCAB] if samples else [] for samples in ends])


def _text(number: int, num_tokens: int) -> list[int]:
    """A text that differs from others in its first token already."""
    return [(number * 7919 + i * (31 + number % 13)) % _VOCAB for i in range(num_tokens)]


def hit_share(sliding: Sliding, live_share: float, load: Load | None = None) -> float:
    """The share of prompt tokens that is found from the second round on."""
    load = load or Load()
    sessions = Sessions(load, sliding, live_share)
    sessions.round()
    before = sessions.scheduler.stats()
    for _ in range(load.num_rounds - 1):
        sessions.round()
    after = sessions.scheduler.stats()
    num_hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    return num_hits / (after.prefix_query_tokens - before.prefix_query_tokens)


def found_shares(sliding: Sliding, live_share: float, load: Load) -> list[float]:
    """By round, the share of requests that find all that they share with others."""
    sessions, least = Sessions(load, sliding, live_share), load.shared_tokens // _SIZE * _SIZE
    rounds = [sessions.round() for _ in range(load.num_rounds)]
    return [sum(found >= least for found in counts) / len(counts) for counts in rounds]


@dataclass(frozen=True)
class Options:
    live_share: float = setting(
        0.9, "Share of the pool that sessions need which branch from others.", number(0.05, 1)
    )


def run(options: Options) -> Report:
    """Sessions in turn, and sessions that branch from each other, over the real block pool.

    python -m benchmarks.windows
    """
    sessions: list[dict[str, Any]] = []
    branches: list[dict[str, Any]] = []
    live_share = options.live_share
    for model, sliding in MODELS.items():
        hits = {f"{live:.0%}": round(hit_share(sliding, live), 4) for live in LIVE_SHARES}
        window, groups = sliding.window, sliding.num_groups
        sessions.append(
            {"model": model, "window": window, "sliding_groups": groups, "hit_shares": hits}
        )
        for name, load in BRANCHING.items():
            found = [round(share, 4) for share in found_shares(sliding, live_share, load)]
            branches.append(
                {"model": model, "load": name, "live_share": live_share, "found_shares": found}
            )
    return {
        "sessions": sessions,
        "branches": branches,
        "least_hit_share": min(min(row["hit_shares"].values()) for row in sessions),
        "least_found_share": min(min(row["found_shares"][1:]) for row in branches),
    }


def show(report: Report) -> None:
    console.out.print("Hit share from the second round on, by what sessions need of the pool:")
    for row in report["sessions"]:
        shares = ", ".join(f"{live} {hit:.3f}" for live, hit in row["hit_shares"].items())
        window = f"window {row['window']:,}, {row['sliding_groups']} groups"
        console.out.print(f"  {row['model']} ({window}): {shares}")
    console.out.print("Share of requests that find what they share, by round:")
    for row in report["branches"]:
        found = ", ".join(f"{share:.3f}" for share in row["found_shares"])
        console.out.print(f"  {row['model']}, {row['load']}: {found}")


BENCHMARK = Benchmark("windows", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
