"""What surrounds the choices of every streamed event, and what closes a stream."""

from __future__ import annotations

from typing import Any, Literal

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.answers import Usage, json_encode
from tokenmill.api.protocol.prepare import PreparedCall

UsageIn = Literal["none", "end", "every"]  # the events that say how many tokens there are
DONE = b"data: [DONE]\n\n"


class EventFrame:
    """The bytes before and after the choices of an event."""

    def __init__(self, job: PreparedCall, model: str, kind: str, usage_in: UsageIn) -> None:
        self._usage_in = usage_in
        identity = b'"id":%b,"object":%b,"created":%d,"model":%b' % (
            json_encode(job.job_id),
            json_encode(kind),
            job.created,
            json_encode(model),
        )
        self.head = b"data: {" + identity + b',"choices":['
        self.tail = b"]}\n\n" if usage_in == "none" else b'],"usage":null}\n\n'

    @property
    def counts(self) -> bool:
        """True where every event says how many tokens there are so far."""
        return self._usage_in == "every"

    def count(self, usage: Usage) -> None:
        """The tokens so far, for the events that come now."""
        self.tail = b'],"usage":' + json_encode(usage) + b"}\n\n"

    def start(self, usage: Usage) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return error.event()

    def end(self, usage: Usage) -> bytes:
        if self._usage_in == "none":
            return DONE
        return self.head + b'],"usage":' + json_encode(usage) + b"}\n\n" + DONE


def typed_event(kind: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event that says its type, as an event name and inside its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json_encode({"type": kind, **fields}))
