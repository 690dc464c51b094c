"""Engines over several ranks: rank 0 schedules for all, or each rank for requests of its own.

With attention data parallelism every rank has a whole engine; rank 0 hands requests out and starts
each round, in which every rank runs one step, or computes its experts' part of the others'.
"""

from __future__ import annotations

from functools import reduce

from tokenmill.core.images import content_ids
from tokenmill.core.kv import DISK
from tokenmill.core.kv_events import (
    Dump,
    Event,
    EventPublisher,
    pack_events,
    unpack_events,
)
from tokenmill.core.types import (
    End,
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    add_stats,
)
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.own_kv import RankExchange, RanksExchange
from tokenmill.engine.ranks.rank_messages import (
    KVNews,
    Message,
    RankState,
    Round,
    RoundOver,
    arrived,
    arrived_output,
    expect,
    leaving,
    leaving_output,
)
from tokenmill.engine.ranks.rank_models import OwnModel
from tokenmill.engine.ranks.rebalance import Rebalancer
from tokenmill.routing.attention_dp import ContextPolicy, Outlook, RankCaches, assign


class LeadingEngine:
    """The engine of rank 0, which schedules for all ranks."""

    def __init__(
        self, engine: LanguageEngine, group: RankGroup, rebalancer: Rebalancer | None
    ) -> None:
        self._engine, self._group, self._rebalancer = engine, group, rebalancer
        self.submit, self.abort, self.has_work = engine.submit, engine.abort, engine.has_work
        self.warm_up, self.kv = engine.warm_up, engine.kv
        self.kv_events, self.kv_dump = engine.kv_events, engine.kv_dump
        self.reset_prefix_cache = engine.reset_prefix_cache
        self.costs = engine.costs

    def step(self) -> list[RequestOutput]:
        """Run one batch on all ranks."""
        with self._group.together():
            return self._engine.step()

    def stats(self) -> EngineStats:
        """Return the scheduler's stats, and how balanced the experts are if they move."""
        self._group.check()
        return with_balance(self._engine.stats(), self._rebalancer)


class OwnEngine:
    """One rank's engine of several, each with requests of its own."""

    def __init__(
        self, engine: LanguageEngine, model: OwnModel, rebalancer: Rebalancer | None
    ) -> None:
        self.engine, self._model, self._rebalancer = engine, model, rebalancer
        self._events = engine.kv_events()
        self.kv = None if engine.kv is None else RankExchange(engine.kv)

    def round(
        self,
        submit: list[Request],
        abort: list[str],
        hold_context: bool,
        kv_news: KVNews,
        resets: bool,
    ) -> list[RequestOutput]:
        """Take what is new, then one step in time with the other ranks."""
        if resets:
            self.engine.reset_prefix_cache()
        for request in submit:
            self.engine.submit(request)
        if self.kv is not None:
            self.kv.take(kv_news)
        for request_id in abort:
            self.engine.abort(request_id)
        if self._rebalancer is not None:
            self._rebalancer.turn()
        self._model.ran = False
        outputs = self.engine.step(hold_context)
        if not self._model.ran:
            self._model.assist()
        return outputs

    def answer(self, message: Message) -> Message:
        """Answer rank 0: run a round, or connect to a peer or disconnect from it."""
        if self.kv is not None and (answer := self.kv.answer(message)) is not None:
            return answer
        told = expect(message, Round)
        requests = list(map(arrived, told.submit))
        outputs = self.round(requests, told.abort, told.hold, told.kv, told.resets)
        events = pack_events(self.take_events())
        kv = None if self.kv is None else self.kv.tell()
        return RoundOver(list(map(leaving_output, outputs)), events, self.state(), kv)

    def take_events(self) -> list[Event]:
        """What its prefix cache has stored and removed since the last call."""
        batch = self._events.take()
        return [] if batch is None else batch.events

    def state(self) -> RankState:
        """What rank 0 has to know for the next round."""
        engine = self.engine
        return RankState(engine.has_work(), engine.stats(), engine.load(), engine.outlook())


