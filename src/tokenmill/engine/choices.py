"""Chooses what the configs leave open, and refuses what does not fit, before anything loads."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Literal

import torch

from tokenmill.core.config import (
    DEFAULT_BLOCK_SIZE,
    GPU_BLOCK_SIZE,
    GPU_MEMORY_SHARE,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Setup,
    default_share,
)
from tokenmill.core.kv_groups import kept_positions
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.drafts.open_drafts import check_drafts
from tokenmill.engine.limits import (
    EXPECTED_TOKENS,
    MemoryRoom,
    choose_budget,
    choose_encoder_patches,
    choose_image_parts,
    choose_least_shared,
    choose_num_seqs,
)
from tokenmill.engine.memory import KV_BYTES, gpu_room
from tokenmill.engine.open_tiers import check_tiers
from tokenmill.engine.ranks.group import check_gpus, ranks_per_gpu
from tokenmill.kernels import MODE, cpu_kernels
from tokenmill.layers.linear import ComputeType
from tokenmill.models.checkpoints import store
from tokenmill.models.checkpoints.shards import plan_layout
from tokenmill.models.checkpoints.weights import open_checkpoint
from tokenmill.parallel import Ranks

KVType = Literal["fp32", "fp16", "bf16", "fp8"]
_MIN_CAPABILITY = {"bf16": (8, 0), "fp8": (8, 9)}  # of a GPU, by compute type


def resolve_setup(asked: Setup) -> Setup:
    """Make every choice that was left open, and refuse what does not go together."""
    model, cache, execution, parallel = asked.model, asked.cache, asked.execution, asked.parallel
    set_mode(execution)
    check_drafts(model, execution)
    check_tiers(asked)
    path = store.resolve(model.model)
    spec = open_checkpoint(path, random_weights=model.random_weights, seed=model.seed).spec
    size = parallel.num_ranks
    plan_layout(spec, parallel, Ranks(0, size))
    device = choose_device(model)
    max_len = _context_limit(spec, model)
    num_threads = max(1, (model.num_threads or os.cpu_count() or 1) // size)
    set_num_threads(num_threads)
    dtype = choose_dtype(device) if model.dtype == "auto" else model.dtype
    kv_dtype = _kv_dtype(cache, spec, device, dtype)
    _check_compute(spec, dtype, device)
    if device == "cuda" and execution.batch_invariant and spec.mla is not None:
        raise ModelLoadError("batch_invariant does not run with latent attention on cuda")
    block_size = cache.block_size or (GPU_BLOCK_SIZE if device == "cuda" else DEFAULT_BLOCK_SIZE)
    if device == "cuda" and GPU_BLOCK_SIZE % block_size and block_size % GPU_BLOCK_SIZE:
        raise ModelLoadError(
            f"block_size is {block_size}: cuda takes divisors and multiples of {GPU_BLOCK_SIZE}"
        )
    share = cache.memory_share or default_share(device)
    if device == "cpu":
        share /= size  # ranks share a machine's memory
    gpu_share = cache.gpu_share
    if device == "cuda" and size > 1:
        check_gpus(size, model.share_gpus)
        if (together := ranks_per_gpu(size)) > 1:
            gpu_share = (gpu_share or GPU_MEMORY_SHARE) / together
    chosen = Setup(
        replace(model, model=str(path), dtype=dtype, device=device, num_threads=num_threads),
        replace(
            cache, block_size=block_size, dtype=kv_dtype, memory_share=share, gpu_share=gpu_share
        ),
        asked.scheduler,
        execution,
        parallel,
    )
    return replace(chosen, scheduler=_limits(chosen, spec, max_len))


def set_mode(execution: ExecutionConfig) -> None:
    if execution.batch_invariant and not execution.fused_kernels:
        raise ModelLoadError("batch_invariant needs the fused kernels: torch's own sums vary")
    MODE.fused, MODE.batch_invariant = execution.fused_kernels, execution.batch_invariant
    try:
        cpu_kernels()  # their first import reads the environment
    except ValueError as error:
        raise ModelLoadError(str(error)) from None


def _limits(setup: Setup, spec: ModelSpec, max_len: int) -> SchedulerConfig:
    """Choose the limits that depend on the device and the model."""
    scheduler, on_gpu = setup.scheduler, setup.model.device == "cuda"
    free = gpu_room(setup.cache.gpu_share) if on_gpu else 0
    total = torch.cuda.mem_get_info()[1] if on_gpu else None
    num_seqs = scheduler.num_seqs
    if scheduler.max_num_seqs is None and on_gpu and setup.cache.num_blocks is None:
        num_seqs = choose_num_seqs(_room(setup, spec, free, max_len), max_len)
    budget, patches = scheduler.max_num_batched_tokens, scheduler.encoder_patches
    width = 1 if setup.model.dtype == "fp8" else 2
    least_shared = scheduler.least_shared_tokens
    if budget is None:  # one that is given is that of every step
        budget = choose_budget(spec, total)
        least_shared = least_shared or choose_least_shared(spec, total, width)
    if patches is None and spec.vision is not None:
        patches = choose_encoder_patches(spec, budget)
    share, tokens = choose_image_parts(spec, total, width)
    return replace(
        scheduler,
        max_num_batched_tokens=budget,
        encoder_patches=patches,
        encoder_share=scheduler.encoder_share or share,
        image_tokens=scheduler.image_tokens or tokens,
        least_shared_tokens=least_shared,
        max_num_seqs=num_seqs,
        max_model_len=max_len,
    )


def _room(setup: Setup, spec: ModelSpec, free: int, max_len: int) -> MemoryRoom:
    """Return the memory of one rank's GPU before anything is loaded."""
    cache, parallel = setup.cache, setup.parallel
    assert cache.memory_share is not None
    expected = min(EXPECTED_TOKENS, max_len)
    layer_bytes = spec.kv_bytes_per_token(KV_BYTES[cache.dtype]) // spec.num_layers // parallel.tp
    per_token = layer_bytes * kept_positions(spec.layer_windows, expected) // expected
    if cache.memory_bytes is not None:
        return MemoryRoom(cache.memory_bytes, 0, per_token)
    width = 1 if setup.model.dtype == "fp8" else 2
    weights = spec.weight_bytes(width) // parallel.num_ranks
    return MemoryRoom(int(free * cache.memory_share), weights, per_token)


