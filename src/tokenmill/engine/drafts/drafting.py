"""How many tokens to draft: a fixed number, or the number that is fastest at this load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from tokenmill.sched.sequence import Batch

TRIAL_STEPS = 8  # with one number of drafts, until its cost is known
MAX_TRIAL_STEPS = 64  # while prompts in the batch hide it
PROBE_EVERY = 256  # steps; then the number that was not seen for longest has a turn
MARGIN = 1.02  # by which drafts must be ahead of none
_FIRST_GUESS = 0.6  # of a draft being right, before any was verified
_COST_SHARE = 0.2  # of the newest step in the mean of a cost
_MEMORY = 0.99  # weight of what is known, for each draft that was verified


class Drafting(Protocol):
    """Decides before each step how many tokens it drafts, and is told how long the step took."""

    def choose(self) -> int:
        """Return the number of drafts of the next step, which may turn out to be empty."""

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Record a step's time; `drafted` and `accepted` are counts by position since the start."""


class FixedDrafting:
    """Drafts the same number in every step."""

    def __init__(self, count: int) -> None:
        self._count = count

    def choose(self) -> int:
        return self._count

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Do nothing: the number is fixed."""


class Shares:
    """The share of accepted drafts by position, given that those before it were accepted."""

    def __init__(self, most: int) -> None:
        self._right = [_FIRST_GUESS] * most
        self._known = ([0] * most, [0] * most)  # drafted and accepted as last heard

    def tokens(self) -> list[float]:
        """Return the tokens that a step brings, by its number of drafts from none on."""
        return list(accumulate(accumulate(self._right, mul), initial=1.0))

    def learn(self, drafted: Sequence[int], accepted: Sequence[int]) -> int:
        """Learn from counts since the start; returns how many drafts are new in them."""
        before, num_new = None, 0
        for position in range(min(len(drafted), len(self._right))):
            counts = drafted[position], accepted[position]
            num_drafted, num_right = (
                now - known[position] for now, known in zip(counts, self._known, strict=True)
            )
            num_reached = num_drafted if before is None else min(before, num_drafted)
            if num_reached:
                share = num_right / num_reached
                self._right[position] += (1 - _MEMORY**num_reached) * (
                    share - self._right[position]
                )
            before = num_right
            num_new += num_drafted
            for known, now in zip(self._known, counts, strict=True):
                known[position] = now
        return num_new


class AdaptiveDrafting:
    """Drafts the number, zero included, that gives the most tokens per second.

    Tokens come from the share of accepted drafts by position, seconds from the steps that only
    decoded, by batch size in powers of two. Each number of drafts is tried when a size is new, and
    again now and then, so that a change is noticed.
    """

    def __init__(self, most: int) -> None:
        self._order: list[int] = [most, 0, *range(1, most)]
        self._shares = Shares(most)
        self._costs: dict[tuple[int, int], float] = {}  # seconds by (size class, drafts)
        self._num_recorded: dict[tuple[int, int], int] = {}
        self._num_tried: dict[tuple[int, int], int] = {}
        self._seen: dict[tuple[int, int], int] = {}  # step at which it was last recorded
        self._size, self._step = 1, 0
        self._probe: tuple[int, int] | None = None  # drafts, and steps that are left

    def choose(self) -> int:
        """The number of drafts of the next step."""
        self._step += 1
        if self._probe is not None:
            count, left = self._probe
            self._probe = (count, left - 1) if left > 1 else None
            return count
        trial = next((count for count in self._order if self._is_open(count)), None)
        if trial is not None:
            return trial
        if self._step % PROBE_EVERY == 0:
            oldest = min(self._order, key=lambda count: self._seen.get((self._size, count), 0))
            self._probe = oldest, TRIAL_STEPS
        return self._best()

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a step."""
        self._shares.learn(drafted, accepted)
        num_seqs, count = len(batch.items), batch.num_to_draft
        self._size = num_seqs.bit_length()
        key = self._size, count
        self._num_tried[key] = self._num_tried.get(key, 0) + 1
        if batch.num_tokens != num_seqs * (1 + count):
            return  # it computed a prompt, or began or ended to draft
        self._seen[key] = self._step
        self._num_recorded[key] = self._num_recorded.get(key, 0) + 1
        known = self._costs.get(key, seconds)
        self._costs[key] = known + _COST_SHARE * (seconds - known)

    def _is_open(self, count: int) -> bool:
        key = self._size, count
        recorded, tried = self._num_recorded.get(key, 0), self._num_tried.get(key, 0)
        return recorded < TRIAL_STEPS and tried < MAX_TRIAL_STEPS

    def _best(self) -> int:
        plain = self._costs.get((self._size, 0))
        if plain is None:
            return 0
        tokens = self._shares.tokens()
        best, most = 0, MARGIN / plain
        for count in self._order:
            cost = self._costs.get((self._size, count))
            if count and cost is not None and tokens[count] / cost > most:
                best, most = count, tokens[count] / cost
        return best


class LookupDrafting:
    """Of drafts that cost nothing to make, as many as pay for being verified; see sched/ngrams.py.

    A sequence has drafts in some steps and none in others, so that plain steps come by themselves
    and all seconds above theirs are those of drafts, by batch size in powers of two.
    """

    def __init__(self, most: int) -> None:
        self._most, self._shares = most, Shares(most)
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by size class
        self._extra: dict[int, float] = {}  # and what one more draft for each sequence adds
        self._size, self._step = 1, 0

    def choose(self) -> int:
        """The number of drafts of the next step."""
        self._step += 1
        turn = self._step % PROBE_EVERY
        if turn < TRIAL_STEPS:
            return self._most
        unknown = self._size not in self._plain
        return 0 if turn < 2 * TRIAL_STEPS and unknown else self._best()

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a step."""
        num_drafts, num_seqs = self._shares.learn(drafted, accepted), len(batch.items)
        self._size = size = num_seqs.bit_length()
        if batch.num_tokens != num_seqs + num_drafts:
            return  # it computed a prompt
        if not num_drafts:
            _average(self._plain, size, seconds)
        elif size in self._plain:
            each = (seconds - self._plain[size]) * num_seqs / num_drafts
            _average(self._extra, size, max(0.0, each))

    def _best(self) -> int:
        plain, extra = self._plain.get(self._size), self._extra.get(self._size)
        if plain is None or extra is None:
            return self._most
        rates = [count / (plain + i * extra) for i, count in enumerate(self._shares.tokens())]
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > MARGIN * rates[0] else 0


def _average(means: dict[int, float], key: int, seconds: float) -> None:
    known = means.get(key, seconds)
    means[key] = known + _COST_SHARE * (seconds - known)
