"""The floor as data: what /floor answers, and what /metrics is made of."""

from __future__ import annotations

import msgspec


class WorkerView(msgspec.Struct, frozen=True):
    """One worker, now and since the start of the server."""

    name: str
    role: str
    state: str
    num_requests: int  # routed there and not ended
    num_running: int
    num_waiting: int
    queued_tokens: int  # of prompts that wait for prefill there, by the router's account
    kv_blocks: int
    kv_blocks_used: int
    cached_blocks: int  # as far as events tell
    routed: int
    routed_tokens: int
    overlap_tokens: int
    tokens_per_s: float
    output_tokens: int
    restarts: int
    failures: int
    hangs: int
    last_failure: str

    @property
    def up(self) -> bool:
        return self.state == "ready"


class DecisionView(msgspec.Struct, frozen=True):
    """Why a request went where it went."""

    request_id: str
    time_s: float  # Unix time
    worker: str
    prompt_tokens: int
    cached_tokens: int
    resumed_tokens: int  # generated before, elsewhere
    terms: dict[str, dict[str, float]]


class FloorView(msgspec.Struct, frozen=True):
    """All workers and what the router did of late."""

    router: str
    num_open: int
    num_held: int  # wait for a worker to go on
    migrations: int
    workers: list[WorkerView]
    decisions: list[DecisionView]
