"""Errors as clients know them: a status and OpenAI's {"error": {message, type, param, code}}.

Below /v1/messages they have Anthropic's shape, {"type": "error", "error": {type, message}}.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import UNSET

from tokenmill.api.protocol.answers import (
    ErrorAnswer,
    ErrorBody,
    MessagesError,
    MessagesErrorAnswer,
    json_encode,
)
from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import FinishReason, InvalidRequestError

RETRY_AFTER_S = 1

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable_error",
}
# Anthropic's, where they differ.
_MESSAGES_TYPES = _TYPES | {
    413: "request_too_large",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
VIDEOS_PATH = "/v1/videos"
# Why the engine refused a request -> status; any other reason is a 400.
_REJECT_STATUS = {"queue_full": 429, "draining": 503, "grammar_busy": 503}


class ApiError(Exception):
    """An answer that is not a completion."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.details = details  # Anthropic's, where its clients act on them

    def __reduce__(self) -> tuple[type[ApiError], tuple[Any, ...]]:
        return type(self), (self.status, str(self), self.param, self.code, self.details)

    def body(self, path: str = "") -> bytes:
        encoded: bytes = json_encode(self._answer(path))
        return encoded

    def event(self, path: str = "", number: int = 0) -> bytes:
        """The event that ends a stream of `path`; `number` is its place in the stream."""
        if path.startswith(MESSAGES_PATH):
            return b"event: error\ndata: %b\n\n" % self.body(path)
        if not path.startswith(RESPONSES_PATH):
            return b"data: %b\n\n" % self.body()
        fields = {"code": self.code, "message": str(self), "param": self.param}
        data = json_encode({"type": "error", **fields, "sequence_number": number})
        return b"event: error\ndata: %b\n\n" % data

    def _answer(self, path: str) -> ErrorAnswer | MessagesErrorAnswer:
        if path.startswith(MESSAGES_PATH):
            kind = _MESSAGES_TYPES.get(self.status, "invalid_request_error")
            details = UNSET if self.details is None else self.details
            error = MessagesError(type=kind, message=str(self), details=details)
            return MessagesErrorAnswer(error=error)
        kind = _TYPES.get(self.status, "invalid_request_error")
        return ErrorAnswer(
            error=ErrorBody(message=str(self), type=kind, param=self.param, code=self.code)
        )

    def answer_headers(self) -> dict[str, str]:
        """Retry-After where trying again makes sense, the scheme where a key is missing."""
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_AFTER_S)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


def unknown_model(name: str, served: str) -> ApiError:
    message = f"the model {name!r} does not exist; this server has {served!r}"
    return ApiError(404, message, "model", "model_not_found")


def context_exceeded(message: str, param: str) -> ApiError:
    return ApiError(400, message, param, "context_length_exceeded")


def of_invalid(error: InvalidRequestError) -> ApiError:
    """400 for a value that the engine's own vocabulary refuses."""
    return ApiError(400, str(error), error.param, "invalid_value")


def of_output(output: RequestOutput) -> ApiError | None:
    """The error that an engine output stands for; None for one that is no error."""
    reason = str(output.stop_reason) if output.stop_reason is not None else None
    match output.finish_reason:
        case FinishReason.REJECT:
            status = _REJECT_STATUS.get(reason or "", 400)
            code = "context_length_exceeded" if reason == "too_long" else reason
            return ApiError(status, output.error or "the engine refused the request", code=code)
        case FinishReason.ERROR:
            status = 400 if reason == "grammar" else 500
            return ApiError(status, output.error or "the engine failed", code=reason)
        case FinishReason.ABORT if reason == "deadline":
            return ApiError(408, "the request passed its deadline", "timeout", "deadline")
        case FinishReason.ABORT:
            return ApiError(500, output.error or "the engine aborted the request", code=reason)
        case _:
            return None


def renamed(error: ApiError, names: dict[str, str]) -> ApiError:
    """An error of the chat completion in the words of the API that was called."""
    words = re.compile(rf"(?<![\w.\"'-])({'|'.join(map(re.escape, names))})(?![\w-])")
    message = words.sub(lambda found: names[found[0]], str(error))
    param = None if error.param is None else words.sub(lambda f: names[f[0]], error.param)
    return ApiError(error.status, message, param, error.code)
