"""The other ranks of an engine, as rank 0 sees them: started, joined, told what to do, ended.

Rank 0 tells what comes next over a connection to each rank, which waits there as long as it takes;
tensors go by collectives, which have a timeout. A rank ends when its connection does. Ranks are
child processes, unless TOKENMILL_RANK_ADDRESS says where they will call: then somebody else starts
them, with TOKENMILL_RANK_KEY as the key to it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenmill.core.types import ModelLoadError, RanksLostError
from tokenmill.engine.ranks.rank_messages import (
    GroupPlace,
    Kind,
    LoadFailed,
    NumBlocks,
    RankCalls,
    RankMessage,
    expect,
    receive,
    send,
)
from tokenmill.kv.shared_memory import host_identity
from tokenmill.parallel import (
    LOOPBACK,
    Ranks,
    connect,
    connected,
    disconnect,
    file_store,
    open_store,
    own_address,
)

ADDRESS_VARIABLE, KEY_VARIABLE = "TOKENMILL_RANK_ADDRESS", "TOKENMILL_RANK_KEY"
PER_GPU_VARIABLE = "TOKENMILL_RANKS_PER_GPU"  # of ranks that others have placed
LANGUAGE_RANK = "tokenmill.engine.ranks.rank_process"
START_TIMEOUT_S = 300.0  # for all ranks to call
END_TIMEOUT_S = 5.0  # for a child to end by itself
_log = logging.getLogger(__name__)


class RankGroup:
    """Rank 0's connections to the others, in the order of their ranks from 1 on."""

    def __init__(self, size: int, device: str, program: str = LANGUAGE_RANK) -> None:
        """`program` is the module that the other ranks run."""
        self.size, self.device, self._program = size, device, program
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: list[Connection] = []
        if connected():
            raise ModelLoadError(
                "this process already has an engine with ranks: close() it before you build another"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="tokenmill-ranks-")
        placed = os.environ.get(ADDRESS_VARIABLE)
        self._staged = device == "cuda" and ranks_per_gpu(size) > 1
        if self._staged:
            _log.warning(
                "%d ranks share %d GPU(s): NCCL takes one rank for each, so they exchange by gloo "
                "through host memory, which is slow",
                size, torch.cuda.device_count(),
            )  # fmt: skip
        try:
            with _listen(placed, Path(self._folder.name)) as (listener, key):
                if placed is None:
                    self._start_children(str(listener.address), key)
                self._accept(listener)
            self.ranks = self._join(placed)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def tell(self, message: RankMessage) -> None:
        self._send([(message, self._links)])

    def tell_each(self, messages: Sequence[RankMessage]) -> None:
        pairs = zip(self._links, messages, strict=True)
        self._send([(message, [link]) for link, message in pairs])

    def _send(self, messages: list[tuple[RankMessage, list[Connection]]]) -> None:
        try:
            for message, links in messages:
                send(message, *links)
        except OSError as error:
            raise RanksLostError(f"a rank is gone: {error}") from error

    def hear(self, kind: type[Kind]) -> list[Kind]:
        """The next message of each rank, of this type; raises what a rank could not do."""
        try:
            messages = [receive(link) for link in self._links]
        except (EOFError, OSError) as error:
            raise RanksLostError(f"a rank is gone: {type(error).__name__}") from error
        heard: list[Kind] = []
        for rank, message in enumerate(messages, 1):
            if isinstance(message, LoadFailed):
                raise ModelLoadError(f"rank {rank}: {message.error}")
            heard.append(expect(message, kind))
        return heard

    def take(self, wait: bool) -> list[RankMessage]:
        """What ranks have said without being waited for, or the next that one of them says."""
        try:
            ready = connection.wait(self._links, None if wait else 0)
            return [receive(link) for link in self._links if link in ready]
        except (EOFError, OSError) as error:
            raise RanksLostError(f"a rank is gone: {type(error).__name__}") from error

    def agree(self, num_blocks: int) -> int:
        """The least that any rank has room for; all have loaded their part then."""
        least = min(num_blocks, *(blocks.count for blocks in self.hear(NumBlocks)))
        self.forget_place()
        self.tell(NumBlocks(least))
        return least

    def forget_place(self) -> None:
        """Remove where ranks met, now that all have: a sudden death leaves nothing behind."""
        self._folder.cleanup()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do; whatever breaks it off, Ctrl-C too, ends the others."""
        try:
            self.check()
            yield
        except RanksLostError as error:
            code = min(self.close(), default=0)  # of a signal, if any; who ended with rank 0 has 0
            raise (RanksLostError(_ended(code)) if code else error) from error.__cause__
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        if not self._links:
            raise RanksLostError("the other ranks have been ended")
        self._check_children()

    def _check_children(self) -> None:
        for child in self._children:
            if child.poll() is not None:
                raise RanksLostError(_ended(child.returncode))

    def close(self) -> list[int]:
        """End the other ranks; exit codes of those that did by themselves. Safe to call twice."""
        atexit.unregister(self.close)
        for link in self._links:
            link.close()
        self._links = []
        disconnect()
        codes = []
        for child in self._children:
            try:
                codes.append(child.wait(END_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children = []
        self._folder.cleanup()
        return codes

    def _start_children(self, address: str, key: bytes) -> None:
        # -P: a folder named tokenmill in the working directory is not the package.
        command = [sys.executable, "-P", "-m", self._program, address]
        env = os.environ | {KEY_VARIABLE: key.hex()}
        for _ in range(self.size - 1):
            child = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for rank 0
            )
            self._children.append(child)

    def _accept(self, listener: Listener) -> None:
        """Wait for every rank's call, as long as all children live."""
        calls: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        caller = threading.Thread(target=_take_calls, args=(listener, calls), daemon=True)
        caller.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self._links) < self.size - 1:
            self._check_children()
            if time.monotonic() > deadline:
                raise RanksLostError(
                    f"{len(self._links) + 1} of {self.size} ranks came within {START_TIMEOUT_S:g} s"
                )
            with contextlib.suppress(queue.Empty):
                self._links.append(calls.get(timeout=0.2))
        machines = [message.identity for message in self.hear(RankCalls)]
        self._links = [self._links[i] for i in side_by_side(host_identity(), machines)]

    def _join(self, placed: str | None) -> Ranks:
        by_nccl = self.device == "cuda" and not self._staged
        place = GroupPlace(0, self.size, "nccl" if by_nccl else "gloo", self.device)
        store = None
        if placed is None:
            place = msgspec.structs.replace(place, file=str(Path(self._folder.name) / "store"))
        else:
            host = placed.rpartition(":")[0]
            store = open_store(host, self.size)
            place = msgspec.structs.replace(place, host=host, port=store.port)
        self.tell_each([msgspec.structs.replace(place, rank=rank) for rank in range(1, self.size)])
        return join(place, store)


