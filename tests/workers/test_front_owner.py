"""Owner and member of several fronts, each against a fake of the other side."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from tokenmill.api.front_server import _without_secrets
from tokenmill.api.keys import Keys
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.core.keys.key_ring import KeyRing
from tokenmill.core.requests import Generate, Request
from tokenmill.routing.load_report import FrontLoad, LoadReport
from tokenmill.workers.fronts import control_socket, sync_rounds
from tokenmill.workers.fronts import owner as owner_module
from tokenmill.workers.fronts.control import (
    AskOwner,
    Connect,
    DeleteResponse,
    Drain,
    FindItem,
    FromFront,
    FrontHello,
    FrontSetup,
    GetResponse,
    GetTotals,
    KeepResponse,
    Left,
    Listening,
    OpenCalls,
    OwnerAnswer,
    Question,
    Sync,
    Synced,
    ToFront,
    Welcome,
    WorkerAdded,
    WorkerGone,
    WorkerLeaving,
    decode_to_front,
    encode,
)
from tokenmill.workers.fronts.front_link import FrontLink, FrontLinks
from tokenmill.workers.fronts.member import MemberPool
from tokenmill.workers.fronts.owner import FrontError, FrontOwner
from tokenmill.workers.fronts.owner_link import OwnerLink
from tokenmill.workers.messages import (
    AddFront,
    DropFront,
    FrontLost,
    GetKV,
    Ready,
    Submit,
    decode_to_worker,
)
from tokenmill.workers.messages import encode as encode_to_worker
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.worker_process import WorkerLoop
from workers.counting_engine import FACTS

SETUP = FrontSetup(
    "1", "m", "", "", ServerConfig(), KeyRing(b"", b""), PoolConfig(heartbeat_s=60.0)
)
GENEROUS_S = 180.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(GENEROUS_S):
        while not condition():
            await asyncio.sleep(0.005)


# The owner, between fake workers and fake fronts.


class Slot:
    """A worker that keeps what it is sent."""

    last_failure, ready = "killed", True

    def __init__(self, name: str, state: str = "ready", role: str = "both") -> None:
        self.name, self.state, self.role = name, state, role
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Pool:
    """Slots, and sums of nothing."""

    def __init__(self, *slots: Slot) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self._empty = WorkerPool(config=PoolConfig())
        self.num_restarts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._empty, name)


class Peer:
    """A front: it says something, and keeps what it hears."""

    def __init__(self, owner: FrontOwner, name: str) -> None:
        self.owner, self.heard = owner, list[ToFront]()
        self.identity, others = str(id(self)).encode(), owner._socket.send

        def send(identity: bytes, data: bytes) -> None:
            if identity == self.identity:
                self.heard.append(decode_to_front(data))
            else:
                others(identity, data)

        owner._socket.send = send  # type: ignore[method-assign]
        self.say(FrontHello(owner._issue(name), "1"))

    def say(self, message: FromFront) -> None:
        self.owner._receive(self.identity, encode(message))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]


class Process:
    """A front's process, which ends when it is killed."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        return -9

    def kill(self) -> None:
        self.ended.set()


@asynccontextmanager
async def owning(*slots: Slot, num_fronts: int = 2, spawn: Any = None) -> AsyncIterator[FrontOwner]:
    owner = FrontOwner(cast(Any, Pool(*slots)), SETUP, spawn, num_fronts)
    try:
        async with asyncio.timeout(GENEROUS_S):
            yield owner
    finally:
        await owner.close()


def test_a_front_is_not_sent_to_a_worker_that_leaves() -> None:
    async def main() -> None:
        staying, leaving = Slot("w0"), Slot("w2", "draining")
        async with owning(staying, leaving) as owner:
            front = Peer(owner, "f0")
            (welcome,) = front.of(Welcome)
            assert welcome.workers == {"w0": "both"}
            for worker in ("w0", "w2", "w9"):
                front.say(Connect(worker, "ipc://x"))
            assert [type(message) for message in staying.sent] == [AddFront]
            assert leaving.sent == []
            assert front.of(WorkerLeaving) == [WorkerLeaving("w2", 0.0), WorkerLeaving("w9", 0.0)]
            owner.worker_ready(cast(Any, leaving))
            assert front.of(WorkerAdded) == []

    asyncio.run(main())


