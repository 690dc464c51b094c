"""The worker pool: routes requests to workers, and continues them elsewhere when a worker dies.

The pool wires four objects: Routers know who may be chosen, Handovers move prompts from prefill to
decode workers, Migration owns the open requests, and Lifecycle owns the worker slots. Without a
decode worker, prefill workers also generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tokenmill.core.config import PoolConfig, RouterConfig, RouterPolicy, ServerConfig
from tokenmill.core.images import LoaderStats
from tokenmill.core.requests import Request
from tokenmill.core.types import EngineStats, FinishReason, add_stats
from tokenmill.routing.disaggregation import DisaggregationRule
from tokenmill.routing.role_balance import match_rates
from tokenmill.routing.suspects import Suspects, Trials
from tokenmill.sched.cache.blocks import U64
from tokenmill.workers.accounts import Accounts, AccountsView
from tokenmill.workers.assignment import Assignment
from tokenmill.workers.exchange.handover import Handovers
from tokenmill.workers.fronts.report import FrontCounts
from tokenmill.workers.fronts.stored_responses import ResponseKeeper, StoredResponses
from tokenmill.workers.joining.listener import JoinListener
from tokenmill.workers.lifecycle import Lifecycle, SpawnOf, WorkerWatcher, roles_of
from tokenmill.workers.link import Spawn, WorkerDownError
from tokenmill.workers.messages import ModelFacts, ResetPrefixCache
from tokenmill.workers.migration import Migration
from tokenmill.workers.open_request import OpenRequest, seeded
from tokenmill.workers.output_stream import OutputStream, WriteTurn
from tokenmill.workers.pool_routers import FRONT, Routers
from tokenmill.workers.pool_view import ImagesView, PoolView, policy_view, worker_view
from tokenmill.workers.slot import OnMessage, Role, WorkerSlot
from tokenmill.workers.trace import NO_TRACE, RequestTrace


class WorkerPool:
    """The workers as one engine: submit, abort and stats; it also restarts dead workers.

    With a `host` the workers connect by TCP. `spawn_of` starts single slots in place of `spawn`;
    `trials` says when a request that seems to kill workers may run, `front` is this one's name.
    A worker has `max_per_worker` requests of other tasks than text at most; further ones wait here.
    """

    def __init__(
        self,
        spawn: Spawn | None = None,
        config: PoolConfig | None = None,
        router: RouterConfig | None = None,
        host: str | None = None,
        prefill_spawn: Spawn | None = None,
        spawn_of: SpawnOf | None = None,
        trials: Trials | None = None,
        front: str = FRONT,
        max_per_worker: int | None = None,
    ) -> None:
        config = self.config = config or PoolConfig()
        slots: dict[str, WorkerSlot] = {}  # one view for all; the lifecycle changes it
        self.slots: Mapping[str, WorkerSlot] = MappingProxyType(slots)
        rule = DisaggregationRule(config.remote_prefill_tokens)
        self.routers = Routers(router or RouterConfig(), self.slots, front)
        self._accounts = Accounts()
        self.handovers = Handovers(rule, self.slots, self.routers, self._accounts)
        self._assignment = Assignment(
            *(self.slots, self.routers, self.handovers, config.kv_lease_s, self._accounts),
            max_per_worker,
        )
        suspects: Suspects[OpenRequest] = Suspects(config.max_migrations, trials)
        self._requests = Migration(
            self.routers, self.handovers, self._assignment, suspects, self._accounts
        )
        self._lifecycle = Lifecycle(
            slots,
            spawn_of or _by_role(spawn, prefill_spawn),
            config,
            self._requests,
            host,
        )
        self.open_requests: Mapping[str, OpenRequest] = MappingProxyType(self._requests.open)
        self.gave_up = self._lifecycle.gave_up  # no slot has a worker, and none can be started
        self._draining = False
        self._listener: JoinListener | None = None
        self.image_loads: LoaderStats | None = None  # of a front that takes images
        self._turn = WriteTurn()

    def watch(self, watcher: WorkerWatcher, on_front: OnMessage) -> None:
        """Have somebody hear of workers, and of the links between them and fronts."""
        self._lifecycle.watcher = watcher
        self._requests.on_front = on_front

    @property
    def facts(self) -> ModelFacts | None:
        """What holds for all workers; None before the first is ready."""
        return self._lifecycle.facts

    @property
    def ready(self) -> bool:
        """True while a worker is there to take requests."""
        return self.num_ready > 0

    @property
    def num_ready(self) -> int:
        return self.routers.num_workers

    @property
    def failure(self) -> str:
        return self._lifecycle.failure

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self.open_requests)

    @property
    def num_pending(self) -> int:
        """Open requests without a first token."""
        return sum(not entry.token_ids for entry in self.open_requests.values())

    @property
    def num_held(self) -> int:
        return sum(entry.slot is None for entry in self.open_requests.values())

    @property
    def num_free(self) -> int:
        busy = {entry.slot.name for entry in self.open_requests.values() if entry.slot is not None}
        return len(set(self.routers.main.workers) - busy)

    @property
    def num_migrations(self) -> int:
        """Times that a request went on at another worker."""
        return self._requests.num_migrations

    @property
    def num_restarts(self) -> int:
        """Times that a worker was started in place of another."""
        return self._lifecycle.num_restarts

    async def start(self) -> ModelFacts:
        """Start all workers, or wait for those that join; WorkerStartError when one is missing."""
        if self.config.join_listen is not None:
            self._listener = JoinListener(self.config, self._lifecycle)
            await self._listener.open()
        await self._lifecycle.start(roles_of(self.config))
        if self._listener is not None:
            await self._listener.filled(lambda: self.num_ready)
        assert self.facts is not None
        return self.facts

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop the workers; open requests end in ERROR."""
        self.fail_open("the server is shutting down", "shutdown")
        if self._listener is not None:
            self._listener.stop()
        await self._lifecycle.close(grace_s)
        if self._listener is not None:
            await self._listener.close()

    # Requests.

    def submit(
        self,
        requests: list[Request],
        traces: Sequence[RequestTrace] = (),
        hash_inputs: Sequence[U64] = (),
        account: str = "",
    ) -> OutputStream:
        """Route requests to workers; their outputs come by their index in the stream.

        Each request reports its stages to its trace. `hash_inputs` are the results of
        cache.blocks.hash_input() for the prompts, if they are known; of those with images they
        do not count. `account` is who pays.
        """
        if not self.ready:
            raise WorkerDownError("the engine is restarting; try again shortly")
        stream = OutputStream([r.request_id for r in requests], self._turn)
        named = [replace(seeded(request), account=account) for request in requests]
        entries = [OpenRequest(request, stream, index) for index, request in enumerate(named)]
        if self._draining:
            message = "the server is draining and takes no new requests"
            for entry in entries:
                entry.put_end(FinishReason.REJECT, message, "draining")
                self._accounts.closed(entry)
            return stream
        for index, entry in enumerate(entries):
            if hash_inputs and not entry.request.task.images:
                entry.hash_input = hash_inputs[index]
            entry.trace = traces[index] if traces else NO_TRACE
            entry.account = account
        self._requests.submit(entries)
        return stream

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free what the engines hold for them; finished ids are ignored."""
        self._requests.abort(request_ids)

    def drain(self) -> None:
        """Refuse new requests from now on; open ones finish, on another worker if need be."""
        self._draining = True

    def fail_open(self, message: str, stop_reason: str) -> None:
        """End every open request with one ERROR output and abort it in the engine."""
        self._requests.fail_all(message, stop_reason)

    # Workers.

    async def scale(self, num_workers: int, role: Role = "both") -> None:
        """Have this many workers: new ones are started, surplus ones drained, youngest first."""
        await self._lifecycle.scale(num_workers, role)

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        """Take a worker out of the pool when its requests are done; late ones move elsewhere."""
        await self._lifecycle.drain(name, timeout_s)

    def renew_router(self, policy: RouterPolicy | None = None) -> None:
        """Begin with a new router, of another policy if asked; it asks the workers what they hold.

        Nothing of what is under way changes.
        """
        if policy is not None:
            self.routers.set_policy(policy)
        self.routers.renew(self.open_requests.values())

    async def reset_prefix_cache(self) -> None:
        """Have all workers forget their cached blocks; returns once they have."""
        for slot in self.slots.values():
            slot.send(ResetPrefixCache())
        await self.stats()

    async def renew_routers(self, policy: RouterPolicy | None = None) -> None:
        self.renew_router(policy)

    async def refresh(self) -> None:
        """Have the figures of all fronts be those of now; one front has its own."""

    def response_keeper(self, limits: ServerConfig) -> ResponseKeeper:
        """Who keeps responses for later calls, at any front; one front has a store of its own."""
        return StoredResponses(limits)

    def total_counts(self) -> FrontCounts | None:
        """The counters of all fronts; None where there is one."""
        return None

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The sums over all workers; last known figures of those that do not answer in time."""
        await asyncio.gather(*(slot.refresh(timeout_s) for slot in self.slots.values()))
        return self.known_stats()

    def known_stats(self) -> EngineStats:
        """The sums over all workers as they last told, a heartbeat ago at most; asks nobody."""
        total = EngineStats(figures=self._requests.past_figures)
        for slot in self.slots.values():
            total = add_stats(total, slot.stats())
        for slot in self._requests.leaving:
            total = add_stats(total, EngineStats(figures=slot.stats().figures))
        return total

    def accounts(self) -> AccountsView:
        """What requests took, as far as the workers last told."""
        return self._accounts.view(self.known_stats())

    def view(self, decisions: bool = True) -> PoolView:
        """The pool as data, as /workers and /metrics show it."""
        slots = list(self.slots.values())
        roles: tuple[Role, Role] = ("prefill", "decode")
        sides = [[slot.busy() for slot in self._lifecycle.of_role(role)] for role in roles]
        at, router_of = self._requests.at, self.routers.of
        return PoolView(
            router=self.routers.main.config.policy,
            policy=policy_view(self.routers.main.policy),
            num_open=self.num_open,
            num_held=self.num_held,
            migrations=self.num_migrations,
            workers=[worker_view(slot, router_of(slot), at(slot)) for slot in slots],
            decisions=self._assignment.choices.views() if decisions else [],
            transfers=self.handovers.num_received,
            failed_transfers=self.handovers.num_failed,
            transferred_bytes=sum(slot.received_bytes() for slot in slots),
            rates=match_rates(*sides) if all(sides) else None,
            images=self._images_view(self.image_loads),
        )

    def _images_view(self, loads: LoaderStats | None) -> ImagesView | None:
        if loads is None:
            return None
        stats = self.known_stats()
        return ImagesView(
            images=loads.num_images,
            cached=loads.num_hits,
            fetched=loads.num_fetched,
            decoded=loads.num_decoded,
            refused=dict(loads.refused),
            tokens=loads.num_tokens,
            encoded=stats.num_images_encoded,
            patches=stats.num_patches_encoded,
            encoder_hits=stats.num_image_hits,
        )


def _by_role(spawn: Spawn | None, prefill_spawn: Spawn | None) -> SpawnOf:
    """What starts a slot: those that compute for others may have a command of their own."""

    def spawn_of(name: str, role: Role) -> Spawn:
        chosen = (prefill_spawn if role == "prefill" else None) or spawn
        assert chosen is not None
        return chosen

    return spawn_of
