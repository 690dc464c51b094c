"""Sampling on the logits' device: best token, penalties and biases, one draw, log-probabilities.

The meaning is that of the numpy sampler; nothing here waits for the device. A row whose largest
logit is not finite gives token -1. Every row is computed by itself, whatever the others are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmill.kernels import always, kernel

LOGPROB_ROWS = 64  # rows of the vocabulary whose 64-bit sort keys are held at once


class Penalties(NamedTuple):
    """The distinct tokens of each row, [offsets[row], offsets[row + 1]), and its penalties."""

    offsets: torch.Tensor  # int32 [rows + 1]
    ids: torch.Tensor  # int32 [entries], distinct within a row
    num_outputs: torch.Tensor  # fp32 [entries], how often the token was generated
    repetition: torch.Tensor  # fp32 [rows]
    frequency: torch.Tensor  # fp32 [rows]
    presence: torch.Tensor  # fp32 [rows]
    last_ids: torch.Tensor  # int32 [rows], the newest token of each row
    pending: torch.Tensor  # int32 [rows], 1: the newest token was generated and is not counted yet


class Biases(NamedTuple):
    """What is added to logits: entries [offsets[row], offsets[row + 1]) belong to a row."""

    offsets: torch.Tensor  # int32 [rows + 1]
    ids: torch.Tensor  # int32 [entries], distinct within a row
    values: torch.Tensor  # fp32 [entries]


class Masks(NamedTuple):
    """What grammars allow: bit i of word w of a mask allows token 32 w + i of its row."""

    numbers: torch.Tensor  # int32 [rows], which mask bounds a row of the logits; -1: none
    words: torch.Tensor  # int32 [masks, ceil(vocab / 32)]


class Filters(NamedTuple):
    temperature: torch.Tensor  # fp64 [rows], 0: greedy
    min_p: torch.Tensor  # fp64 [rows], 0: off
    top_k: torch.Tensor  # int32 [rows], 0: off
    top_p: torch.Tensor  # fp64 [rows], 1: off


class Logprobs(NamedTuple):
    """Log-probabilities of one token per row and of the k best."""

    chosen: torch.Tensor  # fp64 [rows]
    ranks: torch.Tensor  # int64 [rows], 1: no token is likelier
    best_ids: torch.Tensor  # int64 [rows, k], the likeliest first, equal ones by id
    best: torch.Tensor  # fp64 [rows, k]


@kernel(gpu=always)
def argmax(logits: torch.Tensor, least: int = -1) -> torch.Tensor:
    """The id of each row's largest logit, the lowest of equals: [rows, vocab] -> int32 [rows].

    `least`, if that logit is not finite.
    """
    best, ids = logits.max(-1)
    return torch.where(best.isfinite(), ids, least).int()


@kernel(gpu=always)
def masked(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """A copy of logits [rows, vocab] that is -inf where the mask of a row does not allow it."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]] > 0
    own = allowed.index_select(0, masks.numbers.clamp(min=0).long())
    return logits.where(own | (masks.numbers < 0)[:, None], -torch.inf)


@kernel(gpu=always)
def adjust(
    logits: torch.Tensor, penalties: Penalties | None, biases: Biases | None
) -> torch.Tensor:
    """An fp32 copy of logits [rows, vocab] after penalties and, on top of them, biases."""
    logits = logits.to(torch.float32, copy=True)
    if penalties is not None:
        logits = _penalised(logits, penalties)
    if biases is not None:
        logits[_owners(biases.offsets, biases.ids), biases.ids.long()] += biases.values
    return logits


def _owners(offsets: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=len(entries))


def _penalised(logits: torch.Tensor, p: Penalties) -> torch.Tensor:
    counts = torch.full_like(logits, -1.0)  # -1: the row does not have the token
    counts[_owners(p.offsets, p.ids), p.ids.long()] = p.num_outputs
    last = p.last_ids.clamp(min=0).long()[:, None]
    known = counts.gather(1, last)
    pending = (p.pending > 0) & (p.last_ids >= 0)
    counts.scatter_(1, last, torch.where(pending[:, None], known.clamp(min=0) + 1, known))
    repetition = p.repetition[:, None]
    changed = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = changed - p.frequency[:, None] * counts
    changed = changed - p.presence[:, None] * (counts > 0)
    return torch.where(counts >= 0, changed, logits)


@kernel(gpu=always)
def sample(logits: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """One token per row of logits [rows, vocab] by its number of fp64 [rows] -> int32 [rows]."""
    logits = logits.float()
    greedy = argmax.reference(logits)
    weights = _weights(logits, logits, filters)
    weights = torch.where(logits >= _thresholds(logits, filters), weights, 0.0)
    sums = weights.double().cumsum(-1)
    drawn = (sums <= uniforms[:, None] * sums[:, -1:]).sum(-1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    drawn = drawn.minimum(torch.where(weights > 0, ids, 0).amax(-1)).int()
    return torch.where((filters.temperature > 0) & (greedy >= 0), drawn, greedy)


def _weights(values: torch.Tensor, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Probabilities of `values` over that of the row's best token."""
    scale = torch.where(filters.temperature > 0, filters.temperature, 1.0).float()
    return ((values - logits.amax(-1, keepdim=True)) / scale[:, None]).exp()


def _thresholds(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The smallest logit of each row, fp32 [rows, 1], that min_p, top_k and top_p let pass."""
    size = logits.shape[1]
    scale, min_p, top_k, top_p = (x[:, None] for x in filters)
    ordered = logits.sort(-1, descending=True).values
    floor = (ordered[:, :1].double() + scale * min_p.log()).clamp(min=torch.finfo().min).float()
    kth = ordered.gather(1, (top_k.long() - 1).clamp(0, size - 1))
    floor = torch.where((top_k > 0) & (top_k < size), floor.maximum(kth), floor)
    weights = torch.where(ordered >= floor, _weights(ordered, logits, filters), 0.0)
    sums = weights.double().cumsum(-1)
    last = (sums < top_p * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=size - 1)
    return torch.where(top_p < 1.0, floor.maximum(ordered.gather(1, last)), floor)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    """Log-probabilities of token_ids [rows], and of the k best, under raw logits [rows, vocab]."""
    parts = zip(logits.split(LOGPROB_ROWS), token_ids.split(LOGPROB_ROWS), strict=True)
    fields = zip(*(_logprobs(rows.float(), ids, k) for rows, ids in parts), strict=True)
    return Logprobs(*(torch.cat(field) for field in fields))


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> Logprobs:
    best = logits.amax(-1, keepdim=True)
    log_total = best.double() + (logits - best).exp().sum(-1, True, dtype=torch.float64).log()
    chosen = logits.gather(1, token_ids.clamp(min=0).long()[:, None])  # -1: no token, no index
    best_ids = _best_ids(logits, min(k, logits.shape[1]))
    return Logprobs(
        (chosen.double() - log_total)[:, 0],
        1 + (logits > chosen).sum(-1),
        best_ids,
        logits.gather(1, best_ids).double() - log_total,
    )


def _best_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of each row by (logit, lowest id): topk alone leaves the order of equals open."""
    if k == 0:
        return torch.zeros(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[1] - 1
    ids = torch.arange(last + 1, device=logits.device)
    keys = (order << 32) + (last - ids)
    return last - (keys.topk(k, -1).values & 0xFFFFFFFF)
