"""From configs to a running engine: its part of a model, runner, scheduler, and other ranks."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenmill import __version__
from tokenmill.core.config import (
    NGRAM,
    ExecutionConfig,
    Setup,
)
from tokenmill.core.kv_groups import KVGroups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import GrammarVocab
from tokenmill.engine import kernel_choices
from tokenmill.engine.drafts.open_drafts import choose_drafting
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.graphs.capture import CaptureLimits, CaptureReport
from tokenmill.engine.load import LoadedPart, OnPhase, Progress, load_part
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
from tokenmill.kernels import product_trials
from tokenmill.kv.connectors import KVLink
from tokenmill.layers.linear import ComputeType
from tokenmill.models.checkpoints.store import cache_dir
from tokenmill.parallel import ONE, Ranks
from tokenmill.routing.attention_dp import ContextBalancer, ContextPolicy, NeverHold, RankCaches
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.meter import StepMeter, WorkWeights
from tokenmill.sched.recording import make_scheduler

_log = logging.getLogger(__name__)
_NARROW = 2048  # hidden sizes below it: few channels carry most of a product, and its error


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


def make_runner(setup: Setup, part: LoadedPart) -> ModelRunner:
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
    if part.network.layout.ranks.size == 1:
        _capture_alike(setup, part, runner, progress)
    else:
        if runner.leader is not None:
            runner.leader.tell_capture()
        capture_graphs(setup, part, runner, progress)
        if not part.network.layout.own_tokens:
            runner.split_short_prompts(setup.scheduler.num_seqs, setup.scheduler.budget)
    on_phase("CUDA graphs")
    # A step launched ahead is known to nobody else: to no engine whose blocks it may write, and to
    # no rank that would have to meet this one.
    alone = part.link is None and part.network.layout.ranks.size == 1
    runner.drafts.runs_ahead = alone and part.mtp is not None


def _capture_alike(
    setup: Setup, part: LoadedPart, runner: ModelRunner, progress: Progress | None
) -> None:
    """Capture graphs of the kernels that the first engine of this kind has chosen by trial."""
    scheduler, on_gpu = setup.scheduler, setup.model.device == "cuda"
    gpu = torch.cuda.get_device_name(part.network.device) if on_gpu else ""
    key = (
        __version__, torch.__version__, torch.version.cuda, gpu,
        part.checkpoint.spec, setup.model.dtype, setup.cache.dtype, setup.cache.block_size,
        scheduler.num_seqs, scheduler.budget, setup.model.draft,
        replace(setup.execution, record_path=None),
    )  # fmt: skip
    with kernel_choices.opened(cache_dir() / "kernels", key) as file:
        if file.known is None:
            report = capture_graphs(setup, part, runner, progress)
            runner.split_short_prompts(scheduler.num_seqs, scheduler.budget)
            found = product_trials.found(), runner.split.most_prompts
            if report.cut_by is None:  # else a later start, with compiled kernels, gets further
                file.keep(kernel_choices.KernelChoices(*found))
            return
        product_trials.adopt(file.known.products)
        capture_graphs(setup, part, runner, progress, with_trials=False)
        runner.split.most_prompts = file.known.most_prompts
        _log.info("kernels are those of %s", file.path)


def capture_graphs(
    setup: Setup,
    part: LoadedPart,
    runner: ModelRunner,
    progress: Progress | None = None,
    with_trials: bool = True,
) -> CaptureReport:
    """Capture the graphs that this rank's steps are replayed by."""
    execution, scheduler = setup.execution, setup.scheduler
    limits = CaptureLimits(execution.graph_capture_s, execution.graph_memory_bytes)
    report = runner.capture(
        scheduler.num_seqs, limits, progress, execution.mtp, scheduler.budget, with_trials
    )
    _log.info("%s", report.describe())
    return report


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
        drafting=choose_drafting(execution, policy.looks_up),
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


def _drafts_line(execution: ExecutionConfig) -> str:
    """Return what the description of the engine says about drafts."""
    return f", up to {execution.mtp} drafts a step" if execution.mtp else ""
