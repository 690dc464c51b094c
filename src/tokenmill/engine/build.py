"""From configs to a running engine: weights, KV cache, scheduler, runner."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from tokenmill.core.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_BUDGET,
    EXPERTS_GPU_BUDGET,
    GPU_BLOCK_SIZE,
    GPU_BUDGET,
    GPU_MEMORY_SHARE,
    MEMORY_SHARE,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
)
from tokenmill.core.spec import ModelSpec
from tokenmill.core.types import GrammarVocab, ModelLoadError
from tokenmill.engine.calibrate import NARROW, quantize
from tokenmill.engine.draft_graphs import MAX_SIZE
from tokenmill.engine.drafting import AdaptiveDrafting, Drafting, FixedDrafting
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.grammar import GrammarBackend
from tokenmill.engine.graphs import ladder
from tokenmill.engine.kv_link import KVLink
from tokenmill.engine.relaxed import Relaxed
from tokenmill.engine.runner import ModelRunner, allocate_kv_cache
from tokenmill.kernels import MODE, cpu_kernels
from tokenmill.kernels.matmul import activation_limit, matmul, pack, quantize_rows
from tokenmill.layers.linear import ComputeType
from tokenmill.models import MODELS
from tokenmill.models.decoder import Decoder
from tokenmill.models.mtp import MTPModule
from tokenmill.models.names import mtp_spec
from tokenmill.models.store import resolve, shipped_mtp
from tokenmill.models.weights import (
    Checkpoint,
    eos_token_ids,
    open_checkpoint,
    open_mtp,
    read_all,
    read_spec,
)
from tokenmill.sched.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler

Progress = Callable[[int, int], None]
_log = logging.getLogger(__name__)
_KV_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
_TRIAL_ROWS, _TRIAL_BYTES, _TRIALS = 4, 2**26, 4  # of the choice of a compute type on CPU
_RESERVE_BYTES = 2**29  # left to activations and the rest of the process on CPU
_MIN_CAPABILITY = {"bf16": (8, 0), "fp8": (8, 9)}  # of a GPU, by compute type


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and the facts that users ask about it."""

    engine: LanguageEngine
    runner: ModelRunner
    spec: ModelSpec
    path: Path
    dtype: ComputeType
    kv_dtype: str
    device: str
    max_model_len: int
    num_blocks: int
    block_size: int
    weight_bytes: int
    description: str


def build_engine(
    model: ModelConfig,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    execution: ExecutionConfig | None = None,
    grammar_vocab: GrammarVocab | None = None,
    progress: Progress | None = None,
    capture_progress: Progress | None = None,
) -> BuiltEngine:
    """Load a model and put a scheduler and a paged KV cache around it."""
    execution = execution or ExecutionConfig()
    _set_mode(execution)
    path = resolve(model.model)
    checkpoint = open_checkpoint(path, random_weights=model.random_weights, seed=model.seed)
    spec, max_len = checkpoint.spec, _context_limit(checkpoint.spec, model)
    device = choose_device(model)
    set_num_threads(model.num_threads or os.cpu_count() or 1)
    dtype = choose_dtype(spec, device) if model.dtype == "auto" else model.dtype
    kv_dtype = _kv_dtype(cache, spec, device)
    _check_compute(spec, dtype, device)
    if device == "cuda" and execution.batch_invariant and spec.mla is not None:
        raise ModelLoadError("batch_invariant does not run with latent attention on cuda")
    _check_memory(spec, dtype, device)
    scheduler = _limits(scheduler, spec, device, max_len)
    narrow = (
        dtype == "fp8" and spec.hidden_size < NARROW and spec.family == "llama" and not spec.moe
    )
    loaded: ComputeType = "bf16" if narrow else dtype
    network = _load(checkpoint, loaded, max_len, device, progress)
    mtp = _load_mtp(checkpoint, model, network, loaded) if execution.mtp else None
    reserve = _reserve(spec, scheduler, execution, device)
    block_size = cache.block_size or (GPU_BLOCK_SIZE if device == "cuda" else DEFAULT_BLOCK_SIZE)
    drawn = spec if mtp is None else mtp_spec(spec)  # with a layer of KV for the module
    block_bytes = drawn.kv_bytes_per_token(_KV_BYTES[kv_dtype]) * block_size
    num_blocks = _num_blocks(cache, block_size, block_bytes, device, reserve)
    # The block that padded rows of a CUDA graph write to, and drafts that have no place.
    spare = int(device == "cuda" or mtp is not None)
    link = KVLink.plan(cache.connector, device)
    pages = link.pages if link is not None else None
    kv_cache = allocate_kv_cache(drawn, num_blocks + spare, block_size, device, kv_dtype, pages)
    # Requests that ended in a step under way keep their slots until it is over.
    relaxed = None
    if mtp is not None and execution.mtp_relaxed:
        relaxed = Relaxed.parse(execution.mtp_relaxed)
        _log.warning("mtp_relaxed %s: outputs are not exact", execution.mtp_relaxed)
    num_slots = 2 * scheduler.max_num_seqs
    runner = ModelRunner(network, kv_cache, block_size, num_slots, max_len, mtp, relaxed)
    if narrow:
        quantize(runner)
    runner.warm_up(sampling=grammar_vocab is not None)  # a benchmark has no tokenizer
    if device == "cuda" and execution.cuda_graphs and execution.fused_kernels:
        memory, depth = execution.graph_memory_bytes, execution.mtp
        runner.capture(scheduler.max_num_seqs, memory, capture_progress, depth)
        runner.runs_ahead = link is None  # no other engine may wait for blocks that are written
    overlap = device == "cuda" if execution.overlap is None else execution.overlap
    eos = _stop_ids(path, spec, grammar_vocab)
    pool = BlockPool(num_blocks, block_size, cache.prefix_cache)
    policy = Scheduler(scheduler, pool, eos)
    engine = LanguageEngine(
        policy,
        runner,
        grammar=None if grammar_vocab is None else GrammarBackend(grammar_vocab),
        vocab_size=spec.vocab_size,
        launcher=runner if overlap else None,
        kv=None if link is None else link.open(policy, kv_cache, drawn, kv_dtype),
        drafting=_drafting(execution),
    )
    return BuiltEngine(
        engine=engine,
        runner=runner,
        spec=spec,
        path=path,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        max_model_len=max_len,
        num_blocks=num_blocks,
        block_size=block_size,
        weight_bytes=network.num_bytes + (0 if mtp is None else mtp.num_bytes),
        description=checkpoint.describe() + _drafts_line(execution),
    )


