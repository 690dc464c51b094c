"""From configs to a running engine: weights, KV cache, scheduler, runner."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenmill.core.config import (
    GPU_MEMORY_SHARE,
    MEMORY_SHARE,
    NGRAM,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.kv import parse_tiers
from tokenmill.core.kv_groups import KVGroups, plan_groups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import GrammarVocab, ModelLoadError
from tokenmill.engine.choices import (
    KV_BYTES,
    available_bytes,
    gpu_room,
    set_mode,
    set_num_threads,
)
from tokenmill.engine.drafts.drafting import AdaptiveDrafting, Drafting, FixedDrafting
from tokenmill.engine.drafts.eagle3 import Eagle3Files, Eagle3Head, is_eagle3, open_eagle3
from tokenmill.engine.drafts.proposer import Drafter
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.graphs.capture import CaptureLimits
from tokenmill.engine.graphs.draft_graphs import MAX_SIZE
from tokenmill.engine.model import KVCache, allocate_kv_cache
from tokenmill.engine.open_tiers import open_tiers
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.leader import DataParallelEngine, LeadingEngine, OwnEngine
from tokenmill.engine.ranks.rank_messages import EngineOrder
from tokenmill.engine.ranks.rebalance import Rebalancer
from tokenmill.engine.ranks.shared_kv import GroupCalls, GroupLink
from tokenmill.engine.ranks.step_leader import StepLeader
from tokenmill.engine.runner import ModelRunner
from tokenmill.engine.sampling.grammar_pool import GrammarPool
from tokenmill.engine.warm_up import FEW, warm_up_steps
from tokenmill.kernels import prepare_triton
from tokenmill.kv.connectors import KVLink
from tokenmill.kv.tiers.page_copies import staged_bytes
from tokenmill.layers.linear import ComputeType
from tokenmill.models import family_of
from tokenmill.models.checkpoints.shards import local_spec, plan_layout, wanted
from tokenmill.models.checkpoints.store import resolve_draft, shipped_mtp
from tokenmill.models.checkpoints.weights import (
    Checkpoint,
    ReadableTensor,
    open_checkpoint,
    open_mtp,
    read_all,
    read_spec,
)
from tokenmill.models.checkpoints.weights_digest import weights_digest
from tokenmill.models.decoder import Decoder
from tokenmill.models.mtp import MTPModule
from tokenmill.models.names import mtp_spec
from tokenmill.parallel import ALONE, ONE, Layout, Ranks
from tokenmill.routing.attention_dp import ContextBalancer, ContextPolicy, NeverHold, RankCaches
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.encoder_cache import STEPS
from tokenmill.sched.meter import StepMeter, WorkWeights
from tokenmill.sched.recording import make_scheduler

Progress = Callable[[int, int], None]
OnPhase = Callable[[str], None]  # is called with the name of each phase of the start at its end
DraftFiles = Mapping[str, ReadableTensor] | Eagle3Files
_log = logging.getLogger(__name__)
_MOST_PATCHES = 2**16  # of an image: 4,096 x 4,096 pixels, the most that Qwen3-VL's processor makes
_NARROW = 2048  # hidden sizes below it: few channels carry most of a product, and its error
_RESERVE_BYTES = 2**29  # left to activations and the rest of the process on CPU


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and the facts that users ask about it."""

    engine: LanguageEngine | DataParallelEngine
    runner: ModelRunner
    spec: ModelSpec
    path: Path
    dtype: ComputeType
    kv_dtype: str
    device: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int  # of each rank, where ranks have requests of their own
    block_size: int
    kv_tokens: int  # of one request that the blocks hold
    groups: KVGroups
    weight_bytes: int  # of this rank
    description: str
    group: RankGroup | None = None  # the other ranks

    @property
    def whole_tokens(self) -> int:
        """Tokens whose KV in all layers is as large as the cache."""
        layers = self.num_blocks * self.groups.page_layers
        return layers * self.block_size // len(self.groups.places)

    @property
    def gpus(self) -> list[str]:
        """What names the GPUs that the ranks of this machine compute on, on whatever machine."""
        if self.device != "cuda":
            return []
        ranks = 1 if self.group is None else self.group.ranks.size
        places = range(min(ranks, torch.cuda.device_count()))
        return [str(torch.cuda.get_device_properties(place).uuid) for place in places]

    def close(self) -> None:
        """Write out KV that is on its way to disk, and end the other ranks.

        Both also happen when this process ends.
        """
        if self.engine.tiers is not None:
            self.engine.tiers.close()
        if self.group is not None:
            self.group.close()


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


