"""The sampler of a GPU: the answers of sampler.py, and the host never waits for them.

A launch queues kernels and copies and returns; what it knows of the sequences is what the host
knows. The newest token may still be on the device alone, in `last_ids`: penalties take it there.
A grammar's mask needs the token on the host: who follows one is sampled when its mask is set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, StructuredOutput, TokenLogprobs
from tokenmill.engine.sampling.sampler import (
    SampledRow,
    biases,
    forced_token,
    grammar_masks,
    is_greedy,
    is_penalised,
    state_of,
    token_counts,
    uniforms,
)
from tokenmill.kernels import sampling as kernels
from tokenmill.kernels.sampling import Biases, Filters, Logprobs, Masks, Penalties
from tokenmill.sched.sequence import PENDING, Sequence


def upload(array: NDArray, device: torch.device) -> torch.Tensor:
    """Start the copy of an array; pageable memory would make the host wait for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of a step, and the log-probabilities on their way to the host."""

    token_ids: torch.Tensor  # int32 [rows] on the device; -1: the logits are not finite
    logprobs: Logprobs | None = None  # of logprob_rows, in pinned memory
    logprob_rows: Items[int] = ()
    num_best: Items[int] = ()  # of each of these rows
    known: list[TokenLogprobs | None] | None = None  # of all rows, where the host has sampled

    def finish(self, token_ids: list[int]) -> list[TokenLogprobs | None]:
        """Log-probabilities by row, once the step is over and its token_ids are on the host."""
        if self.known is not None:
            return self.known
        entries: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self.logprobs is None:
            return entries
        fields = [field.tolist() for field in self.logprobs]
        for row, k, chosen, rank, ids, best in zip(
            self.logprob_rows, self.num_best, *fields, strict=True
        ):
            known = [value for value in best[:k] if value > -math.inf]
            tokens = [token_ids[row], *ids[: len(known)]]
            entries[row] = TokenLogprobs(tokens, [chosen, *known], rank)
        return entries


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the parameters of a batch's rows ask for: as long as the rows stay, so does it."""

    rows: list[SampledRow]
    filters: Filters | None  # None: all rows are greedy
    seeds: NDArray[np.uint64]  # [rows], empty without filters
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # each fp32 [rows]
    penalised: list[bool]
    may_be_biased: bool
    may_be_masked: bool
    may_be_forced: bool
    logprob_rows: list[int]
    logprob_index: torch.Tensor | None  # None: all rows or none
    num_best: list[int]


class DeviceSampler:
    """Turns the logits of the rows that sample in a step into tokens, without waiting."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None

    def wants_best(self, rows: list[SampledRow]) -> bool:
        """True when nothing but the largest logit of each row is asked for."""
        return all(map(_takes_best, rows))

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile what any launch can ask for, over logits [rows, vocab] of the type to come."""
        last_ids = torch.zeros(1, dtype=torch.int32, device=logits.device)
        masked = SamplingParams(structured=StructuredOutput("json_object"))
        changed = replace(masked, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=1)
        for params in (SamplingParams(temperature=0.0), SamplingParams(), masked, changed):
            seq = Sequence(Request("warm-up", Generate([0], params)), (0, 0, 0), 2, frozenset())
            state_of(seq).mask = np.full(1, -1, np.int32)
            self.launch(logits[:1], [seq], last_ids)
        self._plan = None

    def launch(
        self, logits: torch.Tensor, rows: list[SampledRow], last_ids: torch.Tensor
    ) -> Sampled:
        """Queue the sampling of logits [rows, vocab], which stay as they are.

        last_ids, int32 [rows] on the device: the token that each row was just fed.
        """
        if self._plan is None or self._plan.rows != rows:
            self._plan = _make_plan(rows, logits.device)
        plan, adjusted = self._plan, logits
        if plan.penalties is not None or plan.may_be_biased:
            adjusted = _adjusted(logits, plan, last_ids)
        if plan.may_be_masked and (masks := _masks(plan, logits)) is not None:
            adjusted = kernels.masked(adjusted, masks)
        if plan.filters is None:
            token_ids = kernels.argmax(adjusted)
        else:
            token_ids = kernels.sample(adjusted, plan.filters, _uniforms(plan, logits.device))
        if plan.may_be_forced:
            _force(token_ids, plan)
        if not plan.logprob_rows:
            return Sampled(token_ids)
        return Sampled(
            token_ids, _logprobs(logits, token_ids, plan), plan.logprob_rows, plan.num_best
        )


def _takes_best(seq: SampledRow) -> bool:
    params = seq.request.task.sampling
    plain = is_greedy(params) and params.logprobs is None and params.structured is None
    plain = plain and forced_token(seq) is None
    return plain and not (is_penalised(params) or params.logit_bias or params.min_tokens)


