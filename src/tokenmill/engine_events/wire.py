"""The msgpack format of KV cache events that vLLM and SGLang publish.

A batch is the array [time, events, data-parallel rank]. Since vLLM 0.24 an event is a map with a
"type"; in vLLM before that and in SGLang it is an array that begins with it. Fields that a version
does not have yet are absent. Fields that are not used here are not declared, but for those before
the last one that is: in an array they have a place.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.types import TokenmillError

EXPECTED = (
    "expected KV cache events of vLLM (0.10 and later) or SGLang: "
    "BlockStored, BlockRemoved or AllBlocksCleared in msgpack"
)
SEQUENCE_BYTES = 8
END_SEQUENCE = (-1).to_bytes(
    SEQUENCE_BYTES, "big", signed=True
)  # behind the last batch of a replay

BlockHash = int | bytes
ExtraKeys = list[list[Any] | None]  # by block; None: a block has none


class WireError(TokenmillError):
    """A message is not what vLLM and SGLang publish; it says what was expected."""


class BlockStored(msgspec.Struct, tag=True):
    """Blocks are cached; each one's parent is the one before it."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # of the first; None: it begins a prompt
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None  # SGLang has its metadata in this place
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks are no longer cached."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is cached any more."""


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    """The same as an array."""


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """The same as an array."""


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """The same as an array."""


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class EngineBatch(msgspec.Struct, array_like=True):
    """What one engine publishes at once, in order."""

    ts: float
    events: list[EngineEvent]
    data_parallel_rank: int | None = None


_batch = msgspec.msgpack.Decoder(_RawBatch)
_map = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_encoder = msgspec.msgpack.Encoder()


def decode_batch(payload: bytes) -> EngineBatch:
    """A published batch; raises WireError with what is wrong and what was expected."""
    try:
        raw = _batch.decode(payload)
        events: list[EngineEvent] = [_event(bytes(event)) for event in raw.events]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{error}; {EXPECTED}") from None
    return EngineBatch(raw.ts, events, raw.data_parallel_rank)


def _event(data: bytes) -> EngineEvent:
    event: EngineEvent = (_map if _is_map(data[0]) else _array).decode(data)
    return event


def _is_map(first: int) -> bool:
    """Whether the first byte of a msgpack value begins a map."""
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def encode_batch(batch: EngineBatch) -> bytes:
    """A batch as vLLM publishes it since 0.24."""
    return _encoder.encode(batch)
