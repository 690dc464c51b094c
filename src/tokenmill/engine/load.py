"""What a rank holds of a model: weights, what drafts, and a KV cache in the memory that is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenmill.core.config import NGRAM, Setup
from tokenmill.core.kv import parse_tiers
from tokenmill.core.kv_groups import KVGroups, plan_groups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.engine.choices import set_mode, set_num_threads
from tokenmill.engine.drafts.eagle3 import Eagle3Files
from tokenmill.engine.drafts.open_drafts import DraftFiles, load_draft, open_draft
from tokenmill.engine.drafts.proposer import Drafter
from tokenmill.engine.memory import check_weights_fit, num_kv_blocks, reserve_bytes
from tokenmill.engine.model import KVCache, allocate_kv_cache
from tokenmill.engine.ranks.shared_kv import GroupLink
from tokenmill.kernels import prepare_triton
from tokenmill.kv.connectors import KVLink
from tokenmill.kv.tiers.page_copies import staged_bytes
from tokenmill.layers.linear import ComputeType
from tokenmill.models import family_of
from tokenmill.models.checkpoints.shards import plan_layout, wanted
from tokenmill.models.checkpoints.weights import Checkpoint, open_checkpoint
from tokenmill.models.checkpoints.weights_digest import weights_digest
from tokenmill.models.decoder import Decoder
from tokenmill.models.names import mtp_spec
from tokenmill.parallel import Layout, Ranks

Progress = Callable[[int, int], None]
OnPhase = Callable[[str], None]  # is called with the name of each phase of the start at its end


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """What a rank holds of a model, and its KV cache."""

    checkpoint: Checkpoint
    network: Decoder
    mtp: Drafter | None
    cached: ModelSpec  # whose KV a block holds: the network's as this rank has it, and the module's
    kv_cache: KVCache
    num_blocks: int
    groups: KVGroups
    kv_tokens: int  # of one request that the KV cache holds
    max_model_len: int  # what is asked for, or what the KV cache holds if that is less
    link: KVLink | GroupLink | None
    weights: str  # their digest, where KV moves or is kept


def load_part(
    setup: Setup,
    ranks: Ranks,
    agree: Callable[[int], int],
    progress: Progress | None = None,
    on_phase: OnPhase = lambda name: None,
) -> LoadedPart:
    """Load what this rank holds; `agree` says how many blocks of KV all ranks have room for."""
    model, cache, scheduler = setup.model, setup.cache, setup.scheduler
    set_mode(setup.execution)
    set_num_threads(model.num_threads or 1)
    path, device, dtype = Path(model.model), model.device, model.dtype
    if device == "cuda" and setup.execution.fused_kernels:
        prepare_triton()  # while weights are read
    assert dtype != "auto" and cache.block_size is not None
    checkpoint = open_checkpoint(path, random_weights=model.random_weights, seed=model.seed)
    spec = checkpoint.spec
    layout = plan_layout(spec, setup.parallel, ranks)
    check_weights_fit(spec, layout, dtype, device, cache.gpu_share)
    drafts = setup.execution.mtp > 0
    has_module = drafts and model.draft != NGRAM
    draft_files = open_draft(checkpoint, model) if has_module else {}  # finds a wrong one
    max_len = scheduler.max_model_len
    network = _load(checkpoint, dtype, max_len, device, layout, progress)
    mtp = load_draft(draft_files, network, dtype) if has_module else None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what tensors were read into, which is free for KV again
    on_phase("weights")
    reserve = reserve_bytes(spec, scheduler, setup.execution, device)
    if cache.offloading is not None:
        reserve += staged_bytes(device, parse_tiers(cache.offloading).host_bytes // ranks.size)
    # With a layer of KV for the module.
    cached = network.spec if mtp is None else mtp_spec(network.spec)
    groups = plan_groups(cached.layer_windows, cached.num_layers - network.spec.num_layers)
    num_blocks = agree(num_kv_blocks(cache, cached, groups, device, reserve))
    # The block that padded rows of a CUDA graph write to, and drafts that have no place.
    spare = int(device == "cuda" or drafts)
    weights = _digest(setup, checkpoint, draft_files)
    link = KVLink.plan(cache.connector, device, weights)
    pages = link.pages if link is not None else None
    kv_cache = allocate_kv_cache(
        cached, num_blocks + spare, cache.block_size, device, cache.dtype, pages, groups
    )
    on_phase("KV cache")
    most_new, size = scheduler.most_new_tokens, cache.block_size
    room = groups.sliding.num_blocks(num_blocks, most_new, size) * size
    max_len = min(max_len, room)
    return LoadedPart(
        checkpoint, network, mtp, cached, kv_cache, num_blocks, groups, room, max_len, link, weights
    )


def _load(
    checkpoint: Checkpoint,
    dtype: ComputeType,
    max_len: int,
    device: str,
    layout: Layout,
    progress: Progress | None,
) -> Decoder:
    spec = checkpoint.spec
    tensors = checkpoint.tensors(progress, device, wanted(spec, layout))
    return family_of(spec).model(spec, tensors, dtype, max_len, device, layout)


def _digest(setup: Setup, checkpoint: Checkpoint, drafts: DraftFiles) -> str:
    """A digest of the weights, where other engines or later starts meet what they compute."""
    cache = setup.cache
    if cache.connector == "none" and cache.offloading is None:
        return ""
    tensors = drafts.tensors if isinstance(drafts, Eagle3Files) else drafts
    return weights_digest(checkpoint.readable, tensors)
