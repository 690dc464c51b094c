"""A worker slot: one worker at a time, watched and counted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from tokenmill.core.config import PoolConfig
from tokenmill.core.types import EngineStats, add_stats, is_counter
from tokenmill.workers.link import Spawn, WorkerLink, WorkerStartError
from tokenmill.workers.messages import FromWorker, GetStats, ModelFacts, Stats, ToWorker

_log = logging.getLogger(__name__)

RATE_WINDOW_S = 10
BUSY_SAMPLES = 60  # signs of life over which busy() is a mean
State = Literal["starting", "ready", "draining", "restarting", "failed"]
Role = Literal["both", "prefill", "decode"]


OnMessage = Callable[["WorkerSlot", FromWorker], None]


class WorkerSlot:
    """One worker after another: launched, watched and counted; lifecycle.py replaces the dead."""

    def __init__(
        self,
        name: str,
        spawn: Spawn,
        config: PoolConfig,
        on_message: OnMessage,
        host: str | None = None,
        role: Role = "both",
    ) -> None:
        self.name = name
        self.role: Role = role
        self.state: State = "starting"
        self.facts: ModelFacts | None = None
        self.num_routed = 0
        self.num_ended = 0  # of these, those that it has ended
        self.num_prompt_tokens = 0  # of what was routed here
        self.num_overlap_tokens = 0  # of these, found cached by the router
        self.num_restarts = 0
        self.num_failures = 0
        self.num_hangs = 0
        self.last_failure = ""
        self.worker_lives = False  # though the link to it broke
        self.joined = False  # others have started the worker: nothing takes its place
        self.tokens = Rate()
        self.prompt_tokens = Rate()  # that it has computed, not found cached
        self._busy: deque[bool] = deque(maxlen=BUSY_SAMPLES)
        self._spawn = spawn
        self._config = config
        self._on_message = on_message
        self._host = host
        self._link: WorkerLink | None = None
        self._known: WorkerLink | None = None  # the one whose worker told the facts
        self._stats = EngineStats()
        self._past = EngineStats()  # counters of the workers that were here before
        self._stats_waiters: list[asyncio.Future[None]] = []
        self._stats_s = 0.0  # when they were told
        self._computed_s = 0.0  # of the worker that died: all but its idle time

    @property
    def ready(self) -> bool:
        """True while a worker is there, be it to finish what it has."""
        link = self._link
        return link is not None and link is self._known and not link.dead.is_set()

    @property
    def pid(self) -> int | None:
        """The process of the worker, where it runs; None while there is none."""
        return (self._link.pid or None) if self._link is not None and self.ready else None

    async def launch(self) -> ModelFacts:
        """Spawn a worker; raises WorkerStartError when it does not come up."""
        link = self._link = WorkerLink(self._receive, self._host)
        self.worker_lives = False
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                self.facts = await link.start(self._spawn)
        except TimeoutError:
            raise WorkerStartError(f"the worker was not ready within {limit_s:g} s") from None
        self._known = link
        if self.state != "draining":
            self.state = "ready"
        return self.facts

    async def died(self) -> None:
        """Wait until the worker is dead; then its failure is counted."""
        assert self._link is not None
        await self._link.dead.wait()
        self.last_failure = self._link.reason
        _log.error("worker %s stopped: %s", self.name, self.last_failure)
        self.num_failures += 1
        self.end_stats()
        if self.state != "draining":
            self.state = "restarting"

    async def stop(self, grace_s: float, reason: str = "") -> None:
        """Stop the worker, if there is one; `reason` says why it is not taken."""
        link, self._link = self._link, None
        if link is not None:
            await link.close(grace_s, reason)

    def lost(self, address: str, reason: str, worker_lives: bool = False) -> None:
        """Give up the link of this address: others know that the worker is gone, or the link."""
        if self._link is not None and self._link.address == address:
            self.worker_lives = worker_lives
            self._link.lost(reason)

    @property
    def is_behind(self) -> bool:
        """True while more has come from the worker than the message that is handled."""
        return self._link is not None and self._link.is_behind

    def send(self, message: ToWorker) -> None:
        if self._link is not None:
            self._link.send(message)

    def beat(self) -> None:
        """Ask for a heartbeat, which comes between two steps; a worker that hangs is killed."""
        link, config = self._link, self._config
        if link is None or not self.ready:
            return
        if link.num_unanswered >= max(1, math.ceil(config.hang_timeout_s / config.heartbeat_s)):
            self.num_hangs += 1
            link.kill(f"no sign of life for {config.hang_timeout_s:g} s")
        else:
            link.send(GetStats())
            link.num_unanswered += 1

    async def refresh(self, timeout_s: float) -> None:
        """Ask for the stats of now; a worker in a long step may not answer in time."""
        if self.ready:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            self.send(GetStats())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter

    @property
    def latest_stats(self) -> EngineStats:
        return self._stats

    def stats(self) -> EngineStats:
        """The last known gauges, and the counters of all workers that were here."""
        return add_stats(self._past, self._stats)

    def end_stats(self) -> None:
        """Keep the counters of a worker that is gone, with the time since it was last heard of."""
        stats = self._stats
        if stats.num_gpus:
            stats.gpu_s += (time.monotonic() - self._stats_s) * stats.num_gpus
        self._computed_s = stats.gpu_s - stats.gpu_idle_s
        self._past = _counters(self.stats())
        self._stats = EngineStats()

    def end_account(self, charged_s: float) -> None:
        """Count what the dead worker has spent on nobody, as far as is known, as idle."""
        self._past.gpu_idle_s += max(0.0, self._computed_s - charged_s)
        self._computed_s = 0.0

    def received_bytes(self) -> int:
        kv = self.facts.kv if self.facts is not None else None
        block_bytes = kv.block_bytes if kv is not None else 0
        return self.stats().num_kv_blocks_received * block_bytes

    def busy(self) -> float:
        """The share of its last signs of life at which it had something to compute."""
        return sum(self._busy) / len(self._busy) if self._busy else 0.0

    def _receive(self, message: FromWorker) -> None:
        if isinstance(message, Stats):
            self._take_stats(message.stats)
        self._on_message(self, message)

    def _take_stats(self, stats: EngineStats) -> None:
        self.prompt_tokens.add(_computed(stats) - _computed(self._stats))
        self._stats, self._stats_s = stats, time.monotonic()
        self._busy.append(stats.num_running + stats.num_waiting > 0)
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Rate:
    """Tokens per second over the last seconds, and their total."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self.total = 0
        self._counts: deque[list[int]] = deque()  # [second, tokens]

    def add(self, count: int) -> None:
        self.total += count
        second = int(time.monotonic())
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += count
        else:
            self._counts.append([second, count])
            if len(self._counts) > RATE_WINDOW_S + 1:
                self._counts.popleft()

    def per_s(self) -> float:
        second = int(time.monotonic())
        counts = [n for s, n in self._counts if second - RATE_WINDOW_S <= s < second]
        return sum(counts) / RATE_WINDOW_S


def _computed(stats: EngineStats) -> int:
    """Tokens of prompts that an engine has not found in its cache."""
    return stats.num_prompt_tokens - stats.prefix_hit_tokens


def _counters(stats: EngineStats) -> EngineStats:
    stats.num_waiting = stats.num_running = stats.num_kv_blocks = stats.num_kv_blocks_used = 0
    stats.num_receiving = stats.num_leases = stats.num_gpus = 0
    stats.num_loading = 0
    stats.rank_imbalance = stats.rank_imbalance_before = 0.0
    stats.figures = {name: n for name, n in stats.figures.items() if is_counter(name)}
    stats.tiers = {name: n for name, n in stats.tiers.items() if not name.endswith("_blocks")}
    return stats
