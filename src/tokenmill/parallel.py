"""Process groups and collectives; a group of one rank is the identity.

Only `connect` and `Ranks` know torch.distributed: NCCL between GPUs, gloo between CPUs, and gloo
by way of host memory between ranks that share a GPU: NCCL takes one rank for each.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist

from tokenmill.core.types import RanksLostError

RANK_GONE = "a rank is gone: it closed its connection"
TIMEOUT_S = 300.0  # of one collective: a rank that does not come is taken for dead
Backend = Literal["gloo", "nccl"]
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # the request for an interface's address
_DIST: Any = dist  # the stores are there, but not in its types


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows on their way between ranks."""

    rows: torch.Tensor  # those that this rank receives, by sender
    work: dist.Work | None = None
    device: torch.device | None = None  # where they are wanted, if they arrive elsewhere

    def wait(self) -> torch.Tensor:
        """The received rows, once they are here."""
        if self.work is not None:
            self.work.wait()
        return self.rows if self.device is None else self.rows.to(self.device)


Together = Callable[..., object]  # what ranks do together to tensors, the last one in place


class Apart:
    """Takes what ranks do together while a step is captured, and does it between two graphs."""

    __slots__ = ("between",)

    def __init__(self) -> None:
        self.between: Together | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that run one model together, as one of them sees it."""

    rank: int = 0
    size: int = 1
    staged: bool = False  # tensors of a GPU travel by way of host memory
    apart: Apart = field(default_factory=Apart, compare=False)

    def together(self, do: Together, *tensors: torch.Tensor) -> torch.Tensor:
        """Have all ranks do something to the last tensor; no CUDA graph may have it inside."""
        if self.apart.between is None:
            do(*tensors)
        else:
            self.apart.between(do, *tensors)
        return tensors[-1]

    @contextmanager
    def in_pieces(self, between: Together) -> Iterator[None]:
        """Within it `between` takes what is to be done together, and its tensors."""
        self.apart.between = between
        try:
            yield
        finally:
            self.apart.between = None

    def shares(self, count: int) -> list[int]:
        """How many of `count` rows each rank takes, in the order of the ranks."""
        bounds = [count * rank // self.size for rank in range(self.size + 1)]
        return [end - start for start, end in pairwise(bounds)]

    def own(self, count: int) -> slice:
        """This rank's share of `count` rows."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else self.together(self._add_up, x)

    def _add_up(self, x: torch.Tensor) -> None:
        sent = self._sent(x)
        dist.all_reduce(sent)
        self._arrive(x, sent)

    def add_in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The same, pair by pair in the order of 2, 4, 8, ... ranks, whoever computes it."""
        return x if self.size == 1 else self.together(self._add_in_order, x)

    def _add_in_order(self, x: torch.Tensor) -> None:
        parts = list(self.gather(x))
        while len(parts) > 1:
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
        x.copy_(parts[0])

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, [ranks, ...]; all have the same shape."""
        if self.size == 1:
            return x[None]
        sent = self._sent(x.contiguous())
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(parts, sent)
        return torch.stack(parts).to(x.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in place."""
        return x if self.size == 1 else self.together(self._broadcast, x)

    def _broadcast(self, x: torch.Tensor) -> None:
        sent = self._sent(x)
        dist.broadcast(sent, 0)
        self._arrive(x, sent)

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank; `device` is where their tensors are."""
        if self.size == 1:
            return flag
        return bool(self.gather(torch.tensor([flag], dtype=torch.int32, device=device)).any())

    def exchange(self, rows: torch.Tensor, sends: list[int], receives: list[int]) -> Exchange:
        """Start to send the first sends[0] rows to rank 0, the next sends[1] to rank 1, ..."""
        if self.size == 1:
            return Exchange(rows)
        sent = self._sent(rows.contiguous())
        out = sent.new_empty(sum(receives), *rows.shape[1:])
        work = dist.all_to_all_single(out, sent, receives, sends, async_op=True)
        return Exchange(out, work, rows.device if self.staged else None)

    def join(self, x: torch.Tensor) -> None:
        """Fill x[count, ...] with the share that each rank has in its own."""
        if self.size > 1:
            part, shares = x[self.own(x.shape[0])], self.shares(x.shape[0])
            copies = part.repeat(self.size, *(1,) * (x.dim() - 1))
            x.copy_(self.exchange(copies, [part.shape[0]] * self.size, shares).wait())

    def side_by_side(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """On rank 0 [rows, width] from the columns that each rank has; elsewhere its own ones."""
        if self.size == 1:
            return part
        whole = part if self.rank else part.new_empty(part.shape[0], width)
        return self.together(self._put_side_by_side, part.contiguous(), whole)

    def _put_side_by_side(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        rows, shares = whole.shape[0], self.shares(whole.shape[1])
        sends = [part.numel()] + [0] * (self.size - 1)
        receives = [0 if self.rank else rows * share for share in shares]
        flat = self.exchange(part.reshape(-1), sends, receives).wait()
        if not self.rank:
            parts = zip(flat.split(receives), shares, strict=True)
            columns = [piece.view(rows, share) for piece, share in parts]
            torch.cat(columns, dim=1, out=whole)

    def move(
        self,
        sends: Iterable[tuple[int, torch.Tensor]],
        receives: Iterable[tuple[int, torch.Tensor]],
    ) -> None:
        """Send tensors to ranks and fill others from ranks; both sides list them in one order."""
        arriving = [(rank, as_bytes(x)) for rank, x in receives]
        arrived = [self._sent(x) for _, x in arriving]
        ops = [dist.P2POp(dist.isend, self._sent(as_bytes(x)), rank) for rank, x in sends]
        pairs = zip(arriving, arrived, strict=True)
        ops += [dist.P2POp(dist.irecv, host, rank) for (rank, _), host in pairs]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for (_, x), host in zip(arriving, arrived, strict=True):
            self._arrive(x, host)

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        return to_host(x) if self.staged else x

    def _arrive(self, x: torch.Tensor, sent: torch.Tensor) -> None:
        if self.staged:
            x.copy_(sent)


ONE = Ranks()


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts of a model a rank holds, and whose tokens it computes."""

    ranks: Ranks = ONE
    split_heads: bool = False  # heads, dense MLPs and vocabulary are divided; else all have them
    own_tokens: bool = False  # attention data parallelism: each rank runs requests of its own
    num_slots: int = 0  # places for experts over all ranks; 0: one for each expert

    @property
    def tensor_ranks(self) -> Ranks:
        """Those that share a product and add up its parts."""
        return self.ranks if self.split_heads else ONE

    @property
    def token_ranks(self) -> Ranks:
        """Those that compute the same tokens, which rank 0 samples."""
        return ONE if self.own_tokens else self.ranks

    @property
    def samples(self) -> bool:
        """True where this rank turns hidden states into tokens."""
        return self.own_tokens or self.ranks.rank == 0


ALONE = Layout()


@contextmanager
def all_or_none() -> Iterator[None]:
    """Turn an error in what several ranks do together into RanksLostError: the others wait."""
    try:
        yield
    except RanksLostError:
        raise
    except Exception as error:
        if "by peer" in str(error):  # gloo's "Connection closed by peer", or reset
            raise RanksLostError(RANK_GONE) from error
        message = f"a step of several ranks failed: {type(error).__name__}: {error}"
        raise RanksLostError(message) from error


def to_host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: what travels whatever the type."""
    return x.view(-1).view(torch.uint8)


def open_store(host: str, size: int, port: int | None = None) -> Any:
    """Where ranks of several machines meet: made here, or the one at a port of `host`.

    It listens at `host` alone; by itself it would take every interface.
    """
    listener, fd = port is None, None
    if port is None:
        made = socket.create_server((host, 0), backlog=size)
        port, fd = made.getsockname()[1], made.detach()
    return _DIST.TCPStore(
        host, port, size, is_master=listener, wait_for_workers=False, master_listen_fd=fd
    )


def own_address(host: str) -> str:
    """The address of this machine from which it reaches `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, if any."""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if found[20:24] == wanted:
                    return name
    return None


@contextmanager
def _listening_at(address: str) -> Iterator[None]:
    """Let gloo listen at the interface with this address, unless the operator has named one."""
    name, variable = interface_of(address), "GLOO_SOCKET_IFNAME"
    if name is None or variable in os.environ:
        yield
        return
    os.environ[variable] = name
    try:
        yield
    finally:
        del os.environ[variable]


def file_store(path: str, size: int) -> Any:
    return _DIST.FileStore(path, size)


def connect(
    rank: int,
    size: int,
    store: Any,
    backend: Backend,
    on_gpu: bool = False,
    address: str = LOOPBACK,
) -> Ranks:
    """Join the group that meets at `store`; the process can be in one at a time.

    Ranks of other machines reach this one at `address`.
    """
    timeout = timedelta(seconds=TIMEOUT_S)
    with _listening_at(address):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, staged=on_gpu and backend == "gloo")


def disconnect() -> None:
    if connected():
        dist.destroy_process_group()


def connected() -> bool:
    return bool(dist.is_initialized())
