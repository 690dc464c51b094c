"""From logits to tokens: penalties, constraints, filters, one reproducible draw, log-probabilities.

The order: repetition, frequency and presence penalty, logit_bias, min_tokens and grammar masks,
then, as in vLLM, temperature, min_p, top_k, top_p. Filters are thresholds on the logit: tokens with
equal logits are kept or dropped together. Log-probabilities are those of the raw logits.

A token is drawn by inverting the cumulative distribution in token-id order at one uniform number,
a hash of (seed, output position). Neither the other rows of the batch nor preemption or chunking
can change it, and no sort is needed.

Rows are numpy views of the CPU tensor: at one row of 50,000 to 150,000 logits numpy's argmax,
partition and sort take a fraction of the time of torch's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.types import SamplingParams, TokenLogprobs
from tokenmill.sched.sequence import PENDING

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.core.requests import Request
    from tokenmill.engine.sampling.free_text import Follower
    from tokenmill.sched.sequence import Sequence
    from tokenmill.sched.trackers import Thinking

Row = NDArray[np.float32]  # [vocab]
Ids = NDArray[np.intp]
Bitmask = NDArray[np.int32]  # [ceil(vocab / 32)], bit i of word w allows token 32 w + i

MIN_TEMPERATURE = 1e-5  # below it the row is greedy, as in vLLM
REACH = 12.0  # tokens this far below the best, in units of the temperature, are looked at last
NOT_FINITE = "the largest logit of a row is not finite"
_BLOCK = 256  # probabilities summed at once while the drawn token is searched
_MASK64 = 2**64 - 1

U64 = TypeVar("U64", int, NDArray[Any])  # an array must be of uint64


class SampledRow(Protocol):
    """What the sampler asks about a row: a Sequence, or one with drafts after it."""

    @property
    def request(self) -> Request: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def thinking(self) -> Thinking | None: ...

    sampler_state: object | None


class TokenCounts:
    """The tokens of one sequence, each once, and how often it was generated."""

    __slots__ = ("_ids", "_num_outputs", "_num_seen", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._num_seen = 0  # tokens of the sequence that are counted
        self._ids = np.zeros(64, np.int32)
        self._num_outputs = np.zeros(64, np.float32)

    def copy(self) -> TokenCounts:
        other = TokenCounts()
        other._slots, other._num_seen = dict(self._slots), self._num_seen
        other._ids, other._num_outputs = self._ids.copy(), self._num_outputs.copy()
        return other

    def update(self, seq: SampledRow) -> tuple[NDArray[np.int32], Row]:
        """Count the tokens that are new; returns distinct ids, and outputs of each (0: prompt).

        A pending token is counted once it is known.
        """
        slots, token_ids = self._slots, seq.token_ids
        num_known = len(token_ids) - (token_ids[-1] == PENDING)
        for position in range(self._num_seen, num_known):
            token = token_ids[position]
            slot = slots.setdefault(token, len(slots))
            if slot == self._ids.size:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._num_outputs = np.concatenate(
                    (self._num_outputs, np.zeros_like(self._num_outputs))
                )
            self._ids[slot] = token
            self._num_outputs[slot] += position >= seq.num_prompt_tokens
        self._num_seen = num_known
        return self._ids[: len(slots)], self._num_outputs[: len(slots)]


@dataclass(slots=True)
class SequenceState:
    """What the engine keeps in Sequence.sampler_state; it outlives preemption, as the tokens do."""

    seed: int
    counts: TokenCounts | None = None  # made when a penalty first asks for it
    matcher: Follower | None = None
    mask: Bitmask | None = None  # what the matcher allows in this step
    banned: tuple[int, ...] = ()  # what it does not where it has no mask
    ahead: list[DraftedRow] = field(default_factory=list)  # the rows of its drafts


class DraftedRow:
    """A sequence with its first `depth` drafts taken for granted: what a verified row samples."""

    __slots__ = ("depth", "sampler_state", "seq")

    def __init__(self, seq: Sequence, depth: int) -> None:
        self.seq, self.depth = seq, depth
        self.sampler_state: object | None = SequenceState(state_of(seq).seed)

    @property
    def request(self) -> Request:
        return self.seq.request

    @property
    def token_ids(self) -> list[int]:
        return self.seq.token_ids + self.seq.draft_ids[: self.depth]

    @property
    def num_tokens(self) -> int:
        return len(self.seq.token_ids) + self.depth

    @property
    def num_prompt_tokens(self) -> int:
        return self.seq.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.seq.num_prompt_tokens

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.seq.stop_ids

    @property
    def thinking(self) -> Thinking | None:
        return self.seq.thinking


def sampled_rows(seq: Sequence, num_drafts: int) -> list[SampledRow]:
    """The rows of a step in which a sequence samples: its own, and one after each draft."""
    if not num_drafts:
        return [seq]
    ahead = state_of(seq).ahead
    ahead += [DraftedRow(seq, depth) for depth in range(len(ahead) + 1, num_drafts + 1)]
    if is_penalised(seq.request.task.sampling):
        token_counts(seq)  # of all known tokens
        counts = state_of(seq).counts
        assert counts is not None
        for row in ahead[:num_drafts]:
            state_of(row).counts = counts.copy()
    return [seq, *ahead[:num_drafts]]


def state_of(seq: SampledRow) -> SequenceState:
    """The sequence's state, made at first use; a request without a seed gets a random one."""
    if seq.sampler_state is None:
        seed = seq.request.task.sampling.seed
        seed = random.getrandbits(64) if seed is None else seed & _MASK64
        seq.sampler_state = SequenceState(seed)
    assert isinstance(seq.sampler_state, SequenceState)
    return seq.sampler_state


