"""Batch to tensors, one forward pass, and the rows that sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from tokenmill.core.spec import ModelSpec
from tokenmill.core.types import Request, SamplingParams, StepResult, TokenLogprobs
from tokenmill.engine.device_sampling import DeviceSampler, Sampled
from tokenmill.engine.engine import OutOfMemory
from tokenmill.engine.graphs import DecodeGraphs, Progress
from tokenmill.engine.inputs import InputBuilder
from tokenmill.engine.kv_shared import SharedPages
from tokenmill.engine.sampling import Sampler, grammar_masks, is_penalised
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.layers.experts import RoutedExperts
from tokenmill.layers.linear import Linear
from tokenmill.layers.residual import Residual
from tokenmill.sched.sequence import PENDING, Batch, Sequence

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
KV_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_LOGIT_ROWS = 64  # prompt-logprob rows of the vocabulary held at once


class Model(Protocol):
    """What a model family offers the runner."""

    spec: ModelSpec
    stream: Callable[[torch.Tensor, float], Residual]  # what carries the layers' sum

    @property
    def linears(self) -> list[Linear]: ...
    @property
    def num_bytes(self) -> int: ...
    def forward(
        self, token_ids: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class RankModel(Model, Protocol):
    """One rank's part of a model."""

    @property
    def experts(self) -> list[RoutedExperts]: ...
    def assist(self) -> None: ...


def allocate_kv_cache(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    device: str = "cpu",
    dtype: str = "fp32",
    pages: SharedPages | None = None,
) -> KVCache:
    """Zeroed blocks per layer: a masked key weighs nothing, but must be a number.

    On CPU numpy asks the system for zeroed pages, which take no memory before their first use;
    `pages` has such that other processes can read.
    """
    key_dim, value_dim = spec.cache_dims
    on_cpu = torch.device(device).type == "cpu"
    keys = (key_dim, block_size) if on_cpu else (block_size, key_dim)

    def zeros(block: tuple[int, int]) -> torch.Tensor:
        shape = (num_blocks, spec.num_kv_heads, *block)
        if on_cpu:
            return torch.from_numpy(pages.zeros(shape) if pages else np.zeros(shape, np.float32))
        return torch.zeros(shape, dtype=KV_TYPES[dtype], device=device)

    return [(zeros(keys), zeros((block_size, value_dim))) for _ in range(spec.num_layers)]


@dataclass(slots=True)
class Launched:
    """A step under way; wait() returns its result when all it writes is written."""

    result: StepResult
    ready: list[int] = field(default_factory=list)
    tokens: torch.Tensor | None = None  # on the host once `done` has happened
    done: torch.cuda.Event | None = None
    sampled: Sampled | None = None  # what else the sampler computed

    def wait(self) -> StepResult:
        """The tokens of the items that sampled, and their log-probabilities."""
        if self.done is not None:
            self.done.synchronize()
        if self.tokens is not None:
            tokens = self.tokens.tolist()
            if min(tokens) < 0:
                raise FloatingPointError("the largest logit of a row is not finite")
            logprobs = self.sampled.finish(tokens) if self.sampled is not None else None
            _fill(self.result, self.ready, tokens, logprobs)
        return self.result


def _counts_pending(seq: Sequence) -> bool:
    """True where a penalty asks for a token that the host does not know yet."""
    return seq.token_ids[-1] == PENDING and is_penalised(seq.request.sampling)


def _fill(
    result: StepResult,
    ready: list[int],
    tokens: list[int],
    logprobs: list[TokenLogprobs | None] | None,
) -> None:
    """Put the tokens of the ready items into the result."""
    for i, token in zip(ready, tokens, strict=True):
        result.token_ids[i] = [token]
    if logprobs is not None and any(entry is not None for entry in logprobs):
        result.logprobs = [None] * len(result.token_ids)
        for i, entry in zip(ready, logprobs, strict=True):
            result.logprobs[i] = None if entry is None else [entry]


