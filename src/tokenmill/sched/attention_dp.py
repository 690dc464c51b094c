"""Attention data parallelism: every rank owns its requests' attention and KV, all share the MoE.

Ranks step together, so a step takes as long as its slowest rank. Two rules keep them even: which
rank a request goes to, and in which steps prompts are computed at all. Both depend on gathered
numbers alone, so every rank finds the same answer without another exchange:

    ranks = assign(loads, prompt_lens)            # for new requests; loads: each Scheduler.load()
    held = policy.hold(outlooks)                  # once a step; outlooks: each Scheduler.outlook()
    batch = scheduler.schedule(now_ns, held)      # on each rank; where it is empty the rank idles
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Load = tuple[int, int]  # a rank's (requests that are not finished, tokens of their KV)
Outlook = tuple[int, int]  # a rank's (context requests, decoding requests) before a step


def assign(
    loads: Sequence[Load],
    prompt_lens: Sequence[int],
    cached: Sequence[Mapping[int, int]] | None = None,
) -> list[int]:
    """The rank of each new request: TensorRT-LLM's rule.

    No rank gets more requests than an even share, or than the fullest rank has. Within that the
    longest prompt goes first, to the rank with the fewest tokens. `cached` may say how many tokens
    of each prompt a rank holds already: these cost that rank nothing.
    """
    num_requests = [requests for requests, _ in loads]
    num_tokens = [tokens for _, tokens in loads]
    share = -(-(sum(num_requests) + len(prompt_lens)) // len(loads))
    limit = max(share, *num_requests)
    chosen = [-1] * len(prompt_lens)
    for index in sorted(range(len(prompt_lens)), key=lambda index: -prompt_lens[index]):
        held = cached[index] if cached is not None else {}
        _, _, rank = min(
            (num_tokens[rank] - held.get(rank, 0), num_requests[rank], rank)
            for rank in range(len(loads))
            if num_requests[rank] < limit
        )
        chosen[index] = rank
        num_requests[rank] += 1
        num_tokens[rank] += prompt_lens[index] - held.get(rank, 0)
    return chosen


class ContextPolicy(Protocol):
    """Says whether prompts wait in the next step; asked once a step, on every rank alike."""

    def hold(self, ranks: Sequence[Outlook]) -> bool: ...


class NeverHold:
    """Each rank computes its prompts as soon as it can."""

    def hold(self, ranks: Sequence[Outlook]) -> bool:
        return False


class ContextBalancer:
    """Prompts wait until every rank has one: TensorRT-LLM's rule.

    While a rank has no prompt, or no place for one, they wait for up to `timeout_iters` steps. Once
    every rank has one they wait `batching_wait_iters` steps more, so that ranks gather similar
    amounts. A rank that has nothing to decode ends the wait.
    """

    def __init__(
        self, max_num_seqs: int, timeout_iters: int = 50, batching_wait_iters: int = 10
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._timeout_iters = timeout_iters
        self._batching_wait_iters = batching_wait_iters
        self._num_waited = 0  # steps since every rank had a prompt, or since the last timeout
        self._num_gathered = 0  # held steps in which every rank had one

    def hold(self, ranks: Sequence[Outlook]) -> bool:
        decode = all(decoding > 0 for _, decoding in ranks)
        if all(context > 0 and decoding < self._max_num_seqs for context, decoding in ranks):
            self._num_waited = 0
            if decode and self._num_gathered < self._batching_wait_iters:
                self._num_gathered += 1
                return True
            if decode:
                self._num_gathered = 0
            return False
        self._num_waited += 1
        if self._num_waited >= self._timeout_iters or not decode:
            self._num_waited = 0
            return False
        return True


class IntervalPolicy:
    """Prompts are computed in every `interval`-th step: vLLM's prefill_schedule_interval.

    A rank that has nothing to decode ends the wait. vLLM's exception for queues that a step could
    not empty is left out.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_steps = 0

    def hold(self, ranks: Sequence[Outlook]) -> bool:
        self._num_steps += 1
        due = self._num_steps % self._interval == 0
        return not due and all(decoding > 0 for _, decoding in ranks)


class DelayPolicy:
    """While some ranks have prompts and others none, they wait: the first rule of SGLang's delayer.

    At most `max_delay` steps long, counted from the first prompt. A rank that has nothing to decode
    ends the wait.
    """

    def __init__(self, max_delay: int = 30) -> None:
        self._max_delay = max_delay
        self._num_delayed = 0

    def hold(self, ranks: Sequence[Outlook]) -> bool:
        num_ready = sum(context > 0 for context, _ in ranks)
        mixed = 0 < num_ready < len(ranks) and all(decoding > 0 for _, decoding in ranks)
        held = mixed and self._num_delayed < self._max_delay
        self._num_delayed = self._num_delayed + 1 if held else 0
        return held