def ranks_per_gpu(size: int) -> int:
    """How many ranks share a GPU, of this machine or where others have placed them."""
    if ADDRESS_VARIABLE in os.environ:
        return int(os.environ.get(PER_GPU_VARIABLE, 1))
    return -(-size // max(1, torch.cuda.device_count()))


def check_gpus(size: int, share: bool) -> None:
    """Raise ModelLoadError where ranks would share a GPU and may not."""
    if ranks_per_gpu(size) > 1 and not share:
        raise ModelLoadError(
            f"{size} ranks need {size} GPUs, and this process sees {torch.cuda.device_count()}: "
            "give fewer ranks, or --share-gpus to try the layout, which is slow"
        )


def _ended(code: int) -> str:
    return f"a rank ended with exit code {code}"


def side_by_side(own: str, machines: list[str]) -> list[int]:
    """The order in which those of a machine are neighbours, rank 0's own machine first."""
    return sorted(range(len(machines)), key=lambda i: (machines[i] != own, machines[i]))


def join(place: GroupPlace, store: Any = None) -> Ranks:
    """Join the group that rank 0 has described."""
    if place.device == "cuda":
        torch.cuda.set_device(place.rank % torch.cuda.device_count())
    if place.file is not None:
        store = file_store(place.file, place.size)
    elif store is None:
        store = open_store(place.host, place.size, place.port)
    address = LOOPBACK if place.file is not None else own_address(place.host)
    if address.startswith("127."):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # read at the first collective
    on_gpu = place.device == "cuda"
    return connect(place.rank, place.size, store, place.backend, on_gpu, address)


def call(address: str) -> Connection:
    """A rank's connection to rank 0, which hears where the rank runs."""
    key = bytes.fromhex(os.environ.pop(KEY_VARIABLE, ""))
    host, _, port = address.rpartition(":")
    where, parent = (host, int(port)) if host else address, os.getppid()
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            link = Client(where, authkey=key)
            break
        except (ConnectionRefusedError, FileNotFoundError):
            # A parent that is rank 0 listened before it started this process.
            if not host or os.getppid() != parent:
                _forget(address)
                raise SystemExit(1) from None
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)  # rank 0 is not there yet
    send(RankCalls(host_identity()), link)
    return link


def _forget(address: str) -> None:
    """Remove the folder of a rank 0 of this machine: it may have been killed."""
    if ":" not in address:
        shutil.rmtree(Path(address).parent, ignore_errors=True)


class Inbox:
    """What rank 0 says, in order; the process ends as soon as rank 0 has."""

    def __init__(self, connection: Connection, address: str) -> None:
        """`address` is where rank 0 was called."""
        self._connection, self._address = connection, address
        self._messages: queue.SimpleQueue[RankMessage | RanksLostError] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                self._messages.put(receive(self._connection))
            except (EOFError, OSError):
                _forget(self._address)
                os._exit(0)  # be it in the middle of a collective that will never end
            except RanksLostError as error:
                self._messages.put(error)

    def next(self) -> RankMessage:
        """The next message; raises what it was instead of one."""
        message = self._messages.get()
        if isinstance(message, RanksLostError):
            raise message
        return message

    def next_of(self, kind: type[Kind]) -> Kind:
        """The next message, which must be of this type."""
        return expect(self.next(), kind)


@contextlib.contextmanager
def _listen(placed: str | None, folder: Path) -> Iterator[tuple[Listener, bytes]]:
    if placed is None:
        key = secrets.token_bytes(32)
        with Listener(str(folder / "calls"), authkey=key) as listener:
            yield listener, key
        return
    host, _, port = placed.rpartition(":")
    key = bytes.fromhex(os.environ[KEY_VARIABLE])
    with Listener((host, int(port)), authkey=key) as listener:
        yield listener, key


def _take_calls(listener: Listener, calls: queue.SimpleQueue[Connection]) -> None:
    """Pass on who calls with the right key; ends when the listener is closed."""
    while True:
        try:
            calls.put(listener.accept())
        except OSError:
            return
        except Exception:  # the wrong key
            continue