class ModelRunner:
    """Runs batches of one model over its paged KV cache, in the order they are launched."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        block_size: int,
        num_slots: int = 512,
        max_model_len: int | None = None,
    ) -> None:
        spec = model.spec
        self.model, self.kv_cache, self.block_size = model, kv_cache, block_size
        self.device = kv_cache[0][0].device
        self.on_gpu = self.device.type == "cuda"
        self.sampler, self.device_sampler = Sampler(), DeviceSampler()
        self.builder = InputBuilder(
            block_size,
            (spec.num_heads, spec.num_kv_heads),
            num_slots,
            -(-(max_model_len or spec.max_position) // block_size),
            kv_cache[0][0].shape[0] - 1,
            self.device,
        )
        self.graphs: DecodeGraphs | None = None

    def warm_up(self, sampling: bool = False) -> None:
        """Compile and load every kernel before the first request waits for them.

        Prefill and decode of a few tokens in block 0, which belongs to nobody yet. With `sampling`
        whatever else than the best token may be asked for, too.
        """
        if sampling and self.on_gpu:
            shape = (1, self.model.spec.vocab_size)
            self.device_sampler.warm_up(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"))
        request = Request("warm-up", [0, 0, 0], SamplingParams(temperature=0.0))
        seq = Sequence(request, (0, 0, 0), self.block_size, frozenset())
        seq.block_ids, seq.slot = [0], 0
        for num_new in (2, 1):
            self.run(Batch([(seq, num_new)], num_new, [(seq, 0)]))
            seq.num_computed_tokens += num_new

    @torch.inference_mode()
    def capture(self, max_size: int, budget_bytes: int, progress: Progress | None = None) -> None:
        """Capture decode graphs up to max_size sequences; the cache's last block is padding."""
        self.graphs = DecodeGraphs(self.model, self.kv_cache, self.builder, max_size)
        self.graphs.capture(budget_bytes, progress)

    def run(self, batch: Batch) -> StepResult:
        """Compute every item's new tokens; sample those whose last known token was computed."""
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Start a step; on a GPU this returns while it runs."""
        try:
            self.builder.tables.update(batch.grown, self.builder.staging)
            return self._replay(batch) or self._compute(batch)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise OutOfMemory(str(error).split(". ")[0]) from error

    def _replay(self, batch: Batch) -> Launched | None:
        """A step of single tokens through a captured graph, or None."""
        if self.graphs is None or batch.num_tokens != len(batch.items):
            return None
        seqs = [seq for seq, _ in batch.items]
        if any(s.num_computed_tokens + 1 != s.num_tokens or s.prompt_logprobs for s in seqs):
            return None
        decoded = self.graphs.run(seqs)
        if decoded is None:
            return None
        result, ready = StepResult([[] for _ in seqs]), list(range(len(seqs)))
        if self.device_sampler.wants_best(seqs):
            return self._collect(result, ready, decoded.best)
        return self._choose(result, ready, seqs, decoded.logits, decoded.token_ids, decoded.slots)

    def _compute(self, batch: Batch) -> Launched:
        """A step of any shape."""
        inputs = self.builder.build(batch)
        hidden = self.model.forward(inputs.token_ids, self.kv_cache, inputs.attention)
        result = StepResult([[] for _ in batch.items])
        self._score_prompts(batch, hidden, result)
        if not inputs.ready:
            return Launched(result, done=self._mark())
        seqs = [batch.items[i][0] for i in inputs.ready]
        logits = self.model.logits(hidden.index_select(0, inputs.ends))
        newest = inputs.token_ids.index_select(0, inputs.ends)
        return self._choose(result, inputs.ready, seqs, logits, newest, inputs.slots)

    def _choose(
        self,
        result: StepResult,
        ready: list[int],
        seqs: list[Sequence],
        logits: torch.Tensor,
        newest: torch.Tensor,
        slots: torch.Tensor,
    ) -> Launched:
        """Sample the ready items: on a GPU there, unless a grammar has to be asked."""
        masks = grammar_masks(seqs)
        constrained = any(mask is not None for mask in masks)
        if (self.on_gpu and not constrained) or any(map(_counts_pending, seqs)):
            sampled = self.device_sampler.launch(logits, seqs, newest)
            self.builder.last_tokens.index_copy_(0, slots.long(), sampled.token_ids)
            return self._collect(result, ready, sampled.token_ids, sampled)
        tokens, logprobs = self.sampler(logits.float(), seqs, masks)
        _fill(result, ready, tokens, logprobs)
        newest_tokens = torch.tensor(tokens, dtype=torch.int32).to(self.device)
        self.builder.last_tokens.index_copy_(0, slots.long(), newest_tokens)
        return Launched(result)

    def _collect(
        self,
        result: StepResult,
        ready: list[int],
        tokens: torch.Tensor,
        sampled: Sampled | None = None,
    ) -> Launched:
        """Send the tokens to the host without waiting for them."""
        host = self.builder.staging.buffer(len(ready))
        host.copy_(tokens, non_blocking=True)
        return Launched(result, ready, host, self._mark(), sampled)

    def _mark(self) -> torch.cuda.Event | None:
        """An event after all that was launched, on a GPU."""
        if not self.on_gpu:
            return None
        done = torch.cuda.Event()
        done.record()
        return done

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor, result: StepResult) -> None:
        end = 0
        for i, (seq, num_new) in enumerate(batch.items):
            end += num_new
            if seq.prompt_logprobs is not None and seq.num_computed_tokens < seq.num_prompt_tokens:
                result.prompt_logprobs[i] = self._prompt_logprobs(seq, num_new, hidden, end)

    def _prompt_logprobs(
        self, seq: Sequence, num_new: int, hidden: torch.Tensor, end: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt tokens after each of this chunk's, as far as they go."""
        first = seq.num_computed_tokens
        targets = seq.token_ids[first + 1 : min(first + num_new + 1, seq.num_prompt_tokens)]
        rows = hidden[end - num_new : end - num_new + len(targets)]
        k = seq.request.sampling.prompt_logprobs or 0
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), _LOGIT_ROWS):
            logits = self.model.logits(rows[start : start + _LOGIT_ROWS].contiguous()).float()
            entries += self.sampler.prompt_logprobs(logits, targets[start : start + _LOGIT_ROWS], k)
        return entries