def _make_plan(rows: list[SampledRow], device: torch.device) -> _Plan:
    params = [seq.request.task.sampling for seq in rows]
    penalised = [is_penalised(p) for p in params]
    logprob_rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    some = 0 < len(logprob_rows) < len(rows)
    drawn = not all(map(is_greedy, params))
    return _Plan(
        list(rows),
        _filters(params, device) if drawn else None,
        np.array([state_of(seq).seed for seq in rows if drawn], np.uint64),
        _penalty_parameters(params, device) if any(penalised) else None,
        penalised,
        any(p.logit_bias or p.min_tokens > 0 or p.structured for p in params),
        any(p.structured for p in params),
        any(seq.thinking is not None for seq in rows),
        logprob_rows,
        upload(np.array(logprob_rows), device) if some else None,
        [p.logprobs for p in params if p.logprobs is not None],
    )


def _filters(params: list[SamplingParams], device: torch.device) -> Filters:
    temperatures = [0.0 if is_greedy(p) else p.temperature for p in params]
    return Filters(
        upload(np.array(temperatures), device),
        upload(np.array([p.min_p for p in params]), device),
        upload(np.array([p.top_k for p in params], np.int32), device),
        upload(np.array([p.top_p for p in params]), device),
    )


def _penalty_parameters(
    params: list[SamplingParams], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        upload(np.array([p.repetition_penalty for p in params], np.float32), device),
        upload(np.array([p.frequency_penalty for p in params], np.float32), device),
        upload(np.array([p.presence_penalty for p in params], np.float32), device),
    )


def _force(token_ids: torch.Tensor, plan: _Plan) -> None:
    """Put the tokens that rows must have in the place of what was drawn."""
    forced = [(row, t) for row, seq in enumerate(plan.rows) if (t := forced_token(seq)) is not None]
    if forced:
        rows, tokens = upload(np.array(forced, np.int32).T.copy(), token_ids.device)
        token_ids.index_copy_(0, rows.long(), tokens)


def _uniforms(plan: _Plan, device: torch.device) -> torch.Tensor:
    """The number that decides each row's token, fp64 [rows]."""
    positions = np.array([seq.num_output_tokens for seq in plan.rows])
    return upload(uniforms(plan.seeds, positions.astype(np.uint64)), device)


def _adjusted(logits: torch.Tensor, plan: _Plan, last_ids: torch.Tensor) -> torch.Tensor:
    """The logits, or an fp32 copy if a penalty or bias changes one."""
    penalties = _penalties(plan, last_ids)
    bias = _biases(plan, logits) if plan.may_be_biased else None
    if penalties is None and bias is None:
        return logits
    return kernels.adjust(logits, penalties, bias)


def _penalties(plan: _Plan, last_ids: torch.Tensor) -> Penalties | None:
    if plan.penalties is None:
        return None
    device, none = last_ids.device, (np.zeros(0, np.int32), np.zeros(0, np.float32))
    counts = [
        token_counts(seq) if penalised else none
        for seq, penalised in zip(plan.rows, plan.penalised, strict=True)
    ]
    pending = [seq.token_ids[-1] == PENDING for seq in plan.rows]
    return Penalties(
        upload(_offsets([ids.size for ids, _ in counts]), device),
        upload(np.concatenate([ids for ids, _ in counts]), device),
        upload(np.concatenate([num_outputs for _, num_outputs in counts]), device),
        *plan.penalties,
        last_ids,
        upload(np.array(pending, np.int32), device),
    )


def _biases(plan: _Plan, logits: torch.Tensor) -> Biases | None:
    device, size = logits.device, logits.shape[1]
    entries = [biases(seq, size) for seq in plan.rows]
    if not any(entries):
        return None
    ids = list(itertools.chain.from_iterable(entries))
    values = list(itertools.chain.from_iterable(bias.values() for bias in entries))
    return Biases(
        upload(_offsets([len(bias) for bias in entries]), device),
        upload(np.array(ids, np.int32), device),
        upload(np.array(values, np.float32), device),
    )


def _masks(plan: _Plan, logits: torch.Tensor) -> Masks | None:
    """What the rows with a mask allow; a mask that ends early allows nothing beyond its end."""
    by_row = grammar_masks(plan.rows)
    found = [mask for mask in by_row if mask is not None]
    if not found:
        return None
    bounded = np.array([mask is not None for mask in by_row])
    numbers = np.where(bounded, bounded.cumsum() - 1, -1).astype(np.int32)
    words = np.zeros((len(found), -(-logits.shape[1] // 32)), np.int32)
    for own, mask in zip(words, found, strict=True):
        own[: mask.size] = mask[: own.size]
    return Masks(upload(numbers, logits.device), upload(words, logits.device))


def _offsets(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, plan: _Plan) -> Logprobs:
    """Those of the rows that ask for them, their copies to the host under way."""
    if plan.logprob_index is not None:
        logits, token_ids = logits[plan.logprob_index], token_ids[plan.logprob_index]
    found = kernels.logprobs(logits, token_ids, max(plan.num_best))
    return Logprobs(*(field.to("cpu", non_blocking=True) for field in found))
