"""What `serve --kv-events` publishes, read with structs as vLLM documents them, and by a router."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from api.sim import BLOCK_SIZE, MODEL, make_tokenizer
from api.sim_server import sim_server, wait_until
from proxy.engine_publisher import END, AllBlocksCleared, BlockRemoved, KVEventBatch
from proxy.route_server import router_process
from tokenmill.__main__ import run
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.core.images import ImageInput, ImageSpan, content_ids
from tokenmill.core.kv import DISK, HOST
from tokenmill.core.kv_events import (
    EventBatch,
    EventPublisher,
    Removed,
    Stored,
    pack_events,
    unpack_events,
)
from tokenmill.engine_events.engine_blocks import salt_of
from tokenmill.engine_events.engine_caches import EngineCaches
from tokenmill.engine_events.publisher import CachePublisher, PublisherError, engine_event
from tokenmill.engine_events.wire import EngineBatch, decode_batch, encode_batch
from tokenmill.sched.cache.blocks import BlockPool, block_hashes

SIZE = 4
TOKENS = list(range(50, 66))
SALT = salt_of("", "")
TEXT = "the quick brown fox jumps over the lazy dog " * 8
MESSAGES = [{"role": "user", "content": TEXT}]


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port: int = taken.getsockname()[1]
        return port


def insert(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Cache a prompt's blocks as the scheduler does."""
    parent: int | str = salt
    above = None
    taken = pool.allocate(len(tokens) // SIZE)
    for index, own in enumerate(block_hashes(tokens, SIZE, salt=salt)):
        block = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        parent = pool.insert(taken[index], own, parent, block, above)
        above = own
    return taken


def recorded(pool: BlockPool) -> EventPublisher:
    publisher = EventPublisher(pool.record_events())
    publisher.record_tokens()
    return publisher


def as_vllm(events: list[Any]) -> KVEventBatch:
    """Through the wires between our processes and to others, with vLLM's decoder at the end."""
    travelled = unpack_events(msgspec.json.decode(msgspec.json.encode(pack_events(events))))
    payload = encode_batch(EngineBatch(1.5, list(map(engine_event, travelled)), 3))
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


def test_vllm_reads_what_a_pool_caches() -> None:
    pool = BlockPool(8, SIZE)
    events = recorded(pool)
    pool.release(insert(pool, TOKENS))
    batch = events.take()
    assert batch is not None
    told = as_vllm(batch.events)
    (stored,) = told.events
    hashes = block_hashes(TOKENS, SIZE)
    assert (told.ts, told.data_parallel_rank) == (1.5, 3)
    assert (stored.block_hashes, stored.parent_block_hash) == (hashes, None)
    assert (stored.token_ids, stored.block_size, stored.medium) == (TOKENS, SIZE, "GPU")
    assert (stored.lora_id, stored.lora_name, stored.extra_keys) == (None, None, None)
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    pool.clear()
    batch = events.take()
    assert (
        batch is not None and type(as_vllm(batch.events).events[0]).__name__ == "AllBlocksCleared"
    )


def test_parents_salts_and_tiers_are_told() -> None:
    later, salted = (
        Stored(7, [8], token_ids=TOKENS[:4]),
        Stored(1, [2], token_ids=TOKENS[:4], salt="s"),
    )
    told = as_vllm([later, salted, Stored(None, [8], HOST), Removed([8]), Removed([8], DISK)])
    first, second, third, *removed = told.events
    assert first.parent_block_hash == 7 and first.extra_keys is None
    assert second.parent_block_hash is None and second.extra_keys == [("s",)]
    assert (third.medium, third.token_ids, third.block_size) == ("CPU", [], 0)
    assert [(event.block_hashes, event.medium) for event in removed] == [
        ([8], "GPU"),
        ([8], "STORAGE"),
    ]


def test_images_are_keys_and_no_tokens() -> None:
    def told(data: bytes) -> Any:
        span = ImageSpan(2, 5, ImageInput.of(data * 16, (1, 2, 2)))
        tokens = content_ids(TOKENS[:8], [span])
        return as_vllm([Stored(1, [1, 2], token_ids=tokens, salt="")]).events[0]

    one, other = told(b"1"), told(b"2")
    assert one.token_ids == [50, 51, 0, 0, 0, 0, 0, 57]
    (first,), (second,) = one.extra_keys
    assert first[1] == 2 and second[1] == 0 and first[0] != second[0]
    assert one.extra_keys != other.extra_keys


def test_what_is_published_feeds_a_routers_index() -> None:
    pool = BlockPool(4, SIZE)
    events, caches = recorded(pool), EngineCaches(SIZE, 5.0)
    caches.begin("a", 0, "events")

    def tell() -> int:
        batch = events.take()
        assert batch is not None
        payload = encode_batch(EngineBatch(0.0, list(map(engine_event, batch.events)), 0))
        caches.take("a", 0, decode_batch(payload))
        return caches.overlay({}, [*TOKENS, 1], SALT, 0.0).get("a", 0)

    pool.release(insert(pool, TOKENS))
    assert tell() == 16
    pool.release(insert(pool, [9] * 8))
    assert tell() == 8, "two blocks made room"
    pool.release(insert(pool, [9] * 16, "s"))
    assert tell() == 0 and caches.overlay({}, [9] * 17, salt_of("", "s"), 0.0) == {"a": 16}


@contextlib.contextmanager
def subscribed() -> Iterator[tuple[CachePublisher, Any, Any]]:
    """A publisher, and the sockets of vLLM's example of a subscriber."""
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    with contextlib.closing(CachePublisher(events, replay)) as publisher, zmq.Context() as context:
        sub, req = context.socket(zmq.SUB), context.socket(zmq.REQ)
        for each in (sub, req):
            each.rcvtimeo, each.linger = 60_000, 0
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.subscribe(b"")
        sub.connect(events)
        req.connect(replay)
        assert monitor.poll(60_000)
        sub.disable_monitor()
        yield publisher, sub, req


def test_batches_are_numbered_and_sent_again() -> None:
    with subscribed() as (publisher, sub, req):
        batches = [EventBatch(n, [Removed([n])]) for n in (1, 2, 4)]
        first = 0
        while not sub.poll(50):  # until the subscription has arrived
            publisher.take("w0", EventBatch(first + 1, []))
            first += 1
        while sub.poll(200):
            _, number, _ = sub.recv_multipart()
        assert int.from_bytes(number, "big") == first - 1
        for batch in batches:
            publisher.take("w1", batch)
        publisher.forget("w1")
        frames = [sub.recv_multipart() for _ in range(5)]
        assert [int.from_bytes(f[1], "big") for f in frames] == list(range(first, first + 5))
        read = [msgspec.msgpack.decode(f[2], type=KVEventBatch) for f in frames]
        kinds = [type(batch.events[0]) for batch in read]
        void = AllBlocksCleared
        assert kinds == [BlockRemoved, BlockRemoved, void, BlockRemoved, void]
        assert {batch.data_parallel_rank for batch in read} == {1}
        req.send((first + 3).to_bytes(8, "big"))
        again = [req.recv_multipart() for _ in range(1)]
        assert again == [[b"", *frames[3][1:]]]


def test_a_replay_ends_with_a_number_below_zero() -> None:
    with subscribed() as (publisher, _, req):
        publisher.take("w0", EventBatch(1, []))
        dealer = req.context.socket(zmq.DEALER)
        dealer.rcvtimeo = 10_000
        dealer.connect(req.last_endpoint.decode())
        dealer.send_multipart([b"", b"short"])  # is said to be none, and not answered
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        assert dealer.recv_multipart()[:3] == [b"", b"", (0).to_bytes(8, "big")]
        assert dealer.recv_multipart() == [b"", b"", END, b""]


def test_addresses_that_cannot_be_bound(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PublisherError, match=f"--kv-events {address} cannot be bound"):
            CachePublisher(address)
        with pytest.raises(PublisherError, match=r"--kv-events replay= .* cannot be bound"):
            CachePublisher(f"tcp://127.0.0.1:{free_port()}", address)
    assert run(["serve", "--kv-events", "5557"]) == 2
    assert "tcp://HOST:PORT" in capsys.readouterr().err
    assert run(["serve", "--kv-events", "tcp://*:5557,replay=5558"]) == 2
    assert ",replay=tcp://HOST:PORT" in capsys.readouterr().err
    assert run(["serve", "--kv-events", "tcp://*:5557", "--ep", "2", "--attention-dp"]) == 2
    assert "--kv-events does not go with --attention-dp" in capsys.readouterr().err


@pytest.mark.parametrize("fronts", [1, 2])
def test_a_router_knows_what_a_server_caches(fronts: int) -> None:
    events, replay = f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    pool = PoolConfig(workers=2, kv_events=f"{events},replay={replay}")
    config = ServerConfig(port=0, fronts=fronts)
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
    num_tokens = len(make_tokenizer().encode_chat(MESSAGES, tools=None))
    with sim_server(config, pool=pool) as server:
        assert server.call("POST", "/v1/chat/completions", body).status == 200
        address = f"{server.url},events={events},replay={replay}"
        with router_process((address, "http://127.0.0.1:1")) as router:

            def first() -> dict[str, Any]:
                worker: dict[str, Any] = router.call("GET", "/workers").json["workers"][0]
                return worker

            num_blocks = num_tokens // BLOCK_SIZE
            wait_until(lambda: first()["cached_blocks"] >= num_blocks, "it is told of")
            assert first()["cache_basis"] == "events" and first()["event_batches"]["replayed"]
            assert router.call("POST", "/v1/chat/completions", body).status == 200
            assert first()["overlap_tokens"] == num_blocks * BLOCK_SIZE
