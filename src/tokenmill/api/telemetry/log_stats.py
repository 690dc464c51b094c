"""One line of throughput every ten seconds, while there is something to tell."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.core.kv import DISK, HOST
from tokenmill.core.types import EngineStats

EVERY_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment."""

    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_queries: int
    prefix_hits: int
    num_calls: int


class StatsLog:
    """Says what was done since it was last asked."""

    def __init__(self, metrics: ServerMetrics, stats: Callable[[], EngineStats]) -> None:
        self._metrics = metrics
        self._stats = stats
        self._last = self._read(stats())

    async def run(self) -> None:
        """Log until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            if (line := self.line()) is not None:
                _log.info(line)

    def line(self) -> str | None:
        """What was done since the last call; None where that is nothing."""
        stats, before = self._stats(), self._last
        now = self._last = self._read(stats)
        prompt = now.num_prompt_tokens - before.num_prompt_tokens
        output = now.num_output_tokens - before.num_output_tokens
        is_idle = not stats.num_running and not stats.num_waiting
        if is_idle and not prompt and not output and now.num_calls == before.num_calls:
            return None
        seconds = max(now.time_s - before.time_s, 1e-9)
        parts = [
            f"running {stats.num_running}, waiting {stats.num_waiting}",
            f"prompt {prompt / seconds:.1f} tok/s, output {output / seconds:.1f} tok/s",
        ]
        if stats.num_kv_blocks:
            parts.append(f"KV cache {stats.num_kv_blocks_used / stats.num_kv_blocks:.1%} used")
        if tiers := stats.tiers:
            host, disk = (tiers.get(f"{tier}_blocks", 0) for tier in (HOST, DISK))
            parts.append(f"{host:.0f} KV blocks in host memory, {disk:.0f} on disk")
        if (queries := now.prefix_queries - before.prefix_queries) > 0:
            parts.append(f"prefix hits {(now.prefix_hits - before.prefix_hits) / queries:.1%}")
        return "; ".join(parts)

    def _read(self, stats: EngineStats) -> Reading:
        metrics = self._metrics
        return Reading(
            time.monotonic(),
            metrics.num_prompt_tokens,
            metrics.num_output_tokens,
            stats.prefix_query_tokens,
            stats.prefix_hit_tokens,
            sum(metrics.finished.values()),
        )
