"""A forward pass as CUDA graphs that end where something is done that no graph may have inside.

Of several ranks each has graphs of its own, which end where ranks do something together. So do
those of steps with any sequences at attention, which depends on whose tokens a step has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from tokenmill.engine.graphs.capture import capturing, unowned
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.parallel import Ranks

Made = TypeVar("Made")


class CutBetween(NamedTuple):
    """What is done between two pieces, and its tensors, which lie in the graphs' memory.

    Attention is told whose blocks it reads, and its last tensor is the output. What ranks do
    together has no group.
    """

    do: Callable[..., object]
    tensors: tuple[torch.Tensor, ...]
    group: int | None


class Pieces(NamedTuple):
    """A step's graphs, one more than there are cuts."""

    graphs: list[torch.cuda.CUDAGraph]
    cuts: list[CutBetween]

    def replay(self, groups: Sequence[AttentionBatch] = ()) -> None:
        """Run the step; `groups` are its full layers and each group of sliding ones."""
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            known = () if cut.group is None else (groups[cut.group],)
            cut.do(*cut.tensors, *known)
        self.graphs[-1].replay()


class Recorder:
    """Ends a graph at each cut of a forward pass and begins the next one."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._capture = torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool)
        self._pieces = Pieces([self._capture.cuda_graph], [])

    def record(self, forward: Callable[[], Made]) -> tuple[Pieces, Made]:
        """The pieces of a forward pass that calls cut(), and what it returns."""
        with capturing(self._capture):
            made = forward()
        return self._pieces, made

    def cut(self, group: int | None, do: Callable[..., object], *tensors: torch.Tensor) -> None:
        """End a piece here; `do` runs when pieces are replayed."""
        capture = self._capture
        capture.cuda_graph.capture_end()
        self._pieces.cuts.append(CutBetween(do, tuple(map(unowned, tensors)), group))
        capture.cuda_graph = torch.cuda.CUDAGraph()  # which the end of the capture ends
        self._pieces.graphs.append(capture.cuda_graph)
        mode = capture.capture_error_mode
        capture.cuda_graph.capture_begin(pool=self._pool, capture_error_mode=mode)


def skip(group: int | None, do: object, *tensors: torch.Tensor) -> None:
    """In the place of a cut; what attention would have written is a number."""
    if group is not None:
        tensors[-1].zero_()


def try_and_record(
    pool: Any, ranks: Ranks, forward: Callable[[], Made], trial: Callable[[], Made] | None = None
) -> tuple[Pieces, Made]:
    """Graphs that end where these ranks meet, which they do not while this one captures.

    `trial` runs first, where `forward` reads what only a replayed graph has written.
    """
    with ranks.in_pieces(partial(skip, None)):
        (trial or forward)()  # compiles kernels and picks algorithms, which capture must not
    torch.cuda.synchronize()
    recorder = Recorder(pool)
    with ranks.in_pieces(partial(recorder.cut, None)):
        return recorder.record(forward)
