"""CUDA graphs of the decode step: one launch instead of hundreds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenmill.engine.graphs.capture import CaptureJob, CaptureReport, jobs_for, unowned
from tokenmill.engine.graphs.graph_sizes import graph_for, graph_sizes
from tokenmill.engine.graphs.pieces import Pieces, try_and_record
from tokenmill.engine.inputs import InputBuilder, newest_token
from tokenmill.engine.model import KVCache, Model, likeliest
from tokenmill.kernels.attention import longest_first
from tokenmill.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    pieces: Pieces
    decoded: Decoded


@dataclass(frozen=True, slots=True)
class Decoded:
    """The tensors of a decode step; a graph writes the same ones every time."""

    token_ids: torch.Tensor  # int32 [size], the input
    logits: torch.Tensor  # [size, vocab]; of a graph: until the next replay of any
    best: torch.Tensor  # int32 [size]: the largest logit's token
    slots: torch.Tensor  # int32 [size]


class DecodeGraphs:
    """Forward passes of one token per sequence, captured once and replayed.

    All graphs read one input buffer: ids, contexts, slots, and the order in which sequences attend,
    so that a step is one small copy and one launch. A graph ends by noting the greedy tokens as the
    newest ones of their sequences. Rows beyond the batch use the block tables' last row, which no
    sequence owns.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        builder: InputBuilder,
        max_size: int,
        sizes: list[int] | None = None,
    ) -> None:
        self.model, self.kv_cache, self.builder = model, kv_cache, builder
        self.sizes, self.max_size = sizes or graph_sizes(max_size), max_size
        self.report = CaptureReport()
        self.stride = max_size + -max_size % 4
        self.inputs = torch.zeros(4, self.stride, dtype=torch.int32, device=builder.device)
        self.inputs[2] = builder.tables.pad_row
        torch.arange(self.stride, out=self.inputs[3])
        self._graphs: dict[int, CapturedDecode] = {}

    def jobs(self, pool: Any) -> list[CaptureJob]:
        return jobs_for(self.sizes, lambda size: self._capture(size, pool))

    def start(self, report: CaptureReport) -> None:
        self.sizes = report.decode_sizes = sorted(self._graphs)
        self.report, report.max_size = report, self.max_size

    def _capture(self, size: int, pool: Any) -> None:
        ranks = self.model.layout.ranks
        pieces, decoded = try_and_record(pool, ranks, lambda: self._decode(size))
        decoded = replace(decoded, logits=unowned(decoded.logits))
        self._graphs[size] = CapturedDecode(pieces, decoded)

    def _decode(self, size: int) -> Decoded:
        """A step over views of the input buffer; only the order of its tiles changes."""
        builder = self.builder
        staged, contexts, slots, order = self.inputs[:, :size]
        last_tokens = builder.last_tokens
        ids, cache_slots = builder.place_known(staged, contexts, slots)
        starts, (tiles,) = builder.even(size, 1)
        tiles = replace(tiles, seqs=order)
        turned = builder.turned(contexts, slots)
        placed = builder.attention(turned, cache_slots, starts, contexts, slots, (tiles,))
        logits = self.model.logits(self.model.forward(ids, self.kv_cache, placed))
        best = likeliest(logits, self.model.layout.token_ranks)
        last_tokens.index_copy_(0, slots.long(), best)
        return Decoded(ids, logits, best, slots)

    def run(self, seqs: list[Sequence]) -> Decoded | None:
        """The step's tensors, valid until the next run; None when no graph suits the batch."""
        count = len(seqs)
        size = graph_for(self.sizes, count)
        self.report.count(count, size)
        if size is None:
            return None
        host = self.builder.staging.buffer(self.inputs.numel())
        image = host.numpy().reshape(4, self.stride)
        image[0, :count] = [newest_token(seq) for seq in seqs]
        image[1, :count] = [seq.num_computed_tokens for seq in seqs]
        image[2, :count] = [seq.slot for seq in seqs]
        image[:2, count:size] = 0
        image[2, count:size] = self.builder.tables.pad_row
        image[3, :size] = longest_first(image[1, :size])
        self.inputs.view(-1).copy_(host, non_blocking=True)
        captured = self._graphs[size]
        captured.pieces.replay()
        decoded = captured.decoded
        return Decoded(
            decoded.token_ids[:count], decoded.logits[:count], decoded.best[:count],
            decoded.slots[:count],
        )  # fmt: skip
