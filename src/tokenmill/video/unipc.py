"""UniPC: the noise levels of a run, and the solver that goes from one to the next.

Two versions of diffusers place the noise levels differently: "mlperf" is 0.35, which MLPerf pins,
"diffusers" is 0.42. The solver is the same: order 2, B(h) = e^h - 1, it predicts the clean latents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

TRAIN_STEPS = 1000
_FIRST_BELOW_ONE = 1e-6  # at a level of one the logarithm of what is left would be infinite
ScheduleName = Literal["mlperf", "diffusers"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Noise levels from high to none, and the model's timestep at each but the last."""

    sigmas: tuple[float, ...]
    timesteps: tuple[int, ...]


def make_schedule(name: ScheduleName, num_steps: int, shift: float) -> Schedule:
    """The levels of a run of `num_steps`; fp32 values, as the model was sampled with."""
    levels = np.linspace(1.0, 1.0 / TRAIN_STEPS, num_steps + 1)
    if name == "mlperf":
        levels = 1.0 - levels
        sigmas = np.flip(shift * levels / (1 + (shift - 1) * levels))[:-1].copy()
    else:
        levels = levels[:-1]
        sigmas = shift * levels / (1 + (shift - 1) * levels)
        if abs(sigmas[0] - 1.0) < _FIRST_BELOW_ONE:
            sigmas[0] -= _FIRST_BELOW_ONE
    timesteps = (sigmas * TRAIN_STEPS).astype(np.int64)
    narrow = np.append(sigmas, 0.0).astype(np.float32)
    return Schedule(tuple(narrow.astype(float).tolist()), tuple(timesteps.tolist()))


class UniPC:
    """The state of one run: latents in, the model's velocity in, latents of the next level out."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.index = schedule, 0
        self._cleans: list[torch.Tensor] = []  # predicted clean latents, the last one at the end
        self._last: torch.Tensor | None = None  # latents that the last prediction started from
        self._order = 0

    def step(self, velocity: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """From level `index` to the next one, all in fp32."""
        clean = latents - self.schedule.sigmas[self.index] * velocity
        if self._last is not None:
            latents = self._correct(clean, self._last)
        self._cleans = [*self._cleans, clean][-2:]
        left = len(self.schedule.timesteps) - self.index
        self._order = min(2, left, self.index + 1)
        self._last = latents
        self.index += 1
        return self._predict(latents)

    def _predict(self, latents: torch.Tensor) -> torch.Tensor:
        """From level index - 1 to index, by the clean latents known so far."""
        now, ahead = self.index - 1, self.index
        keep, grow = self._weights(now, ahead)
        clean = self._cleans[-1]
        if self._order == 2:
            slope = (self._cleans[-2] - clean) / self._ratio(now - 1, now, ahead)
            clean = clean + 0.5 * slope
        return keep * latents + grow * clean

    def _correct(self, clean: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The last prediction again, now that the clean latents at its end are known."""
        before, now = self.index - 1, self.index
        keep, grow = self._weights(before, now)
        known = self._cleans[-1]
        if self._order == 1:
            return keep * last + grow * (known + 0.5 * (clean - known))
        ratio = self._ratio(before - 1, before, now)
        slope = (self._cleans[-2] - known) / ratio
        at_slope, at_end = self._corrector(ratio, self._lambda(now) - self._lambda(before))
        return keep * last + grow * (known + at_slope * slope + at_end * (clean - known))

    @staticmethod
    def _corrector(ratio: float, step: float) -> tuple[float, float]:
        """Weights of the two slopes: a + b = phi_1, a * ratio + b = phi_2, over B(h)."""
        h = -step
        base = math.expm1(h)
        first = base / h - 1
        right = first / base, 2 * (first / h - 0.5) / base
        at_slope = (right[1] - right[0]) / (ratio - 1)
        return at_slope, right[0] - at_slope

    def _weights(self, start: int, end: int) -> tuple[float, float]:
        """What is kept of the latents, and what the clean ones add, from one level to another."""
        first, last = self.schedule.sigmas[start], self.schedule.sigmas[end]
        step = self._lambda(end) - self._lambda(start)
        return last / first, -(1 - last) * math.expm1(-step)

    def _ratio(self, other: int, start: int, end: int) -> float:
        return (self._lambda(other) - self._lambda(start)) / (
            self._lambda(end) - self._lambda(start)
        )

    def _lambda(self, index: int) -> float:
        sigma = self.schedule.sigmas[index]
        return math.inf if sigma == 0.0 else math.log((1 - sigma) / sigma)
