"""Engines over several ranks: rank 0 schedules for all, or each rank for requests of its own.

With attention data parallelism every rank has a whole engine; rank 0 hands requests out and starts
each round, in which every rank runs one step, or computes its experts' part of the others'.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from msgspec.structs import replace

from tokenmill.core.images import content_ids
from tokenmill.core.kv import DISK
from tokenmill.core.kv_events import (
    Dump,
    Event,
    EventPublisher,
    pack_events,
    unpack_events,
)
from tokenmill.core.requests import End, Generate, Request, RequestOutput
from tokenmill.core.types import EngineStats, FinishReason, add_stats
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.own_kv import RanksExchange, answer_call, own_events
from tokenmill.engine.ranks.rank_messages import (
    EngineRound,
    RankMessage,
    RankState,
    RoundOver,
    arrived,
    arrived_output,
    expect,
    leaving,
    leaving_output,
)
from tokenmill.engine.ranks.rebalance import Rebalancer
from tokenmill.engine.runner import ModelRunner
from tokenmill.routing.attention_dp import ContextPolicy, Outlook, RankCaches, assign


class LeadingEngine(LanguageEngine):
    """The engine of rank 0, whose runner has the others run every step."""

    def __init__(
        self, group: RankGroup, rebalancer: Rebalancer | None, *parts: Any, **named: Any
    ) -> None:
        """`parts` and those with names are LanguageEngine's."""
        super().__init__(*parts, **named)
        self._group, self._rebalancer = group, rebalancer

    def step(self, hold_context: bool = False) -> list[RequestOutput]:
        with self._group.together():
            return super().step(hold_context)

    def stats(self) -> EngineStats:
        """Return the scheduler's stats, and how balanced the experts are if they move."""
        self._group.check()
        return with_balance(super().stats(), self._rebalancer)


class OwnEngine:
    """One rank's engine of several, each with requests of its own."""

    def __init__(
        self, engine: LanguageEngine, runner: ModelRunner, rebalancer: Rebalancer | None
    ) -> None:
        self.engine, self._runner, self._rebalancer = engine, runner, rebalancer
        self._events = engine.kv_events()
        self.kv = engine.kv

    def run(self, told: EngineRound) -> list[RequestOutput]:
        """Take what is new, then one step in time with the other ranks."""
        if told.resets:
            self.engine.reset_prefix_cache()
        for request in told.submit:
            self.engine.submit(request)
        if self.kv is not None:
            for notice in told.kv_notices:
                self.kv.notice(notice)
            for request_id in told.kv_releases:
                self.kv.release(request_id)
        for request_id in told.abort:
            self.engine.abort(request_id)
        if self._rebalancer is not None:
            self._rebalancer.turn()
        executor = self._runner.plain
        executor.has_met = False
        outputs = self.engine.step(told.hold)
        if not executor.has_met:
            executor.assist()
        return outputs

    def answer(self, message: RankMessage) -> RankMessage:
        """Answer rank 0: run a round, or connect to a peer or disconnect from it."""
        if self.kv is not None and (answer := answer_call(self.kv, message)) is not None:
            return answer
        told = expect(message, EngineRound)
        outputs = self.run(replace(told, submit=list(map(arrived, told.submit))))
        return self.over(list(map(leaving_output, outputs)))

    def over(self, outputs: list[RequestOutput]) -> RoundOver:
        events = pack_events(self.take_events())
        if self.kv is None:
            return RoundOver(outputs, events, self.state())
        return RoundOver(outputs, events, self.state(), own_events(self.kv), self.kv.wait_ms())

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
        request_id = request.request_id
        if request_id in self._new or request_id in self._rank_of:
            message = f"request_id {request_id!r} is already in use"
            end = End(FinishReason.REJECT, "duplicate_id", message)
            self._refused.append(end.output(request_id))
        elif not isinstance(request.task, Generate):
            end = End(FinishReason.REJECT, "invalid_request", "task: this engine generates text")
            self._refused.append(end.output(request_id))
        else:
            self._new[request_id] = request

    def abort(self, request_id: str) -> None:
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
        news = [([], [])] * self._group.size if self.kv is None else self.kv.hand_out(self._rank_of)
        rounds = [
            EngineRound(requests, stopped, hold, *told, resets)
            for requests, stopped, told in zip(submits, aborts, news, strict=True)
        ]
        self._group.tell_each(
            [replace(told, submit=list(map(leaving, told.submit))) for told in rounds[1:]]
        )
        own = self._own.over(self._own.run(rounds[0]))
        outputs = self._take(0, own)
        for rank, over in enumerate(self._group.hear(RoundOver), 1):
            outputs += map(arrived_output, self._take(rank, over))
        return outputs

    def _take(self, rank: int, over: RoundOver) -> list[RequestOutput]:
        self._states[rank] = over.state
        self._caches.apply(rank, unpack_events(over.events))
        if self.kv is not None and over.kv_events is not None:
            self.kv.heard(rank, over.kv_events, over.kv_wait_ms)
        return over.outputs

    def _outlooks(self, submits: list[list[Request]]) -> list[Outlook]:
        """What each rank would do in this round, its new prompts included."""
        outlooks = []
        for state, requests in zip(self._states, submits, strict=True):
            context, decoding = state.outlook
            new = sum(request.task.kv_from is None for request in requests)
            outlooks.append((context + new, decoding))
        return outlooks

    def _hand_out(self) -> tuple[list[list[Request]], list[list[str]]]:
        submits: list[list[Request]] = [[] for _ in self._states]
        aborts: list[list[str]] = [[] for _ in self._states]
        new, self._new = list(self._new.values()), {}
        known = [
            content_ids(r.task.prompt_token_ids, r.task.images) + r.task.output_token_ids
            for r in new
        ]
        cached = [
            self._caches.cached_tokens(token_ids, request.task.cache_salt)
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
    if rebalancer is not None:
        stats.num_rebalances = rebalancer.num_rebalances
        stats.num_expert_bytes_moved = rebalancer.num_bytes_moved
        stats.rebalance_s = rebalancer.seconds
        stats.rank_imbalance = rebalancer.imbalance
        stats.rank_imbalance_before = rebalancer.imbalance_before
    return stats