def test_a_front_that_cannot_be_started_again_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(owner_module, name, 0.01)
    tries: list[Process] = []

    async def spawn(address: str, ticket: str) -> Process:
        tries.append(Process())
        if len(tries) == 2:
            raise BlockingIOError("no more processes")
        return tries[-1]

    async def main() -> None:
        async with owning(num_fronts=1, spawn=spawn) as owner:
            owner._begin(owner._keep(owner._fronts["f0"]))
            await until(lambda: tries)
            owner._fronts["f0"].state = "ready"
            tries[0].kill()
            await until(lambda: len(tries) == 3)
            assert len(owner._tickets) == 1

    asyncio.run(main())


def test_a_worker_that_leaves_the_pool_is_not_waited_for() -> None:
    async def main() -> None:
        first, second = Slot("d0", role="decode"), Slot("p0", role="prefill")
        async with owning(first, second) as owner:
            front = Peer(owner, "f0")
            for name in ("d0", "p0"):
                front.say(Connect(name, "ipc://x"))
            gone = asyncio.create_task(owner._gone(owner._fronts["f0"]))
            await until(lambda: DropFront("f0.1") in first.sent)
            second.ready = False  # removed meanwhile: it is not told, and never answers
            first.ready = False
            owner.worker_stopped(cast(Any, first))
            await gone
            assert DropFront("f0.1") not in second.sent

    asyncio.run(main())


def test_only_the_front_whose_link_broke_loses_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "LINK_S", 0.01)

    async def main() -> None:
        slot = Slot("p0", role="prefill")
        async with owning(slot) as owner:
            first, second = Peer(owner, "f0"), Peer(owner, "f1")
            for front in (first, second):
                front.say(Connect("p0", "ipc://x"))
            owner._on_worker(cast(Any, slot), FrontLost("f0.1"))
            await until(lambda: first.of(WorkerGone))
            assert first.of(WorkerGone)[0].worker_lives and second.of(WorkerGone) == []
            owner.worker_down(cast(Any, slot))
            assert not second.of(WorkerGone)[0].worker_lives

    asyncio.run(main())


def test_a_front_that_takes_no_messages_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (control_socket, owner_module):
        monkeypatch.setattr(module, "MAX_MESSAGES", 8)
    processes: list[Process] = []

    async def spawn(address: str, ticket: str) -> Process:
        processes.append(Process())
        return processes[-1]

    async def main() -> None:
        async with owning(num_fronts=1, spawn=spawn) as owner:
            owner._begin(owner._keep(front := owner._fronts["f0"]))
            with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.set(zmq.LINGER, 0)
                socket.set(zmq.RCVHWM, 8)
                socket.connect(owner._socket.address)
                while not owner._tickets:
                    await asyncio.sleep(0.01)
                socket.send(encode(FrontHello(next(iter(owner._tickets)), "1")))
                while front.peer is None:
                    await asyncio.sleep(0.01)
                front.state = "ready"
                for _ in range(1000):
                    front.send_bytes(bytes(100_000))
                    if processes[0].ended.is_set():
                        break
                await asyncio.wait_for(processes[0].ended.wait(), 20)

    asyncio.run(main())
    assert "front f0 takes no messages (8 wait, the most that may) and is ended" in caplog.text


# Stored responses: one front sends them, and a client asks another one for them.


KEPT = KeepResponse("r", "a", ["i"], b"payload")
QUESTIONS = (GetResponse("r", "a"), FindItem("i", "a"), DeleteResponse("r", "a"))


def listening(owner: FrontOwner, *names: str) -> list[Peer]:
    peers = [Peer(owner, name) for name in names]
    for peer in peers:
        peer.say(Listening("http://x"))
    return peers


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_response_that_is_on_its_way_is_found(question: Question) -> None:
    async def main() -> None:
        async with owning() as owner:
            maker, asked = listening(owner, "f0", "f1")
            asked.say(AskOwner(1, question))
            await until(lambda: maker.of(Sync))
            asked.say(Synced(1))
            maker.say(KEPT)  # it was sent before the client asked, and comes only now
            assert asked.of(OwnerAnswer) == []
            maker.say(Synced(1))
            await until(lambda: asked.of(OwnerAnswer))
            deletes = isinstance(question, DeleteResponse)
            response = None if deletes else KEPT.payload
            assert asked.of(OwnerAnswer) == [OwnerAnswer(1, response=response, is_deleted=deletes)]
            maker.say(AskOwner(2, GetResponse("r", "a")))
            if deletes:
                await until(lambda: maker.of(Sync)[1:])
            else:
                await until(lambda: maker.of(OwnerAnswer))
                assert len(maker.of(Sync)) == 1, "what is there is not waited for"

    asyncio.run(main())


