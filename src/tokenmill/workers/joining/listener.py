"""The server's side: it listens for workers, and gives those that have the token a slot."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable

from tokenmill import __version__
from tokenmill.core.config import PoolConfig
from tokenmill.core.types import TokenmillError
from tokenmill.workers.joining.protocol import (
    HANDSHAKE_S,
    LEAVE,
    MAX_HELLO,
    Admitted,
    Challenge,
    Hello,
    JoinError,
    Proofs,
    Refused,
    Terms,
    encode_terms,
    line_of,
    num_expected,
    read_line,
    read_token,
    split_address,
)
from tokenmill.workers.lifecycle import GRACE_S, Lifecycle
from tokenmill.workers.link import WorkerStartError

POLL_S, TELL_S = 0.02, 30.0  # between two looks at who has joined, and two lines about it
LEAVE_S = 30.0  # that requests have to finish at a worker that leaves
MAX_HANDSHAKES = 64

_log = logging.getLogger(__name__)


class JoinListener:
    """Workers that join have slots of the lifecycle, as those that are spawned."""

    def __init__(self, config: PoolConfig, lifecycle: Lifecycle) -> None:
        assert config.join_listen is not None
        self._config, self._lifecycle = config, lifecycle
        self._token = read_token(config.token_file)
        self._address = split_address(config.join_listen, "--join-listen")
        self._num_expected = 0 if config.workers else num_expected()
        self._num_strangers = 0
        self._stopping = False
        self._where = config.join_listen
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        host, port = self._address
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HELLO)
        except OSError as error:
            why = error.strerror or str(error)
            raise JoinError(f"cannot listen on --join-listen {self._where}: {why}") from None
        host, port = self._server.sockets[0].getsockname()[:2]
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _log.info("workers may join at %s", self._where)

    async def filled(self, num_ready: Callable[[], int]) -> None:
        limit_s, began_s, told_s = self._config.wait_s, time.monotonic(), -TELL_S
        while (num_joined := num_ready()) < self._num_expected:
            passed_s = time.monotonic() - began_s
            what = f"{num_joined} of {self._num_expected} workers have joined at {self._where}"
            if passed_s > limit_s:
                raise WorkerStartError(f"{what} within {limit_s:g} s (--wait-s)")
            if passed_s - told_s >= TELL_S:
                told_s = passed_s
                _log.info("%s: waiting up to %g s (--wait-s)", what, limit_s)
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        self._stopping = True
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Forget those that are there, which have been stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        who = f"a worker at {writer.get_extra_info('peername')[0]}"
        try:
            await self._admit(reader, writer, who)
        except (TokenmillError, OSError) as error:
            why = "it said nothing in time" if isinstance(error, TimeoutError) else str(error)
            _log.error("%s did not join: %s", who, why)
            writer.write(line_of(Refused(why)))
        except asyncio.CancelledError:
            pass  # the server ends
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, who: str
    ) -> None:
        """Have a slot for a worker until it ends, or asks to be let go."""
        proofs = await self._know(reader, writer)
        worker = _Joined(reader, writer)

        async def spawn(address: str) -> _Joined:
            plain, _, key = address.partition("#")
            config, facts = self._config, self._lifecycle.facts
            settings = config.join_settings | ({} if facts is None else {"dtype": facts.dtype})
            masked = proofs.mask(bytes.fromhex(key))
            terms = encode_terms(Terms(plain, masked, settings, config.join_model))
            worker.start(line_of(Admitted(terms, proofs.of_server(terms))))
            return worker

        slot = await self._lifecycle.join(spawn, worker.server_host)
        _log.info("%s joined as %s", who, slot.name)
        if await worker.asks_to_leave():
            await self._lifecycle.leave(slot.name, LEAVE_S, GRACE_S)
            _log.info("worker %s has left", slot.name)

    async def _know(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Proofs:
        """Go on with a worker that has the token and this version."""
        if self._num_strangers >= MAX_HANDSHAKES:
            raise JoinError("too many join at once; try again")
        self._num_strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                nonce = secrets.token_bytes(32)
                writer.write(line_of(Challenge(__version__, nonce)))
                hello = read_line(await reader.readline(), "it")
        except ValueError:
            raise JoinError("it speaks another protocol: its first line is too long") from None
        finally:
            self._num_strangers -= 1
        if self._stopping:
            raise JoinError("the server is shutting down")
        if not isinstance(hello, Hello):
            raise JoinError("it speaks another protocol")
        if hello.version != __version__:
            raise JoinError(
                f"the server runs tokenmill {__version__}, the worker {hello.version}: "
                "both must be the same version"
            )
        proofs = Proofs(self._token, nonce, hello.nonce)
        if not proofs.is_worker(hello):
            raise JoinError("the tokens differ: server and worker must have the same --token-file")
        return proofs


class _Joined:
    """A worker elsewhere, as its link sees it: it lives as long as its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._leaving, self._ended = asyncio.Event(), asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        # The address of this machine that the worker reaches, also where all are listened at.
        self.server_host = str(writer.get_extra_info("sockname")[0]).removeprefix("::ffff:")

    def start(self, admission: bytes) -> None:
        self._writer.write(admission)
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := await self._reader.read(1):
                if data == LEAVE:
                    self._leaving.set()
        self._ended.set()
        self._leaving.set()

    async def asks_to_leave(self) -> bool:
        """Wait until it asks to be let go; False where it has ended."""
        await self._leaving.wait()
        return not self._ended.is_set()

    async def wait(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        self._writer.close()
