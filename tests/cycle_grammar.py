"""A table of masks in the place of a GrammarPool, and the bytes that a step sends to the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmill.core.types import StructuredOutput
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.sampling.grammar_pool import GrammarPool
from tokenmill.engine.sampling.sampler import Bitmask
from tokenmill.engine.sampling.structured import StructuredRequests
from tokenmill.sched.sequence import Sequence

PERIOD = 7
ANY = StructuredOutput("json_object")  # what constrains is the table


class Cycle:
    """In the place of a GrammarPool: a token's id modulo PERIOD follows that of the last one."""

    def __init__(self, vocab_size: int) -> None:
        ids, size = np.arange(vocab_size + -vocab_size % 32), vocab_size
        self.masks: list[Bitmask] = [
            np.packbits((ids % PERIOD == k) & (ids < size), bitorder="little").view(np.int32)
            for k in range(PERIOD)
        ]

    def open(self, structured: StructuredOutput, account: str) -> CycleRow:
        return CycleRow(self.masks)

    def close(self, row: CycleRow) -> None:
        """Nothing is kept of it."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """All is known."""

    def wait(self, rows: list[CycleRow], runs: object = None) -> None:
        """All is known."""


class CycleRow:
    """In the place of a GrammarRow, without a process."""

    pending, error = False, None
    process = SimpleNamespace(is_ready=True, end=None)

    def __init__(self, masks: list[Bitmask]) -> None:
        self._masks = masks

    def ask(self, seq: Sequence, drafts: list[int]) -> bool:
        return False

    def masks(self, seq: Sequence, drafts: list[int]) -> list[Bitmask | None]:
        """The masks after its tokens and drafts, up to the first forbidden one."""
        last = seq.token_ids[-1]
        assert last >= 0, "a mask is asked for after a token that is not known"
        found: list[Bitmask | None] = [self._masks[(last + 1) % PERIOD]]
        for draft in drafts:
            if draft % PERIOD != (last + 1) % PERIOD:
                break
            last = draft
            found.append(self._masks[(last + 1) % PERIOD])
        return found


def follows(prompt: list[int], token_ids: list[int]) -> bool:
    """Whether an answer is one that the grammar allows."""
    known = [prompt[-1], *token_ids]
    return all((b - a) % PERIOD == 1 for a, b in zip(known, token_ids, strict=False))


def add_cycle(engine: LanguageEngine, vocab_size: int) -> None:
    """Let structured requests follow the table from now on."""
    engine._structured = StructuredRequests(cast("GrammarPool", Cycle(vocab_size)))


class HostBytes(TorchDispatchMode):
    """Counts what operations of torch copy from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and isinstance(out, torch.Tensor):
            source = args[1] if name == "copy_" else args[0]
            if source.is_cuda and not out.is_cuda:
                self.num_bytes += out.nbytes
        return out
