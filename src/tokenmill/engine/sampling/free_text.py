"""Constraints by token ids: free text before a grammar, openings before grammars, forbidden tokens.

No text is read here: what ends the free text, and what opens a branch, are token ids.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from tokenmill.core.types import FreeText, TokenRules
from tokenmill.engine.sampling.sampler import Bitmask


class GrammarError(Exception):
    """A grammar left its sequence without a way on."""


class Follower(Protocol):
    """Follows one sequence: which tokens may come next."""

    def allowed(self) -> Bitmask | None:
        """The bitmask [ceil(vocab / 32)] of tokens that may come next; None where all may."""

    def accept(self, token_id: int) -> None:
        """Move on by a sampled token; raises GrammarError where it does not continue."""

    def rollback(self, num_tokens: int) -> None: ...


class Source(Protocol):
    """What sequences can follow from its start: a grammar."""

    def matcher(self, stop_token_ids: Collection[int] | None = None) -> Follower: ...


class FreeTextMatcher:
    """Free text, then what `inner` allows.

    Which of the two holds is a function of the tokens alone, so taking tokens back is easy.
    """

    def __init__(self, inner: Follower, free: FreeText) -> None:
        self._inner = inner
        self._free = free
        self._tokens: list[int] = []
        self._start = -1  # the constraint holds from this token on; -1: not yet

    @property
    def _at_choice(self) -> bool:
        """True where the first token decides whether there is free text at all."""
        return self._free.opening is not None and not self._tokens

    def allowed(self) -> Bitmask | None:
        if self._at_choice and self._free.opening is not None:
            mask = self._inner.allowed()
            return None if mask is None else _with_bits(mask, [self._free.opening])
        return self._inner.allowed() if self._start >= 0 else None

    def accept(self, token_id: int) -> None:
        if self._at_choice and token_id != self._free.opening:
            self._start = 0
        if self._start >= 0:
            self._inner.accept(token_id)
        self._tokens.append(token_id)
        if self._start < 0 and self._ends_here():
            self._start = len(self._tokens)

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        size = len(self._tokens) - num_tokens
        if self._start >= 0:
            self._inner.rollback(min(num_tokens, len(self._tokens) - self._start))
            if size < self._start or not size:
                self._start = -1
        del self._tokens[size:]

    def _ends_here(self) -> bool:
        tokens, begin = self._tokens, self._free.begin
        if tokens[-1] != self._free.end:
            return False
        if not begin:
            return True
        marks = {begin[0], self._free.end, *self._free.breaks}
        at = next((i for i in range(len(tokens) - 2, -1, -1) if tokens[i] in marks), -1)
        return at >= 0 and tuple(tokens[at : at + len(begin)]) == begin


class BranchMatcher:
    """One of several token sequences, then what follows by that one's grammar."""

    def __init__(
        self, branches: list[tuple[tuple[int, ...], Source]], stop_ids: Collection[int] | None
    ) -> None:
        self._branches = branches
        self._stop_ids = stop_ids
        self._opened: list[int] = []
        self._inner: Follower | None = None
        self._num_inner = 0  # tokens of the inner one
        last = max(token for token_ids, _ in branches for token in token_ids)
        self._empty = np.zeros(last // 32 + 1, np.int32)

    def allowed(self) -> Bitmask | None:
        if self._inner is not None:
            return self._inner.allowed()
        size = len(self._opened)
        return _with_bits(self._empty.copy(), [token_ids[size] for token_ids, _ in self._alive()])

    def accept(self, token_id: int) -> None:
        if self._inner is not None:
            self._inner.accept(token_id)
            self._num_inner += 1
            return
        self._opened.append(token_id)
        alive = self._alive()
        if not alive:
            self._opened.pop()
            raise GrammarError(f"token {token_id} opens none of the branches")
        if len(alive[0][0]) == len(self._opened):
            self._inner = alive[0][1].matcher(self._stop_ids)

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            num_inner = min(num_tokens, self._num_inner)
            self._inner.rollback(num_inner)
            self._num_inner -= num_inner
            num_tokens -= num_inner
            self._inner = None if num_tokens else self._inner
        if num_tokens:
            del self._opened[-num_tokens:]

    def _alive(self) -> list[tuple[tuple[int, ...], Source]]:
        opened = tuple(self._opened)
        return [branch for branch in self._branches if branch[0][: len(opened)] == opened]


class Branches:
    """Compiled branches; any number of sequences may follow them."""

    def __init__(self, branches: list[tuple[tuple[int, ...], Source]]) -> None:
        self._branches = branches

    def matcher(self, stop_token_ids: Collection[int] | None = None) -> BranchMatcher:
        """A matcher before all branches."""
        return BranchMatcher(self._branches, stop_token_ids)


class AnyText:
    """No constraint at all, as a source and as what follows it."""

    def matcher(self, stop_token_ids: Collection[int] | None = None) -> AnyText:
        """Any text has one state alone."""
        return self

    def allowed(self) -> None:
        """All tokens may come next."""

    def accept(self, token_id: int) -> None:
        """Every token continues it."""

    def rollback(self, num_tokens: int) -> None:
        """There is nothing to take back."""


class RuledMatcher:
    """What `inner` allows without the tokens that rules forbid; `banned` are those in free text."""

    def __init__(
        self, inner: Follower, rules: TokenRules, vocab_size: int, banned: Collection[int]
    ) -> None:
        self._inner = inner
        self._sequences = rules.banned
        self._tokens: list[int] = []
        ids = range(vocab_size) if rules.allowed is None else rules.allowed
        self._free = _bits([i for i in ids if i < vocab_size], vocab_size)
        self._bound = self._free & ~_bits(banned, vocab_size)

    def allowed(self) -> Bitmask:
        inner = self._inner.allowed()
        if inner is None:
            mask = self._bound.copy()
        else:
            size = min(inner.size, self._free.size)
            mask = inner[:size] & self._free[:size]
        for *before, last in self._sequences:
            if before == self._tokens[len(self._tokens) - len(before) :] and last // 32 < mask.size:
                mask.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
        if not mask.any():
            raise GrammarError("allowed_token_ids and bad_words leave no token to continue with")
        return mask

    def accept(self, token_id: int) -> None:
        self._inner.accept(token_id)
        self._tokens.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        del self._tokens[len(self._tokens) - num_tokens :]


def _bits(token_ids: Collection[int], vocab_size: int) -> Bitmask:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _with_bits(mask: Bitmask, token_ids: list[int]) -> Bitmask:
    """The mask with these tokens allowed; it grows where it ends before them."""
    size = max(token_ids) // 32 + 1
    if size > mask.size:
        mask = np.concatenate((mask, np.zeros(size - mask.size, np.int32)))
    words = mask.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask
