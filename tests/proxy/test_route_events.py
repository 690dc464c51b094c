"""Backends that publish what they cache: sockets, gaps, restarts, and what a router makes of it."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.sim import BLOCK_SIZE, make_tokenizer
from api.sim_server import SimServer, wait_until
from proxy.engine_publisher import AllBlocksCleared, BlockRemoved, Publisher, packed, stored
from proxy.route_server import MODEL, Scripted, router_process, say
from tokenmill.__main__ import run
from tokenmill.proxy.backend_address import BackendError, EventAddress, read_backends
from tokenmill.proxy.call_prompt import read_prompt
from tokenmill.proxy.event_source import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS

TEXT = "the quick brown fox jumps over the lazy dog " * 8
MESSAGES = [{"role": "user", "content": TEXT}]
TOKENS = list(make_tokenizer().encode_chat(MESSAGES, tools=None))
NUM_BLOCKS = len(TOKENS) // BLOCK_SIZE


class Pair:
    """A router over two scripted backends, the first of which publishes events."""

    def __init__(self, router: SimServer, publisher: Publisher, log: Path) -> None:
        self.router, self.publisher, self._log = router, publisher, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def first(self) -> dict[str, Any]:
        worker: dict[str, Any] = self.router.call("GET", "/workers").json["workers"][0]
        return worker

    def wait(self, key: str, value: Any) -> None:
        wait_until(lambda: self.first()[key] == value, f"{key} is {value}")

    def ask(self) -> dict[str, Any]:
        """Where the prompt goes now, and why."""
        body = {"model": MODEL, "messages": MESSAGES}
        assert self.router.call("POST", "/v1/chat/completions", body).status == 200
        decision: dict[str, Any] = self.router.call("GET", "/workers").json["decisions"][-1]
        return decision


def blocks(first: int, end: int) -> bytes:
    """Blocks of the prompt, hashed by their numbers."""
    tokens = TOKENS[first * BLOCK_SIZE : end * BLOCK_SIZE]
    parent = None if first == 0 else first - 1
    return packed(stored(list(range(first, end)), parent, tokens, BLOCK_SIZE))


@contextlib.contextmanager
def pair(replay: bool, *earlier: bytes, **options: Any) -> Iterator[Pair]:
    publisher = Publisher(**options)
    backends = [Scripted(), Scripted()]
    for backend in backends:
        backend.behaviour = say(200, b"{}")
    for payload in earlier:
        publisher.publish(payload)
    parts = [backends[0].url, f"events={publisher.events}"]
    parts += [f"replay={publisher.replay}"] if replay else []
    with tempfile.NamedTemporaryFile("w") as log:
        try:
            with router_process((",".join(parts), backends[1].url), log=log) as router:  # type: ignore[arg-type]
                wait_until(lambda: len(router.call("GET", "/workers").json["workers"]) == 2, "up")
                yield Pair(router, publisher, Path(log.name))
        finally:
            for backend in backends:
                backend.stop()
            publisher.stop()


def linked(made: Pair) -> Pair:
    """Wait until the router takes events: a subscription takes a moment to arrive."""

    def heard() -> bool:
        made.publisher.publish(packed(AllBlocksCleared()))
        return bool(made.first()["event_batches"]["received"])

    wait_until(heard, "events are received")
    return made


def test_a_router_knows_what_its_backends_say() -> None:
    with pair(True) as made:
        made = linked(made)
        assert made.first()["cache_basis"] == "events"
        made.publisher.publish(blocks(0, NUM_BLOCKS - 1))
        made.wait("cached_blocks", NUM_BLOCKS - 1)
        decision = made.ask()
        assert decision["worker"] == made.first()["name"]
        assert decision["cached_tokens"] == (NUM_BLOCKS - 1) * BLOCK_SIZE
        assert decision["basis"] == "events"
        made.publisher.publish(packed(BlockRemoved(list(range(2, NUM_BLOCKS - 1)), "GPU")))
        made.wait("cached_blocks", 2)
        text = made.router.call("GET", "/metrics").body.decode()
        first = made.first()
        for result, count in first["event_batches"].items():
            labels = f'result="{result}",worker="{first["name"]}"'
            assert f"tokenmill_backend_event_batches_total{{{labels}}} {count}.0" in text
        assert first["event_batches"]["received"] >= 3


@pytest.mark.parametrize("topic", [True, False])
def test_what_was_published_before_is_replayed(topic: bool) -> None:
    with pair(True, blocks(0, 2), blocks(2, 4), topic_in_replay=topic) as made:
        made.wait("cached_blocks", 4)
        first = made.first()
        assert first["cache_basis"] == "events"
        assert first["event_batches"] == {"received": 2, "replayed": 2, "lost": 0}


def test_a_gap_is_replayed() -> None:
    with pair(True, blocks(0, 1)) as made:
        made.wait("cached_blocks", 1)
        made = linked(made)
        before = made.first()["event_batches"]
        made.publisher.publish(blocks(0, 2), sent=False)
        made.publisher.publish(blocks(2, 3), sent=False)
        made.publisher.publish(blocks(3, 4))
        made.wait("cached_blocks", 4)
        after = made.first()["event_batches"]
        assert after["replayed"] == before["replayed"] + 2 and after["lost"] == 0
        assert made.first()["cache_basis"] == "events"


@pytest.mark.parametrize("replay", [True, False])
def test_after_a_gap_that_stays_the_index_is_dropped(replay: bool) -> None:
    with pair(replay) as made:
        made = linked(made)
        made.publisher.publish(blocks(0, 3))
        wait_until(lambda: made.ask()["cached_tokens"] > 0, "it is told of")
        made.publisher.publish(packed(BlockRemoved([2], "GPU")), kept=False, sent=False)
        made.publisher.publish(blocks(3, 4))
        wait_until(lambda: made.first()["event_batches"]["lost"] == 1, "the gap is seen")
        assert made.first()["cache_basis"] == "partial events"
        assert "1 batches of events were missed" in made.log
        assert made.ask()["basis"] in ("partial events", "assumed")


def test_a_backend_that_restarts_is_forgotten() -> None:
    assert HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS < 1_000, "a host that is gone, within a second"
    with pair(False) as made:
        made = linked(made)
        made.publisher.publish(blocks(0, 3))
        wait_until(lambda: made.ask()["cached_tokens"] > 0, "it is told of")
        port = made.publisher.port
        made.publisher.stop()
        made.wait("cache_basis", "assumed")
        made.wait("cached_blocks", 0)
        made.publisher = Publisher(port)
        wait_until(lambda: "what it had cached is forgotten" in made.log, "it is said")

        def heard() -> bool:
            made.publisher.publish(packed(stored([0], None, [1] * BLOCK_SIZE, BLOCK_SIZE)))
            return bool(made.first()["cache_basis"] != "assumed")

        wait_until(heard, "the new process is heard")
        made.publisher.stop()


def test_events_that_cannot_be_read_are_done_without() -> None:
    with pair(True) as made:
        made = linked(made)
        made.publisher.publish(packed({"type": "BlockMoved"}))
        made.wait("cache_basis", "assumed")
        assert "Invalid value 'BlockMoved'" in made.log and "expected KV cache events" in made.log
        assert made.ask()["basis"] == "assumed"


def test_nobody_answers_at_the_address_of_events() -> None:
    backend = Scripted()
    backend.behaviour = say(200, b"{}")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    address = f"{backend.url},events=tcp://127.0.0.1:{port}"
    with (
        tempfile.NamedTemporaryFile("w") as log,
        router_process((address,), log=log) as router,  # type: ignore[arg-type]
    ):
        body = {"model": MODEL, "messages": MESSAGES}
        assert router.call("POST", "/v1/chat/completions", body).status == 200
        read = Path(log.name).read_text
        wait_until(lambda: "nobody answers at events=tcp" in read(), "it is said")
        assert "expected KV cache events of vLLM" in read()
        assert router.call("POST", "/v1/chat/completions", body).status == 200
    backend.stop()


def test_prompts_that_events_do_not_tell_of() -> None:
    tokenizer = make_tokenizer()
    chat = b'{"model": "m", "cache_salt": "s", "messages": [{"role": "user", "content": %s}]}'
    exact = read_prompt(chat % b'"an \\"image\\""', tokenizer)
    assert exact.is_exact and exact.cache_salt == "s"
    assert not read_prompt(chat % b'"hello"', None).is_exact, "no tokenizer"
    part = b'[{"type": "image_url", "image_url": {"url": "http://h/i.png"}}]'
    assert not read_prompt(chat % part, tokenizer).is_exact


def test_addresses_of_events() -> None:
    events = "events=tcp://h:5557,replay=tcp://h:5558,events=tcp://h:5559"
    (address,) = read_backends((f"http://H:1/v1/,{events}",))
    assert (address.url, address.name) == ("http://h:1", "h:1")
    first = EventAddress("tcp://h:5557", "tcp://h:5558")
    assert address.streams == (first, EventAddress("tcp://h:5559"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("http://h:1,events=h:5557", "must be URL, or URL,events=tcp://HOST:PORT"),
        ("http://h:1,events=tcp://*:5557", "got 'events=tcp://\\*:5557'"),
        ("http://h:1,events=tcp://h", "got 'events=tcp://h'"),
        ("http://h:1,replay=tcp://h:1", "must stand behind the events="),
        ("http://h:1,topic=x", "got 'topic=x'"),
    ],
)
def test_addresses_that_are_none(value: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        read_backends((value,))


def test_events_need_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["route", "--backend", "http://h:1,events=tcp://h:2"]) == 2
    assert "--backend ...,events= needs --tokenizer" in capsys.readouterr().err
