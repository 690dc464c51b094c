"""Multi-token prediction: one more layer that guesses the token after next.

From the model's state at position i and the token at i + 1 it predicts the token at i + 2. Its own
result serves as the next state, so that the same layer goes on guessing. Embedding and head are the
model's; position, cache slot and blocks of a pair are those of position i. An EAGLE head is such a
module without norms of embedding, state, the layer's input and its result.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.rows import norm_pair
from tokenmill.layers.linear import ComputeType
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, LayerTensors
from tokenmill.models.names import canonical, mtp_spec
from tokenmill.parallel import ALONE, Layout


class MTPModule:
    """enorm(embedding) and hnorm(state), projected, through one decoder layer of the family."""

    def __init__(
        self,
        model: Decoder,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: ComputeType,
        layout: Layout = ALONE,
    ) -> None:
        spec, index = mtp_spec(model.full), model.full.num_layers
        self.model, self.eps = model, spec.rms_eps
        parts = LayerTensors(spec, index, dtype, model.device, layout)
        for name, tensor in tensors:
            parts.put(canonical(spec, name.removeprefix(f"model.layers.{index}.")), tensor)
        self.embedding_norm = parts.optional_norm("enorm")
        self.state_norm = parts.optional_norm("hnorm")
        self.project = parts.linear("eh_proj")
        self.norm = parts.optional_norm("shared_head.norm")
        self.layer = model.layer_type(parts)

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Tokens [t] and the normed states before them [t, hidden] -> [t, hidden]."""
        embedded = self.model.embedding(token_ids)
        if self.embedding_norm is None or self.state_norm is None:
            pairs = torch.cat([embedded, states], dim=1)
        else:
            pairs = norm_pair(embedded, states, self.embedding_norm, self.state_norm, self.eps)
        stream = Residual(self.project(pairs), self.eps)
        self.layer(stream, cache, self.model.cos_sin[-1], batch)
        return stream.complete()

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], where ranks divide it as the model's logits()."""
        return self.model.score(out, self.norm)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's ids: its head is the model's."""
        return ids

    def states(self, out: torch.Tensor) -> torch.Tensor:
        """What stands for the model's normed state in the next guess, [rows, hidden]."""
        return out if self.norm is None else Residual(out, self.eps).normed(self.norm)

    @property
    def num_bytes(self) -> int:
        return self.project.num_bytes + self.layer.num_bytes
