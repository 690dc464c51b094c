"""A request in the pool: what the next worker has to know of it, wherever it went before."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tokenmill.core.types import FinishReason, Request, RequestOutput
from tokenmill.sched.blocks import U64, hash_input
from tokenmill.workers.output_stream import OutputStream
from tokenmill.workers.slot import WorkerSlot
from tokenmill.workers.trace import NO_TRACE, RequestTrace


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    request: Request
    stream: OutputStream
    index: int
    slot: WorkerSlot | None = None  # who generates; None: held until a worker can take it
    token_ids: list[int] = field(default_factory=list)
    hash_input: U64 | None = None  # the prompt as the router reads it
    num_uncached: int = 0  # tokens to compute before its first one, as far as is known
    num_sent: int = 0  # to workers before the one that has it now
    num_deaths: int = 0  # of workers that it was at, since it last got on
    num_tokens_at_death: int = 0
    stays: bool = False  # its prompt is computed where it decodes
    trace: RequestTrace = NO_TRACE  # who wants to know what becomes of it

    @property
    def sent_as(self) -> str:
        """Its id at the workers: another one each time, so that late answers are known as such."""
        request_id = self.request.request_id
        return f"{request_id}~{self.num_sent}" if self.num_sent else request_id

    def routed_tokens(self) -> U64:
        """What the next worker has to have in its cache: the prompt and what was said."""
        if self.hash_input is None:
            self.hash_input = hash_input(self.request.prompt_token_ids)
        if not self.token_ids:
            return self.hash_input
        return hash_input(self.token_ids, self.hash_input)

    @property
    def may_hand_over(self) -> bool:
        """True while another worker than the one that decodes may compute its prompt."""
        return not self.token_ids and not self.stays

    def resumed(self) -> Request:
        """The request as the next worker has to see it."""
        request = self.request
        if self.sent_as != request.request_id:
            request = replace(request, request_id=self.sent_as)
        if not self.token_ids:
            return request
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:  # these were sent with the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(request, sampling=sampling, output_token_ids=list(self.token_ids))


def seeded(request: Request) -> Request:
    """The request with a seed of its own, so that any worker continues it alike."""
    sampling = request.sampling
    if sampling.seed is not None or sampling.greedy:
        return request
    return replace(request, sampling=replace(sampling, seed=random.getrandbits(63)))


def end(request_id: str, reason: FinishReason, message: str, stop_reason: str) -> RequestOutput:
    """A terminal output that no worker produced."""
    return RequestOutput(
        request_id, [], finish_reason=reason, stop_reason=stop_reason, error=message
    )
