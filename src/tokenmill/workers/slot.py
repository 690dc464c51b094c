"""A worker slot: one worker that is kept alive, watched and counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from typing import Literal, Protocol

from tokenmill.core.config import PoolConfig
from tokenmill.core.types import EngineStats, add_stats
from tokenmill.workers.link import Spawn, WorkerLink, WorkerStartError
from tokenmill.workers.messages import FromWorker, GetStats, ModelFacts, Stats, ToWorker

_log = logging.getLogger(__name__)

RATE_WINDOW_S = 10
BUSY_SAMPLES = 60  # signs of life over which busy() is a mean
MAX_BACKOFF_S = 30.0
State = Literal["starting", "ready", "draining", "restarting", "failed"]
Role = Literal["both", "prefill", "decode"]


class Owner(Protocol):
    """Who hears of what happens at a slot."""

    def on_ready(self, slot: WorkerSlot) -> None:
        """A worker is there and takes requests; raises WorkerStartError if it does not fit."""

    def on_down(self, slot: WorkerSlot) -> None:
        """The worker is gone, with all that it held."""

    def on_failed(self, slot: WorkerSlot) -> None:
        """No worker could be started any more."""

    def on_message(self, slot: WorkerSlot, message: FromWorker) -> None: ...

    def on_stats(self, slot: WorkerSlot) -> None:
        """A worker has told its stats."""


class WorkerSlot:
    """One worker after another: spawned, watched, replaced when it dies or hangs."""

    def __init__(
        self,
        name: str,
        spawn: Spawn,
        config: PoolConfig,
        owner: Owner,
        host: str | None = None,
        role: Role = "both",
    ) -> None:
        self.name = name
        self.role: Role = role
        self.state: State = "starting"
        self.facts: ModelFacts | None = None
        self.num_routed = 0
        self.num_prompt_tokens = 0  # of what was routed here
        self.num_overlap_tokens = 0  # of these, found cached by the router
        self.num_restarts = 0
        self.num_failures = 0
        self.num_hangs = 0
        self.last_failure = ""
        self.tokens = Rate()
        self.prompt_tokens = Rate()  # that it has computed, not found cached
        self._busy: deque[bool] = deque(maxlen=BUSY_SAMPLES)
        self._spawn = spawn
        self._config = config
        self._owner = owner
        self._host = host
        self._link: WorkerLink | None = None
        self._known: WorkerLink | None = None  # the one whose worker told the facts
        self._tasks: list[asyncio.Task[None]] = []
        self._stats = EngineStats()
        self._past = EngineStats()  # counters of the workers that were here before
        self._stats_waiters: list[asyncio.Future[None]] = []

    @property
    def ready(self) -> bool:
        """True while a worker is there, be it to finish what it has."""
        link = self._link
        return link is not None and link is self._known and not link.dead.is_set()

    async def start(self) -> ModelFacts:
        """Spawn the first worker; raises WorkerStartError when it does not come up."""
        facts = await self._launch()
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]
        return facts

    def send(self, message: ToWorker) -> None:
        """Tell the worker, if there is one."""
        if self._link is not None:
            self._link.send(message)

    def stats(self) -> EngineStats:
        """The last known gauges, and the counters of all workers that were here."""
        return add_stats(self._past, self._stats)

    def received_bytes(self) -> int:
        """KV that came from other workers."""
        kv = self.facts.kv if self.facts is not None else None
        block_bytes = kv.block_bytes if kv is not None else 0
        return self.stats().num_kv_blocks_received * block_bytes

    def busy(self) -> float:
        """The share of its last signs of life at which it had something to compute."""
        return sum(self._busy) / len(self._busy) if self._busy else 0.0

    async def refresh(self, timeout_s: float) -> None:
        """Ask for the stats of now; a worker in a long step may not answer in time."""
        if self.ready:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            self.send(GetStats())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter

    async def close(self, grace_s: float) -> None:
        """Stop the worker for good."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._link is not None:
            link, self._link = self._link, None
            await link.close(grace_s)

    async def _launch(self) -> ModelFacts:
        link = self._link = WorkerLink(self._on_message, self._host)
        try:
            self.facts = await self._started(link)
            self._known = link
            if self.state != "draining":
                self.state = "ready"
            self._owner.on_ready(self)
        except BaseException:
            self._link = None
            await link.close(grace_s=0.0)
            raise
        return self.facts

    async def _started(self, link: WorkerLink) -> ModelFacts:
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await link.start(self._spawn)
        except TimeoutError:
            raise WorkerStartError(f"the worker was not ready within {limit_s:g} s") from None

    async def _supervise(self) -> None:
        """Replace the worker whenever it dies."""
        loop = asyncio.get_running_loop()
        attempts = 0
        while self._link is not None:
            started_s = loop.time()
            await self._link.dead.wait()
            self._count_failure(self._link.reason)
            self._owner.on_down(self)
            link, self._link = self._link, None
            await link.close(grace_s=self._config.backoff_s)
            if self.state == "draining":
                return
            attempts = 0 if loop.time() - started_s > self._config.stable_s else attempts
            attempts = await self._restart(attempts)

    def _count_failure(self, reason: str) -> None:
        _log.error("worker %s stopped: %s", self.name, reason)
        self.num_failures += 1
        self.last_failure = reason
        self._past = _counters(self.stats())
        self._stats = EngineStats()
        if self.state != "draining":
            self.state = "restarting"

    async def _restart(self, attempts: int) -> int:
        """Launch until a worker is ready; returns the attempts used, or gives up."""
        config = self._config
        while attempts < config.max_restarts:
            await asyncio.sleep(min(config.backoff_s * 2 ** min(attempts, 16), MAX_BACKOFF_S))
            attempts += 1
            try:
                await self._launch()
            except WorkerStartError as error:
                _log.error("restart %d of worker %s failed: %s", attempts, self.name, error)
                continue
            _log.warning("worker %s was restarted", self.name)
            self.num_restarts += 1
            return attempts
        self.state = "failed"
        self._owner.on_failed(self)
        return attempts

    async def _watch(self) -> None:
        """Ask for a sign of life now and then; it comes between two steps."""
        config = self._config
        limit = max(1, math.ceil(config.hang_timeout_s / config.heartbeat_s))
        while True:
            await asyncio.sleep(config.heartbeat_s)
            link = self._link
            if link is None or not self.ready:
                continue
            if link.num_unanswered >= limit:
                self.num_hangs += 1
                link.kill(f"no sign of life for {config.hang_timeout_s:g} s")
            else:
                link.send(GetStats())
                link.num_unanswered += 1

    def _on_message(self, message: FromWorker) -> None:
        if isinstance(message, Stats):
            self.prompt_tokens.add(_computed(message.stats) - _computed(self._stats))
            self._stats = message.stats
            self._busy.append(message.stats.num_running + message.stats.num_waiting > 0)
            self._owner.on_stats(self)
            waiters, self._stats_waiters = self._stats_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        else:
            self._owner.on_message(self, message)


class Rate:
    """Tokens per second over the last seconds, and their total."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self.total = 0
        self._counts: deque[list[int]] = deque()  # [second, tokens]

    def add(self, count: int) -> None:
        """Count tokens that came now."""
        self.total += count
        second = int(time.monotonic())
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += count
        else:
            self._counts.append([second, count])
            if len(self._counts) > RATE_WINDOW_S + 1:
                self._counts.popleft()

    def per_s(self) -> float:
        """The mean over the last whole seconds."""
        second = int(time.monotonic())
        counts = [n for s, n in self._counts if second - RATE_WINDOW_S <= s < second]
        return sum(counts) / RATE_WINDOW_S


def _computed(stats: EngineStats) -> int:
    """Tokens of prompts that an engine has not found in its cache."""
    return stats.num_prompt_tokens - stats.prefix_hit_tokens


def _counters(stats: EngineStats) -> EngineStats:
    """What remains of an engine that is gone."""
    stats.num_waiting = stats.num_running = stats.num_kv_blocks = stats.num_kv_blocks_used = 0
    stats.num_receiving = stats.num_leases = 0
    stats.rank_imbalance = stats.rank_imbalance_before = 0.0
    return stats
