"""Which worker takes a request: a policy over the account of what was routed.

The KV policy predicts, in milliseconds, what a request costs on each worker:

    wait    = until the step that runs there ends, which may compute prompts
    queue   = prefill of the prompts that wait for the next step
    prefill = the uncached tokens of this prompt, for this request and for those that come while
              they are computed and wait, too: as many as waited of late for each token computed.
              Those that another worker has are shared by all who are expected to use the copy
    stall   = the requests there get no token while this prompt is computed. What a step takes once
              for all of its prompts is paid by the first, times the share of the latest prompts
              that were alone in theirs: in a burst others would open that step without this one
    decode  = in the steps that this request shares with those there, each slows down the others

The lowest sum wins, ties at random. Stall and decode count half: requests that come later even out
what this one does. A prefix deserves as many workers as its share of the latest requests: what
exceeds the share of the workers that have it will use another copy. Rates are fitted to the
workers' own steps (step_rates.py); how many steps an answer takes is the mean of those that ended.

Each front of a pool has a router of its own. It accounts for what it routes; load reports of the
workers tell it what other fronts have there, and other_fronts.py estimates what they sent since.
While much of that is unknown, each front takes workers of nearly the lowest cost by turns.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from tokenmill.core.config import RouterConfig
from tokenmill.core.kv_events import Dump, EventBatch
from tokenmill.core.types import TokenmillError
from tokenmill.routing.kv_index import KVIndex
from tokenmill.routing.load_report import Announcement, LoadReport, shared_tokens
from tokenmill.routing.other_fronts import OtherFronts
from tokenmill.routing.policies import POLICIES, RoutingChoice
from tokenmill.routing.prices import IDLE, Line, Prices, WorkerLoad, cached_tokens, tier_price
from tokenmill.routing.step_rates import PRIOR, StepRates
from tokenmill.sched.cache.blocks import U64, hash_chain

OUTPUT_TOKENS = 128.0  # prior: tokens per answer
MEMORY = 256  # answers in the moving mean of their length
MAX_PREFIXES = 4096  # with a count of uses
USE_DECAY = 0.5 ** (1 / 256)  # per decision: a use counts half after 256
AHEAD = 16  # expected future uses per extra prefix replica, by worker
MANY = 2.0  # unreported requests of other fronts above which fronts take turns
NEAR = 2.0  # most of them that are assumed at one worker
FIRST_TOKENS = 64.0  # prior: queued tokens per waiting request


# How the cached blocks of a backend are known: by events; by events since some time and assumed
# before; or assumed from the prompts that it received.
Basis = Literal["events", "partial events", "assumed"]


class CacheReports(Protocol):
    """Cached blocks of backends that publish events, as engine_events/engine_caches.py has it."""

    def basis(self, backend: str, /) -> Basis: ...

    def overlay(
        self, assumed: dict[str, int], token_ids: Sequence[int] | U64, salt: str, now_s: float, /
    ) -> dict[str, int]: ...

    def predict(
        self, backend: str, token_ids: Sequence[int] | U64, salt: str, now_s: float, /
    ) -> None: ...


class NoWorkerError(TokenmillError):
    """There is no worker to route to."""


@dataclass(slots=True)
class Decision:
    """The worker that was chosen, and what the policy saw of all of them."""

    worker: str
    num_prompt_tokens: int
    num_cached_tokens: int  # on the worker chosen, as far as is known
    workers: list[str]
    loads: list[WorkerLoad]  # by worker, before this request
    cached_tokens: dict[str, int]  # by worker; those without any are left out
    prices: Prices
    now_ms: float
    num_uses: float  # expected of one more replica of the longest cached prefix
    num_waiting: float  # expected requests, this one included, that wait per queued token
    announcement: Announcement | None = None  # for the other fronts, if there are any
    basis: Basis | None = None  # how it is known what a backend has cached; None: of a worker

    def terms(self) -> dict[str, dict[str, float]]:
        """The terms of the score by worker, for logs and metrics."""
        pairs = zip(self.workers, self.loads, strict=True)
        return {name: self._terms(name, load) for name, load in pairs}

    def _terms(self, name: str, load: WorkerLoad) -> dict[str, float]:
        num_tokens = self.num_prompt_tokens
        uncached = num_tokens - self.cached_tokens.get(name, 0)
        held = max(self.cached_tokens.values(), default=0)
        paid = num_tokens - held + (held + uncached - num_tokens) / self.num_uses
        paid *= self.num_waiting
        costs = self.prices.terms(load, self.now_ms, num_tokens, uncached, paid)
        return {
            "uncached_tokens": uncached,
            "num_requests": load.num_requests,
            **{term: round(cost, 3) for term, cost in costs.items()},
        }


@dataclass(slots=True)
class _Routed:
    """A routed request: what it adds to its worker's load until it ends."""

    worker: str
    queued_tokens: int
    kv_tokens: int


