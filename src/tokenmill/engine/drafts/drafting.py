"""How many tokens to draft: a fixed number, or the number that is fastest at this load."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from tokenmill.sched.sequence import Batch

TRIAL_STEPS = 4  # recorded with one number of drafts, until its cost is known
MAX_TRIAL_STEPS = 32  # while prompts in the batch hide it
MIN_BETWEEN = 64  # steps, from a trial to the next once all that matters is known
EXPLORED = 0.004  # share of the time that such trials may lose
MARGIN = 1.02  # by which drafts must be ahead of none
_LEAST_SLOPE = 0.35  # cost of a further draft as a share of the first one's, at least
_FIRST_GUESS, _GUESS_WEIGHT = 0.6, 10  # of a draft being right, and as many drafts it counts for
_COST_SHARE = 0.1  # of the newest step in the mean of a cost
_EXTRA_SHARE = 0.01  # the same of what drafts add
_MEMORY = 0.998  # weight of what is known, for each draft that was verified
_TRIAL_DRAFTS = 32  # that a trial's shares count for at most: those after a pause are worse


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
        self._weights = [float(_GUESS_WEIGHT)] * most  # verified drafts that a share rests on
        self._known = ([0] * most, [0] * most)  # drafted and accepted as last heard

    def tokens(self) -> list[float]:
        """Return the tokens that a step brings, by its number of drafts from none on."""
        return list(accumulate(accumulate(self._right, mul), initial=1.0))

    def learn(
        self, drafted: Sequence[int], accepted: Sequence[int], most: int | None = None
    ) -> tuple[int, int]:
        """Learn from counts since the start; returns the new drafts, and the right ones of them.

        Drafts beyond `most` of a position do not add to the weight of what is new.
        """
        before, num_new, num_accepted = None, 0, 0
        for position in range(min(len(drafted), len(self._right))):
            counts = drafted[position], accepted[position]
            num_drafted, num_right = (
                now - known[position] for now, known in zip(counts, self._known, strict=True)
            )
            num_reached = num_drafted if before is None else min(before, num_drafted)
            if num_reached:
                self._move(position, num_right / num_reached, min(num_reached, most or num_reached))
            before = num_right
            num_new += num_drafted
            num_accepted += num_right
            for known, now in zip(self._known, counts, strict=True):
                known[position] = now
        return num_new, num_accepted

    def _move(self, position: int, share: float, weight: int) -> None:
        """Take a share of so many drafts in: a mean at first, then the latest count more."""
        self._weights[position] += weight
        part = max(weight / self._weights[position], 1 - _MEMORY**weight)
        self._right[position] += part * (share - self._right[position])


class Budget:
    """Lets trials lose a small share of the time, and no more."""

    def __init__(self) -> None:
        self._total_s = self._lost_s = 0.0

    def spend(self, seconds: float, lost_s: float = 0.0) -> None:
        """A step took so long, and lost so much against what is best."""
        self._total_s += seconds
        self._lost_s += lost_s

    def allows(self, lost_s: float) -> bool:
        return self._lost_s + lost_s <= EXPLORED * self._total_s


class SizeCosts:
    """Seconds of a step by its number of drafts, at one batch size; what was not tried is guessed.

    The machine's own drift affects all numbers alike, so what is in use moves the others with it.
    """

    def __init__(self, most: int, like: SizeCosts | None = None) -> None:
        """Before any step is known, steps may cost what they do at another size."""
        self.seconds: list[float | None] = [None] * (most + 1)
        if like is not None:
            self.seconds = list(like.seconds)
        self.counts = [0] * (most + 1)  # steps that were recorded
        self.tried = [0] * (most + 1)  # steps since a trial began
        self.last = [0] * (most + 1)  # when it was last in use
        self.budget = Budget()

    def record(self, count: int, seconds: float, in_use: bool) -> None:
        """Take in the time of a step that only decoded with `count` drafts for each sequence."""
        known, num_known = self.seconds[count], self.counts[count]
        self.counts[count] += 1
        if known is None:
            self.seconds[count] = seconds
            return
        part = max(_COST_SHARE, 1 / (num_known + 1))
        ratio = seconds / known
        if num_known >= TRIAL_STEPS:
            ratio = min(2.0, max(0.5, ratio))  # a step that something else held up
        factor = 1 + part * (ratio - 1)
        for number, cost in enumerate(self.seconds):
            follows = in_use if self.is_known(number) else not self.counts[number]
            if cost is not None and (number == count or follows):
                self.seconds[number] = cost * factor

    def is_known(self, count: int) -> bool:
        return self.counts[count] >= TRIAL_STEPS

    def hopeful(self, count: int) -> float | None:
        """The least that a step can be expected to cost; None where nothing tells."""
        known, plain = self.seconds[count], self.seconds[0]
        if known is not None or plain is None:
            return known
        below = max((i for i in range(1, count) if self.seconds[i] is not None), default=None)
        nearest = None if below is None else self.seconds[below]
        if below is None or nearest is None:
            return None
        return nearest + _LEAST_SLOPE * (count - below) * max(0.0, nearest - plain) / below

    def best(self, tokens: Sequence[float]) -> int:
        """The number of drafts that gives most tokens a second, of those whose cost is known."""
        plain = self.seconds[0]
        if plain is None or not self.counts[0]:
            return 0
        best, most = 0, MARGIN / plain
        for count in range(1, len(tokens)):
            cost = self.seconds[count]
            if cost is not None and self.is_known(count) and tokens[count] / cost > most:
                best, most = count, tokens[count] / cost
        return best

    def to_learn(self, tokens: Sequence[float]) -> int | None:
        """The number whose cost has to be known to decide, or None; one draft is tried first."""
        tried = enumerate(self.tried)
        may = [i for i, num_tried in tried if self.is_known(i) or num_tried < MAX_TRIAL_STEPS]
        if all(cost is None for cost in self.seconds) and 1 in may:
            return 1
        if not self.is_known(0):
            return 0 if 0 in may else None
        rates = {i: tokens[i] / cost for i in may if (cost := self.hopeful(i)) is not None}
        first = max(rates, key=lambda i: rates[i], default=0)
        if 1 in may and 1 not in rates:
            first = 1
        ahead = rates.get(first, 0.0) > MARGIN * rates.get(0, 0.0) or first not in rates
        return first if first and ahead and not self.is_known(first) else None

    def to_check(self, tokens: Sequence[float], best: int, step: int) -> int | None:
        """The number that was not in use for longest, where the budget allows to try it."""
        others = [count for count in range(len(tokens)) if count != best]
        oldest = min(others, key=lambda count: self.last[count])
        plain, known = self.seconds[0], self.seconds[best]
        if known is None or plain is None or step - max(self.last[i] for i in others) < MIN_BETWEEN:
            return None
        cost = self.hopeful(oldest)
        cost = plain * (1 + oldest) if cost is None else cost
        lost = (TRIAL_STEPS + 2) * cost - TRIAL_STEPS * tokens[oldest] * known / tokens[best]
        return oldest if self.budget.allows(max(lost, 0.0)) else None


class Trial:
    """Some steps with another number of drafts than the best known."""

    def __init__(self, count: int, paid: bool) -> None:
        self.count = count
        self.paid = paid  # from the budget: all that matters is known
        self.left = TRIAL_STEPS


class AdaptiveDrafting:
    """Drafts the number, zero included, that gives the most tokens per second.

    Tokens come from the share of accepted drafts by position, seconds from the steps that only
    decoded, by batch size in powers of two. At a new size none and one draft are tried, and more
    where they can pay; later a number has a turn now and then, within a budget of time.
    """

    def __init__(self, most: int) -> None:
        self._most, self._shares = most, Shares(most)
        self._sizes: dict[int, SizeCosts] = {}
        self._size, self._step = 1, 0
        self._trial: Trial | None = None
        self._last: int | None = None  # number of drafts of the last step, at the same size
        self._last_clean = False  # it only decoded

    def choose(self) -> int:
        """The number of drafts of the next step."""
        self._step += 1
        costs, tokens = self._costs(), self._shares.tokens()
        best = costs.best(tokens)
        if self._trial is None and (count := costs.to_learn(tokens)) is not None:
            self._trial = Trial(count, paid=False)
        elif self._trial is None:
            count = costs.to_check(tokens, best, self._step)
            if count is not None:
                self._trial = Trial(count, paid=True)
                costs.tried[count] = 0
        return best if self._trial is None else self._trial.count

    def _costs(self) -> SizeCosts:
        """Those of the present size; a new one begins with those of the nearest."""
        if self._size not in self._sizes:
            near = min(self._sizes, key=lambda size: abs(size - self._size), default=None)
            like = None if near is None else self._sizes[near]
            self._sizes[self._size] = SizeCosts(self._most, like)
        return self._sizes[self._size]

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a step."""
        trial, num_seqs, count = self._trial, len(batch.items), batch.num_to_draft
        paid = trial is not None and trial.paid
        _, num_right = self._shares.learn(drafted, accepted, _TRIAL_DRAFTS if paid else None)
        if num_seqs.bit_length() != self._size:
            self._size, self._trial, self._last = num_seqs.bit_length(), None, None
            return
        costs = self._costs()
        costs.tried[count] += 1
        costs.last[count] = self._step
        tokens = (num_seqs + num_right) / num_seqs
        costs.budget.spend(seconds, self._lost(costs, tokens, seconds) if paid else 0.0)
        clean = batch.num_tokens == num_seqs * (1 + count)  # no prompt, no beginning, no end
        # Without drafts a step is launched ahead of the one before it, and its time is that one's.
        if clean and self._last == count and (count or self._last_clean):
            costs.record(count, seconds, in_use=trial is None)
            if trial is not None and trial.count == count:
                trial.left -= 1
        self._last, self._last_clean = count, clean
        if trial is not None and (not trial.left or costs.tried[count] >= MAX_TRIAL_STEPS):
            self._trial = None

    def _lost(self, costs: SizeCosts, tokens: float, seconds: float) -> float:
        """What a step took longer than the best number would have for its tokens of a sequence."""
        expected = self._shares.tokens()
        best = costs.best(expected)
        known = costs.seconds[best]
        return 0.0 if known is None else seconds - tokens * known / expected[best]


