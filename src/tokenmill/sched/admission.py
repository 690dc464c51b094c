"""Which requests can run at all, and how far."""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.types import Request
from tokenmill.sched.sequence import Sequence


class Limits(NamedTuple):
    """What bounds a request: the configuration, and the tokens that the KV cache holds."""

    config: SchedulerConfig
    capacity: int

    def refusal(self, request: Request, num_waiting: int) -> tuple[str, str] | None:
        """Why a request is not taken: (stop_reason, a sentence), or None."""
        num_prompt = len(request.prompt_token_ids) + len(request.output_token_ids)
        max_len = self.config.max_model_len
        if not request.prompt_token_ids:
            return "empty_prompt", "the prompt has no tokens, at least 1 is needed"
        if num_prompt > max_len - 1:
            return (
                "too_long",
                f"the prompt has {num_prompt} tokens; with a context of {max_len} "
                f"at most {max_len - 1} fit",
            )
        if num_prompt + 1 > self.capacity:
            return (
                "no_capacity",
                f"the prompt has {num_prompt} tokens; the KV cache holds {self.capacity} "
                "and must have room for one more",
            )
        if num_waiting >= self.config.max_waiting and not request.output_token_ids:
            return "queue_full", f"{num_waiting} requests are waiting, the queue is full"
        return None

    def sequence(self, request: Request, order: int, eos: frozenset[int]) -> Sequence:
        """The sequence of a request that came as number `order`."""
        sampling = request.sampling
        priority = request.priority if self.config.policy == "priority" else 0
        # One token past the pool needs no block of its own as long as nothing follows it.
        max_len = min(self.config.max_model_len, self.capacity + 1)
        if sampling.max_tokens is not None:
            max_len = min(max_len, len(request.prompt_token_ids) + sampling.max_tokens)
        if request.hold_kv_s is not None:
            max_len = min(max_len, len(request.prompt_token_ids) + 1)
        stop_ids = frozenset() if sampling.ignore_eos else eos
        if sampling.stop_token_ids:
            stop_ids = stop_ids.union(sampling.stop_token_ids)
        return Sequence(request, (priority, request.arrival_ns, order), max_len, stop_ids)
