"""Models over several ranks, as the runner of one rank sees them.

Where ranks share every token, rank 0 tells the others what to compute and broadcasts its inputs:
a step, its logits where each rank has a part of the vocabulary, the same of the MTP module.
Whatever fails inside is the end of all ranks: the others cannot know how far it came.

On a GPU each rank replays its part of a step by CUDA graphs that end where ranks meet. Ranks need
not have the same graphs: what they do together is the same in the same order without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch

from tokenmill.core.types import RanksLostError
from tokenmill.engine.drafts.proposer import Cache, Drafter
from tokenmill.engine.graphs.piecewise_graphs import PiecewiseGraphs
from tokenmill.engine.model import KVCache, RankModel
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.rank_messages import (
    KVCall,
    Message,
    Rows,
    Step,
    pack_step,
    step_size,
    unpack_step,
)
from tokenmill.engine.ranks.rebalance import Rebalancer
from tokenmill.engine.ranks.shared_kv import RankReader
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.layers.images import ImageBuffers, ImageRows, StepRows
from tokenmill.parallel import Ranks

RANK_GONE = "a rank is gone: it closed its connection"


@contextmanager
def all_or_none() -> Iterator[None]:
    """Turn an error in what several ranks do together into RanksLostError: the others wait."""
    try:
        yield
    except RanksLostError:
        raise
    except Exception as error:
        if "by peer" in str(error):  # gloo's "Connection closed by peer", or reset
            raise RanksLostError(RANK_GONE) from error
        message = f"a step of several ranks failed: {type(error).__name__}: {error}"
        raise RanksLostError(message) from error


def run_part(
    model: RankModel,
    graphs: PiecewiseGraphs | None,
    token_ids: torch.Tensor,
    kv_cache: KVCache,
    batch: AttentionBatch,
    images: StepRows | None = None,
) -> torch.Tensor:
    """A rank's part of a step, by its graphs if there are any."""
    assert not isinstance(images, ImageBuffers), "those of a step are rows until a graph has them"
    if graphs is None:
        return model.forward(token_ids, kv_cache, batch, images)
    return graphs.run(token_ids, batch, images)


