"""Workers that join a pool: what they answer, how they end, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from api.sim import MAX_MODEL_LEN, worker_argv
from api.sim_server import sim_server, wait_until
from api.streams import GENEROUS_S, read
from tokenmill import __version__
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.workers.joining import listener
from tokenmill.workers.joining.joiner import Membership
from tokenmill.workers.joining.protocol import (
    Admitted,
    Challenge,
    Hello,
    JoinError,
    Proofs,
    Refused,
    Terms,
    encode_terms,
    join_address,
    line_of,
    link_host,
    num_expected,
    read_line,
    read_token,
    split_address,
)
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.messages import Submit, encode
from tokenmill.workers.pool import WorkerPool

WORKER = [sys.executable, str(Path(__file__).with_name("counting_engine.py"))]
TOKEN = "0123456789abcdef0123456789abcdef"
SLOW = ("--step-s", "0.01")
ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return write_token(tmp_path / "token", TOKEN)


def write_token(path: Path, token: str) -> Path:
    path.touch(0o600)
    path.write_text(token + "\n")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Pool:
    """A pool without workers of its own, and those that join it."""

    def __init__(self, token_file: Path, wait_s: float, min_joined: int = 1) -> None:
        self.token_file = token_file
        self.where = f"127.0.0.1:{free_port()}"
        self.processes: list[subprocess.Popen[str]] = []
        config = PoolConfig(
            workers=0,
            join_listen=self.where,
            token_file=str(token_file),
            wait_s=wait_s,
            heartbeat_s=0.1,
        )
        self.pool = WorkerPool(config=config)

    def join(self, *flags: str, token_file: Path | None = None) -> subprocess.Popen[str]:
        """Start a worker that joins."""
        given = str(token_file or self.token_file)
        argv = [*WORKER, "--join", self.where, "--token-file", given, *flags]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=ENV)
        self.processes.append(process)
        return process

    async def until(self, num_ready: int) -> None:
        await until(lambda: self.pool.num_ready == num_ready)

    def submit(self, name: str, num_tokens: int = 300):  # type: ignore[no-untyped-def]
        sampling = SamplingParams(max_tokens=num_tokens)
        return self.pool.submit([Request(name, Generate([1], sampling))])

    def at(self, name: str) -> str:
        """The worker of a request."""
        slot = self.pool.open_requests[name].slot
        return "" if slot is None else slot.name


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def joined(token_file: Path, *flags: str, wait_s: float = 120.0) -> AsyncIterator[Pool]:
    """A pool that one worker has joined."""
    pool = Pool(token_file, wait_s)
    starting = asyncio.create_task(pool.pool.start())
    try:
        pool.join(*flags)
        async with asyncio.timeout(GENEROUS_S):
            await starting
            yield pool
    finally:
        await pool.pool.close()
        for process in pool.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 10)
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a worker and the last that it said."""
    _, said = await asyncio.to_thread(process.communicate)
    return process.returncode, said.strip().splitlines()[-1] if said.strip() else ""


def test_a_killed_worker_loses_nothing_and_is_not_started_again(token_file: Path) -> None:
    async def main() -> None:
        async with joined(token_file, *SLOW) as pool:
            pool.join(*SLOW)
            await pool.until(2)
            streams = [pool.submit(str(i)) for i in range(4)]
            for stream in streams:
                await stream.get()
            places = [pool.at(str(i)) for i in range(4)]
            assert set(places) == {"w0", "w1"}
            pool.processes[1].kill()
            for stream in streams:
                (output,) = await read(stream)
                assert output.finish_reason is FinishReason.LENGTH
            (gone,) = {"w0", "w1"} - pool.pool.slots.keys()
            assert pool.pool.num_migrations == places.count(gone) and pool.pool.num_restarts == 0

    asyncio.run(main())


