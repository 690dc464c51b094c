"""A publisher of KV cache events, with the structs that vLLM and SGLang document.

The structs with maps are those of vLLM at commit a014e35f38c (2026-08-22, between 0.26 and 0.27);
the arrays are those of SGLang at cce0a1244b5 (2026-08-23) and of vLLM before 0.24. They are
declared here again, so that what is read and written is compared with what others declare.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Array(msgspec.Struct, array_like=True, gc=False, tag=True):
    pass


class SGLangStored(Array, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class SGLangSalted(SGLangStored, tag="BlockStored", kw_only=True):
    metadata: dict[str, str]


class SGLangRemoved(Array, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class SGLangCleared(Array, tag="AllBlocksCleared"):
    pass


def stored(
    hashes: list[Any], parent: Any, tokens: list[int], size: int = 16, **more: Any
) -> BlockStored:
    """vLLM's event, as it is for a model without adapters."""
    fields = {"lora_id": None, "medium": "GPU", "lora_name": None, **more}
    return BlockStored(hashes, parent, tokens, size, **fields)


def packed(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, list(events), rank))


class Publisher:
    """A PUB socket and a replay socket, as vLLM's ZmqEventPublisher has them."""

    def __init__(self, port: int | None = None, topic_in_replay: bool = True) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        self.port = self._bind(self._pub, port)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.linger = 0
        self.replay_port = self._bind(self._replay, None)
        self._topic_in_replay = topic_in_replay
        self.sent: list[tuple[int, bytes]] = []
        self._next = 0
        self._ended = False
        self._thread = threading.Thread(target=self._serve_replays, daemon=True)
        self._thread.start()

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], port: int | None) -> int:
        if port is None:
            return socket.bind_to_random_port("tcp://127.0.0.1")
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port

    def publish(self, payload: bytes, kept: bool = True, sent: bool = True) -> None:
        """One batch; it may be lost on its way, or no longer be there to be replayed."""
        number, self._next = self._next, self._next + 1
        if kept:
            self.sent.append((number, payload))
        if sent:
            self._pub.send_multipart((b"kv", number.to_bytes(8, "big"), payload))

    def _serve_replays(self) -> None:
        while not self._ended:
            if not self._replay.poll(20):
                continue
            client, delimiter, first = self._replay.recv_multipart()
            topic = [b"kv"] if self._topic_in_replay else []
            for number, payload in list(self.sent):
                if number >= int.from_bytes(first, "big"):
                    frames = [client, delimiter, *topic, number.to_bytes(8, "big"), payload]
                    self._replay.send_multipart(frames)
            topic = [b""] if self._topic_in_replay else []
            self._replay.send_multipart([client, delimiter, *topic, END, b""])
        self._replay.close(0)

    def stop(self) -> None:
        self._ended = True
        self._thread.join()
        self._context.destroy(0)