def test_a_sync_that_began_before_the_question_does_not_count() -> None:
    async def main() -> None:
        async with owning() as owner:
            maker, asked = listening(owner, "f0", "f1")
            asked.say(AskOwner(1, GetResponse("unknown", "a")))
            await until(lambda: maker.of(Sync))
            maker.say(Synced(1))  # and after it the response, which comes late
            for number in (2, 3):
                asked.say(AskOwner(number, GetResponse("r", "a")))
            await asyncio.sleep(0)
            asked.say(Synced(1))
            await until(lambda: len(maker.of(Sync)) == 2)
            assert asked.of(OwnerAnswer) == [OwnerAnswer(1)]
            asked.say(Synced(2))
            maker.say(KEPT)
            maker.say(Synced(2))
            await until(lambda: len(asked.of(OwnerAnswer)) == 3)
            assert {answer.response for answer in asked.of(OwnerAnswer)[1:]} == {KEPT.payload}
            assert len(maker.of(Sync)) == 2, "those who wait share the next one"

    asyncio.run(main())


def test_a_silent_front_delays_a_miss_by_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_rounds, "ROUND_S", 0.01)

    async def main() -> None:
        async with owning() as owner:
            silent, asked = listening(owner, "f0", "f1")
            asked.say(AskOwner(1, GetResponse("r", "a")))
            await until(lambda: asked.of(OwnerAnswer))
            assert asked.of(OwnerAnswer) == [OwnerAnswer(1)]
            monkeypatch.setattr(sync_rounds, "ROUND_S", 2 * GENEROUS_S)
            asked.say(AskOwner(2, GetResponse("r", "a")))
            await until(lambda: len(silent.of(Sync)) == 2)
            asked.say(Synced(2))
            silent.say(Synced(1))  # late: it says nothing of what was sent after it
            await asyncio.sleep(0.01)
            assert len(asked.of(OwnerAnswer)) == 1
            silent.say(KEPT)
            silent.say(Synced(2))
            await until(lambda: len(asked.of(OwnerAnswer)) == 2)
            assert asked.of(OwnerAnswer)[1].response == KEPT.payload

    asyncio.run(main())


def test_what_a_front_sent_before_its_end_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_rounds, "ROUND_S", 2 * GENEROUS_S)
    monkeypatch.setattr(owner_module, "LATE_S", 0.1)

    async def main() -> None:
        async with owning() as owner:
            maker, asked = listening(owner, "f0", "f1")
            asked.say(AskOwner(1, GetResponse("unknown", "a")))
            await until(lambda: maker.of(Sync))
            asked.say(Synced(1))
            await owner._gone(owner._fronts["f0"])
            await until(lambda: asked.of(OwnerAnswer))  # nobody waits for the dead
            maker.say(KEPT)
            maker.say(OpenCalls(5))
            assert owner._responses.size() == (1, len(KEPT.payload))
            assert owner._fronts["f0"].calls.num_open == 0
            await until(lambda: len(owner._by_peer) == 1)
            maker.say(KeepResponse("later", "a", [], b"x"))
            assert owner._responses.size()[0] == 1

    asyncio.run(main())


# An owner and the connection of a front to it.


@asynccontextmanager
async def linked(owner: FrontOwner) -> AsyncIterator[OwnerLink]:
    link = OwnerLink(owner._socket.address)
    try:
        yield link
    finally:
        link.close()


def test_a_question_that_fails_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with owning() as owner, linked(owner) as link:
            await link.join(owner._issue("f0"), "1")
            monkeypatch.setattr(owner, "_totals", lambda decisions: 1 / 0)
            with pytest.raises(FrontError, match="ZeroDivisionError"):
                await link.ask(GetTotals())

    asyncio.run(main())


@pytest.mark.parametrize(("ticket", "version"), [("used", "1"), ("guessed", "1"), ("new", "0")])
def test_only_fronts_that_the_owner_started_get_its_settings(ticket: str, version: str) -> None:
    async def main() -> None:
        async with owning() as owner, linked(owner) as first, linked(owner) as second:
            tickets = {"used": owner._issue("f0"), "new": owner._issue("f1"), "guessed": "0" * 64}
            await first.join(tickets["used"], "1")
            with pytest.raises(FrontError, match=r"by its server alone|after an update"):
                await second.join(tickets[ticket], version)

    asyncio.run(main())


