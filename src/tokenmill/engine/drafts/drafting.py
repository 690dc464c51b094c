"""How many tokens to draft: a fixed number, or the number that is fastest at this load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from tokenmill.sched.sequence import Batch

TRIAL_STEPS = 4  # recorded with one number of drafts, until its cost is known
MAX_TRIAL_STEPS = 32  # while prompts in the batch hide it
MIN_BETWEEN = 64  # steps from a trial to the next, once all that matters is known
EXPLORED = 0.004  # share of the time that such trials may lose
MARGIN = 1.02  # by which drafts must be ahead of none
_LEAST_SLOPE = 0.35  # cost of a further draft as a share of the first one's, at least
_FIRST_GUESS, _GUESS_WEIGHT = 0.6, 10.0  # acceptance, and as many drafts it counts for
_COST_SHARE = 0.1  # of the newest step in the mean of a cost
_MEMORY = 0.998  # weight of what is known, for each draft that was verified
_MOST_DRAFTS = 32  # of a step that count: the first ones after a pause are worse


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
        pass


class DraftAcceptance:
    """Moving means by position: the share of drafts accepted, given that those before it were."""

    def __init__(self, most: int) -> None:
        self._right = [_FIRST_GUESS * _GUESS_WEIGHT] * most
        self._reached = [_GUESS_WEIGHT] * most
        self._known = [(0, 0)] * most  # drafted and accepted as last heard

    def tokens(self, share: float) -> list[float]:
        """Tokens of a sequence and step by the number of drafts, which a share of sequences has."""
        shares = [right / of for right, of in zip(self._right, self._reached, strict=True)]
        return list(accumulate((share * p for p in accumulate(shares, mul)), initial=1.0))

    def learn(self, drafted: Sequence[int], accepted: Sequence[int]) -> tuple[list[int], int]:
        """Learn from counts since the start; returns the new drafts by position, and those right.

        A draft is reached where the one before it was right.
        """
        added, num_right, before = [], 0, None
        for i, now in enumerate(zip(drafted, accepted, strict=True)):
            new, right = (count - known for count, known in zip(now, self._known[i], strict=True))
            self._known[i] = now
            reached = new if before is None else min(before, new)
            if reached:
                counted = min(1.0, _MOST_DRAFTS / reached)
                kept = _MEMORY ** (counted * reached)
                self._right[i] = kept * self._right[i] + counted * right
                self._reached[i] = kept * self._reached[i] + counted * reached
            added.append(new)
            num_right += right
            before = right
        return added, num_right


class StepCosts:
    """Seconds of a step by its number of drafts, at one batch size; what was not tried is guessed.

    The machine's own drift affects all numbers alike, so what is in use moves the others with it.
    """

    def __init__(self, most: int, like: StepCosts | None = None) -> None:
        """Before any step is known, steps may cost what they do at another size."""
        self.seconds: list[float | None] = [None] * (most + 1)
        if like is not None:
            self.seconds = list(like.seconds)
        self.counts = [0] * (most + 1)  # steps that were recorded
        self.last = [0] * (most + 1)  # the step in which it was last in use
        self.tried: set[int] = set()
        self.share = 1.0  # of the sequences that have drafts where any has
        self.often = 1.0  # share of the steps in which any has

    def record(self, count: int, seconds: float, in_use: bool) -> None:
        """Take in the time of a step that only decoded."""
        known, num_known = self.seconds[count], self.counts[count]
        self.counts[count] += 1
        if known is None:
            self.seconds[count] = seconds
            return
        ratio = seconds / known
        if num_known >= TRIAL_STEPS:
            ratio = min(2.0, max(0.5, ratio))  # a step that something else held up
        factor = 1 + max(_COST_SHARE, 1 / (num_known + 1)) * (ratio - 1)
        for number, cost in enumerate(self.seconds):
            follows = in_use if self.is_known(number) else not self.counts[number]
            if cost is not None and (number == count or follows):
                self.seconds[number] = cost * factor

    def is_known(self, count: int) -> bool:
        return self.counts[count] >= TRIAL_STEPS

    def best(self, tokens: Sequence[float]) -> int:
        """The number of drafts that gives most tokens a second, of those whose cost is known."""
        plain = self.seconds[0]
        if plain is None or not self.counts[0]:
            return 0
        best, most = 0, 0.0
        for count, cost in enumerate(self.seconds):
            if not count or cost is None or not self.is_known(count):
                continue
            rate = 1 + self.often * (tokens[count] - 1)
            rate /= plain + self.often * (cost - plain)
            if rate > most and tokens[count] * plain > MARGIN * cost:
                best, most = count, rate
        return best

    def unknown(self, tokens: Sequence[float]) -> int | None:
        """The number whose cost has to be known to decide: one draft, none, what else may pay."""
        plain, first, *_ = self.seconds
        if first is None:
            return 1
        if plain is None or not self.is_known(0):
            return 0
        fastest, cost, most = 0, plain, MARGIN / plain
        for count in range(1, len(tokens)):
            cost = self.seconds[count] or cost + _LEAST_SLOPE * max(0.0, first - plain)
            if tokens[count] / cost > most:
                fastest, most = count, tokens[count] / cost
        return None if self.is_known(fastest) else fastest


class AdaptiveDrafting:
    """Drafts the number, zero included, that gives the most tokens per second.

    Tokens come from the moving mean of what is accepted, seconds from the steps that only decoded,
    by batch size in powers of two. At a new size none and one draft are tried, and more where they
    can pay; later a number has a turn now and then, and what it loses is waited out.
    `looks_up`: drafts cost nothing to make, and a sequence has them in some steps alone.
    """

    def __init__(self, most: int, looks_up: bool = False) -> None:
        self._most, self._looks_up = most, looks_up
        self._acceptance = DraftAcceptance(most)
        self._sizes = {1: StepCosts(most)}
        self._size = 1
        self._step = self._trial_end = 0
        self._trial: int | None = None  # the number that is tried instead of the best known
        self._left = 0  # steps that are still to be recorded of it
        self._tried = 0  # steps that it has taken
        self._paid = False  # it is not the first trial of that number
        self._debt_s = 0.0  # what trials have lost, less a share of the time since
        self._last: int | None = None  # drafts of the last step, at the same size
        self._last_plain = False  # it only decoded

    def choose(self) -> int:
        self._step += 1
        costs = self._sizes[self._size]
        tokens = self._acceptance.tokens(costs.share)
        best = costs.best(tokens)
        if self._trial is None and (count := self._to_try(costs, tokens, best)) is not None:
            self._trial, self._left, self._tried = count, TRIAL_STEPS, 0
            self._paid = count in costs.tried
            costs.tried.add(count)
        return best if self._trial is None else self._trial

    def _to_try(self, costs: StepCosts, tokens: Sequence[float], best: int) -> int | None:
        """What has to be known, else at times the number that was not in use for longest."""
        count = costs.unknown(tokens)
        if count is not None and count not in costs.tried:
            return count
        if self._debt_s > 0 or self._step - self._trial_end < MIN_BETWEEN:
            return None
        others = (other for other in range(self._most + 1) if other != best)
        return min(others, key=lambda other: costs.last[other]) if count is None else count

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        added, num_right = self._acceptance.learn(drafted, accepted)
        num_seqs, num_drafts, count = len(batch.items), sum(added), batch.num_to_draft
        if num_seqs.bit_length() != self._size:
            self._change_size(num_seqs.bit_length())
            return
        costs, tokens = self._sizes[self._size], (num_seqs + num_right) / num_seqs
        only_decodes = batch.num_tokens == num_seqs + num_drafts
        clean = only_decodes and (self._looks_up or num_drafts == count * num_seqs)
        depth = 0 if self._looks_up and not num_drafts else count
        costs.last[count] = costs.last[depth] = self._step
        self._debt_s -= EXPLORED * seconds
        came_alone = self._looks_up and count > 0 and not num_drafts
        if self._paid and self._trial is not None and not came_alone:
            self._debt_s += self._lost(costs, tokens, seconds)
        # Without drafts a step is launched ahead of the one before it, and its time is that one's.
        if clean and self._last == count and (depth or self._last_plain):
            costs.record(depth, seconds, in_use=self._trial is None)
            if depth:
                costs.share += _COST_SHARE * (added[0] / num_seqs - costs.share)
            self._left -= depth == self._trial
        if self._looks_up and count and only_decodes:
            costs.often += _COST_SHARE * (bool(num_drafts) - costs.often)
        self._last, self._last_plain = count, clean and (count == 0 or not depth)
        self._tried += not (came_alone and clean)
        if self._trial is not None and (self._left <= 0 or self._tried >= MAX_TRIAL_STEPS):
            self._trial, self._trial_end = None, self._step

    def _change_size(self, size: int) -> None:
        """Costs of a new size begin with those of the nearest."""
        near = min(self._sizes, key=lambda known: abs(known - size))
        self._sizes.setdefault(size, StepCosts(self._most, self._sizes[near]))
        self._size, self._trial, self._last = size, None, None

    def _lost(self, costs: StepCosts, tokens: float, seconds: float) -> float:
        """What a step took longer than the best number would have for its tokens of a sequence."""
        expected = self._acceptance.tokens(costs.share)
        best = costs.best(expected)
        return max(0.0, seconds - tokens * (costs.seconds[best] or 0.0) / expected[best])
