"""The null trace of a request: the pool reports each stage to it, and it does nothing."""

from __future__ import annotations

from tokenmill.core.requests import RequestOutput
from tokenmill.routing.router import Decision


class RequestTrace:
    """The stages of one request, told by the worker pool as they happen."""

    __slots__ = ()

    def routed(self, decision: Decision, began_ns: int, role: str) -> None:
        """A worker was chosen, for all of it or, as `role` says, for a part."""

    def output(self, output: RequestOutput) -> None:
        """Tokens have come; with the first ones the prompt is computed."""

    def transfer_began(self) -> None:
        """The first blocks are ready to be read by the decode worker."""

    def transfer_ended(self) -> None:
        """The decode worker has the KV; decoding begins."""

    def migrated(self, reason: str) -> None:
        """It goes on elsewhere."""

    def ended(self) -> None:
        """No more comes from the worker that has it."""


NO_TRACE = RequestTrace()
