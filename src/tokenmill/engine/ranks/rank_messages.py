"""What rank 0 and the other ranks tell each other: msgpack over a connection with a key, no pickle.

Clocks of machines differ, so times travel as distances from now.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Literal, TypeVar, get_args

import msgspec
import torch

from tokenmill.core.config import ModelConfig, Setup
from tokenmill.core.kv import KVAddress, KVEvents, KVNotice
from tokenmill.core.kv_events import PackedEvent
from tokenmill.core.types import (
    EngineStats,
    GrammarVocab,
    RanksLostError,
    Request,
    RequestOutput,
)
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.kernels.attention import AttentionBatch, QueryTiles
from tokenmill.kv.transfer import Run
from tokenmill.parallel import Backend
from tokenmill.routing.attention_dp import Load, Outlook

# How the ranks come together.


@dataclass(frozen=True, slots=True)
class Machine:
    """A rank calls rank 0 and says where it runs."""

    identity: str


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in the group, and where the group meets: at a file, or at a port of a host."""

    rank: int
    size: int
    backend: Backend
    device: str
    file: str | None = None
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """What every rank is to load."""

    setup: Setup
    vocab: GrammarVocab | None


@dataclass(frozen=True, slots=True)
class NumBlocks:
    """The blocks of KV that a rank has room for; from rank 0: what all have."""

    count: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank could not do what it was told."""

    error: str


@dataclass(frozen=True, slots=True)
class KVReachable:
    """Where a rank's KV lies."""

    address: KVAddress


# Where ranks share every token.


@dataclass(frozen=True, slots=True)
class Step:
    """The sizes of a step's inputs, which follow as one tensor."""

    do: Literal["step", "draft"]
    tokens: int
    seqs: int
    width: int  # of a block table
    tiles: list[tuple[int, int, int, int, int]]  # sequences, tokens, splits, first and last row
    num_sliding: int = 0  # groups of sliding layers, with slots and tables of their own
    image_rows: int = 0  # whose places and features follow, too


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows of hidden states follow, to become logits."""

    do: Literal["logits", "draft_logits"]
    count: int


@dataclass(frozen=True, slots=True)
class KVCall:
    """Something that a rank's connector does; it answers with the same number."""

    do: Literal["connect", "disconnect", "read"]
    connector: str
    engine_id: str
    peer: KVAddress | None = None
    runs: list[Run] = field(default_factory=list)
    number: int = 0


@dataclass(frozen=True, slots=True)
class KVCallOver:
    """The answer to a KVCall."""

    number: int
    error: str | None


# Where each rank has requests of its own.


@dataclass(frozen=True, slots=True)
class KVNews:
    """What the front has said of a rank's requests."""

    notices: list[KVNotice] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KVTold:
    """What the front has to hear, and how long a rank without work may sleep."""

    events: KVEvents
    wait_ms: int | None


@dataclass(frozen=True, slots=True)
class Round:
    """One step of every rank."""

    submit: list[Request]
    abort: list[str]
    hold: bool
    kv: KVNews
    resets: bool = False  # first forget all cached blocks


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank after a round."""

    has_work: bool
    stats: EngineStats
    load: Load
    outlook: Outlook


@dataclass(frozen=True, slots=True)
class RoundOver:
    """What a round was on one rank."""

    outputs: list[RequestOutput]
    events: list[PackedEvent]
    state: RankState
    kv: KVTold | None


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Be ready to read from another engine."""

    peer: KVAddress


@dataclass(frozen=True, slots=True)
class DisconnectPeer:
    """Forget another engine."""

    engine_id: str


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Why a peer cannot be read from, or None."""

    problem: str | None


# Where ranks divide a video.


@dataclass(frozen=True, slots=True)
class VideoOrder:
    """What every rank is to load."""

    model: ModelConfig
    offload: bool
    parallel: VideoParallel


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has its weights."""


@dataclass(frozen=True, slots=True)
class SubmitVideo:
    """A job that all ranks have, in the same order."""

    request: Request