class SharedModel:
    """A model whose ranks all compute the same tokens, as rank 0 runs it."""

    def __init__(self, model: RankModel, group: RankGroup, rebalancer: Rebalancer | None) -> None:
        self.spec, self.num_bytes, self.norm = model.spec, model.num_bytes, model.norm
        self.read_layers = model.read_layers
        self.visual = model.visual  # rank 0 encodes; the others get the features of a step
        self._model, self._group, self._rebalancer = model, group, rebalancer
        self.graphs: PiecewiseGraphs | None = None  # of this rank's part

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVCache,
        batch: AttentionBatch,
        images: StepRows | None = None,
    ) -> torch.Tensor:
        """Send the step to all ranks and compute this one's part."""
        with all_or_none():
            _send_step(self._group, "step", token_ids, batch, images)
            if self._rebalancer is not None:
                self._rebalancer.turn()
            return run_part(self._model, self.graphs, token_ids, kv_cache, batch, images)

    def draft_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.draft_states(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, of which each rank may have a part."""
        with all_or_none():
            if self._model.layout.split_heads:
                _send_rows(self._group, "logits", hidden)
            return self._model.logits(hidden)


class SharedDrafter:
    """The MTP module of such a model, divided like one of its layers."""

    def __init__(self, module: Drafter, model: RankModel, group: RankGroup) -> None:
        self.num_bytes = module.num_bytes
        self._module, self._model, self._group = module, model, group

    def forward(
        self, token_ids: torch.Tensor, states: torch.Tensor, cache: Cache, batch: AttentionBatch
    ) -> torch.Tensor:
        """Send tokens and states to all ranks and compute this one's part."""
        with all_or_none():
            _send_step(self._group, "draft", token_ids, batch)
            self._group.ranks.broadcast(states)
            return self._module.forward(token_ids, states, cache, batch)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        with all_or_none():
            if self._model.layout.split_heads:
                _send_rows(self._group, "draft_logits", out)
            return self._module.logits(out)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self._module.target_ids(ids)

    def states(self, out: torch.Tensor) -> torch.Tensor:
        return self._module.states(out)


def _send_step(
    group: RankGroup,
    do: Literal["step", "draft"],
    token_ids: torch.Tensor,
    batch: AttentionBatch,
    images: StepRows | None = None,
) -> None:
    sizes, flat = pack_step(do, token_ids, batch)
    assert not isinstance(images, ImageBuffers), "those of a step are rows until a graph has them"
    if images is not None:
        sizes = replace(sizes, image_rows=images.features.shape[1])
    group.tell(sizes)
    group.ranks.broadcast(flat)
    if images is not None:
        group.ranks.broadcast(torch.cat([images.rows[None], images.positions]))
        group.ranks.broadcast(images.features)


def _send_rows(group: RankGroup, do: Literal["logits", "draft_logits"], rows: torch.Tensor) -> None:
    group.tell(Rows(do, rows.shape[0]))
    group.ranks.broadcast(rows)


class Follower:
    """Computes another rank's part of what SharedModel and SharedDrafter send."""

    def __init__(
        self,
        model: RankModel,
        drafter: Drafter | None,
        kv_cache: KVCache,
        ranks: Ranks,
        rebalancer: Rebalancer | None,
        reader: RankReader | None = None,
        graphs: PiecewiseGraphs | None = None,
    ) -> None:
        """With a drafter the cache's last layer is its own; with a reader KV moves."""
        self._graphs = graphs
        self._model, self._drafter, self._ranks, self._reader = model, drafter, ranks, reader
        self._rebalancer, self._kv_cache = rebalancer, kv_cache

    @torch.inference_mode()
    def follow(self, message: Message) -> None:
        """Take part in one call; what all ranks have computed together is rank 0's to use."""
        model, drafter = self._model, self._drafter
        match message:
            case Step(do="step"):
                token_ids, batch = self._step(message)
                if self._rebalancer is not None:
                    self._rebalancer.turn()
                images = self._images(message.image_rows) if message.image_rows else None
                layers = self._kv_cache[: model.spec.num_layers]
                run_part(model, self._graphs, token_ids, layers, batch, images)
            case Rows(do="logits"):
                model.logits(self._rows(message.count))
            case Step(do="draft") if drafter is not None:
                token_ids, batch = self._step(message)
                drafter.forward(token_ids, self._rows(message.tokens), self._kv_cache[-1], batch)
            case Rows(do="draft_logits") if drafter is not None:
                drafter.logits(self._rows(message.count))
            case KVCall() if self._reader is not None:
                self._reader.do(message)
            case unknown:
                raise RanksLostError(f"rank 0 asks for {unknown!r}")

    def _step(self, sizes: Step) -> tuple[torch.Tensor, AttentionBatch]:
        device = self._kv_cache[0][0].device
        flat = torch.empty(step_size(sizes), dtype=torch.int32, device=device)
        return unpack_step(sizes, self._ranks.broadcast(flat))

    def _images(self, count: int) -> ImageRows:
        norm, vision = self._model.norm, self._model.spec.vision
        assert vision is not None
        shape = 4, count
        places = torch.empty(shape, dtype=torch.int64, device=norm.device)
        features = norm.new_empty(vision.num_features, count, vision.out_size)
        places = self._ranks.broadcast(places)
        return ImageRows(places[0], places[1:], self._ranks.broadcast(features))

    def _rows(self, count: int) -> torch.Tensor:
        """Rows of the residual stream."""
        norm = self._model.norm
        return self._ranks.broadcast(norm.new_empty(count, norm.shape[0]))


class OwnModel:
    """A model whose ranks have tokens of their own, and experts together."""

    def __init__(self, model: RankModel) -> None:
        self.spec, self.num_bytes, self.norm = model.spec, model.num_bytes, model.norm
        self.visual = model.visual
        self.read_layers = model.read_layers
        self._model, self.ran = model, False
        self.graphs: PiecewiseGraphs | None = None  # of this rank's part

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVCache,
        batch: AttentionBatch,
        images: StepRows | None = None,
    ) -> torch.Tensor:
        """Compute a step of this rank's, with the experts of all."""
        self.ran = True
        with all_or_none():
            return run_part(self._model, self.graphs, token_ids, kv_cache, batch, images)

    def draft_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.draft_states(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)

    @torch.inference_mode()
    def assist(self) -> None:
        """Compute the experts' part of the other ranks' step."""
        with all_or_none():
            self._model.assist()