class ExtraCost:
    """What drafts add to a step: a part that is there with the first one, and one for each."""

    def __init__(self) -> None:
        self._count = 0
        self._means = [0.0] * 4  # of drafts x, seconds y, x * x and x * y

    def learn(self, drafts: float, seconds: float) -> None:
        """A step with so many drafts for a sequence took so much longer than one without."""
        self._count += 1
        part = max(1 / self._count, _EXTRA_SHARE)
        newest = drafts, seconds, drafts * drafts, drafts * seconds
        for i, value in enumerate(newest):
            self._means[i] += part * (value - self._means[i])

    def expected(self, drafts: float) -> float:
        """In proportion to the drafts as long as their number was always the same."""
        x, y, xx, xy = self._means
        slope, spread = y / x, xx - x * x
        if spread > 0.01 * x * x:
            slope = min(slope, max(0.2 * slope, (xy - x * y) / spread))
        return max(0.0, y + slope * (drafts - x)) if drafts else 0.0


class LookupDrafting:
    """Of drafts that cost nothing to make, as many as pay for being verified.

    A sequence has drafts in some steps and none in others, so that plain steps come by themselves
    and all seconds above theirs are those of drafts, by batch size in powers of two.
    """

    def __init__(self, most: int) -> None:
        self._most, self._shares = most, Shares(most)
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by size class
        self._extra: dict[int, ExtraCost] = {}
        self._budgets: dict[int, Budget] = {}
        self._size, self._step = 1, 0
        self._left = 0  # steps of a trial with more drafts than the best number
        self._num_unknown = 0  # steps with a size of which no plain step is known

    def choose(self) -> int:
        """The number of drafts of the next step."""
        self._step += 1
        if self._size not in self._plain:  # every other few steps are plain ones
            self._num_unknown += 1
            return self._most if self._num_unknown // TRIAL_STEPS % 2 else 0
        if self._size not in self._extra:
            return self._most
        best = self._best()
        if not self._left and best < self._most and self._step % MIN_BETWEEN == 0:
            lost = TRIAL_STEPS * self._extra[self._size].expected(best + 1)
            self._left = TRIAL_STEPS if self._budget().allows(lost) else 0
        return best + 1 if self._left and best < self._most else best

    def record(
        self, batch: Batch, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """Learn from a step."""
        num_drafts, num_right = self._shares.learn(drafted, accepted)
        num_seqs = len(batch.items)
        self._size = size = num_seqs.bit_length()
        if batch.num_tokens != num_seqs + num_drafts:
            return  # it computed a prompt
        plain = self._plain.get(size)
        if plain is not None:
            lost = seconds - plain * (num_seqs + num_right) / num_seqs if self._left else 0.0
            self._budget().spend(seconds, lost if num_drafts else 0.0)
        self._left -= bool(self._left and num_drafts)
        if not num_drafts:
            _average(self._plain, size, seconds)
        elif plain is not None:
            extra = self._extra.setdefault(size, ExtraCost())
            extra.learn(num_drafts / num_seqs, max(0.0, seconds - plain))

    def _budget(self) -> Budget:
        return self._budgets.setdefault(self._size, Budget())

    def _best(self) -> int:
        plain, extra = self._plain[self._size], self._extra[self._size]
        tokens = enumerate(self._shares.tokens())
        rates = [count / (plain + extra.expected(i)) for i, count in tokens]
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > MARGIN * rates[0] else 0


def _average(means: dict[int, float], key: int, seconds: float) -> None:
    known = means.get(key, seconds)
    means[key] = known + _COST_SHARE * (seconds - known)