class Router:
    """Chooses workers and keeps account of what each has to do; the caller moves the requests.

    Decisions have an announcement for the routers of other fronts as soon as a report names one.
    """

    def __init__(self, config: RouterConfig, front: str = "front-0") -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.index = KVIndex()
        self.told: CacheReports | None = None  # of backends that publish events
        self._num_output_tokens = OUTPUT_TOKENS  # of an answer, a moving mean
        self._num_answers = 0
        self._answers: deque[int] = deque(maxlen=MEMORY)  # tokens of those that ended, unannounced
        self._num_alone = 1.0  # of the latest prompts, those that have a step for themselves
        self._num_learned = 2.0  # latest prompts
        self._prices = Prices.of(PRIOR, OUTPUT_TOKENS, config, self._alone)
        self._priced_tokens = OUTPUT_TOKENS
        self._rng = random.Random(config.seed)
        self._others = OtherFronts(front, config.seed)
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._loads: list[WorkerLoad] = []  # by slot
        self._lines: list[Line] = []
        self._routed: dict[str, _Routed] = {}
        self._token_ms: dict[str, dict[str, float]] = {}  # by worker and tier, as it has measured
        self._turn = 0
        self._uses: dict[int, tuple[float, int]] = {}  # (count, decision) by prefix, by age
        self._num_decisions = 0
        self._num_recent = 0.0  # decisions, counted as uses are
        self._waited_tokens = FIRST_TOKENS  # queued tokens that the latest requests found
        self._own_tokens = FIRST_TOKENS  # of these prompts

    @property
    def num_open(self) -> int:
        return len(self._routed)

    @property
    def rates(self) -> StepRates:
        return self._prices.rates

    @property
    def _alone(self) -> float:
        """Share of the latest prompts that were alone in their step."""
        return max(self._num_alone, 0.0) / self._num_learned

    def loads(self) -> list[WorkerLoad]:
        """What each worker has to do, by the order of `workers`; a copy."""
        return self._loads.copy()

    # Workers come and go.

    @property
    def workers(self) -> list[str]:
        return list(self._names)

    def add_worker(self, name: str) -> None:
        """A worker that may be chosen from now on; one of the same name is replaced."""
        self.remove_worker(name)
        self.index.add_worker(name)
        self._others.add_worker(name)
        self._slots[name] = len(self._names)
        self._names = [*self._names, name]
        self._loads.append(IDLE)
        self._lines.append(self._prices.line(IDLE))

    def remove_worker(self, name: str) -> list[str]:
        """Forget a worker; returns the requests that were routed there."""
        slot = self._slots.get(name)
        if slot is None:
            return []
        self.index.remove_worker(name)
        self._others.remove_worker(name)
        self._token_ms.pop(name, None)
        self._names = [other for other in self._names if other != name]
        self._slots = {other: i for i, other in enumerate(self._names)}
        del self._loads[slot], self._lines[slot]
        lost = [key for key, routed in self._routed.items() if routed.worker == name]
        for request_id in lost:
            del self._routed[request_id]
        return lost

    def forget_cache(self, name: str) -> None:
        """Drop the cached blocks of a known worker."""
        if name in self._slots:
            self.index.add_worker(name)

    def apply(self, worker: str, batch: EventBatch) -> bool:
        """Take a worker's events; False: pull a dump from it."""
        return self.index.apply(worker, batch)

    def load(self, worker: str, dump: Dump) -> bool:
        """Replace a worker's blocks by its dump; False: a newer dump is needed."""
        if worker in self._slots:
            self._token_ms[worker] = dump.token_ms
        return self.index.load(worker, dump)

    def report(self, worker: str, report: LoadReport, made_s: float, now_s: float) -> None:
        """Take a worker's load report, made when a step ended; an unknown worker's is ignored."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        made_ms, now_ms, token_ms = 1e3 * made_s, 1e3 * now_s, self.rates.prefill
        self._add(worker, *self._others.report(worker, report, made_ms, now_ms, token_ms))
        if self._others.begins(worker, made_ms, now_ms, self._loads[slot].step_began_ms):
            self.stepped(worker, now_s)

    def heard(self, told: Announcement, sent_s: float, now_s: float) -> None:
        """Take what another front has sent to a worker, and learn from it as from one's own.

        One's own announcements and those of unknown workers are ignored.
        """
        if told.worker not in self._slots or told.front == self._others.front:
            return
        if self.policy.knows_blocks:
            self._count_use(told.prefix)
        told = self._without_shared(told)
        self._learn_waiting(told.worker, told.queued_tokens)
        for num_tokens in told.answers:
            self._learn_length(num_tokens)
        self._add(told.worker, *self._others.heard(told, 1e3 * sent_s, 1e3 * now_s))
        self._begin_if_idle(told.worker, 1, now_s)
        if told.hashes and self.config.events:
            self.index.predict_marks(told.worker, told.hashes, now_s + self.config.predict_s)

    def _without_shared(self, told: Announcement) -> Announcement:
        """The announcement without tokens of a prefix that another request computes."""
        queued, kv, size = told.queued_tokens, told.kv_tokens, self.config.block_size
        known = self.index.known_marks(told.worker, told.hashes)
        shared = shared_tokens(queued, kv, size, known)
        return replace(told, queued_tokens=queued - shared) if shared else told

    # Requests come and go.

    def route(
        self,
        request_id: str,
        token_ids: Sequence[int] | U64,
        now_s: float,
        salt: str = "",
        without: Collection[str] = (),
        told_salt: str | None = None,
    ) -> Decision:
        """Choose a worker for a prompt, but none of `without`, and put it on its account.

        `told_salt` is the prompt's in the events of backends; None: these do not tell of it.
        """
        if not self._names or (without and not set(self._names).difference(without)):
            raise NoWorkerError("no worker is ready")
        config, num_tokens = self.config, len(token_ids)
        size = config.block_size
        chain = hash_chain(token_ids, size, salt=salt) if self.policy.knows_blocks else None
        cached = {} if chain is None else self._cached(num_tokens, chain, now_s)
        caches = self.told if chain is not None else None
        if caches is not None and told_salt is not None:
            known = caches.overlay(cached, token_ids, told_salt, now_s)
            cached = {name: num for name, num in known.items() if name in self._slots}
        held = max(cached.values(), default=0)
        prefix = chain.item(held // size - 1) if chain is not None and held >= size else None
        num_uses = 1.0 if chain is None else self._num_uses(prefix, cached)
        num_waiting = 1.0 + self._waited_tokens / self._own_tokens
        copy_ms = self._prices.uncached * num_waiting / num_uses
        others = self._others if self._others.known and self.policy.counts_load else None
        if others is not None:
            self._assume_others(now_s)
        name = self._choose(num_tokens, cached, copy_ms, without, now_s, others)
        if others is not None:
            others.took_turn(name, 1e3 * now_s)
        num_cached = cached.get(name, 0)
        decision = Decision(
            name,
            num_tokens,
            num_cached,
            self._names,
            self._loads.copy(),
            cached,
            self._prices,
            1e3 * now_s,
            num_uses,
            num_waiting,
        )
        self._learn_waiting(name, num_tokens - num_cached)
        marks: list[int] = []
        if chain is not None and config.events:
            marks = self.index.predict(name, chain, num_cached // size, now_s + config.predict_s)
        elif chain is not None:
            self.index.assume(name, chain, now_s, config.approximate_blocks)
        if caches is not None:
            decision.basis = "assumed" if told_salt is None else caches.basis(name)
            if told_salt is not None:
                caches.predict(name, token_ids, told_salt, now_s)
        self.adopt(request_id, name, num_tokens, num_tokens - num_cached)
        self._begin_if_idle(name, 1, now_s)
        if self._others.known:
            routed = self._routed[request_id]
            load = routed.queued_tokens, routed.kv_tokens
            told = Announcement(self._others.front, name, *load, marks, prefix, [*self._answers])
            decision.announcement = told
            self._answers.clear()
        return decision

    def adopt(self, request_id: str, worker: str, num_tokens: int, queued_tokens: int) -> None:
        size = self.config.block_size
        self._put(request_id, _Routed(worker, queued_tokens, size * -(-num_tokens // size)))

    def _put(self, request_id: str, routed: _Routed) -> None:
        self.free(request_id)  # it may have been at another one
        self._routed[request_id] = routed
        queued = routed.queued_tokens
        self._add(routed.worker, queued, routed.kv_tokens, 1, bool(queued))

    def prefill_progress(self, request_id: str, num_tokens: int) -> None:
        """A worker has computed so many more tokens of a prompt; unknown requests are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None and routed.queued_tokens:
            done = min(routed.queued_tokens, num_tokens)
            routed.queued_tokens -= done
            self._add(routed.worker, -done, 0, 0, -(not routed.queued_tokens))

    def told_step(self, worker: str, num_tokens: int, now_s: float) -> None:
        """A worker's events tell of a step that computed so many tokens: the oldest prompts'."""
        if worker not in self._slots:
            return
        for request_id, routed in self._routed.items():
            if num_tokens <= 0:
                break
            if routed.worker == worker and routed.queued_tokens:
                done = min(routed.queued_tokens, num_tokens)
                num_tokens -= done
                self.prefill_progress(request_id, done)
        self.stepped(worker, now_s)

    def prefill_done(self, request_id: str) -> None:
        """The first token is there; unknown requests are ignored."""
        routed = self._routed.get(request_id)
        if routed is not None:
            self.prefill_progress(request_id, routed.queued_tokens)

    def free(self, request_id: str, num_output_tokens: int = 0) -> None:
        """The request has ended, after so many tokens if that is known; unknown: ignored."""
        routed = self._routed.pop(request_id, None)
        if routed is not None:
            queued = routed.queued_tokens
            self._add(routed.worker, -queued, -routed.kv_tokens, -1, -bool(queued))
            if num_output_tokens:
                self._learn_length(num_output_tokens)
                if self._others.known:
                    self._answers.append(num_output_tokens)

    # What a request costs.

    def stepped(self, worker: str, now_s: float) -> None:
        """A worker's step has ended and what is there runs in the next one; unknown: ignored."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        queued, kv, count, pending, *_ = self._loads[slot]
        self._set(slot, WorkerLoad(queued, kv, count, pending, 1e3 * now_s, queued, pending))

    def _begin_if_idle(self, name: str, num_requests: int, now_s: float) -> None:
        """An idle worker starts the request in its next step."""
        if self._loads[self._slots[name]].num_requests == num_requests:
            self.stepped(name, now_s)

    def learn_rates(self, rates: StepRates) -> None:
        self._set_prices(rates)

    def _learn_length(self, num_output_tokens: int) -> None:
        self._num_answers += 1
        share = 1 / min(self._num_answers + 1, MEMORY)
        self._num_output_tokens += share * (num_output_tokens - self._num_output_tokens)
        if not 0.9 < self._num_output_tokens / self._priced_tokens < 1.1:
            self._set_prices(self._prices.rates)

    def _learn_waiting(self, name: str, num_tokens: int) -> None:
        """Update the mean number of requests that wait per queued token."""
        load = self._loads[self._slots[name]]
        self._waited_tokens = self._waited_tokens * USE_DECAY + load.queued_tokens
        self._own_tokens = self._own_tokens * USE_DECAY + max(num_tokens, 1)
        alone = (1.0, -1.0)[load.num_waiting] if load.num_waiting < 2 else 0.0
        self._num_alone = self._num_alone * USE_DECAY + alone  # the second ends it for the first
        self._num_learned = self._num_learned * USE_DECAY + 1.0

    def _set_prices(self, rates: StepRates) -> None:
        self._priced_tokens = self._num_output_tokens
        self._prices = Prices.of(rates, self._num_output_tokens, self.config, self._alone)
        self._lines = [self._prices.line(load) for load in self._loads]

    def _add(
        self, name: str, queued_tokens: int, kv_tokens: int, num_requests: int, num_pending: int
    ) -> None:
        slot = self._slots[name]
        queued, kv, count, pending, began_ms, tokens, step_pending = self._loads[slot]
        queued, kv = queued + queued_tokens, kv + kv_tokens
        count, pending = count + num_requests, pending + num_pending
        self._set(slot, WorkerLoad(queued, kv, count, pending, began_ms, tokens, step_pending))

    def _set(self, slot: int, load: WorkerLoad) -> None:
        self._loads[slot] = load
        self._lines[slot] = self._prices.line(load)

    def _cached(self, num_tokens: int, chain: U64, now_s: float) -> dict[str, int]:
        """Prompt tokens that each worker has cached, as far as is known; one is always computed."""
        if self.config.events:
            self.index.expire(now_s)
        else:
            self.index.forget(now_s - self.config.approximate_s)
        token_ms, computed_ms = self._token_ms, self.rates.prefill
        return cached_tokens(
            *(self.index, chain, num_tokens, self.config.block_size),
            lambda name, tier: tier_price(tier, token_ms.get(name, {}), computed_ms),
        )

    def _assume_others(self, now_s: float) -> None:
        """Place the estimated requests of other fronts on the workers of lowest cost."""
        others, now_ms = self._others, 1e3 * now_s
        for name, change in others.silenced(now_ms, self.rates.prefill):
            self._add(name, *change)
        for sent_ms, share in others.sent_before(now_ms):
            name = self._choose(share.queued_tokens // share.num_requests, {}, 0.0, (), now_s)
            change = others.assume(name, share, sent_ms, now_ms)
            self._add(name, *change)
            if change.num_requests:
                self._begin_if_idle(name, change.num_requests, now_s)

    def _num_uses(self, prefix: int | None, cached: dict[str, int]) -> float:
        """Expected future uses of one more replica of the prompt's longest cached prefix."""
        count = self._count_use(prefix)
        if prefix is None:
            return 1.0
        num_copies = list(cached.values()).count(max(cached.values()))
        share = count / (1.0 + self._num_recent)
        return 1.0 + AHEAD * max(0.0, share * len(self._names) - num_copies)

    def _count_use(self, prefix: int | None) -> float:
        """Count a use of a prefix; returns its decayed number of uses."""
        self._num_decisions += 1
        self._num_recent = 1.0 + self._num_recent * USE_DECAY
        if prefix is None:
            return 0.0
        uses, now = self._uses, self._num_decisions
        count, last = uses.pop(prefix, (1.0, now - 1))  # someone has computed it
        count = 1.0 + count * USE_DECAY ** (now - last)
        uses[prefix] = (count, now)
        if len(uses) > MAX_PREFIXES:
            del uses[next(iter(uses))]
        return count

    def _choose(
        self,
        num_tokens: int,
        cached: dict[str, int],
        copy_ms: float,
        without: Collection[str],
        now_s: float,
        others: OtherFronts | None = None,
    ) -> str:
        """The worker with the lowest cost, any of several; nearly so if `others` choose, too."""
        names = self._names
        self._turn += 1
        choice = RoutingChoice(
            num_tokens,
            1e3 * now_s,
            self._turn,
            self._loads,
            self._lines,
            self._prices,
            self._slots,
            cached,
            copy_ms,
        )
        costs = self.policy.costs(choice)
        if without:
            pairs = zip(names, costs, strict=True)
            costs = [math.inf if name in without else cost for name, cost in pairs]
        if others is not None and (num_unknown := others.num_unknown()) > MANY:
            return self._by_turns(choice, costs, min(NEAR, num_unknown / len(names)))
        lowest = min(costs)
        if costs.count(lowest) == 1:
            return names[costs.index(lowest)]
        best = [name for name, cost in zip(names, costs, strict=True) if cost == lowest]
        return self._rng.choice(best)

    def _by_turns(self, choice: RoutingChoice, costs: list[float], num_more: float) -> str:
        """Of the workers that are nearly the best, the one that got the fewest from here.

        They cost no more than the best one would with so many more requests, which other fronts
        may just have sent.
        """
        lowest, num_slots = min(costs), len(costs)
        best = costs.index(lowest)
        name, load = self._names[best], self._others.one_more(self._loads[best])
        more = replace(
            choice,
            loads=[load],
            lines=[self._prices.line(load)],
            slots={name: 0},
            cached={name: choice.cached[name]} if name in choice.cached else {},
        )
        limit = lowest + num_more * max(self.policy.costs(more)[0] - lowest, 0.0)
        held = choice.cached.get(name, 0)  # a turn is not worth recomputing a cached prefix
        near = [
            slot
            for slot, other in enumerate(self._names)
            if costs[slot] <= limit and choice.cached.get(other, 0) >= held
        ]
        turns, first = self._others.own_turns(choice.now_ms), self._others.rank
        return self._names[
            min(near, key=lambda slot: (turns[self._names[slot]], (slot - first) % num_slots))
        ]