def test_what_comes_right_after_the_welcome_is_passed_on_in_order() -> None:
    async def main() -> None:
        async with owning() as owner, linked(owner) as link:
            owner._stopping = True
            await link.join(owner._issue("f0"), "1")
            owner._fronts["f0"].send(WorkerAdded("w3", "both"))
            await until(lambda: len(link._messages) == 2)
            heard: list[ToFront] = []
            link.pass_to(heard.append)
            assert heard == []  # whoever listens may have more to prepare
            owner._fronts["f0"].send(WorkerLeaving("w3", 1.0))
            await until(lambda: len(heard) == 3)
            assert heard == [Drain(), WorkerAdded("w3", "both"), WorkerLeaving("w3", 1.0)]

    asyncio.run(main())


def test_stored_responses_and_their_limits_are_those_of_all_fronts() -> None:
    limits = ServerConfig(max_stored_responses=2)

    async def main() -> None:
        setup = msgspec.structs.replace(SETUP, server=limits)
        owner = FrontOwner(cast(Any, Pool()), setup, cast(Any, None), 2)
        async with asyncio.timeout(GENEROUS_S), linked(owner) as one, linked(owner) as other:
            fronts = [
                MemberPool(await link.join(owner._issue(name), "1"), link, None)
                for link, name in ((one, "f0"), (other, "f1"))
            ]
            for front in fronts:
                front.membership.listening("http://x")
            first, second = (front.response_keeper(limits) for front in fronts)
            first.put("a", "k", ["i"], b"a")
            first.put("b", "k", ["i", "j"], b"bb")
            assert await second.get("b", "k") == b"bb", "it is there when another front asks for it"
            assert await second.get("a", "k") == b"a", "and is used later than b now"
            assert await second.get("a", "l") is None and not await second.delete("a", "l")
            second.put("c", "k", ["k"], b"ccc")
            assert await first.get("b", "k") is None, "the limit is that of all fronts"
            assert (
                await first.find_item("i", "k") == b"a" and await first.find_item("j", "k") is None
            )
            for front in fronts:
                await front.refresh()
            assert first.size() == second.size() == (2, 4)
            assert await first.delete("c", "k") and not await second.delete("c", "k")
            for front in fronts:
                await front.close()
            await owner.close()

    asyncio.run(main())


def test_fronts_are_told_no_secret() -> None:
    config = ServerConfig(api_keys=("the-key",), control_token="the-token")
    told = _without_secrets(config, 1)
    ring = Keys.of(config, "the-token", b"salt").ring
    welcome = encode(
        Welcome("f0", "f0.1", msgspec.structs.replace(SETUP, server=told, keys=ring), {})
    )
    assert b"the-" not in welcome
    found = decode_to_front(welcome)
    assert isinstance(found, Welcome)
    keys = found.setup.keys
    assert keys.account_of("the-key") == ring.account_of("the-key") is not None
    assert keys.is_control("the-token") and keys.account_of("the-tokens") is None


# A worker that a front has left.


def test_nothing_runs_for_a_front_that_was_dropped() -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:  # a short path
        _drop_a_front(f"ipc://{folder}/owner")


def _drop_a_front(address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(address)
    links = FrontLinks(FrontLink(address), FACTS)
    submitted: list[Any] = []
    engine = SimpleNamespace(submit=submitted.append, abort=lambda request_id: None)
    loop = WorkerLoop(cast(Any, engine), links, None)

    def receive(*messages: tuple[str, Any]) -> None:
        found = [(front, encode_to_worker(message)) for front, message in messages]
        links.receive = lambda wait_ms: (found, True)  # type: ignore[method-assign]
        loop._receive(0)

    try:
        receive(
            ("", AddFront("f0.1", f"{address}1")), ("f0.1", Submit([Request("a", Generate([1]))]))
        )
        receive(
            ("", DropFront("f0.1")),
            ("f0.1", Submit([Request("b", Generate([1]))])),
            ("f0.1", GetKV()),
        )
        assert [request.request_id for request in submitted] == ["a"]
        assert links._load.report().fronts == {} and not links._listeners
    finally:
        links.close()
        context.destroy(0)


def test_a_worker_tells_how_much_of_a_prefix_fronts_have_counted_twice() -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        address = f"ipc://{folder}/owner"
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PAIR)  # a socket that nobody keeps is closed
        socket.bind(address)
        links, size = FrontLinks(FrontLink(address), FACTS), FACTS.block_size
        prompt = [1] * (3 * size)
        try:
            for front in ("f0.1", "f1.1"):
                links.add(front, f"{address}-{front}")
                links.submitted(
                    front, Submit([Request(front, Generate(prompt))], [3 * size], [[7, 8, 9]])
                )
            assert links._load.report().shared_tokens == 3 * size - 1
            links.submitted("f1.1", Submit([Request("untold", Generate(prompt))], [3 * size]))
            assert links._load.report().shared_tokens == 3 * size - 1
        finally:
            links.close()
            context.destroy(0)


