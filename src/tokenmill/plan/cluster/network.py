"""KV on its way from one worker to another: over the links of a rack, or between racks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.metrics import summarize
from tokenmill.plan.cluster.worker import Worker
from tokenmill.plan.hardware import Accelerator


@dataclass(slots=True)
class Moved:
    """What went one kind of way."""

    num_bytes: float = 0.0
    times_ms: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return {
            "transfers": len(self.times_ms),
            "gigabytes": round(self.num_bytes / 1e9, 3),
            "ms": summarize(self.times_ms, 3),
        }


class Network:
    """The rate of a GPU's links and of its network, one transfer at a time, and a latency."""

    def __init__(self, gpu: Accelerator, bytes_per_token: float, latency_s: float) -> None:
        self._gpu, self._bytes_per_token, self._latency_s = gpu, bytes_per_token, latency_s
        self.inside, self.between = Moved(), Moved()

    def transfer_s(self, source: Worker, target: Worker, num_tokens: int) -> float:
        """Seconds until the KV of so many tokens is there; counted."""
        is_inside = bool(set(source.place.racks) & set(target.place.racks))
        gpu, moved = self._gpu, self.inside if is_inside else self.between
        rate = gpu.link_bytes_per_s if is_inside else gpu.network_bytes_per_s
        num_bytes = num_tokens * self._bytes_per_token
        seconds = num_bytes / rate + self._latency_s
        moved.num_bytes += num_bytes
        moved.times_ms.append(seconds * 1e3)
        return seconds
