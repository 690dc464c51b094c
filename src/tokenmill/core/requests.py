"""Requests with their tasks, what comes back, and the Engine protocol, all as they travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from tokenmill.core.cost import Cost
from tokenmill.core.images import ImageSpan
from tokenmill.core.tasks import Rank, Scores, TaskProgress, Video, VideoFile, VideoFrames
from tokenmill.core.types import EngineStats, FinishReason, SamplingParams, TokenLogprobs


class Generate(msgspec.Struct, tag=True, frozen=True):
    """A task: one sequence of tokens; the caller fans `n > 1` out into n requests."""

    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    cache_salt: str = ""  # requests with different salts never share cached blocks
    output_token_ids: list[int] = []  # generated elsewhere; goes on there
    hold_kv_s: float | None = None  # compute the prompt and one token, then hold the KV so long
    kv_from: str | None = None  # id of the engine that computes the prompt and the first token
    images: tuple[ImageSpan, ...] = ()  # of the prompt, in its order

    @property
    def num_units(self) -> int:
        return len(self.prompt_token_ids)


Task = Generate | Rank | Video
TaskT = TypeVar("TaskT", bound=Task)


@dataclass(frozen=True, slots=True)
class Request(Generic[TaskT]):
    request_id: str
    task: TaskT
    priority: int = 0  # lower runs first, as in vLLM
    arrival_ns: int = 0  # time.monotonic_ns() at the front door
    deadline_ns: int | None = None  # monotonic; past it the request ends in ABORT
    account: str = ""  # who pays, and shares what is shared by account

    def with_task(self, **changes: Any) -> Request[TaskT]:
        return replace(self, task=msgspec.structs.replace(self.task, **changes))


@dataclass(slots=True)
class RequestOutput:
    """What one step produced for one request. `finish_reason` is set on the terminal one only."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one per token of token_ids
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once; position 0 has none
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that fired, or why it ended
    num_cached_tokens: int = 0  # prompt tokens served by the prefix cache
    error: str | None = None  # for REJECT and ERROR: one sentence for the user
    scheduled_ns: int = 0  # monotonic: the start of the first step it ran in; 0 when unknown
    cost: Cost | None = None  # on the terminal one of a request that an engine took
    delta: Scores | TaskProgress | VideoFrames | VideoFile | None = (
        None  # of another task than text
    )


class End(NamedTuple):
    """How a request ends without a new token."""

    reason: FinishReason
    stop_reason: str | None = None
    error: str | None = None  # for REJECT and ERROR: one sentence for the user

    def output(
        self,
        request_id: str,
        num_cached_tokens: int = 0,
        scheduled_ns: int = 0,
        cost: Cost | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id,
            [],
            finish_reason=self.reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=num_cached_tokens,
            error=self.error,
            scheduled_ns=scheduled_ns,
            cost=cost,
        )


class Engine(Protocol):
    """What workers and load generators drive: language, ranking, video or simulated alike.

    Each request ends in exactly one output with a finish_reason; one thread calls the engine.
    """

    def submit(self, request: Request) -> None:
        """Queue a request. Never raises for a bad one: the next step() yields its REJECT."""

    def step(self) -> list[RequestOutput]:
        """Run one batch and return what it produced; [] when there is nothing to do."""

    def abort(self, request_id: str) -> None:
        """End a request; unknown or finished ids are ignored. The next step() yields its ABORT."""

    def has_work(self) -> bool:
        """True while a step() would do something."""

    def stats(self) -> EngineStats: ...