def _set_mode(execution: ExecutionConfig) -> None:
    """Switch the kernels of this process."""
    if execution.batch_invariant and not execution.fused_kernels:
        raise ModelLoadError("batch_invariant needs the fused kernels: torch's own sums vary")
    MODE.fused, MODE.batch_invariant = execution.fused_kernels, execution.batch_invariant


def _limits(
    scheduler: SchedulerConfig, spec: ModelSpec, device: str, max_len: int
) -> SchedulerConfig:
    """Fill what was left to the device and the model."""
    on_gpu = EXPERTS_GPU_BUDGET if spec.moe else GPU_BUDGET
    budget = on_gpu if device == "cuda" else DEFAULT_BUDGET
    return replace(
        scheduler,
        max_num_batched_tokens=scheduler.max_num_batched_tokens or budget,
        max_model_len=max_len,
    )


def _stop_ids(path: Path, spec: ModelSpec, grammar_vocab: GrammarVocab | None) -> frozenset[int]:
    """End-of-sequence ids; the tokenizer knows turn ends too."""
    eos = frozenset(eos_token_ids(path) or spec.eos_token_ids)
    return eos if grammar_vocab is None else eos | frozenset(grammar_vocab.stop_token_ids)


def set_num_threads(num_threads: int) -> None:
    """The compiled kernels bring their own threads; torch keeps one beside them."""
    if cpu_kernels():
        from tokenmill.kernels.cpu.pool import set_num_threads as set_kernel_threads

        set_kernel_threads(num_threads)
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(num_threads)


