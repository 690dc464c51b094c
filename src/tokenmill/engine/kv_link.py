"""How an engine's KV is reached by others: which connector, over which memory."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from uuid import uuid4

import torch

from tokenmill.core.kv import KVAddress, KVGeometry
from tokenmill.core.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.kv_nixl import NixlConnector
from tokenmill.engine.kv_shared import SharedMemoryConnector, SharedPages
from tokenmill.engine.kv_transfer import Connector, KVTransfer
from tokenmill.sched.scheduler import Scheduler

_LAYOUTS = {"cpu": "keys [head, channel, token]", "cuda": "keys [head, token, channel]"}


@dataclass(frozen=True, slots=True)
class KVLink:
    """What is decided before the cache is allocated."""

    engine_id: str
    connector: str
    pages: SharedPages | None  # where the cache has to lie

    @classmethod
    def plan(cls, connector: str, device: str) -> KVLink | None:
        """Choose the connector; None: this engine's KV stays here."""
        if connector == "none":
            return None
        if connector == "auto":
            connector = "nixl" if find_spec("nixl") else "shm"
        if connector == "shm" and device != "cpu":
            raise ModelLoadError(
                "kv_connector shm moves host memory alone: on cuda install nixl and use it"
            )
        engine_id = uuid4().hex[:12]
        pages = SharedPages(engine_id) if connector == "shm" else None
        return cls(engine_id, connector, pages)

    def connect(self, tensors: list[torch.Tensor]) -> Connector:
        """The connector over the tensors of a cache."""
        if self.pages is not None:
            return SharedMemoryConnector(self.pages, tensors)
        return NixlConnector(self.engine_id, tensors)

    def open(
        self,
        scheduler: Scheduler,
        kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
        spec: ModelSpec,
        dtype: str,
    ) -> KVTransfer:
        """Make the cache reachable."""
        tensors = [tensor for layer in kv_cache for tensor in layer]
        connector, pool = self.connect(tensors), scheduler.pool
        shape = geometry(spec, tensors, dtype, pool.block_size)
        return KVTransfer(scheduler, connector, self.address(connector, shape, pool.num_blocks))

    def address(self, connector: Connector, shape: KVGeometry, num_blocks: int) -> KVAddress:
        """What a peer has to know."""
        return KVAddress(
            engine_id=self.engine_id,
            connector=connector.name,
            geometry=shape,
            num_blocks=num_blocks,
            regions=connector.regions,
            endpoint=connector.endpoint,
        )


def geometry(
    spec: ModelSpec, tensors: list[torch.Tensor], dtype: str, block_size: int
) -> KVGeometry:
    """What the blocks of another engine must look like, too."""
    shape = (spec.family, spec.vocab_size, spec.hidden_size, spec.num_heads, spec.rope)
    rest = (spec.qk_norm, spec.layer_windows)
    return KVGeometry(
        model=blake2b(repr((shape, rest)).encode(), digest_size=8).hexdigest(),
        dtype=dtype,
        layout=_LAYOUTS[tensors[0].device.type],
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=block_size,
        block_bytes=tuple(t.nbytes // t.shape[0] for t in tensors),
    )
