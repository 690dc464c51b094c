"""The state of the pool as data, for /workers and /metrics."""

from __future__ import annotations

import logging
import time
from collections import deque

import msgspec

from tokenmill.routing.policies import Policy
from tokenmill.routing.role_balance import RateMatch
from tokenmill.routing.router import Decision, Router
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.slot import WorkerSlot

_log = logging.getLogger(__name__)

NUM_DECISIONS = 64  # that are remembered


class WorkerView(msgspec.Struct, frozen=True):
    """One worker, now and since the start of the server."""

    name: str
    role: str
    state: str
    num_requests: int  # routed there and not ended
    num_running: int
    num_waiting: int
    queued_tokens: int  # of prompts that wait for prefill there, by the router's account
    kv_blocks: int
    kv_blocks_used: int
    cached_blocks: int  # as far as events tell
    routed: int
    routed_tokens: int
    overlap_tokens: int
    tokens_per_s: float
    output_tokens: int
    restarts: int
    failures: int
    hangs: int
    last_failure: str
    busy: float = 0.0  # share of the last minute with something to compute
    prompt_tokens_per_s: float | None = None  # computed there, over ten seconds; None: not known
    warnings: list[str] = []  # that it started with
    kv_tokens: int | None = None  # of one request that its KV cache holds; None: not known
    pid: int | None = None  # on its machine; None while it has no process
    returns: int = 0  # times that a backend of a router was there again
    tiers: dict[str, float] = {}  # of --kv-offloading: blocks, hits, bytes and seconds
    cache_basis: str = ""  # of a backend: how it is known what it has cached
    event_batches: dict[str, int] = {}  # of a backend's KV cache events: received, replayed, lost

    @property
    def up(self) -> bool:
        return self.state == "ready"


class DecisionView(msgspec.Struct, frozen=True):
    """Why a request went where it went."""

    request_id: str
    time_s: float  # Unix time
    worker: str
    prompt_tokens: int
    cached_tokens: int
    resumed_tokens: int  # generated before, elsewhere
    terms: dict[str, dict[str, float]]
    role: str = "both"  # of the worker
    note: str = ""  # who computes the prompt, where there are prefill and decode workers
    basis: str = ""  # of a backend: how it was known what it has cached


class FrontView(msgspec.Struct, frozen=True):
    """One of several API processes."""

    name: str
    state: str  # starting, ready, restarting or draining
    url: str
    pid: int
    num_open: int  # calls
    restarts: int


class PolicyView(msgspec.Struct, frozen=True):
    """How a router chooses, in a few words."""

    rule: str = ""
    term: str = ""  # of a decision, by which workers are compared
    reason: str = ""  # why a worker, where no term says it
    knows_blocks: bool = False


class ImagesView(msgspec.Struct, frozen=True):
    """Images of all calls, and what the workers did for them."""

    images: int
    cached: int  # ready, or on the way, when they were asked for
    fetched: int
    decoded: int
    refused: dict[str, int]  # by what failed: fetch, read or decode
    tokens: int  # of prompts
    encoded: int
    patches: int  # that were encoded
    encoder_hits: int  # features that were there when a request needed them


class PoolView(msgspec.Struct, frozen=True):
    """All workers and what the router did of late."""

    router: str
    num_open: int
    num_held: int  # wait for a worker to go on
    migrations: int
    workers: list[WorkerView]
    decisions: list[DecisionView]
    transfers: int = 0  # prompts whose KV went from a prefill to a decode worker
    failed_transfers: int = 0  # beside these: taken up by a prefill worker, and lost on the way
    transferred_bytes: int = 0  # of KV
    rates: RateMatch | None = None  # where there are prefill and decode workers
    policy: PolicyView = PolicyView()
    fronts: list[FrontView] = []  # where there are several
    images: ImagesView | None = None  # of a model that takes some


def policy_view(policy: Policy) -> PolicyView:
    return PolicyView(policy.rule, policy.term, policy.reason, policy.knows_blocks)


class Choices:
    """The latest decisions of routers that had a choice, or workers with roles."""

    def __init__(self) -> None:
        self._latest: deque[tuple[str, float, int, Decision, str, str]]
        self._latest = deque(maxlen=NUM_DECISIONS)

    def add(
        self,
        request_id: str,
        decision: Decision,
        num_resumed: int = 0,
        role: str = "both",
        note: str = "",
    ) -> None:
        """Note a decision of now for a request that has so many tokens already."""
        if len(decision.workers) > 1 or role != "both":
            self._latest.append((request_id, time.time(), num_resumed, decision, role, note))
            if _log.isEnabledFor(logging.DEBUG):
                by = f", by {decision.basis}" if decision.basis else ""
                _log.debug("%s -> %s%s: %s", request_id, decision.worker, by, decision.terms())

    def views(self) -> list[DecisionView]:
        return [
            DecisionView(
                request_id=request_id,
                time_s=time_s,
                worker=decision.worker,
                prompt_tokens=decision.num_prompt_tokens,
                cached_tokens=decision.num_cached_tokens,
                resumed_tokens=num_resumed,
                terms=decision.terms(),
                role=role,
                note=note,
                basis=decision.basis or "",
            )
            for request_id, time_s, num_resumed, decision, role, note in self._latest
        ]


def worker_view(slot: WorkerSlot, router: Router, entries: list[OpenRequest]) -> WorkerView:
    stats = slot.stats()
    known = slot.name in router.workers
    return WorkerView(
        name=slot.name,
        role=slot.role,
        state=slot.state,
        num_requests=len(entries),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_tokens=sum(e.num_uncached for e in entries if not e.token_ids),
        kv_blocks=stats.num_kv_blocks,
        kv_blocks_used=stats.num_kv_blocks_used,
        cached_blocks=router.index.num_blocks(slot.name) if known else 0,
        routed=slot.num_routed,
        routed_tokens=slot.num_prompt_tokens,
        overlap_tokens=slot.num_overlap_tokens,
        tokens_per_s=round(slot.tokens.per_s(), 1),
        output_tokens=slot.tokens.total,
        restarts=slot.num_restarts,
        failures=slot.num_failures,
        hangs=slot.num_hangs,
        last_failure=slot.last_failure,
        busy=round(slot.busy(), 3),
        prompt_tokens_per_s=round(slot.prompt_tokens.per_s(), 1),
        warnings=[] if slot.facts is None else slot.facts.warnings,
        kv_tokens=None if slot.facts is None else slot.facts.kv_tokens,
        pid=slot.pid,
        tiers=stats.tiers,
    )