def open_device(device: str) -> None:
    """Create the context of a GPU, for which its first use would else wait."""
    torch.zeros(1, device=device)


def _context_limit(spec: ModelSpec, model: ModelConfig) -> int:
    limit = model.max_model_len or spec.max_position
    if limit > spec.max_position:
        raise ModelLoadError(
            f"max_model_len is {limit}, but {model.model} has {spec.max_position} positions"
        )
    return limit


def set_num_threads(num_threads: int) -> None:
    """Set the threads of the compiled kernels, beside which torch keeps one; else torch's."""
    if cpu_kernels():
        from tokenmill.kernels.cpu.threads import set_num_threads as set_kernel_threads

        set_kernel_threads(num_threads)
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(num_threads)


def choose_device(model: ModelConfig) -> Literal["cpu", "cuda"]:
    """Return the device that was asked for, or a GPU if there is one for the compute type."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("device is cuda, but torch sees no GPU here")
    if model.device != "auto":
        return model.device
    needed = _MIN_CAPABILITY.get("bf16" if model.dtype == "auto" else model.dtype)
    if needed is None or not torch.cuda.is_available():
        return "cpu"
    return "cuda" if torch.cuda.get_device_capability() >= needed else "cpu"


def _check_compute(spec: ModelSpec, dtype: str, device: str) -> None:
    """Refuse a compute type that does not run on the device."""
    needed = _MIN_CAPABILITY.get(dtype)
    if (needed is not None) != (device == "cuda"):
        raise ModelLoadError(
            f"dtype {dtype} does not run on {device}: use bf16 or fp8 on cuda, else fp32 or int8"
        )
    if needed is None:
        return
    for dim in spec.cache_dims:
        if dim & (dim - 1):
            name = "head_dim" if spec.mla is None else "qk_rope_head_dim or kv_lora_rank"
            raise ModelLoadError(f"{name} is {dim}: cuda takes powers of two, use --device cpu")
    found = torch.cuda.get_device_capability()
    if found < needed:
        raise ModelLoadError(
            f"dtype {dtype} needs a GPU of compute capability {needed[0]}.{needed[1]} or more, "
            f"but {torch.cuda.get_device_name()} has {found[0]}.{found[1]}"
        )


def _kv_dtype(cache: CacheConfig, spec: ModelSpec, device: str, dtype: str) -> KVType:
    known: tuple[KVType, ...] = ("bf16", "fp8") if device == "cuda" else ("fp32", "fp16")
    if cache.dtype == "auto":
        rounded = dtype == "int8" and spec.mla is None
        return "fp16" if rounded else known[0]
    if cache.dtype not in known:
        raise ModelLoadError(
            f"kv_cache_dtype {cache.dtype} does not run on {device}: use {' or '.join(known)}"
        )
    if cache.dtype in ("fp8", "fp16") and spec.mla is not None:
        raise ModelLoadError(
            f"kv_cache_dtype {cache.dtype} does not run with latent attention: use {known[0]}"
        )
    if cache.dtype == "fp8" and spec.head_dim < 32:
        raise ModelLoadError(
            f"kv_cache_dtype fp8 needs a head_dim of 32 or more, the model has {spec.head_dim}"
        )
    return cache.dtype


def choose_dtype(device: str) -> ComputeType:
    """Return bf16 for a GPU, int8 for a CPU with compiled kernels, else fp32.

    A rule and no trial: all workers of a server, and every start of them, have one type.
    """
    if device == "cuda":
        return "bf16"
    return "int8" if cpu_kernels() else "fp32"
