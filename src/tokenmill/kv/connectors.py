"""Chooses the connectors by which other engines reach an engine's KV, and the memory for it."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from uuid import uuid4

import torch

from tokenmill.core.kv import CUDA_IPC, NIXL, SHM, KVAddress, KVGeometry, KVWay, choose_connectors
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.kv.cuda_ipc import CudaIpcConnector
from tokenmill.kv.nixl_connector import NixlConnector
from tokenmill.kv.shared_memory import SharedMemoryConnector, SharedPages, host_identity
from tokenmill.kv.transfer import KVTransfer, OwnConnector
from tokenmill.sched.scheduler import Scheduler

CONNECTORS: dict[
    str, type[SharedMemoryConnector] | type[CudaIpcConnector] | type[NixlConnector]
] = {
    SHM: SharedMemoryConnector,
    CUDA_IPC: CudaIpcConnector,
    NIXL: NixlConnector,
}
_LAYOUTS = {"cpu": "keys [head, channel, token]", "cuda": "keys [head, token, channel]"}


@dataclass(frozen=True, slots=True)
class KVLink:
    """The connectors of an engine, chosen before its cache is allocated."""

    engine_id: str
    connectors: tuple[str, ...]  # the quickest first
    pages: SharedPages | None  # where the cache has to lie
    weights: str  # their digest, as peers must have it

    @classmethod
    def plan(cls, connector: str, device: str, weights: str) -> KVLink | None:
        """Choose the connectors; returns None if this engine's KV is not to move."""
        if connector == "none":
            return None
        names = choose_connectors(connector, on_gpu=device != "cpu")
        for name in names:
            kind = CONNECTORS[name]
            if device == "cpu" and not kind.reads_host:
                problem = f"{name} moves a GPU's memory alone; on cpu take shm or nixl"
                raise ModelLoadError(f"kv_connector {connector}: {problem}")
            if device != "cpu" and not kind.reads_gpus:
                problem = f"{name} moves host memory alone; on cuda take cuda-ipc or nixl"
                raise ModelLoadError(f"kv_connector {connector}: {problem}")
        engine_id = uuid4().hex[:12]
        shared = any(CONNECTORS[name].needs_pages for name in names)
        return cls(engine_id, names, SharedPages(engine_id) if shared else None, weights)

    def open(
        self,
        scheduler: Scheduler,
        kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
        spec: ModelSpec,
        dtype: str,
    ) -> KVTransfer:
        pool = scheduler.pool
        reached = self.reach(kv_cache, spec, dtype, pool.block_size, pool.num_blocks)
        return KVTransfer(scheduler, *reached)

    def reach(
        self,
        kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
        spec: ModelSpec,
        dtype: str,
        block_size: int,
        num_blocks: int,
    ) -> tuple[list[OwnConnector], KVAddress]:
        # Layers of different groups share tensors.
        tensors = list({id(tensor): tensor for layer in kv_cache for tensor in layer}.values())
        shape = geometry(spec, self.weights, tensors, dtype, block_size)
        return self.offer(tensors, shape, num_blocks)

    def offer(
        self, tensors: list[torch.Tensor], shape: KVGeometry, num_blocks: int
    ) -> tuple[list[OwnConnector], KVAddress]:
        """Connectors over tensors [blocks, ...], and how a peer reaches them."""
        connectors: list[OwnConnector] = [
            CONNECTORS[name].over(self.engine_id, tensors, self.pages) for name in self.connectors
        ]
        return connectors, KVAddress(
            engine_id=self.engine_id,
            host=host_identity(),
            geometry=shape,
            num_blocks=num_blocks,
            ways=tuple(KVWay(c.name, c.regions, c.endpoint) for c in connectors),
        )


def geometry(
    spec: ModelSpec, weights: str, tensors: list[torch.Tensor], dtype: str, block_size: int
) -> KVGeometry:
    """Return what the blocks hold, which must be equal in both engines."""
    shape = (spec.family, spec.vocab_size, spec.hidden_size, spec.num_heads, spec.rope)
    rest = (spec.qk_norm, spec.layer_windows, spec.window_rope)
    return KVGeometry(
        model=blake2b(repr((shape, rest)).encode(), digest_size=8).hexdigest(),
        weights=weights,
        dtype=dtype,
        layout=_LAYOUTS[tensors[0].device.type],
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        block_bytes=tuple(t.nbytes // t.shape[0] for t in tensors),
    )
