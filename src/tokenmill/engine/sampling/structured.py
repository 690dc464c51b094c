"""Requests with structured output: they wait for their grammars, which then bound each token."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.core.requests import End, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.sampling.grammar_pool import PATIENCE_S, GrammarPool, GrammarRow
from tokenmill.engine.sampling.sampler import Bitmask, sampled_rows, state_of
from tokenmill.sched.sequence import Batch, Sequence, num_drafts

COMPILE_TIMEOUT_NS = 60 * 10**9
_IDLE_WAIT_S = 0.005  # how long a step without a batch waits for a grammar


class StructuredRequests:
    """The grammars of one engine's requests; without a pool there can be none."""

    def __init__(self, pool: GrammarPool | None) -> None:
        self._pool = pool
        self._waiting: dict[str, tuple[Request, int]] = {}  # for a grammar, and when to give up
        self._rows: dict[str, GrammarRow] = {}  # of these requests, and of those that run
        self._late: dict[str, GrammarRow] = {}  # of those that had no mask when a step sampled

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        return len(self._rows)

    def late(self) -> set[str]:
        """The running requests that still wait for a mask."""
        rows = self._rows
        self._late = {i: row for i, row in self._late.items() if row.pending and i in rows}
        return set(self._late)

    def warm_up(self) -> None:
        if self._pool is not None:
            self._pool.warm_up()

    def refusal(self, sampling: SamplingParams) -> str | None:
        """Why structured output with these parameters is not taken: one sentence, or None."""
        if self._pool is None:
            return "this engine has no structured output"
        is_free = sampling.structured is not None and sampling.structured.kind == "any"
        if (sampling.ignore_eos or sampling.min_tokens) and not is_free:
            name = "ignore_eos" if sampling.ignore_eos else "min_tokens"
            return f"{name} does not go with structured output, which ends itself"
        return None

    def compile(self, request: Request, now_ns: int) -> None:
        assert self._pool is not None and request.task.sampling.structured is not None
        row = self._pool.open(request.task.sampling.structured, request.account)
        self._rows[request.request_id] = row
        self._waiting[request.request_id] = request, now_ns + COMPILE_TIMEOUT_NS

    def take_ready(self, now_ns: int) -> list[tuple[Request, End | None]]:
        """The requests that wait no more: their grammar is compiled, or they have to end."""
        if self._pool is not None and self._rows:
            self._pool.poll()
        ready: list[tuple[Request, End | None]] = []
        for request_id, (request, give_up_ns) in list(self._waiting.items()):
            process, deadline_ns = self._rows[request_id].process, request.deadline_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                end: End | None = End(FinishReason.ABORT, "deadline")
            elif process.is_ready or process.end is not None:
                end = process.end
            elif give_up_ns <= now_ns:
                message = f"the grammar was not compiled within {COMPILE_TIMEOUT_NS // 10**9} s"
                end = End(FinishReason.REJECT, "grammar_busy", f"{message}: others come first")
            else:
                continue
            del self._waiting[request_id]
            if end is not None:
                self.forget(request_id)
            ready.append((request, end))
        return ready

    def wait(self) -> bool:
        """Give the processes a moment; False where nobody waits for them."""
        if self._pool is None or not (self._waiting or self._late):
            return False
        self._pool.poll(_IDLE_WAIT_S)
        return True

    def cancel(self, request_id: str) -> bool:
        """Forget a request that waits for its grammar; False if it does not."""
        if self._waiting.pop(request_id, None) is None:
            return False
        self.forget(request_id)
        return True

    def forget(self, request_id: str) -> None:
        """Drop what a request that has ended had of its grammar."""
        row = self._rows.pop(request_id, None)
        if row is not None and self._pool is not None:
            self._pool.close(row)

    def put_off(self, batch: Batch) -> None:
        """Let a batch be launched while tokens before its masks are not known yet."""
        for item in batch.items if self._rows else ():
            seq = item[0]
            if seq.request.task.sampling.structured is not None and num_drafts(item) >= 0:
                state = state_of(seq)
                state.mask, state.banned, batch.masks_follow = None, (), True

    def constrain(self, batch: Batch, runs: Callable[[], bool] = lambda: False) -> dict[str, str]:
        """Set the masks of the structured items that sample, and say which have none in time.

        `runs` says whether the device computes the batch, so that waiting costs nothing.

        Returns the errors of those that cannot go on. They run like the others, since their blocks
        may already be shared, and end after it. Items that have ended meanwhile need no mask.
        """
        batch.masks_follow, batch.unsampled = False, []
        if not self._rows or self._pool is None:
            return {}
        asked: list[tuple[int, Sequence, int, GrammarRow]] = []
        fresh: list[GrammarRow] = []
        for index, item in enumerate(batch.items):
            seq, count = item[0], num_drafts(item)
            constrained = seq.request.task.sampling.structured is not None and not seq.finished
            if constrained and count >= 0:
                row = self._rows[seq.request_id]
                asked.append((index, seq, count, row))
                if row.ask(seq, seq.draft_ids[:count]):
                    fresh.append(row)
        self._pool.wait(fresh, runs)
        if len(asked) == len(batch.items) and all(row.pending for *_, row in asked):
            self._pool.poll(PATIENCE_S)  # there is nothing else to do
        lost: dict[str, str] = {}
        for index, seq, count, row in asked:
            masks = row.masks(seq, seq.draft_ids[:count])
            _set_masks(seq, count, masks or [])
            if masks is None:
                batch.unsampled.append(index)
                self._late[seq.request_id] = row
            if row.error is not None:
                lost[seq.request_id] = row.error
        return lost


def _set_masks(seq: Sequence, num_drafted: int, masks: list[Bitmask | None]) -> None:
    """Say what each row may sample; a row without a mask is in free text, or behind a bad draft."""
    structured = seq.request.task.sampling.structured
    free = None if structured is None else structured.after
    rows = sampled_rows(seq, num_drafted)
    for row, mask in zip(rows, masks + [None] * len(rows), strict=False):
        state = state_of(row)
        state.mask = mask
        state.banned = free.banned if free is not None and mask is None else ()
