"""Batch to tensors, one forward pass, and the rows that sample."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tokenmill.core.spec import ModelSpec
from tokenmill.core.types import Request, SamplingParams, StepResult, TokenLogprobs
from tokenmill.engine.graphs import DecodeGraphs
from tokenmill.engine.sampling import Sampler, grammar_masks
from tokenmill.kernels.attention import AttentionBatch, query_tiles
from tokenmill.sched.sequence import Batch, Sequence

KVCache = list[tuple[torch.Tensor, torch.Tensor]]
_LOGIT_ROWS = 64  # prompt-logprob rows of the vocabulary held at once


class Model(Protocol):
    """What a model family offers the runner."""

    spec: ModelSpec

    @property
    def num_bytes(self) -> int: ...
    def forward(
        self, token_ids: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def allocate_kv_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
) -> KVCache:
    """Zeroed blocks per layer: a masked key weighs nothing, but must be a number.

    On CPU numpy asks the system for zeroed pages, which take no memory before their first use.
    """
    values = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    on_cpu = torch.device(device).type == "cpu"
    keys = (*values[:2], spec.head_dim, block_size) if on_cpu else values

    def zeros(shape: tuple[int, ...]) -> torch.Tensor:
        if on_cpu:
            return torch.from_numpy(np.zeros(shape, np.float32))
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    return [(zeros(keys), zeros(values)) for _ in range(spec.num_layers)]


class ModelRunner:
    """Runs batches of one model over its paged KV cache."""

    def __init__(self, model: Model, kv_cache: KVCache, block_size: int, sampler: Sampler) -> None:
        self.graphs: DecodeGraphs | None = None
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = block_size
        self.sampler = sampler
        self.device = kv_cache[0][0].device
        self.group = model.spec.num_heads // model.spec.num_kv_heads

    def warm_up(self) -> None:
        """Compile and load every kernel before the first request waits for them.

        Prefill and decode of a few tokens in block 0, which belongs to nobody yet.
        """
        request = Request("warm-up", [0, 0, 0], SamplingParams(temperature=0.0))
        seq = Sequence(request, (0, 0, 0), self.block_size, frozenset())
        seq.block_ids = [0]
        for num_new in (2, 1):
            self.run(Batch([(seq, num_new)], num_new))
            seq.num_computed_tokens += num_new

    @torch.inference_mode()
    def capture(self, max_model_len: int, max_size: int) -> None:
        """Capture decode graphs up to max_size sequences; the cache's last block is padding."""
        width = -(-max_model_len // self.block_size)
        self.graphs = DecodeGraphs(
            self.model, self.kv_cache, self.block_size, self.group, width, max_size
        )

    def _replay(self, batch: Batch) -> StepResult | None:
        """A step of single tokens through a captured graph, or None."""
        if self.graphs is None or any(n != 1 for _, n in batch.items):
            return None
        seqs = [seq for seq, _ in batch.items]
        if any(s.num_computed_tokens + 1 != s.num_tokens or s.prompt_logprobs for s in seqs):
            return None
        contexts = np.array([seq.num_computed_tokens for seq in seqs], np.int64)
        logits = self.graphs.run([s.token_ids[-1] for s in seqs], contexts, _block_tables(seqs))
        if logits is None:
            return None
        result = StepResult([[] for _ in seqs])
        self._choose(batch, list(range(len(seqs))), logits, result)
        return result

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Compute every item's new tokens; sample those whose last known token was computed."""
        replayed = self._replay(batch)
        if replayed is not None:
            return replayed
        token_ids, attention = self._prepare(batch)
        hidden = self.model.forward(token_ids, self.kv_cache, attention)
        ends = attention.query_starts[1:].long() - 1
        return self._sample(batch, hidden, ends)

    def _prepare(self, batch: Batch) -> tuple[torch.Tensor, AttentionBatch]:
        """Flatten the items' new tokens and say where each stands in the cache."""
        items = batch.items
        lens = np.array([n for _, n in items], np.int64)
        contexts = np.array([seq.num_computed_tokens for seq, _ in items], np.int64)
        starts = np.concatenate([[0], np.cumsum(lens)])
        owners = np.repeat(np.arange(len(items)), lens)
        positions = np.arange(starts[-1]) - starts[owners] + contexts[owners]
        tables = _block_tables([seq for seq, _ in items])
        slots = tables[owners, positions // self.block_size].astype(np.int64)
        slots = slots * self.block_size + positions % self.block_size
        token_ids: list[int] = []
        for seq, n in items:
            token_ids += seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + n]
        attention = AttentionBatch(
            positions=self._tensor(positions),
            slots=self._tensor(slots),
            query_starts=self._tensor(starts.astype(np.int32)),
            context_lens=self._tensor(contexts.astype(np.int32)),
            block_tables=self._tensor(tables),
            tiles=query_tiles(lens, self.group, self.device, split=self.device.type != "cpu"),
        )
        return self._tensor(np.array(token_ids)), attention

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _sample(self, batch: Batch, hidden: torch.Tensor, ends: torch.Tensor) -> StepResult:
        """Sample the items that reached their last token, and score prompts that ask for it."""
        result = StepResult([[] for _ in batch.items])
        ready = [
            i for i, (s, n) in enumerate(batch.items) if s.num_computed_tokens + n == s.num_tokens
        ]
        for i, (seq, n) in enumerate(batch.items):
            if seq.prompt_logprobs is not None and seq.num_computed_tokens < seq.num_prompt_tokens:
                result.prompt_logprobs[i] = self._prompt_logprobs(seq, n, hidden, int(ends[i]))
        if not ready:
            return result
        self._choose(batch, ready, self.model.logits(hidden[ends[ready]]), result)
        return result

    def _choose(
        self, batch: Batch, ready: list[int], logits: torch.Tensor, result: StepResult
    ) -> None:
        """Sample the ready items from their logits into the result."""
        rows = [batch.items[i][0] for i in ready]
        tokens, logprobs = self.sampler(logits, rows, grammar_masks(rows))
        for i, token in zip(ready, tokens, strict=True):
            result.token_ids[i] = [token]
        if any(entry is not None for entry in logprobs):
            result.logprobs = [None] * len(batch.items)
            for i, entry in zip(ready, logprobs, strict=True):
                result.logprobs[i] = None if entry is None else [entry]

    def _prompt_logprobs(
        self, seq: Sequence, num_new: int, hidden: torch.Tensor, end: int
    ) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt tokens after each of this chunk's, as far as they go."""
        first = seq.num_computed_tokens
        targets = seq.token_ids[first + 1 : min(first + num_new + 1, seq.num_prompt_tokens)]
        rows = hidden[end + 1 - num_new : end + 1 - num_new + len(targets)]
        k = seq.request.sampling.prompt_logprobs or 0
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), _LOGIT_ROWS):
            logits = self.model.logits(rows[start : start + _LOGIT_ROWS].contiguous())
            entries += self.sampler.prompt_logprobs(logits, targets[start : start + _LOGIT_ROWS], k)
        return entries


def _block_tables(seqs: list[Sequence]) -> np.ndarray:
    """int32 [seqs, most blocks of any], padded with block 0."""
    tables = np.zeros((len(seqs), max(len(seq.block_ids) for seq in seqs)), np.int32)
    for row, seq in zip(tables, seqs, strict=True):
        row[: len(seq.block_ids)] = seq.block_ids
    return tables