def choose_device(model: ModelConfig) -> str:
    """What was asked for, or a GPU where there is one that runs the compute type."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("device is cuda, but torch sees no GPU here")
    if model.device != "auto":
        return model.device
    needed = _MIN_CAPABILITY.get("bf16" if model.dtype == "auto" else model.dtype)
    if needed is None or not torch.cuda.is_available():
        return "cpu"
    return "cuda" if torch.cuda.get_device_capability() >= needed else "cpu"


def _check_compute(spec: ModelSpec, dtype: str, device: str) -> None:
    """The compute type must run on the device, and the device must have what it takes."""
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


def _check_memory(spec: ModelSpec, dtype: str, device: str) -> None:
    """On a GPU, say before loading that the weights will not fit."""
    if device != "cuda":
        return
    free = torch.cuda.mem_get_info()[0]
    needed = spec.weight_bytes(1 if dtype == "fp8" else 2)
    if needed > free:
        raise ModelLoadError(
            f"the weights take {needed / 2**30:.1f} GiB in {dtype}, but "
            f"{torch.cuda.get_device_name()} has {free / 2**30:.1f} GiB free"
        )


def _kv_dtype(cache: CacheConfig, spec: ModelSpec, device: str) -> str:
    known = ("bf16", "fp8") if device == "cuda" else ("fp32",)
    if cache.dtype == "auto":
        return known[0]
    if cache.dtype not in known:
        raise ModelLoadError(
            f"kv_cache_dtype {cache.dtype} does not run on {device}: use {' or '.join(known)}"
        )
    if cache.dtype == "fp8" and spec.mla is not None:
        raise ModelLoadError("kv_cache_dtype fp8 does not run with latent attention: use bf16")
    if cache.dtype == "fp8" and spec.head_dim < 32:
        raise ModelLoadError(
            f"kv_cache_dtype fp8 needs a head_dim of 32 or more, the model has {spec.head_dim}"
        )
    return cache.dtype


def choose_dtype(spec: ModelSpec, device: str) -> ComputeType:
    """bf16 on a GPU; else the faster of fp32 and int8 where a few rows read weights from memory."""
    if device == "cuda":
        return "bf16"
    if not cpu_kernels():
        return "fp32"  # without compiled kernels int8 is emulated
    n, k = min(spec.intermediate_size, 4096), spec.hidden_size
    x, limit = torch.randn(_TRIAL_ROWS, k), activation_limit(k)
    weights = [torch.randn(n, k) for _ in range(-(-_TRIAL_BYTES // (4 * n * k)))]
    fp32, int8 = [pack(w, "fp32") for w in weights], [pack(w, "int8") for w in weights]
    best = {"fp32": math.inf, "int8": math.inf}
    for _ in range(_TRIALS):  # in turns: what disturbs one disturbs the other
        best["fp32"] = min(best["fp32"], _seconds(lambda: [matmul(x, w) for w in fp32]))
        best["int8"] = min(
            best["int8"], _seconds(lambda: [matmul(quantize_rows(x, limit), w) for w in int8])
        )
    return "int8" if best["int8"] < best["fp32"] else "fp32"


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _context_limit(spec: ModelSpec, model: ModelConfig) -> int:
    limit = model.max_model_len or spec.max_position
    if limit > spec.max_position:
        raise ModelLoadError(
            f"max_model_len is {limit}, but {model.model} has {spec.max_position} positions"
        )
    return limit


def _load(
    checkpoint: Checkpoint,
    dtype: ComputeType,
    max_len: int,
    device: str,
    progress: Progress | None,
) -> Decoder:
    module, _, name = MODELS[checkpoint.spec.family].partition(":")
    family = getattr(import_module(module), name)
    tensors = checkpoint.tensors(progress, device)
    network: Decoder = family(checkpoint.spec, tensors, dtype, max_len, device)
    return network


def _load_mtp(
    checkpoint: Checkpoint, model: ModelConfig, network: Decoder, dtype: ComputeType
) -> MTPModule:
    """The MTP module: what --draft names, the checkpoint's own, or the one that comes with it."""
    random = model.random_weights and model.draft is None
    path = checkpoint.path
    if model.draft is not None:
        path = Path(model.draft).expanduser()
    elif not random and not checkpoint.spec.num_mtp_layers:
        shipped = shipped_mtp(path)
        if shipped is None:
            raise ModelLoadError(f"mtp: {path.name} has no MTP module; give one with --draft")
        path = shipped
    tensors = open_mtp(path, checkpoint.spec, random_weights=random, seed=model.seed)
    return MTPModule(network, read_all(tensors, network.device), dtype)


def has_mtp(model: ModelConfig, path: Path) -> bool:
    """Whether a model at this path can draft."""
    if model.draft is not None or read_spec(path).num_mtp_layers > 0:
        return True
    return not model.random_weights and shipped_mtp(path) is not None


def _drafts_line(execution: ExecutionConfig) -> str:
    """What a user has to know of drafts."""
    if not execution.mtp:
        return ""
    line = f", up to {execution.mtp} drafts a step"
    if execution.mtp_relaxed:
        line += f", relaxed acceptance {execution.mtp_relaxed}: outputs are not exact"
    return line


def _drafting(execution: ExecutionConfig) -> Drafting | None:
    if not execution.mtp:
        return None
    return (AdaptiveDrafting if execution.mtp_adaptive else FixedDrafting)(execution.mtp)


def _reserve(
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
    logits = scheduler.max_num_seqs * spec.vocab_size * 12  # bf16, and fp32 where it is sampled
    return (
        2**30
        + 2 * activations
        + logits
        + execution.graph_memory_bytes
        + _draft_bytes(spec, execution.mtp, scheduler.max_num_seqs)
    )


def _draft_bytes(spec: ModelSpec, depth: int, max_num_seqs: int) -> int:
    """The logits that captured steps with drafts keep, a row for each draft and one more."""
    num_seqs = sum(ladder(min(max_num_seqs, MAX_SIZE)))
    return sum(range(2, depth + 2)) * num_seqs * spec.vocab_size * 2


def _num_blocks(
    cache: CacheConfig, block_size: int, block_bytes: int, device: str, reserve: int
) -> int:
    """Blocks that fit in the memory given, or in a share of what is free now."""
    if cache.num_blocks is not None:
        return cache.num_blocks
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
    budget = cache.memory_bytes
    if budget is None:
        share = cache.memory_share or (GPU_MEMORY_SHARE if device == "cuda" else MEMORY_SHARE)
        budget = int(max(0, free - reserve) * share)
    elif budget > free:
        raise ModelLoadError(
            f"kv_cache_memory asks for {budget / 2**30:.1f} GiB, "
            f"but {free / 2**30:.1f} GiB are free after loading the weights"
        )
    if budget < block_bytes:
        raise ModelLoadError(
            f"the KV cache gets {budget} bytes, but one block of {block_size} tokens "
            f"takes {block_bytes}: give it more with kv_cache_memory"
        )
    return budget // block_bytes


def available_bytes() -> int:
    """Memory that can be taken without swapping: the machine's, or the container's if less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free = fields["MemAvailable"]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free
