"""Moves KV blocks by NIXL; UCX chooses the transport, from shared memory to RDMA."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.core.kv import NIXL, KVAddress, KVWay, nixl_installed
from tokenmill.core.types import ModelLoadError
from tokenmill.kv.shared_memory import SharedPages
from tokenmill.kv.transfer import Run, TransferError

_POLL_S = 0.0002
Descriptor = tuple[int, int, int]  # address, bytes, device


@dataclass(slots=True)
class _Peer:
    name: str  # NIXL's own
    address: KVAddress
    regions: tuple[int, ...]
    memory: str  # DRAM or VRAM
    device: int
    gone: bool = False


class NixlConnector:
    """Reads the blocks of engines anywhere; one thread makes all calls of the agent."""

    name, reads_gpus, reads_host, needs_pages = NIXL, True, True, False

    @classmethod
    def over(
        cls, engine_id: str, tensors: list[torch.Tensor], pages: SharedPages | None
    ) -> NixlConnector:
        return cls(engine_id, tensors)

    @staticmethod
    def installed() -> bool:
        return nixl_installed()

    def __init__(self, engine_id: str, tensors: Iterable[torch.Tensor]) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ModelLoadError(
                f"kv_connector nixl needs the package nixl (pip install nixl): {error}"
            ) from None
        logging.getLogger("nixl").setLevel(logging.WARNING)
        tensors = list(tensors)
        self._memory = "VRAM" if tensors[0].is_cuda else "DRAM"
        self._device = tensors[0].get_device() if tensors[0].is_cuda else 0
        self.regions = tuple(tensor.data_ptr() for tensor in tensors)
        self._agent: Any = nixl_agent(engine_id, nixl_agent_config(backends=["UCX"]))
        spans = [(t.data_ptr(), t.nbytes, self._device, "") for t in tensors]
        self._registered = self._agent.register_memory(spans, self._memory)
        where = f"{self._memory}:{self._device}:".encode()
        self.endpoint = where + self._agent.get_agent_metadata()
        self._peers: dict[str, _Peer] = {}
        self._thread = ThreadPoolExecutor(1, "kv-nixl")

    def connect(self, peer: KVAddress, way: KVWay) -> None:
        """Load a peer's metadata; the connection itself is made by the first read."""
        memory, device, metadata = way.endpoint.split(b":", 2)
        try:
            name = self._thread.submit(self._agent.add_remote_agent, metadata).result()
        except Exception as error:
            raise TransferError(f"NIXL does not take engine {peer.engine_id}: {error}") from error
        self._peers[peer.engine_id] = _Peer(
            _text(name), peer, way.regions, memory.decode(), int(device)
        )

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; reads from it that are under way fail."""
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            peer.gone = True
            self._thread.submit(self._agent.remove_remote_agent, peer.name)

    def read(self, engine_id: str, runs: list[Run]) -> Future[None]:
        return self._thread.submit(self._read, self._peers[engine_id], runs)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.gone = True
        self._thread.shutdown()
        self._agent.deregister_memory(self._registered)

    def _read(self, peer: _Peer, runs: list[Run]) -> None:
        agent, sizes = self._agent, peer.address.geometry.block_bytes
        ours: list[Descriptor] = []
        theirs: list[Descriptor] = []
        for own, other, size in zip(self.regions, peer.regions, sizes, strict=True):
            theirs += [(other + i * size, n * size, peer.device) for i, _, n in runs]
            ours += [(own + i * size, n * size, self._device) for _, i, n in runs]
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(ours, self._memory),
                agent.get_xfer_descs(theirs, peer.memory),
                peer.name,
            )
            state = agent.transfer(handle)
            while state == "PROC" and not peer.gone:
                time.sleep(_POLL_S)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        except Exception as error:
            raise TransferError(f"NIXL: {error}") from error
        if state != "DONE":
            raise TransferError(f"NIXL ended a read from {peer.address.engine_id} with {state}")


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