# A front, between a fake owner and the sockets of fake workers.


class Owner:
    """Keeps what the front says, and connects workers where it is told to."""

    tell: Callable[[ToFront], None]

    def __init__(self) -> None:
        self.said: list[FromFront] = []
        self.gone, self.heard_s = asyncio.Event(), time.monotonic()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.links: list[FrontLink] = []

    def pass_to(self, on_message: Callable[[ToFront], None]) -> None:
        self.tell = on_message

    def send(self, message: FromFront) -> None:
        self.said.append(message)

    async def ask(self, question: Any) -> OwnerAnswer:
        return OwnerAnswer(0)

    def addresses(self, worker: str) -> list[str]:
        said = [message for message in self.said if isinstance(message, Connect)]
        return [message.address for message in said if message.worker == worker]

    async def connect(self, worker: str, number: int = 0) -> None:
        """Have a worker say Ready where the front waits for it."""
        await until(lambda: len(self.addresses(worker)) > number)
        link = FrontLink(self.addresses(worker)[number], shared=self.context)
        self.links.append(link)
        link.send(Ready(FACTS))


@asynccontextmanager
async def joined(*workers: str) -> AsyncIterator[tuple[MemberPool, Owner]]:
    owner = Owner()
    welcome = Welcome("f0", "f0.1", SETUP, dict.fromkeys(workers, "both"))
    front = MemberPool(welcome, cast(Any, owner), None)
    try:
        async with asyncio.timeout(GENEROUS_S):
            yield front, owner
    finally:
        await front.close()
        for link in owner.links:
            link.close()
        owner.context.destroy(0)


def test_a_front_starts_though_a_worker_leaves() -> None:
    async def main() -> None:
        async with joined("w0", "w2") as (front, owner):
            start = asyncio.create_task(front.start())
            await owner.connect("w0")
            await until(lambda: owner.addresses("w2"))
            owner.tell(WorkerLeaving("w2", 0.0))
            assert await start == FACTS
            assert list(front.slots) == ["w0"] and Left("w2") in owner.said

    asyncio.run(main())


def test_a_front_tells_workers_which_blocks_a_request_computes() -> None:
    async def main() -> None:
        async with joined("w0", "w1") as (front, owner):
            start = asyncio.create_task(front.start())
            for worker in ("w0", "w1"):
                await owner.connect(worker)
            await start
            front.submit([Request("alone", Generate([1] * 64))])
            idle = LoadReport({"f0.1": FrontLoad(), "f1.1": FrontLoad()})
            for slot in front.slots.values():
                front.routers.on_report(slot, idle, time.monotonic_ns())
            front.submit([Request("one-of-two", Generate([2] * 64))])
            sent: list[Submit] = []

            def has_come() -> bool:
                messages = [decode_to_worker(d) for link in owner.links for d in link.take()]
                sent.extend(m for m in messages if isinstance(m, Submit))
                return len(sent) == 2

            await until(has_come)
            hashes = {m.requests[0].request_id: m.hashes for m in sent}
            assert hashes["alone"] == [] and len(hashes["one-of-two"][0]) > 0

    asyncio.run(main())


def test_a_front_connects_again_where_a_worker_dies_before_it_is_ready() -> None:
    async def main() -> None:
        async with joined("w0") as (front, owner):
            start = asyncio.create_task(front.start())
            await until(lambda: owner.addresses("w0"))
            owner.tell(WorkerGone("w0", owner.addresses("w0")[0], "killed"))
            await owner.connect("w0", number=1)
            assert await start == FACTS
            owner.tell(WorkerAdded("w3", "both"))
            await until(lambda: owner.addresses("w3"))
            owner.tell(WorkerGone("w3", owner.addresses("w3")[0], "killed"))
            await owner.connect("w3", number=1)
            await until(lambda: front.slots["w3"].ready)

    asyncio.run(main())