def forced_token(row: SampledRow) -> int | None:
    """What the row must sample, where a budget of reasoning is spent."""
    return None if row.thinking is None else row.thinking.forced(row.num_tokens)


def grammar_masks(rows: list[SampledRow]) -> list[Bitmask | None]:
    """The Sampler's masks of this step, as the engine set them before the run."""
    return [state_of(seq).mask for seq in rows]


def token_counts(seq: SampledRow) -> tuple[NDArray[np.int32], Row]:
    """Distinct tokens of the sequence, and how often each was generated."""
    state = state_of(seq)
    if state.counts is None:
        state.counts = TokenCounts()
    return state.counts.update(seq)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides a token: 48 bits of a hash of seed and position."""
    return (splitmix64(splitmix64(seed) + position) >> 16) * 2.0**-48


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    hashes = splitmix64(splitmix64(seeds) + positions)
    return (hashes >> 16).astype(np.float64) * 2.0**-48


def splitmix64(value: U64) -> U64:
    """The first output of the splitmix64 generator seeded with `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


class Sampler:
    """Turns the logits of the rows that sample in a step into tokens and log-probabilities."""

    def __call__(
        self,
        logits: Tensor,
        rows: list[SampledRow],
        masks: list[Bitmask | None],
        newest: list[int] | None = None,
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row of fp32 logits [rows, vocab], which are left as they are.

        It is -1 where the row has no largest logit, or none that is allowed.

        `newest` are the tokens that the rows were just fed: what a pending token turned out to be.
        """
        values, fed = _values(logits), newest or [PENDING] * len(rows)
        if all(map(_is_plain, rows, masks)):
            best = values.argmax(-1)
            finite = np.isfinite(values[np.arange(len(rows)), best])
            token_ids: list[int] = np.where(finite, best, -1).tolist()
        else:
            token_ids = [_sampled(*row) for row in zip(values, rows, masks, fed, strict=True)]
        forced = map(forced_token, rows)
        token_ids = [t if f is None else f for t, f in zip(token_ids, forced, strict=True)]
        logprobs = [
            None
            if token < 0 or (k := seq.request.task.sampling.logprobs) is None
            else token_logprobs(row, token, k)
            for row, seq, token in zip(values, rows, token_ids, strict=True)
        ]
        return token_ids, logprobs

    def prompt_logprobs(self, logits: Tensor, token_ids: list[int], k: int) -> list[TokenLogprobs]:
        """Log-probabilities of a prompt: row i of logits [tokens, vocab] predicts token_ids[i]."""
        values = _values(logits)
        return [token_logprobs(row, t, k) for row, t in zip(values, token_ids, strict=True)]


def _values(logits: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = logits.numpy(force=True)
    if values.dtype != np.float32 or values.ndim != 2:
        raise TypeError(f"logits must be fp32 [rows, vocab], got {values.dtype} {values.shape}")
    return values


def check_finite(best: float) -> None:
    if not math.isfinite(best):
        raise FloatingPointError(NOT_FINITE)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def is_penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def biases(seq: SampledRow, vocab_size: int) -> dict[int, float]:
    """logit_bias, and -inf for what free text has not, and for stop ids before min_tokens."""
    params, banned = seq.request.task.sampling, state_of(seq).banned
    early = seq.num_output_tokens < params.min_tokens
    if not early and not banned:
        return params.logit_bias or {}
    ids = seq.stop_ids.union(banned) if early else banned
    masked = (token for token in ids if token < vocab_size)
    return {**(params.logit_bias or {}), **dict.fromkeys(masked, -math.inf)}


def is_adjusted(seq: SampledRow) -> bool:
    params = seq.request.task.sampling
    return (
        bool(params.logit_bias or state_of(seq).banned)
        or seq.num_output_tokens < params.min_tokens
        or is_penalised(params)
    )


def _is_plain(seq: SampledRow, mask: Bitmask | None) -> bool:
    """Nothing but the largest logit decides."""
    return mask is None and is_greedy(seq.request.task.sampling) and not is_adjusted(seq)


def _sampled(row: Row, seq: SampledRow, mask: Bitmask | None, newest: int) -> int:
    try:
        return _sample(row, seq, mask, newest)
    except FloatingPointError:
        return -1


def _sample(row: Row, seq: SampledRow, mask: Bitmask | None, newest: int) -> int:
    params = seq.request.task.sampling
    if is_adjusted(seq):
        row = adjusted(row, seq, newest)
    allowed = None if mask is None else allowed_ids(mask, row.size)
    if allowed is not None:
        row = row[allowed]
    if is_greedy(params):
        index = int(row.argmax())
        check_finite(float(row[index]))
    else:
        ids, probs = filtered_probs(row, params)
        index = int(ids[draw(probs, uniform(state_of(seq).seed, seq.num_output_tokens))])
    return index if allowed is None else int(allowed[index])


def adjusted(row: Row, seq: SampledRow, newest: int = PENDING) -> Row:
    """A copy of the logits after penalties, logit_bias and min_tokens."""
    row = row.copy()
    if is_penalised(seq.request.task.sampling):
        _penalise(row, seq, newest)
    bias = biases(seq, row.size)
    if bias:
        row[list(bias)] += np.array(list(bias.values()), np.float32)
    return row


def _penalise(row: Row, seq: SampledRow, newest: int) -> None:
    """Repetition counts prompt and output; frequency and presence count the output alone."""
    params = seq.request.task.sampling
    ids, num_outputs = token_counts(seq)
    if seq.token_ids[-1] == PENDING and newest != PENDING:
        ids, num_outputs = _with_output(ids, num_outputs, newest)
    logits, penalty = row[ids], params.repetition_penalty
    logits = np.where(logits > 0, logits / penalty, logits * penalty)
    logits -= params.frequency_penalty * num_outputs
    logits -= params.presence_penalty * (num_outputs > 0)
    row[ids] = logits


def _with_output(
    ids: NDArray[np.int32], num_outputs: Row, token: int
) -> tuple[NDArray[np.int32], Row]:
    if token not in ids:
        return np.append(ids, np.int32(token)), np.append(num_outputs, np.float32(1.0))
    return ids, num_outputs + (ids == token)


def allowed_ids(mask: Bitmask, vocab_size: int) -> Ids:
    """The token ids that a bitmask allows; ids beyond its end are not."""
    bits = np.unpackbits(
        mask.view(np.uint8), count=min(mask.size * 32, vocab_size), bitorder="little"
    )
    return np.flatnonzero(bits)


def filtered_probs(logits: Row, params: SamplingParams) -> tuple[Ids, NDArray[np.float32]]:
    """The token ids, ascending, that survive min_p, top_k and top_p, and their probabilities."""
    best = float(logits.max())
    check_finite(best)
    scale, size = params.temperature, logits.size
    floor = float(np.finfo(np.float32).min)
    if params.min_p > 0.0:
        floor = max(floor, best + scale * math.log(params.min_p))
    if 0 < params.top_k < size:
        ids = _top_k(logits, params.top_k, floor, best - REACH * scale)
        weights = _weights(logits[ids], best, scale)
    elif params.min_p > 0.0:
        ids = np.flatnonzero(logits >= floor)
        weights = _weights(logits[ids], best, scale)
    else:
        ids = _all_ids(size)
        weights = _weights(logits, best, scale)
    if params.top_p < 1.0:
        kept = _top_p(weights, params.top_p)
        ids, weights = ids[kept], weights[kept]
    return ids, weights / weights.sum(dtype=np.float64).astype(np.float32)


@lru_cache(maxsize=4)
def _all_ids(size: int) -> Ids:
    ids = np.arange(size)
    ids.flags.writeable = False
    return ids


def _weights(logits: Row, best: float, scale: float) -> Row:
    weights = logits - np.float32(best)
    if scale != 1.0:
        weights /= np.float32(scale)
    np.exp(weights, out=weights)
    return weights


def _top_k(logits: Row, k: int, floor: float, near: float) -> Ids:
    """Ids, ascending, of the logits that reach both the k-th largest and the floor.

    The k-th largest is looked for among those that reach `near`, and among all if they are fewer.
    """
    ids = np.flatnonzero(logits >= max(floor, near))
    if ids.size < k and near > floor:
        ids = np.flatnonzero(logits >= floor)
    if ids.size > k:
        values = logits[ids]
        ids = ids[values >= np.partition(values, -k)[-k]]
    return ids


def _top_p(weights: Row, top_p: float) -> Ids:
    """Indices, ascending, of the largest weights whose sum first reaches the share top_p.

    Only weights near the best are sorted, if these suffice.
    """
    target = top_p * float(weights.sum(dtype=np.float64))
    for reach in (REACH / 3, REACH, math.inf):
        near = np.flatnonzero(weights >= math.exp(-reach))
        values = weights[near]
        if values.sum(dtype=np.float64) >= target:
            break
    ordered = np.sort(values)[::-1]
    sums = np.cumsum(ordered, dtype=np.float64)
    last = min(int(np.searchsorted(sums, target)), ordered.size - 1)
    kept: Ids = near[values >= ordered[last]]
    return kept


def draw(probs: NDArray[np.float32], number: float) -> int:
    """The first index whose cumulative probability exceeds `number`, uniform in [0, 1)."""
    starts = np.arange(0, probs.size, _BLOCK)
    sums = np.cumsum(np.add.reduceat(probs, starts, dtype=np.float64))
    target = number * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    start = block * _BLOCK
    within = probs[start : start + _BLOCK]
    sums_within = np.cumsum(within, dtype=np.float64) + (sums[block - 1] if block else 0.0)
    index = int(np.searchsorted(sums_within, target, side="right"))
    return start + min(index, int(np.flatnonzero(within)[-1]))  # the two sums round differently


def token_logprobs(row: Row, token: int, k: int) -> TokenLogprobs:
    """Log-probability of a token and of the k best, and the token's rank, from raw logits."""
    best = float(row.max())
    check_finite(best)
    log_total = best + math.log(_weights(row, best, 1.0).sum(dtype=np.float64))
    ids = [token]
    if k > 0:
        reach = _top_k(row, min(k, row.size), float(np.finfo(np.float32).min), best - REACH)
        ids += reach[np.argsort(-row[reach], kind="stable")][:k].tolist()
    logprobs = (row[ids].astype(np.float64) - log_total).tolist()
    return TokenLogprobs(ids, logprobs, 1 + int(np.count_nonzero(row > row[token])))