class DataParallelEngine:
    """Rank 0's engine and those of the other ranks, as one."""

    def __init__(
        self,
        own: OwnEngine,
        group: RankGroup,
        rebalancer: Rebalancer | None,
        policy: ContextPolicy,
        caches: RankCaches,
        max_num_seqs: int,
    ) -> None:
        self._own, self._group, self._rebalancer = own, group, rebalancer
        self.warm_up = own.engine.warm_up
        self._policy, self._caches, self._max_num_seqs = policy, caches, max_num_seqs
        self._publisher: EventPublisher | None = None
        self._new: dict[str, Request] = {}
        self._refused: list[RequestOutput] = []
        self._aborted: list[str] = []
        self._resets = False
        self._rank_of: dict[str, int] = {}  # of open requests
        self._states = [own.state() for _ in range(group.size)]  # all alike before the first round
        self.kv = None if own.engine.kv is None else RanksExchange(own.engine.kv, group)
        self.tiers = own.engine.tiers  # those of rank 0; each rank has its own

    def submit(self, request: Request) -> None:
        """Queue a request for the next round."""
        request_id = request.request_id
        if request_id in self._new or request_id in self._rank_of:
            message = f"request_id {request_id!r} is already in use"
            end = End(FinishReason.REJECT, "duplicate_id", message)
            self._refused.append(end.output(request_id))
        else:
            self._new[request_id] = request

    def abort(self, request_id: str) -> None:
        """End a request in the next round."""
        self._aborted.append(request_id)

    def reset_prefix_cache(self) -> None:
        """Have all ranks forget their cached blocks in the next round."""
        self._resets = True

    def has_work(self) -> bool:
        """True while a step() would do something."""
        news = self._new or self._aborted or self._refused or self._resets
        return bool(news or self._busy())

    def _busy(self) -> bool:
        moving = self.kv is not None and self.kv.has_news()
        return moving or any(state.has_work for state in self._states)

    def step(self) -> list[RequestOutput]:
        """One round of all ranks."""
        watching = self.kv is not None and self.kv.wait_ms() is not None
        if not self.has_work() and not watching:
            self._group.check()
            return []
        with self._group.together():
            outputs = self._round()
        for output in outputs:
            if output.finish_reason is not None:
                self._rank_of.pop(output.request_id, None)
        refused, self._refused = self._refused, []
        return refused + outputs

    def _round(self) -> list[RequestOutput]:
        submits, aborts = self._hand_out()
        resets, self._resets = self._resets, False
        hold = self._policy.hold(self._outlooks(submits))
        others = range(1, self._group.size)
        news = [KVNews()] * self._group.size if self.kv is None else self.kv.hand_out(self._rank_of)
        self._group.tell_each(
            [
                Round(list(map(leaving, submits[rank])), aborts[rank], hold, news[rank], resets)
                for rank in others
            ]
        )
        outputs = self._own.round(submits[0], aborts[0], hold, news[0], resets)
        self._states[0] = self._own.state()
        self._caches.apply(0, self._own.take_events())
        if self.kv is not None and self._own.kv is not None:
            self.kv.heard(0, self._own.kv.tell())
        for rank, over in zip(others, self._group.hear(RoundOver), strict=True):
            outputs += map(arrived_output, over.outputs)
            self._states[rank] = over.state
            self._caches.apply(rank, unpack_events(over.events))
            if self.kv is not None and over.kv is not None:
                self.kv.heard(rank, over.kv)
        return outputs

    def _outlooks(self, submits: list[list[Request]]) -> list[Outlook]:
        """What each rank would do in this round, its new prompts included."""
        outlooks = []
        for state, requests in zip(self._states, submits, strict=True):
            context, decoding = state.outlook
            new = sum(request.kv_from is None for request in requests)
            outlooks.append((context + new, decoding))
        return outlooks

    def _hand_out(self) -> tuple[list[list[Request]], list[list[str]]]:
        """The new requests and the aborts of each rank."""
        submits: list[list[Request]] = [[] for _ in self._states]
        aborts: list[list[str]] = [[] for _ in self._states]
        new, self._new = list(self._new.values()), {}
        known = [content_ids(r.prompt_token_ids, r.images) + r.output_token_ids for r in new]
        cached = [
            self._caches.cached_tokens(token_ids, request.cache_salt)
            for request, token_ids in zip(new, known, strict=True)
        ]
        loads = [state.load for state in self._states]
        ranks = assign(loads, list(map(len, known)), cached, self._max_num_seqs)
        for request, rank in zip(new, ranks, strict=True):
            submits[rank].append(request)
            self._rank_of[request.request_id] = rank
        for request_id in self._aborted:
            if request_id in self._rank_of:
                aborts[self._rank_of[request_id]].append(request_id)
        self._aborted = []
        return submits, aborts

    def stats(self) -> EngineStats:
        """Return the sums over all ranks."""
        self._group.check()
        total = reduce(add_stats, (state.stats for state in self._states))
        # Since the last round all ranks wait.
        since_s = self._own.engine.stats().gpu_s - self._states[0].stats.gpu_s
        total.gpu_s += since_s * self._group.size
        total.gpu_idle_s += since_s * self._group.size
        total.num_waiting += len(self._new)
        return with_balance(total, self._rebalancer)

    def kv_events(self) -> EventPublisher:
        """Return the publisher of what is cached on any rank, or no longer on any."""
        if self._publisher is None:
            self._publisher = EventPublisher(self._caches.record_events())
        return self._publisher

    def kv_dump(self) -> Dump:
        """Return all blocks that any rank has cached."""
        publisher, hashes = self.kv_events(), self._caches.cached_hashes()
        if self.tiers is None:
            return publisher.dump(hashes)
        held = self._caches.tier_hashes() | {DISK: self.tiers.hashes()[DISK]}  # which all share
        return publisher.dump(hashes, held, self.tiers.token_ms)


def with_balance(stats: EngineStats, rebalancer: Rebalancer | None) -> EngineStats:
    """Return the stats, with those of the rebalancer if there is one."""
    if rebalancer is not None:
        stats.num_rebalances = rebalancer.num_rebalances
        stats.num_expert_bytes_moved = rebalancer.num_bytes_moved
        stats.rebalance_s = rebalancer.seconds
        stats.rank_imbalance = rebalancer.imbalance
        stats.rank_imbalance_before = rebalancer.imbalance_before
    return stats
