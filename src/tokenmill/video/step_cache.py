"""Skipping denoising steps that would change little: faster, and not exact.

The blocks' result changes with the timestep's embedding. As long as the embedding's relative
changes since the last computed step add up to less than the threshold, what the blocks then added
to their input is added again.
"""

from __future__ import annotations

import torch

from tokenmill.models.wan.wan_transformer import TextKV, WanTransformer


class StepCache:
    """The state of one job with one expert."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.num_skipped = threshold, 0
        self._change = 0.0
        self._time: torch.Tensor | None = None
        self._added: torch.Tensor | None = None

    def velocity(
        self,
        expert: WanTransformer,
        latents: torch.Tensor,
        timestep: float,
        text: TextKV,
        last: bool,
    ) -> torch.Tensor:
        """As the expert's own call; the first and the last step are always computed."""
        embedding, time = expert.embed_time(timestep)
        x = expert.embed_patches(latents, text[0][0].shape[0])
        if self._skips(time) and not last and self._added is not None:
            self.num_skipped += 1
            x = x.add_(self._added)
        else:
            before = x.clone()
            x = expert.run_blocks(x, time, expert.grid(latents), text)
            self._change, self._added = 0.0, x - before
        return expert.project(x, embedding, latents.shape)

    def _skips(self, time: torch.Tensor) -> bool:
        if self._time is not None:
            change = (time - self._time).abs().mean() / self._time.abs().mean()
            self._change += change.item()
        self._time = time
        return self._change < self.threshold
