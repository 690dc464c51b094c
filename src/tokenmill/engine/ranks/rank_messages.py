"""What rank 0 and the other ranks tell each other: JSON over a connection with a key, no pickle.

Clocks of machines differ, so times travel as distances from now.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from tokenmill.core.kv import KVAddress, KVGeometry, KVWay
from tokenmill.core.types import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)
from tokenmill.engine.setup import Setup
from tokenmill.kernels.attention import AttentionBatch, QueryTiles

Message = dict[str, Any]
_TIMES = ("arrival_ns", "deadline_ns")


def send(connection: Connection, message: Message) -> None:
    """Send one message; raises OSError when the other side is gone."""
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> Message:
    """The next message; raises EOFError or OSError when the other side is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message


def pack_setup(setup: Setup) -> Message:
    """A setup as a message."""
    return asdict(setup)


def unpack_setup(data: Message) -> Setup:
    """The setup of a message."""
    return Setup(
        ModelConfig(**data["model"]),
        CacheConfig(**data["cache"]),
        SchedulerConfig(**data["scheduler"]),
        ExecutionConfig(**data["execution"]),
        ParallelConfig(**data["parallel"]),
    )


def pack_request(request: Request) -> Message:
    """A request as a message."""
    data = asdict(request)
    now = time.monotonic_ns()
    return data | {name: None if data[name] is None else data[name] - now for name in _TIMES}


def unpack_request(data: Message) -> Request:
    """The request of a message."""
    now = time.monotonic_ns()
    times = {name: None if data[name] is None else data[name] + now for name in _TIMES}
    sampling = data["sampling"]
    if sampling["structured"] is not None:
        sampling["structured"] = StructuredOutput(**sampling["structured"])
    if sampling["logit_bias"] is not None:
        sampling["logit_bias"] = {int(k): v for k, v in sampling["logit_bias"].items()}
    return Request(**(data | times | {"sampling": SamplingParams(**sampling)}))


def pack_output(output: RequestOutput) -> Message:
    """An output as a message."""
    now = time.monotonic_ns()
    return asdict(replace(output, scheduled_ns=output.scheduled_ns and output.scheduled_ns - now))


def unpack_output(data: Message) -> RequestOutput:
    """The output of a message."""
    reason, started_ns = data["finish_reason"], data["scheduled_ns"]
    more = {
        name: data[name]
        and [None if entry is None else TokenLogprobs(**entry) for entry in data[name]]
        for name in ("logprobs", "prompt_logprobs")
    }
    more["finish_reason"] = None if reason is None else FinishReason(reason)
    more["scheduled_ns"] = started_ns and started_ns + time.monotonic_ns()
    return RequestOutput(**(data | more))


def pack_address(address: KVAddress) -> Message:
    """Where a rank's KV lies, as a message."""
    ways = [asdict(way) | {"endpoint": way.endpoint.hex()} for way in address.ways]
    more = {name: [pack_address(a) for a in getattr(address, name)] for name in ("others", "ranks")}
    return asdict(address) | {"ways": ways} | more


def unpack_address(data: Message) -> KVAddress:
    """The address of a message."""
    shape = data["geometry"] | {"block_bytes": tuple(data["geometry"]["block_bytes"])}
    ways = [
        KVWay(way["connector"], tuple(way["regions"]), bytes.fromhex(way["endpoint"]))
        for way in data["ways"]
    ]
    more = {name: tuple(map(unpack_address, data[name])) for name in ("others", "ranks")}
    return KVAddress(**(data | {"geometry": KVGeometry(**shape), "ways": tuple(ways)} | more))


def pack_step(token_ids: torch.Tensor, batch: AttentionBatch) -> tuple[Message, torch.Tensor]:
    """A step's inputs: their sizes as a message, their values as one int32 tensor."""
    tables = batch.block_tables[batch.table_rows]
    parts = [token_ids, batch.positions, batch.slots, batch.query_starts, batch.context_lens]
    parts += [tables, *(part for tiles in batch.tiles for part in (tiles.seqs, tiles.starts))]
    sizes = {
        "tokens": token_ids.shape[0],
        "seqs": tables.shape[0],
        "width": tables.shape[1],
        "tiles": [(tiles.seqs.shape[0], *_plan(tiles)) for tiles in batch.tiles],
    }
    return sizes, torch.cat([part.flatten().int() for part in parts])


def _plan(tiles: QueryTiles) -> tuple[int, int, int, int]:
    return tiles.tokens, tiles.splits, tiles.rows.start, tiles.rows.stop


def step_size(sizes: Message) -> int:
    """How many integers a step's inputs are."""
    tiles = 2 * sum(count for count, *_ in sizes["tiles"])
    return int(3 * sizes["tokens"] + sizes["seqs"] * (2 + sizes["width"]) + 1 + tiles)


def unpack_step(sizes: Message, flat: torch.Tensor) -> tuple[torch.Tensor, AttentionBatch]:
    """The inverse of pack_step."""
    tokens, seqs, width = sizes["tokens"], sizes["seqs"], sizes["width"]
    counts = [tokens, tokens, tokens, seqs + 1, seqs, seqs * width]
    counts += [count for count, *_ in sizes["tiles"] for _ in range(2)]
    ids, positions, slots, starts, contexts, tables, *tiles = flat.split(counts)
    if flat.device.type == "cpu":  # what the compiled kernels read
        ids, positions, slots = ids.long(), positions.long(), slots.long()
    return ids, AttentionBatch(
        positions=positions,
        slots=slots,
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables.view(seqs, width),
        table_rows=torch.arange(seqs, dtype=torch.int32, device=flat.device),
        tiles=tuple(
            QueryTiles(seqs, starts, tokens, splits, range(start, stop))
            for seqs, starts, (_, tokens, splits, start, stop) in zip(
                tiles[::2], tiles[1::2], sizes["tiles"], strict=True
            )
        ),
    )