def test_a_worker_that_is_told_to_end_finishes_its_requests(token_file: Path) -> None:
    async def main() -> None:
        async with joined(token_file, *SLOW) as pool:
            first = pool.processes[0]
            early = pool.submit("early")
            await early.get()
            first.send_signal(signal.SIGTERM)
            pool.join(*SLOW)
            await until(lambda: "w1" in pool.pool.slots and pool.pool.ready)
            late = pool.submit("late", 5)
            await late.get()
            assert pool.at("early") == "w0" and pool.pool.slots["w0"].state == "draining"
            for stream in (late, early):
                assert (await read(stream))[0].finish_reason is FinishReason.LENGTH
            code, said = await ended(first)
            assert code == 0 and said.startswith("leaving: "), said
            assert list(pool.pool.slots) == ["w1"] and pool.pool.num_migrations == 0

    asyncio.run(main())


def test_requests_wait_for_the_next_worker(token_file: Path) -> None:
    async def main() -> None:
        async with joined(token_file, *SLOW, wait_s=60.0) as pool:
            stream = pool.submit("r", 100)
            await stream.get()
            pool.processes[0].kill()
            await pool.until(0)
            pool.join()
            (output,) = await read(stream)
            assert output.finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_requests_end_when_no_worker_comes(token_file: Path) -> None:
    async def main() -> None:
        async with joined(token_file, wait_s=4.0) as pool:
            stream = pool.submit("endless", 10**9)
            await stream.get()
            pool.processes[0].kill()
            (output,) = await read(stream)
            assert output.finish_reason is FinishReason.ERROR
            assert output.error == "no worker has joined within 4 s (--wait-s)"

    asyncio.run(main())


def test_a_pool_says_that_nobody_joined(token_file: Path) -> None:
    async def main() -> None:
        pool = Pool(token_file, wait_s=0.1)
        expected = r"0 of 1 workers have joined at .* within 0.1 s \(--wait-s\)"
        with pytest.raises(WorkerStartError, match=expected):
            await pool.pool.start()
        await pool.pool.close()

    asyncio.run(main())


