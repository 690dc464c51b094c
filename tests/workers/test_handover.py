"""The end of a handover: KV is held until the worker that decodes has ended the request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenmill.core.requests import Generate, Request
from tokenmill.routing.disaggregation import DisaggregationRule
from tokenmill.workers.exchange.handover import Handovers
from tokenmill.workers.messages import Abort, DisconnectKV
from tokenmill.workers.open_request import OpenHandover, OpenRequest
from tokenmill.workers.output_stream import OutputStream


class Slot:
    """Keeps what a worker is sent."""

    worker_lives = False

    def __init__(self, name: str = "", role: str = "both") -> None:
        self.name, self.role = name, role
        self.facts = SimpleNamespace(kv=SimpleNamespace(engine_id=f"engine of {name}"))
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def open_request(source: Slot, target: Slot, told: bool) -> OpenRequest:
    request = Request("a", Generate([1, 2]))
    entry = OpenRequest(request, OutputStream(["a"]), 0)
    entry.slot = cast(Any, target)
    entry.handover = OpenHandover(request, cast(Any, source), told)
    return entry


@pytest.mark.parametrize("gone", [False, True])
def test_blocks_are_held_until_the_decode_worker_reads_no_more(gone: bool) -> None:
    slots: list[Any] = [Slot(), Slot(), Slot()]
    source, target, other = slots
    handovers = Handovers(DisaggregationRule(1), {}, cast(Any, None), cast(Any, None))
    handovers.end(open_request(source, target, told=True))
    assert target.sent == [Abort(["a"])] and source.sent == []
    handovers.on_ended(other, "a")
    handovers.on_ended(target, "b")
    handovers.on_gone(other)
    assert source.sent == []
    if gone:
        handovers.on_gone(target)
    else:
        handovers.on_ended(target, "a")
    assert source.sent == [Abort(["a"])]
    handovers.on_ended(target, "a")
    assert len(source.sent) == 1


def test_a_worker_that_knows_nothing_of_it_is_not_waited_for() -> None:
    source, target = Slot(), Slot()
    handovers = Handovers(DisaggregationRule(1), {}, cast(Any, None), cast(Any, None))
    handovers.end(open_request(source, target, told=False))
    assert source.sent == [Abort(["a"])] and target.sent == []


@pytest.mark.parametrize("lives", [False, True])
def test_other_workers_read_on_where_only_a_link_broke(lives: bool) -> None:
    prefill, decode = Slot("p0", "prefill"), Slot("d0", "decode")
    slots: Any = {"p0": prefill, "d0": decode}
    handovers = Handovers(DisaggregationRule(1), slots, cast(Any, None), cast(Any, None))
    prefill.worker_lives = lives
    handovers.disconnect(cast(Any, prefill))
    assert decode.sent == ([] if lives else [DisconnectKV("engine of p0")])
