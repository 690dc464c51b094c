"""What a decode step tells its graph: tokens, places, and which sequence attends first."""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.core.requests import Generate, Request
from tokenmill.engine.graphs.decode_graphs import CapturedDecode, Decoded, DecodeGraphs
from tokenmill.engine.inputs import InputBuilder
from tokenmill.sched.sequence import Sequence


class Replayed:
    """In place of a graph: counts its replays."""

    count = 0

    def replay(self) -> None:
        self.count += 1


def sequence(slot: int, context: int) -> Sequence:
    request = Request(str(slot), Generate([*range(context), 40 + slot]))
    seq = Sequence(request, (0, 0, slot), context + 8, frozenset())
    seq.slot, seq.num_computed_tokens = slot, context
    return seq


def test_the_longest_sequences_attend_first() -> None:
    """Rows that pad the step have no context and come last."""
    builder = InputBuilder(16, (4, 2), 8, 64, 99, torch.device("cpu"))
    unused: Any = None
    graphs = DecodeGraphs(unused, unused, builder, 8, [4, 8])
    empty = torch.zeros(8, dtype=torch.int32)
    graph: Any = Replayed()
    graphs._graphs[4] = graphs._graphs[8] = CapturedDecode(
        graph, Decoded(empty, empty, empty, empty)
    )
    graphs.run([sequence(slot, context) for slot, context in ((0, 9), (1, 30), (2, 3), (3, 17))])
    ids, contexts, slots, order = graphs.inputs[:, :4].tolist()
    assert (ids, contexts, slots) == ([40, 41, 42, 43], [9, 30, 3, 17], [0, 1, 2, 3])
    assert order == [1, 3, 0, 2]
    graphs.run([sequence(slot, context) for slot, context in enumerate((5, 6, 7, 8, 20, 4))])
    assert graphs.inputs[3].tolist() == [4, 3, 2, 1, 0, 5, 6, 7] and graph.count == 2
    assert graphs.inputs[2].tolist() == [0, 1, 2, 3, 4, 5, *[builder.tables.pad_row] * 2]
