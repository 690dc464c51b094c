"""What an engine may take of the memory: weights that fit, room for steps, blocks of KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    SchedulerConfig,
    default_share,
)
from tokenmill.core.kv_groups import KVGroups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.graphs.draft_graphs import MAX_SIZE
from tokenmill.models.checkpoints.shards import local_spec
from tokenmill.parallel import Layout
from tokenmill.sched.cache.encoder_cache import STEPS

KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_CONTEXT_BYTES = 2**29  # of a GPU's memory that a process takes beside torch's
_MOST_PATCHES = 2**16  # of an image: 4,096 x 4,096 pixels, the most that Qwen3-VL's processor makes
_RESERVE_BYTES = 2**29  # left to activations and the rest of the process on CPU


def available_bytes() -> int:
    """Memory that can be taken without swapping: the machine's, or the container's if less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free = fields["MemAvailable"]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def gpu_room(share: float | None) -> int:
    """Bytes that this process may still take of its GPU: what is free, within its share of it.

    What others take meanwhile changes nothing in a share, so that they may start at once.
    """
    free, total = torch.cuda.mem_get_info()
    if share is None:
        return free
    return max(0, min(free, int(share * total) - torch.cuda.memory_reserved() - _CONTEXT_BYTES))


def check_weights_fit(
    spec: ModelSpec, layout: Layout, dtype: str, device: str, share: float | None
) -> None:
    """On a GPU, say before loading that the weights will not fit."""
    if device != "cuda":
        return
    free = gpu_room(share)
    vocab_size = max(layout.tensor_ranks.shares(spec.vocab_size))
    own = replace(local_spec(spec, layout), vocab_size=vocab_size)
    if own.moe is not None and layout.num_slots:
        own = replace(own, moe=replace(own.moe, num_experts=layout.num_slots // layout.ranks.size))
    needed = own.weight_bytes(1 if dtype == "fp8" else 2)
    if needed > free:
        given = "" if share is None else f" within --gpu-memory-utilization {share:g}"
        raise ModelLoadError(
            f"the weights take {needed / 2**30:.1f} GiB in {dtype}, but "
            f"{torch.cuda.get_device_name()} has {free / 2**30:.1f} GiB free{given}"
        )


def reserve_bytes(
    spec: ModelSpec, scheduler: SchedulerConfig, execution: ExecutionConfig, device: str
) -> int:
    """Bytes kept from the KV cache: on a GPU graphs, and the largest step's activations twice."""
    if device != "cuda":
        return _RESERVE_BYTES
    widest = 2 * spec.intermediate_size + spec.q_size + 2 * spec.kv_size + 8 * spec.hidden_size
    if spec.moe is not None:
        inner, shared = spec.moe.intermediate_size, spec.moe.shared_size
        widest += spec.moe.top_k * (3 * inner + spec.hidden_size) + 2 * shared
    if spec.mla is not None:
        widest += 2 * spec.num_heads * spec.mla.kv_rank
    activations = (scheduler.max_num_batched_tokens or 0) * widest * 2
    logits = scheduler.num_seqs * spec.vocab_size * 12  # bf16, and fp32 where it is sampled
    return (
        2**30
        + 2 * activations
        + logits
        + execution.graph_memory_bytes
        + _draft_bytes(spec, execution.mtp, scheduler.num_seqs)
        + _image_bytes(spec.vision, scheduler.encoder_budget)
    )


def _draft_bytes(spec: ModelSpec, depth: int, max_num_seqs: int) -> int:
    """The logits of steps with drafts: in graphs and out of them a row for each draft, one more."""
    return 2 * (depth + 1) * min(max_num_seqs, MAX_SIZE) * spec.vocab_size * 2 if depth else 0


def _image_bytes(vision: VisionSpec | None, patches: int) -> int:
    """The features of encoded images, and the activations of the largest one."""
    if vision is None:
        return 0
    kept = STEPS * patches // vision.merge_size**2
    features = kept * vision.num_features * vision.out_size
    widest = 3 * vision.patch_dim + 8 * vision.hidden_size + vision.intermediate_size
    return 2 * (features + _MOST_PATCHES * widest)


def num_kv_blocks(
    cache: CacheConfig, spec: ModelSpec, groups: KVGroups, device: str, reserve: int
) -> int:
    """Blocks that fit in the memory given, or in a share of what is free now.

    Where layers slide each is a page of one group of layers, and a number that was asked for
    counts blocks of all layers.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks * groups.sliding.pages_per_block
    assert cache.block_size is not None
    layer_bytes = spec.kv_bytes_per_token(KV_BYTES[cache.dtype]) // spec.num_layers
    block_bytes = layer_bytes * groups.page_layers * cache.block_size
    free = gpu_room(cache.gpu_share) if device == "cuda" else available_bytes()
    budget = cache.memory_bytes
    if budget is None:
        share = cache.memory_share or default_share(device)
        budget = int(max(0, free - reserve) * share)
    elif budget > free:
        raise ModelLoadError(
            f"kv_cache_memory asks for {budget / 2**30:.1f} GiB, "
            f"but {free / 2**30:.1f} GiB are free after loading the weights"
        )
    least = groups.sliding.pages_per_block * block_bytes
    if budget < least:
        raise ModelLoadError(
            f"the KV cache gets {budget} bytes, but one block of {cache.block_size} tokens "
            f"takes {least}: give it more with kv_cache_memory"
            + (" or --gpu-memory-utilization" if cache.gpu_share else "")
        )
    return budget // block_bytes