def build_engine(
    setup: Setup,
    grammar_vocab: GrammarVocab | None = None,
    progress: Progress | None = None,
    capture_progress: Progress | None = None,
    on_warning: Callable[[str], None] = _log.warning,
    on_phase: OnPhase = lambda name: None,
) -> BuiltEngine:
    """Load a model and put a scheduler and a paged KV cache around it.

    The setup is what resolve_setup() has returned. `on_warning` is called with each thing that a
    user has to know.
    """
    group = None
    if setup.parallel.num_ranks > 1:
        group = RankGroup(setup.parallel.num_ranks, setup.model.device)
    with nullcontext() if group is None else group.together():
        if group is not None:
            vocab = grammar_vocab if setup.parallel.attention_dp else None
            group.tell(EngineOrder(setup, vocab))
        ranks = ONE if group is None else group.ranks
        agree = _same if group is None else group.agree
        part = load_part(setup, ranks, agree, progress, on_phase)
        rebalancer, runner = make_rebalancer(setup, part, ranks), make_runner(setup, part)
        if group is not None and not setup.parallel.attention_dp:
            runner.leader = StepLeader(group, rebalancer)
        prepare_runner(setup, part, runner, capture_progress, on_phase)
        engine = _lead(setup, part, group, rebalancer, runner, grammar_vocab)
    warnings = *_context_warning(setup, part), *_fp8_warning(setup, part)
    for warning in (*warnings, *_capture_warnings(runner)):
        on_warning(warning)
    assert setup.model.dtype != "auto" and setup.cache.block_size is not None
    return BuiltEngine(
        engine=engine,
        runner=runner,
        spec=part.checkpoint.spec,
        path=part.checkpoint.path,
        dtype=setup.model.dtype,
        kv_dtype=setup.cache.dtype,
        device=setup.model.device,
        max_model_len=part.max_model_len,
        max_num_seqs=setup.scheduler.num_seqs,
        max_num_batched_tokens=setup.scheduler.max_num_batched_tokens or 0,
        num_blocks=part.num_blocks,
        block_size=setup.cache.block_size,
        kv_tokens=part.kv_tokens,
        groups=part.groups,
        weight_bytes=part.network.num_bytes + (0 if part.mtp is None else part.mtp.num_bytes),
        description=part.checkpoint.describe() + _drafts_line(setup.execution),
        group=group,
    )


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
    _check_memory(spec, layout, dtype, device, cache.gpu_share)
    drafts = setup.execution.mtp > 0
    has_module = drafts and model.draft != NGRAM
    draft_files = _open_draft(checkpoint, model) if has_module else {}  # finds a wrong one
    max_len = scheduler.max_model_len
    network = _load(checkpoint, dtype, max_len, device, layout, progress)
    mtp = _load_draft(draft_files, network, dtype) if has_module else None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what tensors were read into, which is free for KV again
    on_phase("weights")
    reserve = _reserve(spec, scheduler, setup.execution, device)
    if cache.offloading is not None:
        reserve += staged_bytes(device, parse_tiers(cache.offloading).host_bytes // ranks.size)
    # With a layer of KV for the module.
    cached = network.spec if mtp is None else mtp_spec(network.spec)
    groups = plan_groups(cached.layer_windows, cached.num_layers - network.spec.num_layers)
    num_blocks = agree(_num_blocks(cache, cached, groups, device, reserve))
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


def make_runner(setup: Setup, part: LoadedPart) -> ModelRunner:
    """A runner of this rank's part of a model."""
    assert setup.cache.block_size is not None
    # Requests that ended in a step under way keep their slots until it is over.
    return ModelRunner(
        part.network, part.kv_cache, setup.cache.block_size, 2 * setup.scheduler.num_seqs,
        part.max_model_len, part.mtp, part.groups.sliding,
    )  # fmt: skip


def prepare_runner(
    setup: Setup,
    part: LoadedPart,
    runner: ModelRunner,
    progress: Progress | None = None,
    on_phase: OnPhase = lambda name: None,
) -> None:
    """Compile, warm up and capture, with all ranks that follow this one."""
    if setup.model.device == "cuda":
        _warm_up(runner, setup, part, on_phase)
    else:
        runner.warm_up(FEW)  # a CPU's kernels are compiled for all shapes
    on_phase("warm-up")
    if not _captures(setup):
        return
    if runner.leader is not None:
        runner.leader.tell_capture()
    capture_graphs(setup, part, runner, progress)
    layout = part.network.layout
    if not layout.own_tokens:
        runner.split_short_prompts(setup.scheduler.num_seqs, setup.scheduler.budget)
    on_phase("CUDA graphs")
    # A step launched ahead is known to nobody else: to no engine whose blocks it may write, and to
    # no rank that would have to meet this one.
    alone = part.link is None and layout.ranks.size == 1
    runner.drafts.runs_ahead = alone and part.mtp is not None


def capture_graphs(
    setup: Setup, part: LoadedPart, runner: ModelRunner, progress: Progress | None = None
) -> None:
    """Capture the graphs that this rank's steps are replayed by."""
    execution, scheduler = setup.execution, setup.scheduler
    limits = CaptureLimits(execution.graph_capture_s, execution.graph_memory_bytes)
    report = runner.capture(scheduler.num_seqs, limits, progress, execution.mtp, scheduler.budget)
    _log.info("%s", report.describe())


def make_engine(
    setup: Setup,
    part: LoadedPart,
    runner: ModelRunner,
    grammar_vocab: GrammarVocab | None = None,
    kind: Callable[..., LanguageEngine] = LanguageEngine,
    calls: GroupCalls | None = None,
) -> LanguageEngine:
    """A scheduler around a runner; ranks with the same requests are told by `calls`."""
    scheduler = replace(setup.scheduler, max_model_len=part.max_model_len)
    cache, execution, block_size = setup.cache, setup.execution, runner.block_size
    on_gpu = setup.model.device == "cuda"
    overlap = on_gpu if execution.overlap is None else execution.overlap
    spec = part.checkpoint.spec
    eos = _stop_ids(spec, grammar_vocab)
    pool = BlockPool(part.num_blocks, block_size, cache.prefix_cache, part.groups.sliding)
    # Ranks that schedule for themselves count their own time, rank 0 that of all others.
    num_gpus = 1 if setup.parallel.attention_dp else setup.parallel.num_ranks
    meter = StepMeter(WorkWeights.of(spec, setup.model.device), num_gpus)
    moves_kv = part.link is not None or cache.offloading is not None
    policy = make_scheduler(scheduler, pool, eos, execution, moves_kv, meter)
    policy.looks_up = setup.model.draft == NGRAM
    policy.token_texts = () if grammar_vocab is None else grammar_vocab.encoded_vocab
    link, kv_cache = part.link, part.kv_cache
    kv = None if link is None else link.open(policy, kv_cache, part.cached, cache.dtype)
    return kind(
        policy,
        runner,
        grammar=None if grammar_vocab is None else GrammarPool(grammar_vocab),
        vocab_size=spec.vocab_size,
        launcher=runner if overlap else None,
        kv=kv,
        tiers=open_tiers(setup, policy, kv_cache, part.cached, part.weights, calls),
        drafting=_drafting(execution, policy.looks_up),
        vision=spec.vision,
        may_rerun=not setup.parallel.attention_dp,
    )


def _captures(setup: Setup) -> bool:
    """Whether steps are to be replayed by CUDA graphs."""
    execution = setup.execution
    return setup.model.device == "cuda" and execution.cuda_graphs and execution.fused_kernels


def _context_warning(setup: Setup, part: LoadedPart) -> list[str]:
    """Where the memory, and not who asked for a number of blocks, cuts the context."""
    asked = setup.scheduler.max_model_len
    if part.max_model_len == asked or setup.cache.num_blocks is not None:
        return []
    return [
        f"the context is {part.max_model_len} tokens instead of {asked}: "
        "the KV cache holds no more; raise --kv-cache-memory"
    ]


def _fp8_warning(setup: Setup, part: LoadedPart) -> list[str]:
    width = part.checkpoint.spec.hidden_size
    if setup.model.dtype != "fp8" or width >= _NARROW:
        return []
    return [
        f"--dtype fp8 costs narrow models accuracy, and this one is {width} wide: SmolLM2-135M, "
        "which is 576 wide, loses 3 % of perplexity; --dtype bf16 loses none"
    ]


def _capture_warnings(runner: ModelRunner) -> list[str]:
    graphs = runner.decode.graphs
    return [] if graphs is None else graphs.report.warnings()


def _warm_up(runner: ModelRunner, setup: Setup, part: LoadedPart, on_phase: OnPhase) -> None:
    """Run what first requests will meet on a GPU.

    Of ranks each compiles while it runs; an engine of one compiles all kernels at once before.
    """
    begin, scheduler = time.monotonic(), setup.scheduler
    num_tokens = min(scheduler.max_model_len, part.kv_tokens)
    budget = scheduler.max_num_batched_tokens or num_tokens
    steps = warm_up_steps(budget, scheduler.num_seqs, num_tokens)
    if setup.parallel.num_ranks == 1 and setup.execution.fused_kernels:
        from tokenmill.kernels.gpu import launch

        cache = setup.cache.dtype, setup.cache.block_size
        key = part.checkpoint.spec, setup.model.dtype, cache, setup.execution, steps
        warm_up = functools.partial(runner.warm_up, steps, sampling=True)
        num_kernels = launch.compile_ahead(warm_up, key)
        seconds = time.monotonic() - begin
        _log.info("compiled or loaded %d kernels ahead in %.1f s", num_kernels, seconds)
        on_phase("kernels")
        begin = time.monotonic()
    runner.warm_up(steps, sampling=True)
    _log.info("warmed up the kernels in %.1f s", time.monotonic() - begin)


def make_rebalancer(setup: Setup, part: LoadedPart, ranks: Ranks) -> Rebalancer | None:
    """What moves experts, where that is wanted."""
    if not setup.parallel.rebalance_steps or part.checkpoint.spec.moe is None or ranks.size == 1:
        return None
    return Rebalancer(part.network.experts, part.checkpoint.spec, setup.parallel, ranks)


def _lead(
    setup: Setup,
    part: LoadedPart,
    group: RankGroup | None,
    rebalancer: Rebalancer | None,
    runner: ModelRunner,
    grammar_vocab: GrammarVocab | None,
) -> LanguageEngine | DataParallelEngine:
    """The engine of rank 0."""
    if group is None:
        return make_engine(setup, part, runner, grammar_vocab)
    if setup.parallel.attention_dp:
        engine = make_engine(setup, part, runner, grammar_vocab)
        ours = OwnEngine(engine, runner, rebalancer)
        caches = RankCaches(group.size, runner.block_size)
        places, policy = setup.scheduler.num_seqs, _context_policy(setup)
        return DataParallelEngine(ours, group, rebalancer, policy, caches, places)
    calls, leading = GroupCalls(group), functools.partial(LeadingEngine, group, rebalancer)
    if isinstance(part.link, KVLink):
        part = replace(part, link=GroupLink(part.link, calls, part.network.layout.split_heads))
    return make_engine(setup, part, runner, grammar_vocab, leading, calls)


def _context_policy(setup: Setup) -> ContextPolicy:
    """Whether prompts of ranks with requests of their own wait for each other."""
    parallel = setup.parallel
    if not parallel.timeout_iters:
        return NeverHold()
    return ContextBalancer(
        setup.scheduler.num_seqs, parallel.timeout_iters, parallel.batching_wait_iters
    )


def _same(num_blocks: int) -> int:
    return num_blocks


def _stop_ids(spec: ModelSpec, grammar_vocab: GrammarVocab | None) -> frozenset[int]:
    """End-of-sequence ids; the tokenizer knows turn ends too."""
    eos = frozenset(spec.eos_token_ids)
    return eos if grammar_vocab is None else eos | frozenset(grammar_vocab.stop_token_ids)


def _check_memory(
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


def _open_draft(checkpoint: Checkpoint, model: ModelConfig) -> DraftFiles:
    """What drafts: what --draft names, the checkpoint's own module, or one that comes with it."""
    random = model.random_weights and model.draft is None
    path, spec = checkpoint.path, checkpoint.spec
    if spec.vision is not None:
        problem = "takes images, and no MTP module knows their positions; use --draft ngram"
        raise ModelLoadError(f"mtp: {spec.architecture} {problem}")
    if model.draft is not None:
        path = resolve_draft(model.draft)
        if is_eagle3(path):
            return open_eagle3(path, spec)
    elif not random and not spec.num_mtp_layers:
        shipped = shipped_mtp(path)
        if shipped is None:
            problem = "has no MTP module; give one with --draft, or draft with --draft ngram"
            raise ModelLoadError(f"mtp: {path.name} {problem}")
        path = shipped
    return open_mtp(path, spec, random_weights=random, seed=model.seed)


def _digest(setup: Setup, checkpoint: Checkpoint, drafts: DraftFiles) -> str:
    """A digest of the weights, where other engines or later starts meet what they compute."""
    cache = setup.cache
    if cache.connector == "none" and cache.offloading is None:
        return ""
    tensors = drafts.tensors if isinstance(drafts, Eagle3Files) else drafts
    return weights_digest(checkpoint.readable, tensors)


def _load_draft(files: DraftFiles, network: Decoder, dtype: ComputeType) -> Drafter:
    """Ranks that share every token divide the module like a layer; others have one each."""
    if isinstance(files, Eagle3Files):
        network.read_layers = files.layers
        return Eagle3Head(files, network, dtype)
    layout = ALONE if network.layout.own_tokens else network.layout
    needs = wanted(network.full, layout)
    own = {name: tensor for name, tensor in files.items() if needs(name)}
    return MTPModule(network, read_all(own, network.device), dtype, layout)


def has_mtp(model: ModelConfig, path: Path) -> bool:
    """Whether a model at this path can draft."""
    if model.draft is not None or read_spec(path).num_mtp_layers > 0:
        return True
    return not model.random_weights and shipped_mtp(path) is not None


def _drafts_line(execution: ExecutionConfig) -> str:
    """Return what the description of the engine says about drafts."""
    return f", up to {execution.mtp} drafts a step" if execution.mtp else ""


def _drafting(execution: ExecutionConfig, looks_up: bool) -> Drafting | None:
    if not execution.mtp:
        return None
    if not execution.mtp_adaptive:
        return FixedDrafting(execution.mtp)
    return AdaptiveDrafting(execution.mtp, looks_up)


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


def _num_blocks(
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
        share = cache.memory_share or (GPU_MEMORY_SHARE if device == "cuda" else MEMORY_SHARE)
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
