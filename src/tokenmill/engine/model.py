"""What the runner asks of a model, and the KV cache it gives it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tokenmill.core.kv_groups import KVGroups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.sampling import argmax
from tokenmill.kv.shared_memory import SharedPages
from tokenmill.layers.images import ImageEncoder, StepRows
from tokenmill.parallel import Layout, Ranks

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
KV_TYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


class Model(Protocol):
    """What a model family offers the runner."""

    spec: ModelSpec
    visual: ImageEncoder | None  # None: it takes no images, or another rank encodes them
    layout: Layout  # which part of the model this rank has
    norm: torch.Tensor  # the final one, in the stream's type
    read_layers: tuple[int, ...]  # whose incoming states drafts are made from, if not the last ones

    @property
    def num_bytes(self) -> int: ...
    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVCache,
        batch: AttentionBatch,
        images: StepRows | None = None,
    ) -> torch.Tensor: ...
    def draft_states(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def assist(self) -> None: ...


def likeliest(logits: torch.Tensor, ranks: Ranks, least: int = -1) -> torch.Tensor:
    """The largest logit's token of each row on all ranks, int32 [rows]; rank 0 has the logits.

    `least` stands for the token where logits are not finite. While ranks do not meet, it is 0.
    """
    if ranks.rank:
        best = torch.zeros(logits.shape[0], dtype=torch.int32, device=logits.device)
    else:
        best = argmax(logits, least=least)
    return ranks.broadcast(best)


def allocate_kv_cache(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    device: str = "cpu",
    dtype: str = "fp32",
    pages: SharedPages | None = None,
    groups: KVGroups | None = None,
) -> KVCache:
    """Zeroed blocks per layer: a masked key weighs nothing, but must be a number.

    Layers of different groups share what they have in the same place of a page.

    On CPU numpy asks the system for zeroed pages, which take no memory before their first use;
    `pages` has such that other processes can read.
    """
    key_dim, value_dim = spec.cache_dims
    on_cpu = torch.device(device).type == "cpu"
    keys = (key_dim, block_size) if on_cpu else (block_size, key_dim)

    def zeros(block: tuple[int, int]) -> torch.Tensor:
        shape = (num_blocks, spec.num_kv_heads, *block)
        if on_cpu:
            kind = np.float16 if dtype == "fp16" else np.float32
            return torch.from_numpy(pages.zeros(shape, kind) if pages else np.zeros(shape, kind))
        return torch.zeros(shape, dtype=KV_TYPES[dtype], device=device)

    count = spec.num_layers if groups is None else groups.page_layers
    layers = [(zeros(keys), zeros((block_size, value_dim))) for _ in range(count)]
    return layers if groups is None else [layers[place] for place in groups.places]
