"""An open request of the pool, with all that another worker needs to continue it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tokenmill.core.cost import Cost
from tokenmill.core.images import content_ids
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason
from tokenmill.sched.cache.blocks import U64, hash_input
from tokenmill.workers.output_stream import OutputStream
from tokenmill.workers.slot import WorkerSlot
from tokenmill.workers.trace import NO_TRACE, RequestTrace


@dataclass(slots=True)
class OpenHandover:
    """A prompt that another worker computes than the one that decodes."""

    request: Request  # as the worker that decodes will see it
    source: WorkerSlot  # who computes
    told: bool = False  # the worker that decodes has the request and waits for its KV


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that has not ended."""

    request: Request
    stream: OutputStream
    index: int
    slot: WorkerSlot | None = None  # who generates; None: held until a worker can take it
    handover: OpenHandover | None = None  # until its KV is where it decodes
    token_ids: list[int] = field(default_factory=list)
    hash_input: U64 | None = None  # the prompt as the router reads it
    num_uncached: int = 0  # tokens to compute before its first one, as far as is known
    num_sent: int = 0  # to workers before the one that has it now
    sent_as: str = ""  # its id at the workers
    num_deaths: int = 0  # of workers that it was at, since it last got on
    num_tokens_at_death: int = 0
    stays: bool = False  # its prompt is computed where it decodes
    trace: RequestTrace = NO_TRACE  # who wants to know what becomes of it
    account: str = ""  # who pays
    cost: Cost = field(default_factory=Cost)  # what workers told when they were done with it
    num_workers: int = 0  # that have not
    closed: bool = False  # it has ended for its client
    steady: WorkerSlot | None = None  # whose tokens need no more than to be passed on

    def __post_init__(self) -> None:
        self.sent_as = self.request.request_id

    @property
    def source(self) -> WorkerSlot | None:
        """Who computes the prompt, while that is another one than who decodes."""
        return None if self.handover is None else self.handover.source

    def settle(self, slot: WorkerSlot) -> None:
        """Look, after an output of this worker, whether the next ones are but text."""
        is_first = self.sent_as == self.request.request_id and not self.num_deaths
        if is_first and self.slot is slot and self.token_ids and self.trace is NO_TRACE:
            self.steady = slot if self.handover is None else None

    def take_back(self) -> None:
        """Take the request off its worker; its new id tells late answers from new ones."""
        self.slot = self.steady = None
        self.num_sent += 1
        self.sent_as = f"{self.request.request_id}~{self.num_sent}"

    def put_end(self, reason: FinishReason, message: str, stop_reason: str) -> None:
        """Put a terminal output that no worker produced."""
        output = RequestOutput(
            self.request.request_id,
            [],
            finish_reason=reason,
            stop_reason=stop_reason,
            error=message,
        )
        self.stream.put(self.index, output)

    def routed_tokens(self) -> U64:
        """What the next worker has to have in its cache: the prompt and what was said."""
        if self.hash_input is None:
            request = self.request
            self.hash_input = hash_input(
                content_ids(request.task.prompt_token_ids, request.task.images)
            )
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
        sampling = request.task.sampling
        if sampling.prompt_logprobs is not None:  # these were sent with the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return request.with_task(sampling=sampling, output_token_ids=list(self.token_ids))


def seeded(request: Request) -> Request:
    """The request with a seed of its own, so that any worker continues it alike."""
    task = request.task
    if not isinstance(task, Generate) or task.sampling.seed is not None or task.sampling.greedy:
        return request
    return request.with_task(sampling=replace(task.sampling, seed=random.getrandbits(63)))
