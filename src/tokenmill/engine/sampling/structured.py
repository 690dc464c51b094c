"""Requests with structured output: they wait for their grammars, which then bound each token."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from tokenmill.core.types import (
    End,
    FinishReason,
    InvalidRequestError,
    Request,
    SamplingParams,
    StepResult,
)
from tokenmill.engine.sampling.free_text import Follower, FreeTextMatcher, GrammarError, Source
from tokenmill.engine.sampling.grammar import GrammarBackend
from tokenmill.engine.sampling.sampler import Bitmask, sampled_rows, state_of
from tokenmill.sched.sequence import Batch, Sequence, num_drafts

COMPILE_TIMEOUT_NS = 60 * 10**9
_IDLE_WAIT_S = 0.005  # how long a step without a batch waits for a grammar

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Compiling:
    """A request that waits for its grammar, outside the scheduler."""

    request: Request
    grammar: Future[Source]
    give_up_ns: int


class StructuredOutputs:
    """The grammars of one engine's requests; without a backend there can be none."""

    def __init__(self, backend: GrammarBackend | None) -> None:
        self._backend = backend
        self._compiling: dict[str, _Compiling] = {}
        self._compiled: dict[str, Source] = {}  # of requests that have sampled no token yet

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._compiling or request_id in self._compiled

    @property
    def num_waiting(self) -> int:
        """The requests that wait for their grammars."""
        return len(self._compiling)

    def warm_up(self) -> None:
        """Start to load what the first structured request would wait for, in the background."""
        if self._backend is not None:
            self._backend.warm_up()

    def refusal(self, sampling: SamplingParams) -> str | None:
        """Why structured output with these parameters is not taken: one sentence, or None."""
        if self._backend is None:
            return "this engine has no structured output"
        if sampling.ignore_eos or sampling.min_tokens:
            name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
            return f"{name} does not go with structured output, which ends itself"
        return None

    def compile(self, request: Request, now_ns: int) -> None:
        """Let a request wait for its grammar."""
        assert self._backend is not None and request.sampling.structured is not None
        grammar = self._backend.compile_async(request.sampling.structured)
        entry = _Compiling(request, grammar, now_ns + COMPILE_TIMEOUT_NS)
        self._compiling[request.request_id] = entry

    def take_ready(self, now_ns: int) -> list[tuple[Request, End | None]]:
        """The requests that wait no more: their grammar is compiled, or they have to end."""
        ready: list[tuple[Request, End | None]] = []
        for request_id, entry in list(self._compiling.items()):
            deadline_ns = entry.request.deadline_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                ready.append((entry.request, End(FinishReason.ABORT, "deadline")))
            elif entry.grammar.done():
                ready.append((entry.request, self._take(request_id, entry.grammar)))
            elif entry.give_up_ns <= now_ns:
                message = f"the grammar was not compiled within {COMPILE_TIMEOUT_NS // 10**9} s"
                ready.append((entry.request, End(FinishReason.REJECT, "invalid_grammar", message)))
            else:
                continue
            del self._compiling[request_id]
        return ready

    def _take(self, request_id: str, grammar: Future[Source]) -> End | None:
        error = grammar.exception()
        if error is None:
            self._compiled[request_id] = grammar.result()
            return None
        if isinstance(error, InvalidRequestError):
            return End(FinishReason.REJECT, "invalid_grammar", str(error))
        _log.error("the grammar compiler failed", exc_info=error)
        return End(FinishReason.ERROR, error=f"{type(error).__name__}: {error}")

    def wait(self) -> None:
        """Give the compile threads a moment."""
        grammars = [entry.grammar for entry in self._compiling.values()]
        wait(grammars, _IDLE_WAIT_S, FIRST_COMPLETED)

    def cancel(self, request_id: str) -> bool:
        """Forget a request that waits for its grammar; False if it does not."""
        return self._compiling.pop(request_id, None) is not None

    def forget(self, request_id: str) -> None:
        """Drop the grammar of a request that has ended."""
        self._compiled.pop(request_id, None)

    def constrain(self, batch: Batch) -> dict[str, str]:
        """Set the masks of the structured items that sample; returns those whose grammar is lost.

        They run like the others, since their blocks may already be shared, and end after it.
        """
        lost: dict[str, str] = {}
        for item in batch.items:
            seq, count = item[0], num_drafts(item)
            if seq.request.sampling.structured is not None and count >= 0:
                state = state_of(seq)
                try:
                    state.matcher = state.matcher or self._matcher(seq)
                    masks = next_masks(state.matcher, seq.draft_ids[:count])
                except GrammarError as error:
                    masks = []
                    lost[seq.request_id] = str(error)
                _set_masks(seq, count, masks)
        return lost

    def _matcher(self, seq: Sequence) -> Follower:
        """A new sequence's matcher, to be ended by what ends the sequence: EOS.

        A sequence that began in another engine has tokens already.
        """
        stop_ids = seq.stop_ids.difference(seq.request.sampling.stop_token_ids) or seq.stop_ids
        matcher = self._compiled.pop(seq.request_id).matcher(stop_ids)
        structured = seq.request.sampling.structured
        if structured is not None and structured.after is not None:
            matcher = FreeTextMatcher(matcher, structured.after)
        for token in seq.token_ids[seq.num_prompt_tokens :]:
            matcher.accept(token)
        return matcher


def follow(batch: Batch, result: StepResult, lost: dict[str, str]) -> None:
    """Move the matchers on by what was sampled; a lost request gets no token."""
    for index, (seq, _) in enumerate(batch.items):
        tokens = result.token_ids[index]
        if seq.request.sampling.structured is None or not tokens:
            continue
        matcher = state_of(seq).matcher
        if matcher is not None and seq.request_id not in lost:
            try:
                for token in tokens:
                    matcher.accept(token)
            except GrammarError as error:
                lost[seq.request_id] = str(error)
        if seq.request_id in lost:
            result.token_ids[index] = []


def _set_masks(seq: Sequence, num_drafted: int, masks: list[Bitmask | None]) -> None:
    """Say what each row may sample; a row without a mask is in free text, or behind a bad draft."""
    structured = seq.request.sampling.structured
    free = None if structured is None else structured.after
    rows = sampled_rows(seq, num_drafted)
    for row, mask in zip(rows, masks + [None] * len(rows), strict=False):
        state = state_of(row)
        state.mask = mask
        state.banned = free.banned if free is not None and mask is None else ()


def next_masks(matcher: Follower, drafts: list[int]) -> list[Bitmask | None]:
    """Return what may come next, and after each draft up to the first forbidden one."""
    masks: list[Bitmask | None] = [matcher.allowed()]
    try:
        for draft in drafts:
            if not _allows(masks[-1], draft):
                break
            matcher.accept(draft)
            masks.append(None)
            masks[-1] = matcher.allowed()
    except GrammarError:
        pass
    matcher.rollback(len(masks) - 1)
    return masks


def _allows(mask: Bitmask | None, token: int) -> bool:
    """Whether a token may come next; the matcher itself writes a warning when it may not."""
    return mask is None or (token < 32 * mask.size and bool(mask[token // 32] >> token % 32 & 1))