@dataclass(frozen=True, slots=True)
class AbortVideo:
    """A job that all ranks drop."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StepVideo:
    """One step of every rank."""


@dataclass(frozen=True, slots=True)
class VideoStepOver:
    """A rank has done a step; so many jobs have failed on it so far."""

    num_failed: int


@dataclass(frozen=True, slots=True)
class MeasureVideo:
    """A video to be measured, or some of its steps."""

    request: Request
    num_steps: int | None


Message = (
    Machine | Place | Order | NumBlocks | Failed | KVReachable
    | Step | Rows | KVCall | KVCallOver
    | Round | RoundOver | ConnectPeer | DisconnectPeer | PeerAnswer
    | VideoOrder | Loaded | SubmitVideo | AbortVideo | StepVideo | VideoStepOver | MeasureVideo
)  # fmt: skip
Kind = TypeVar("Kind", bound=Message)
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
_SAME_VERSION = "all ranks need the same version of tokenmill"


def send(connection: Connection, message: Message) -> None:
    """Send one message; raises OSError when the other side is gone."""
    connection.send_bytes(msgspec.msgpack.encode((type(message).__name__, message)))


def receive(connection: Connection) -> Message:
    """The next message. Raises EOFError or OSError when the other side is gone, and RanksLostError
    when it sends anything else."""
    data = connection.recv_bytes()
    try:
        name, fields = msgspec.msgpack.decode(data, type=tuple[str, msgspec.Raw])
        message = msgspec.msgpack.decode(fields, type=_KINDS[name])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        what = f"{data[:80]!r}, which is no message of this version ({type(error).__name__})"
        raise RanksLostError(f"a rank said {what}: {_SAME_VERSION}") from error
    return message


def expect(message: Message, kind: type[Kind]) -> Kind:
    """The message, if it is of this type; what another process sends is not for an assertion."""
    if not isinstance(message, kind):
        what = f"{type(message).__name__} where {kind.__name__} was expected"
        raise RanksLostError(f"a rank said {what}: {_SAME_VERSION}")
    return message


def leaving(request: Request) -> Request:
    """A request as it travels."""
    return _shifted(request, -time.monotonic_ns())


def arrived(request: Request) -> Request:
    """A request that has travelled."""
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
    """An output that has travelled."""
    scheduled_ns = output.scheduled_ns and output.scheduled_ns + time.monotonic_ns()
    return replace(output, scheduled_ns=scheduled_ns)


def pack_step(
    do: Literal["step", "draft"], token_ids: torch.Tensor, batch: AttentionBatch
) -> tuple[Step, torch.Tensor]:
    """A step's inputs: their sizes as a message, their values as one int32 tensor."""
    tables = batch.block_tables[batch.table_rows]
    parts = [token_ids, batch.positions, batch.slots, batch.query_starts, batch.context_lens]
    parts += [tables, *(part for tiles in batch.tiles for part in (tiles.seqs, tiles.starts))]
    for own in batch.sliding:
        parts += [own.slots, own.block_tables[own.table_rows]]
    tiles = [(tiles.seqs.shape[0], *_plan(tiles)) for tiles in batch.tiles]
    num_sliding = len(batch.sliding)
    sizes = Step(do, token_ids.shape[0], tables.shape[0], tables.shape[1], tiles, num_sliding)
    return sizes, torch.cat([part.flatten().int() for part in parts])


def _plan(tiles: QueryTiles) -> tuple[int, int, int, int]:
    return tiles.tokens, tiles.splits, tiles.rows.start, tiles.rows.stop


def step_size(sizes: Step) -> int:
    """How many integers a step's inputs are."""
    tiles = 2 * sum(count for count, *_ in sizes.tiles)
    sliding = sizes.num_sliding * (sizes.tokens + sizes.seqs * sizes.width)
    return 3 * sizes.tokens + sizes.seqs * (2 + sizes.width) + 1 + tiles + sliding


def unpack_step(sizes: Step, flat: torch.Tensor) -> tuple[torch.Tensor, AttentionBatch]:
    """The inverse of pack_step."""
    tokens, seqs, width = sizes.tokens, sizes.seqs, sizes.width
    counts = [tokens, tokens, tokens, seqs + 1, seqs, seqs * width]
    counts += [count for count, *_ in sizes.tiles for _ in range(2)]
    counts += [tokens, seqs * width] * sizes.num_sliding
    ids, positions, slots, starts, contexts, tables, *rest = flat.split(counts)
    tiles, sliding = rest[: 2 * len(sizes.tiles)], rest[2 * len(sizes.tiles) :]
    if flat.device.type == "cpu":  # what the compiled kernels read
        ids, positions, slots = ids.long(), positions.long(), slots.long()
        sliding[::2] = [own.long() for own in sliding[::2]]
    batch = AttentionBatch(
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables.view(seqs, width),
        table_rows=torch.arange(seqs, dtype=torch.int32, device=flat.device),
        tiles=tuple(
            QueryTiles(seqs, starts, tokens, splits, range(start, stop))
            for seqs, starts, (_, tokens, splits, start, stop) in zip(
                tiles[::2], tiles[1::2], sizes.tiles, strict=True
            )
        ),
    )
    groups = tuple(
        replace(batch, slots=own, block_tables=table.view(seqs, width))
        for own, table in zip(sliding[::2], sliding[1::2], strict=True)
    )
    return ids, replace(batch, sliding=groups)
