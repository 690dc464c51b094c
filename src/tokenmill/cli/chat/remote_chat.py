"""Streams answers for `chat` and `generate` from a running OpenAI-compatible server."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from tokenmill.cli.chat.local_chat import ChatAnswer
from tokenmill.core.types import TokenmillError

CONNECT_TIMEOUT_S = 600


class RemoteError(TokenmillError):
    """The server cannot be reached or answers with an error."""


class Server:
    """A base URL such as http://127.0.0.1:8000/v1; without a model name, its first model."""

    def __init__(
        self, url: str, api_key: str | None, model: str | None, sampling: dict[str, Any]
    ) -> None:
        self._url = api_root(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sampling = sampling
        self.model = model or self._first_model()

    def stream(self, messages: list[dict[str, Any]], answer: ChatAnswer) -> Iterator[str]:
        """Text as it arrives; leaving early closes the connection, which aborts the request."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }
        with self._open("/chat/completions", body) as response:
            for event in _events(response):
                if "error" in event:
                    raise RemoteError(f"the server answered: {event['error']['message']}")
                yield from _take(event, answer)

    def _first_model(self) -> str:
        with self._open("/models") as response:
            models = json.load(response)["data"]
        return str(models[0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            response: http.client.HTTPResponse = urllib.request.urlopen(
                request, timeout=CONNECT_TIMEOUT_S
            )
        except urllib.error.HTTPError as error:
            raise RemoteError(f"{self._url}{path} answered {_reason(error)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise RemoteError(f"cannot reach {self._url}: {reason}") from None
        return response


def api_root(url: str) -> str:
    """The URL that /chat/completions follows; a server's URL without a path gets /v1."""
    url = url.rstrip("/")
    return url if urllib.parse.urlsplit(url).path else f"{url}/v1"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    try:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return
            if data.startswith("{"):
                yield json.loads(data)
    except (OSError, http.client.HTTPException) as error:
        raise RemoteError(f"the connection broke before the answer was complete: {error}") from None
    raise RemoteError("the server ended the answer before it was complete")


def _take(event: dict[str, Any], answer: ChatAnswer) -> Iterator[str]:
    """Note what a chunk says, and yield its text."""
    if usage := event.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.times.num_tokens = usage["completion_tokens"]
    for choice in event.get("choices", []):
        text = choice["delta"].get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if text:
            answer.times.record(time.monotonic_ns(), 1)
            answer.text += text
            yield text


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return f"{error.code}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code}: {error.reason}"
