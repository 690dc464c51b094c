"""Descriptions of KV that moves: its layout, address and ready blocks, and tiers that keep it."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

from tokenmill.core.flags import Kind, parse_size

LEASE_S = 30.0  # how long computed blocks are held for another engine, unless told otherwise
DEVICE, HOST, DISK = "device", "host", "disk"  # where blocks lie: `--kv-offloading`
SHM, CUDA_IPC, NIXL = "shm", "cuda-ipc", "nixl"
ONE_HOST = (SHM, CUDA_IPC)  # connectors that map memory; NIXL reaches all hosts
PREFILLED = "prefilled"  # stop_reason of a prefill whose blocks wait for the engine that decodes


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What an engine's KV blocks hold; two engines exchange them only if all of it is equal."""

    model: str  # digest of the architecture
    weights: str  # digest of the weights
    dtype: str
    layout: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_bytes: tuple[int, ...]  # of a block in each region


_NAMES = {
    "model": "model architecture",
    "weights": "weights",
    "dtype": "KV dtype",
    "layout": "KV layout",
    "num_layers": "number of layers",
    "num_kv_heads": "number of KV heads",
    "head_dim": "head_dim",
    "block_size": "block size",
    "block_bytes": "bytes of a block",
}


@dataclass(frozen=True, slots=True)
class KVWay:
    connector: str
    regions: tuple[int, ...]  # where keys and values of each layer begin
    endpoint: bytes  # the connector's own


@dataclass(frozen=True, slots=True)
class KVAddress:
    """How another engine reaches this engine's KV blocks."""

    engine_id: str
    host: str  # equal where one process can map the other's memory
    geometry: KVGeometry
    num_blocks: int
    ways: tuple[KVWay, ...]  # the quickest first
    others: tuple[KVAddress, ...] = ()  # where further ranks have their parts of the same blocks
    ranks: tuple[KVAddress, ...] = ()  # further ranks, with blocks and requests of their own

    @property
    def block_bytes(self) -> int:
        return sum(self.geometry.block_bytes) * (1 + len(self.others))


@dataclass(frozen=True, slots=True)
class KVNotice:
    """Blocks of a prompt that are computed and held; the last one brings the first token."""

    request_id: str
    first: int  # index of block_ids[0] in the sequence
    block_ids: list[int]  # in the engine that computed them
    token_id: int | None = None
    hold_s: float = LEASE_S  # how long they are held once the prompt is computed
    engine_id: str = ""  # of the rank that holds them, where ranks have blocks of their own
    # With the token: blocks of sliding layers that it sees, one of each group in turn.
    window_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class KVTransferEvents:
    """What the front has to hear of moving KV."""

    notices: list[KVNotice]  # to pass on to the engine that decodes
    received: list[str]  # requests whose KV is here: their lease can be released
    expired: list[str]  # leases that ended before anyone released them

    def __bool__(self) -> bool:
        return bool(self.notices or self.received or self.expired)


def nixl_installed() -> bool:
    return find_spec(NIXL) is not None


def choose_connectors(asked: str, on_gpu: bool, one_host: bool = False) -> tuple[str, ...]:
    """The connectors that an engine opens, the quickest first; this alone knows what `auto` means.

    shm serves caches in the memory of one host, cuda-ipc those on its GPUs, and nixl, where it is
    installed, all others. With `one_host` all engines are known to run there: they need no nixl,
    whose thread polls all the time.
    """
    if asked != "auto":
        return () if asked == "none" else (asked,)
    near = CUDA_IPC if on_gpu else SHM
    return (near, NIXL) if nixl_installed() and not one_host else (near,)


def common_ways(source: KVAddress, target: KVAddress) -> list[KVWay]:
    """The ways that both have, the quickest first; memory is mapped on one host alone."""
    ours = {way.connector for way in target.ways}
    if source.host != target.host:
        ours -= {*ONE_HOST}
    return [way for way in source.ways if way.connector in ours]


def mismatch(source: KVAddress, target: KVAddress) -> str | None:
    """Why `target` cannot take KV from `source`: one sentence, or None."""
    if not common_ways(source, target):
        theirs, ours = (" or ".join(w.connector for w in a.ways) for a in (source, target))
        reason = f"the prefill engine moves KV by {theirs}, the decode engine by {ours}"
        near = " and ".join(w.connector for w in source.ways if w.connector in ONE_HOST)
        return f"{reason}: {near} needs one host" if source.host != target.host else reason
    if len(source.others) != len(target.others):
        from_ranks, to_ranks = (1 + len(address.others) for address in (source, target))
        return f"ranks of --tp: the prefill engine has {from_ranks}, the decode engine {to_ranks}"
    for part, name in _NAMES.items():
        theirs, ours = getattr(source.geometry, part), getattr(target.geometry, part)
        if theirs != ours:
            if part == "block_bytes":  # as with other ranks, or drafts on one side alone
                theirs, ours = (f"{sum(sizes)} in {len(sizes)} tensors" for sizes in (theirs, ours))
            return f"{name}: the prefill engine has {theirs}, the decode engine {ours}"
    return None


class KVExchange(Protocol):
    """What a worker drives beside an Engine that moves KV."""

    @property
    def address(self) -> KVAddress: ...

    def connect(self, peer: KVAddress) -> str | None:
        """Be ready to read from a peer; returns why not."""

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; requests that wait for its KV end in ERROR."""

    def notice(self, notice: KVNotice) -> None:
        """Blocks of a request that waits here are ready to be read."""

    def release(self, request_id: str) -> None:
        """End a lease; unknown ids are ignored."""

    def take_events(self) -> KVTransferEvents:
        """What happened since the last call."""

    def wait_ms(self) -> int | None:
        """How long a worker without other work may sleep; None: until a message comes."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of host memory, and a folder with the bytes that it may take."""

    host_bytes: int = 0
    folder: str | None = None
    disk_bytes: int = 0


def parse_tiers(text: str) -> TierSizes:
    """Read "host=8GiB,disk=/var/kv:100GiB", or "8GiB" of host memory; raises ValueError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        name, value = (name, value) if equals else (HOST, name)
        if name not in (HOST, DISK) or name in found:
            raise ValueError(text)
        found[name] = value
    folder, _, size = found.get(DISK, "").rpartition(":")
    if DISK in found and not folder:
        raise ValueError(text)
    return TierSizes(
        parse_size(found[HOST]) if HOST in found else 0,
        folder or None,
        parse_size(size) if folder else 0,
    )


def _read(value: Any) -> str:
    text = str(value)
    parse_tiers(text)
    return text


OFFLOADING = Kind(
    _read,
    "host=SIZE, disk=FOLDER:SIZE or both with a comma, such as host=8GiB,disk=/var/kv:100GiB",
    "TIERS",
)
