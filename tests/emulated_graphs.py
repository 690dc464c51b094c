"""CUDA graphs without a GPU: operations of torch, done again over the same tensors.

As a program it is a rank whose engine captures such graphs: `emulated_graphs.py ADDRESS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmill.engine import build
from tokenmill.engine.graphs import (
    decode_graphs,
    draft_graphs,
    pieces,
    piecewise_graphs,
    prompt_graphs,
)
from tokenmill.engine.ranks import rank_process
from tokenmill.parallel import Ranks

POOL = "pool"
UNOWNED = decode_graphs, draft_graphs, pieces, piecewise_graphs


class Operations(TorchDispatchMode):
    """Notes every operation of torch with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, out))
        return out


def storages(values: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Graph:
    """In place of a CUDAGraph: operations of torch, done again over the same tensors."""

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == (POOL, "global")
        self.operations = Operations()
        self.operations.__enter__()

    def capture_end(self) -> None:
        self.operations.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations.noted:
            again, known = func(*args, **kwargs), storages((args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and not storages(old) & known:
                    old.copy_(new)


class Capture:
    """In place of torch.cuda.graph."""

    capture_error_mode = "global"
    capture_stream = None

    def __init__(self, cuda_graph: Graph, pool: str) -> None:
        self.cuda_graph, self.pool = cuda_graph, (pool,)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture and replay so from now on, in graphs of the pool POOL."""
    for place, name, value in (
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", Capture),
        (torch.cuda, "synchronize", lambda: None),
        *((place, "unowned", same) for place in UNOWNED),
    ):
        monkeypatch.setattr(place, name, value)


class Again:
    """In place of whole graphs: computes a step anew, since attention reads its shape on the host.

    What it makes is written where the first run has put it.
    """

    num_replayed = 0

    def __init__(self, forward: Callable[[], Any]) -> None:
        self._forward, self.made = forward, forward()

    def replay(self) -> None:
        Again.num_replayed += 1
        with torch.inference_mode():
            new = self._forward()
        pairs = [(self.made, new)]
        if is_dataclass(new):
            names = [field.name for field in fields(new)]
            pairs = [(getattr(self.made, name), getattr(new, name)) for name in names]
        for old, made in pairs:
            if isinstance(made, torch.Tensor):
                old.copy_(made)


def again(
    pool: str, ranks: Ranks, forward: Callable[[], Any], trial: Callable[[], Any] | None = None
) -> tuple[Any, Any]:
    """In place of try_and_record(): ranks meet in the first run, too."""
    assert pool == POOL
    graph = Again(forward)
    return graph, graph.made


def emulate_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on capture all kinds of graphs."""
    emulate(monkeypatch)
    for place in (decode_graphs, draft_graphs, prompt_graphs):
        monkeypatch.setattr(place, "try_and_record", again)
    for name, value in (
        ("graph_pool_handle", lambda: POOL),
        ("empty_cache", lambda: None),
        ("mem_get_info", lambda: (2**40, 2**40)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    folder = TemporaryDirectory()
    monkeypatch.setattr(build, "cache_dir", lambda: Path(folder.name))  # of choices of kernels
    monkeypatch.setattr(build, "_captures", lambda setup: True)


if __name__ == "__main__":
    emulate_start(pytest.MonkeyPatch())
    rank_process.main(sys.argv[1])
