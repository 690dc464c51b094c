"""GPU time that requests take, and its price."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(slots=True)
class Cost:
    """GPU-seconds of a request, on all workers that it was at."""

    prefill_s: float = 0.0  # several known tokens in a step: prompts, also what is computed again
    decode_s: float = 0.0  # one token in a step
    drafts_s: float = 0.0  # drafts that were verified, accepted or not
    saved_s: float = 0.0  # what cached tokens of the prompt would have taken; nobody pays for it

    @property
    def spent_s(self) -> float:
        return self.prefill_s + self.decode_s + self.drafts_s

    def add(self, other: Cost) -> None:
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.drafts_s += other.drafts_s
        self.saved_s += other.saved_s


def usd_of(gpu_s: float, price_per_gpu_hour: float) -> float:
    return gpu_s / HOUR_S * price_per_gpu_hour
