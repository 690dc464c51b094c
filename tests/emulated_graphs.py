"""CUDA graphs without a GPU: operations of torch, done again over the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmill.engine.graphs import piecewise_graphs

POOL = "pool"


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
        (piecewise_graphs, "unowned", same),
    ):
        monkeypatch.setattr(place, name, value)
