"""What is known of one HTTP call: its id, and what the log line and the counters say of it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.api.errors import ApiError

Scope = MutableMapping[str, Any]  # ASGI's
REQUEST_ID = b"x-request-id"
WARNING = b"x-warning"  # what of a call an answer does not follow
CHUNK_WRITER = "chunk_writer"  # in a scope: writes parts of a streamed answer at once
GONE = 499  # the client went before the answer; nginx's number
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def new_request_id() -> str:
    return f"req-{os.urandom(16).hex()}"


@dataclass(slots=True)
class CallRecord:
    request_id: str
    path: str
    endpoint: str = ""  # the route that took it
    began_ns: int = field(default_factory=time.monotonic_ns)
    account: str = "-"
    status: int = 0  # 0: nothing has been answered
    error: str | None = None  # its code
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_ms: float | None = None
    finish_reason: str = "-"
    worker: str = "-"

    @classmethod
    def begin(cls, scope: Scope) -> CallRecord:
        """The record of a call that has just come; a client's own id is kept if it is sane."""
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        is_sane = _SANE_ID.fullmatch(given) is not None
        return cls(given.decode("ascii") if is_sane else new_request_id(), scope["path"])

    def fail(self, error: ApiError) -> None:
        self.status, self.error = error.status, error.code

    def line(self) -> str:
        ttft = "-" if self.ttft_ms is None else f"{self.ttft_ms:.1f}"
        duration_ms = (time.monotonic_ns() - self.began_ns) / 1e6
        return (
            f"request id={self.request_id} key={self.account} endpoint={self.endpoint} "
            f"status={self.status} prompt_tokens={self.num_prompt_tokens} "
            f"cached_tokens={self.num_cached_tokens} output_tokens={self.num_output_tokens} "
            f"ttft_ms={ttft} duration_ms={duration_ms:.1f} finish={self.finish_reason} "
            f"error={self.error or '-'} worker={self.worker}"
        )


def record_of(scope: Scope) -> CallRecord:
    """The record of a call; of an app that stands alone, one that nobody reads."""
    record = scope.get("call")
    if record is None:
        record = scope["call"] = CallRecord.begin(scope)
    assert isinstance(record, CallRecord)
    return record
