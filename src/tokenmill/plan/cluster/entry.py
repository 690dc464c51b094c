"""A simulated request that has not ended, with all that another worker needs to continue it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import Request, SamplingParams
from tokenmill.plan.cluster.rank_work import OUTPUT_TOKEN, TokenCount
from tokenmill.plan.cluster.worker import Worker
from tokenmill.sched.sequence import Sequence


@lru_cache(1 << 16)
def _sampling(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True)


@dataclass(slots=True, eq=False)
class SimulatedHandover:
    """A prompt that another worker computes than the one that decodes."""

    request: Request  # as the worker that decodes will see it
    source: Worker
    told: bool = False  # the worker that decodes has the request and waits for its KV
    num_blocks: int = 0  # that are computed
    num_last: int = 0  # of these, those that were announced last
    is_ready: bool = False  # all are computed
    receiver: tuple[int, Sequence] | None = None  # rank and sequence that get the KV
    began_late: bool = False  # the receiver had no room before all was computed
    is_moving: bool = False


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request."""

    number: int
    num_prompt: int
    num_output: int
    times: RequestTimes
    prompt: list[int] | None = None  # token ids, where prompts share some
    num_known: int = 0  # output tokens when it was last sent to a worker
    num_before: int = 0  # of these, those before the run
    worker: Worker | None = None  # who generates; None: held until one can take it
    handover: SimulatedHandover | None = None
    num_sent: int = 0
    sent_as: str = ""
    num_deaths: int = 0
    num_tokens_at_death: int = 0
    prefill_locally: bool = False  # its prompt is computed where it decodes
    is_measured: bool = False

    def __post_init__(self) -> None:
        self.sent_as = str(self.number)

    @property
    def token_ids(self) -> range:
        """As many as are known; what they are does not matter."""
        return range(self.num_known)

    @property
    def may_hand_over(self) -> bool:
        return not self.num_known and not self.prefill_locally

    def routed_tokens(self) -> list[int]:
        """What the router hashes: prompts share what the trace says, else nothing."""
        if self.prompt is not None:
            return self.prompt + self._output()
        return [self.number] * (self.num_prompt + self.num_known)

    def _output(self) -> list[int]:
        if self.prompt is None:
            return TokenCount(self.num_known)
        return [OUTPUT_TOKEN + self.number] * self.num_known

    def request(self, kv_from: str | None = None) -> Request:
        """The request as the next worker has to see it."""
        prompt = TokenCount(self.num_prompt) if self.prompt is None else self.prompt
        return Request(
            self.sent_as,
            prompt,
            _sampling(self.num_output),
            arrival_ns=self.times.arrival_ns,
            output_token_ids=self._output(),
            kv_from=kv_from,
        )

    def take_back(self) -> None:
        """Take the request off its worker; its new id tells late answers from new ones."""
        self.worker, self.handover = None, None
        self.num_sent += 1
        self.sent_as = f"{self.number}~{self.num_sent}"
