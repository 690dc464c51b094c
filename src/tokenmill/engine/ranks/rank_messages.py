"""What rank 0 and the other ranks tell each other: msgpack over a connection with a key, no pickle.

Clocks of machines differ, so times travel as distances from now.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache, reduce
from multiprocessing.connection import Connection
from operator import or_
from typing import Any, Literal, TypeVar

import msgspec

from tokenmill.core.config import Setup
from tokenmill.core.images import Grid
from tokenmill.core.kv import KVAddress, KVNotice, KVTransferEvents
from tokenmill.core.kv_events import PackedEvent
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import EngineStats, GrammarVocab, RanksLostError
from tokenmill.kv.transfer import Run
from tokenmill.parallel import Backend
from tokenmill.routing.attention_dp import Outlook, RankLoad


class RankMessage(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """Its class's name, then its fields in their order; each subclass is a kind of message."""


class CallOver(RankMessage):
    """What rank 0 has asked for is done, or why not; answers to calls with numbers say which."""

    number: int = 0
    error: str | None = None


# How the ranks come together.


class RankCalls(RankMessage):
    """A rank calls rank 0 and says where it runs."""

    identity: str


class GroupPlace(RankMessage):
    """A rank's place in the group, and where the group meets: at a file, or at a port of a host."""

    rank: int
    size: int
    backend: Backend
    device: str
    file: str | None = None
    host: str = ""
    port: int = 0


class EngineOrder(RankMessage):
    """What every rank is to load."""

    setup: Setup
    vocab: GrammarVocab | None


class NumBlocks(RankMessage):
    """The blocks of KV that a rank has room for; from rank 0: what all have."""

    count: int


class LoadFailed(RankMessage):
    """A rank could not load its part."""

    error: str


class KVReachable(RankMessage):
    """Where a rank's KV lies."""

    address: KVAddress


class KVCall(RankMessage):
    """Something that a rank's connector does, which a CallOver of the same number answers.

    Ranks with KV of their own connect all their connectors.
    """

    do: Literal["connect", "disconnect", "read"]
    connector: str
    engine_id: str
    peer: KVAddress | None = None
    runs: list[Run] = []
    number: int = 0


class OpenTiers(RankMessage):
    """Every rank has tiers of so many pages in host memory, which hold the same blocks."""

    num_slots: int
    root: bytes


class TierCall(RankMessage):
    """Something that tiers do on all ranks; a CallOver answers all but a save."""

    do: Literal["save", "load", "write", "read"]
    slots: list[int]
    block_ids: list[int] = []
    name: bytes = b""  # of a block on disk
    number: int = 0


# Where ranks compute the same tokens.


class GrownRow(msgspec.Struct, array_like=True):
    """The blocks that a sequence got, from its block `first` on; with 0 the slot has a new one."""

    slot: int
    first: int
    block_ids: list[int]
    window_first: int
    window_ids: list[int]
    num_prompt_tokens: int
    images: list[tuple[int, int, Grid]]  # offset and number of tokens of each


class StepBatch(RankMessage):
    """A step of every rank's runner."""

    items: bytes  # int32 [items, fields]
    token_ids: bytes  # int32: of each item its new tokens, the one after them, and its drafts
    grown: list[GrownRow]
    num_tokens: int
    num_to_draft: int


class LateTokens(RankMessage):
    """So many rows of the last step were sampled after its launch; their tokens follow."""

    count: int


class CaptureGraphs(RankMessage):
    """All ranks capture their CUDA graphs."""


class ShortPrompts(RankMessage):
    """Up to how many short prompts run by themselves beside so many sequences that decode."""

    most: dict[int, int]


# Where each rank has requests of its own.


class EngineRound(RankMessage):
    """One step of every rank's engine, and what the front has said of its requests."""

    submit: list[Request]
    abort: list[str]
    hold: bool
    kv_notices: list[KVNotice]
    kv_releases: list[str]
    resets: bool = False  # first forget all cached blocks


class RankState(msgspec.Struct, array_like=True):
    """A rank after a round."""

    has_work: bool
    stats: EngineStats
    load: RankLoad
    outlook: Outlook


class RoundOver(RankMessage):
    """What a round was on one rank; of KV what the front has to hear."""

    outputs: list[RequestOutput]
    events: list[PackedEvent]
    state: RankState
    kv_events: KVTransferEvents | None = None
    kv_wait_ms: int | None = None  # how long a rank without work may sleep


Kind = TypeVar("Kind", bound=RankMessage)
_SAME_VERSION = "all ranks need the same version of tokenmill"


def send(message: RankMessage, *connections: Connection) -> None:
    """Send a message; raises OSError when the other side is gone."""
    data = msgspec.msgpack.encode(message)
    for connection in connections:
        connection.send_bytes(data)


def receive(connection: Connection) -> RankMessage:
    """The next message. Raises EOFError or OSError when the other side is gone, and RanksLostError
    when it sends anything else."""
    data = connection.recv_bytes()
    try:
        message: RankMessage = _decoder().decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = f"{data[:80]!r}, which is no message of this version ({type(error).__name__})"
        raise RanksLostError(f"a rank said {what}: {_SAME_VERSION}") from error
    return message


@cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(reduce(or_, RankMessage.__subclasses__()))


def expect(message: RankMessage, kind: type[Kind]) -> Kind:
    """The message, if it is of this type; what another process sends is not for an assertion."""
    if not isinstance(message, kind):
        what = f"{type(message).__name__} where {kind.__name__} was expected"
        raise RanksLostError(f"a rank said {what}: {_SAME_VERSION}")
    return message


def leaving(request: Request) -> Request:
    return _shifted(request, -time.monotonic_ns())


def arrived(request: Request) -> Request:
    return _shifted(request, time.monotonic_ns())


def _shifted(request: Request, by_ns: int) -> Request:
    deadline_ns = request.deadline_ns
    return replace(
        request,
        arrival_ns=request.arrival_ns + by_ns,
        deadline_ns=None if deadline_ns is None else deadline_ns + by_ns,
    )


def leaving_output(output: RequestOutput) -> RequestOutput:
    """An output as it travels; 0 stays unknown."""
    scheduled_ns = output.scheduled_ns and output.scheduled_ns - time.monotonic_ns()
    return replace(output, scheduled_ns=scheduled_ns)


def arrived_output(output: RequestOutput) -> RequestOutput:
    scheduled_ns = output.scheduled_ns and output.scheduled_ns + time.monotonic_ns()
    return replace(output, scheduled_ns=scheduled_ns)
