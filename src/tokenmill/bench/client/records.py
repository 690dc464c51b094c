"""Messages of the client: OpenAI's request bodies and chunks, and the records of event files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenmill.bench.client.datasets import Message

Api = Literal["chat", "completions"]

DONE = b"[DONE]"
_PLAIN = re.compile(rb"data: [^\n]*\Z").match  # one line, as nearly every event has it
_IGNORED = (b":", b"event:", b"id:", b"retry:")


class SseError(ValueError):
    """A line is not part of a server-sent event, or its data are not a chunk."""


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class ChunkChoice(msgspec.Struct, gc=False):
    """A choice of a chat or of a completion, whole or in part."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    def output(self) -> str:
        """Its new text; a tool call counts as output too."""
        delta = self.delta or self.message
        if delta is None:
            return self.text or ""
        if delta.reasoning_content or delta.reasoning:
            thought = delta.reasoning_content or delta.reasoning or ""
            return thought + (delta.content or "")
        return delta.content or (str(delta.tool_calls) if delta.tool_calls else "")


class PromptDetails(msgspec.Struct, gc=False):
    """What a server says of the prompt's tokens."""

    cached_tokens: int | None = None
    image_tokens: int | None = None


class ChunkUsage(msgspec.Struct, gc=False):
    """Tokens as the server counts them."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct, gc=False):
    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


class LoadRecord(msgspec.Struct, gc=False):
    """All that is known of one request; times in ns of the monotonic clock."""

    session: int
    turn: int
    planned_ns: int
    point: int = 0  # of a sweep
    sent_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    gaps_ns: list[int] = []  # between successive outputs
    num_outputs: int = 0
    max_tokens: int | None = None
    prompt_tokens: int | None = None  # as usage has them
    completion_tokens: int | None = None
    total_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, where the server says so
    image_tokens: int | None = None  # the same
    counted_tokens: int | None = None  # by a tokenizer
    num_bytes: int = 0  # of the output text
    status: int = 0
    saw_done: bool = True  # the stream ended with [DONE]; True where there is no stream
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""
    retried: bool = False
    text: str | None = None  # kept for the tokenizer and for the next turn


_decode_chunk = msgspec.json.Decoder(Chunk).decode
_decode_record = msgspec.json.Decoder(LoadRecord).decode
_encode = msgspec.json.Encoder().encode


def decode_chunk(data: bytes) -> Chunk:
    try:
        return _decode_chunk(data)
    except msgspec.DecodeError as error:
        raise SseError(f"{error}: {data[:120]!r}") from None


def error_text(body: bytes) -> str:
    """The message of an error answer, whatever its shape."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


@dataclass(slots=True)
class SseScanner:
    """Bytes in, data of whole events out."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        data = self._rest + data if self._rest else data
        held = b""
        if b"\r" in data:
            held = b"\r" if data.endswith(b"\r") else b""  # its newline may be on the way
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n")
        *events, rest = data.split(b"\n\n")
        self._rest = rest + held
        return [
            found
            for event in events
            if (found := event[6:] if _PLAIN(event) else _data_of(event)) is not None
        ]


def _data_of(event: bytes) -> bytes | None:
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[5:].strip())
        elif line and not line.startswith(_IGNORED):
            raise SseError(f"not a server-sent event: {line[:120]!r}")
    return b"\n".join(lines) if lines else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint and what every request says to it."""

    url: str  # of the route
    model: str
    api: Api = "chat"
    stream: bool = True
    api_key: str | None = None
    timeout_s: float = 600.0
    insecure: bool = False  # do not check the certificate
    keep_text: bool = False
    fields: dict[str, Any] = field(default_factory=dict)  # sent with every request


def request_body(
    target: Endpoint, content: str | Sequence[Message] | Sequence[int], max_tokens: int | None
) -> bytes:
    """The JSON of one request; a prompt may be token ids where the route is completions."""
    body: dict[str, Any] = {"model": target.model}
    if target.api == "completions":
        body["prompt"] = content
    else:
        one = [{"role": "user", "content": content}]
        body["messages"] = one if isinstance(content, str) else content
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if target.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return _encode(body | target.fields)


def write_records(path: Path, records: Iterable[LoadRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.writelines(_encode(record) + b"\n" for record in records)


def read_records(path: Path) -> list[LoadRecord]:
    with path.open("rb") as file:
        return [_decode_record(line) for line in file]