def test_workers_that_do_not_fit_are_refused_at_both_ends(
    token_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = write_token(tmp_path / "other", TOKEN[::-1])
    refused = {
        "the tokens differ: server and worker must have the same --token-file": ((), other),
        "dtype: the other workers have none, the new one has bf16": (("--dtype", "bf16"), None),
        "GPU GPU-1 is that of worker w0: give each worker its own": (("--gpu", "GPU-1"), None),
        "ValueError: no such model": (("--fail", "no such model"), None),
    }

    async def main() -> None:
        async with joined(token_file, "--gpu", "GPU-1") as pool:
            for why, (flags, file) in refused.items():
                code, said = await ended(pool.join(*flags, token_file=file))
                assert code == 1 and (why in said or "--fail" in flags), said
                told = f"a worker at 127.0.0.1 did not join: {why}"
                await until(lambda told=told: told in caplog.text)  # type: ignore[misc]
            await pool.until(1)
            assert list(pool.pool.slots) == ["w0"]
            assert (await read(pool.submit("r", 3)))[0].token_ids == [0, 1, 2]

    asyncio.run(main())


def ask(where: str, line: bytes) -> Refused:
    """What a server answers to a line."""
    host, port = split_address(where, "--join")
    with socket.create_connection((host, port)) as connection, connection.makefile("rb") as lines:
        challenge = read_line(lines.readline(), "server")
        assert isinstance(challenge, Challenge) and challenge.version == __version__
        connection.sendall(line)
        answer = read_line(lines.readline(), "server")
        assert isinstance(answer, Refused)
        return answer


def test_strangers_and_other_versions_are_refused(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.5)
    other = line_of(Hello("0.0.1", b"n", b"p"))
    answers = {
        other: f"the server runs tokenmill {__version__}, the worker 0.0.1: both must be the same",
        b"GET / HTTP/1.1\r\n": "it speaks another protocol: it says b'GET / HTTP/1.1",
        line_of(Refused("x")): "it speaks another protocol",
        b"": "it said nothing in time",
        b"x" * 2**15 + b"\n": "it speaks another protocol: its first line is too long",
    }

    async def main() -> None:
        async with joined(token_file) as pool:
            for line, expected in answers.items():
                answer = await asyncio.to_thread(ask, pool.where, line)
                assert answer.reason.startswith(expected), answer
            assert (await read(pool.submit("r", 2)))[0].token_ids == [0, 1]

    asyncio.run(main())


@contextlib.contextmanager
def impostor(*said: bytes):  # type: ignore[no-untyped-def]
    """A server that says these lines, whatever it hears."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                for line in said:
                    connection.sendall(line)
                    connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_a_worker_joins_no_server_without_the_token() -> None:
    terms = encode_terms(Terms("tcp://127.0.0.1:1", b"k" * 40, {}, {}))
    proof = Proofs(b"another token", b"n" * 32, b"").of_server(terms)
    challenge = line_of(Challenge(__version__, b"n" * 32))
    for lines, why in {
        (challenge, line_of(Admitted(terms, proof))): "does not have the token of --token-file",
        (b"220 smtp\r\n",): "speaks another protocol: it says b'220 smtp",
    }.items():
        with impostor(*lines) as where, pytest.raises(JoinError, match=why):
            Membership(where, TOKEN.encode(), wait_s=0.0)


def test_an_address_that_nobody_answers_is_named() -> None:
    where = f"127.0.0.1:{free_port()}"
    expected = rf"no server answers at {where}: Connection refused; waited 0.2 s \(--wait-s\)"
    with pytest.raises(JoinError, match=expected):
        Membership(where, TOKEN.encode(), wait_s=0.2)


def test_a_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    assert read_token(str(write_token(tmp_path / "good", TOKEN))) == TOKEN.encode()
    with pytest.raises(JoinError, match=r"gone: No such file or directory; .* makes one"):
        read_token(str(tmp_path / "gone"))
    for mode in (0o640, 0o604, 0o644):
        open_file = write_token(tmp_path / f"{mode:o}", TOKEN)
        open_file.chmod(mode)
        with pytest.raises(JoinError, match=rf"\(mode {mode:04o}\), expected 0600"):
            read_token(str(open_file))
    with pytest.raises(JoinError, match="at least 32 characters, it has 5"):
        read_token(str(write_token(tmp_path / "short", "short")))


def test_addresses() -> None:
    assert split_address("leader-0.svc", "--join") == ("leader-0.svc", 7001)
    assert split_address("[::1]:9", "--join") == ("::1", 9)
    for wrong in ("", ":7001", "h:port", "h/x", "a@b:1", "::1:7"):
        with pytest.raises(JoinError, match="--join must be HOST:PORT"):
            split_address(wrong, "--join")
    with pytest.raises(JoinError, match="with --fronts it must be an address of this machine"):
        link_host("0.0.0.0:7001")
    assert link_host("localhost:7001") in ("127.0.0.1", "::1")


def test_variables_of_a_leader_worker_set() -> None:
    group = {"LWS_LEADER_ADDRESS": "tokenmill-0.svc", "LWS_GROUP_SIZE": "4"}
    assert join_address(None, group | {"LWS_WORKER_INDEX": "2"}) == "tokenmill-0.svc"
    assert join_address("10.0.0.1:1", group) == "10.0.0.1:1"
    assert num_expected(group) == 3 and num_expected({}) == 1
    with pytest.raises(JoinError, match="this pod is the leader of its group"):
        join_address(None, group | {"LWS_WORKER_INDEX": "0"})
    with pytest.raises(JoinError, match="--join is needed"):
        join_address(None, {})
    with pytest.raises(JoinError, match="LWS_GROUP_SIZE must be at least 2"):
        num_expected({"LWS_GROUP_SIZE": "1"})


class Relay:
    """Passes bytes on between a worker and a server, and keeps them."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.port = free_port()

    @asynccontextmanager
    async def to(self, port_of: Callable[[], int]) -> AsyncIterator[None]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", port_of())
            await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

        server = await asyncio.start_server(serve, "127.0.0.1", self.port)
        yield
        server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                self.seen += data
                writer.write(data)
            writer.close()


def test_who_reads_along_learns_neither_prompt_nor_key(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []

    def curve_keypair() -> tuple[bytes, bytes]:
        keys.extend(pair := make_keys())
        return pair

    make_keys = zmq.curve_keypair
    monkeypatch.setattr(zmq, "curve_keypair", curve_keypair)
    prompt = list(range(300, 700))
    plain = encode(Submit([Request("r", Generate(prompt, SamplingParams(), cache_salt="whose"))]))
    assert bytes([205, 1, 44, 205, 1, 45]) in plain and b"whose" in plain

    async def main() -> None:
        handshake, link = Relay(), Relay()
        file = tmp_path / f"{link.port}.port"
        pool = Pool(token_file, wait_s=120.0)
        _, port = split_address(pool.where, "")
        async with handshake.to(lambda: port), link.to(lambda: int(file.read_text())):
            starting = asyncio.create_task(pool.pool.start())
            await asyncio.sleep(0.2)
            server, pool.where = pool.where, f"127.0.0.1:{handshake.port}"
            process = pool.join("--relay", str(file))
            async with asyncio.timeout(GENEROUS_S):
                await starting
                request = Request(
                    "r", Generate(prompt, SamplingParams(max_tokens=3), cache_salt="whose")
                )
                (output,) = await read(pool.pool.submit([request]))
            assert output.token_ids == [0, 1, 2]
            await pool.pool.close()
            assert (await ended(process))[0] == 0
        wire = bytes(handshake.seen + link.seen)
        assert server and len(link.seen) > len(plain) and b"Admitted" in wire
        secrets = [TOKEN.encode(), b"whose", *keys, *(key.hex().encode() for key in keys)]
        assert keys and not [secret for secret in secrets if secret in wire]
        assert all(bytes([205, 1, 44 + i, 205, 1, 45 + i]) not in wire for i in range(100))

    asyncio.run(main())


def test_fronts_share_workers_that_join(token_file: Path) -> None:
    """A link between front and worker goes by TCP, too; who leaves is left by all fronts."""
    where = f"127.0.0.1:{free_port()}"
    argv = worker_argv(SchedulerConfig(max_model_len=MAX_MODEL_LEN), step_ms=5.0)
    joining = [*argv, "--join", where, str(token_file)]
    pool = PoolConfig(workers=0, join_listen=where, token_file=str(token_file), heartbeat_s=0.1)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(joining, env=ENV)) for _ in range(2)]
        for process in processes:
            stack.callback(process.kill)
        server = stack.enter_context(sim_server(ServerConfig(port=0, fronts=2), pool=pool))

        def names() -> list[str]:
            return [w["name"] for w in server.call("GET", "/workers").json["workers"] if w["state"]]

        wait_until(lambda: names() == ["w0", "w1"], "both workers have joined")
        with ThreadPoolExecutor(8) as threads:
            told = list(threads.map(server.chat, ["count: 100"] * 8))
            texts = {answer.json["choices"][0]["message"]["content"] for answer in told}
            assert len(texts) == 1
            later = [threads.submit(server.chat, "count: 200") for _ in range(8)]
            time.sleep(0.3)
            processes[0].kill()
            assert {f.result().json["usage"]["completion_tokens"] for f in later} == {201}
            wait_until(lambda: len(names()) == 1, "the worker is gone")
            last = threads.submit(server.chat, "count: 200")
            time.sleep(0.2)
            processes[1].terminate()
            assert (
                last.result().json["usage"]["completion_tokens"] == 201
            )  # and the end of the text
            assert processes[1].wait(GENEROUS_S) == 0
        wait_until(lambda: names() == [], "both have left")
        assert server.chat("hello").status == 503
