"""An Anthropic message as bytes: the events of a stream, and the whole answer."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from tokenmill.api.errors import MESSAGES_PATH, ApiError
from tokenmill.api.open_call import TextDelta
from tokenmill.api.protocol.answers import AnswerSchema, Usage, UsageReceipt, json_encode
from tokenmill.api.protocol.format_stream import typed_event
from tokenmill.api.protocol.prepare import PreparedCall
from tokenmill.text.parsers import ContentDelta, FoundCallDelta, MessageEvent, ReasoningDelta

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingTokens(AnswerSchema, kw_only=True):
    thinking_tokens: int = 0


class ImageTokens(AnswerSchema, kw_only=True):
    image_tokens: int


class MessageUsage(AnswerSchema, kw_only=True):
    """The prompt is the sum of the first three; its images' tokens are among these."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    input_tokens_details: ImageTokens | UnsetType = UNSET  # of prompts with images
    output_tokens: int
    output_tokens_details: ThinkingTokens
    receipt: UsageReceipt | UnsetType = UNSET  # where the call asks for it


class TextAnswer(AnswerSchema, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingAnswer(AnswerSchema, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseAnswer(AnswerSchema, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


class MessageAnswer(AnswerSchema, kw_only=True):
    """The answer to POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextAnswer | ThinkingAnswer | ToolUseAnswer] = field(default_factory=list)
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStreamEvent(AnswerSchema, kw_only=True):
    """One event of a streamed message; the other fields depend on its type."""

    type: str


class TokenCountAnswer(AnswerSchema, kw_only=True):
    """The answer to POST /v1/messages/count_tokens."""

    input_tokens: int


def message_usage(usage: Usage) -> MessageUsage:
    """The same counts under Anthropic's names: cached tokens are not among input_tokens."""
    details = usage.completion_tokens_details
    num_cached = usage.prompt_tokens_details.cached_tokens
    num_image = usage.prompt_tokens_details.image_tokens
    num_thinking = 0 if details is UNSET else details.reasoning_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        input_tokens_details=UNSET if num_image is UNSET else ImageTokens(image_tokens=num_image),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens=num_thinking),
        receipt=usage.receipt,
    )


class MessageFormat:
    """Formats one message; its content blocks grow as the parts of the message come.

    At most one block is open. `hides_thinking`: thinking blocks stay empty. `fills_context`: the
    answer may be as long as the context, which is less than its max_tokens.
    """

    counts = False

    def __init__(
        self, job: PreparedCall, model: str, hides_thinking: bool, fills_context: bool
    ) -> None:
        self._message_id = job.job_id
        self._model = model
        self._hides_thinking = hides_thinking
        self._fills_context = fills_context
        self._blocks: list[TextAnswer | ThinkingAnswer | ToolUseAnswer] = []
        self._arguments = ""  # of the last block, if it is a call
        self._is_open = False
        self._writes = True  # events, which a whole answer has not
        self._stop_reason: StopReason = "end_turn"
        self._stop_sequence: str | None = None

    @property
    def frame(self) -> MessageFormat:
        return self

    def count(self, usage: Usage) -> None: ...

    def start(self, usage: Usage) -> bytes:
        message = MessageAnswer(id=self._message_id, model=self._model, usage=message_usage(usage))
        return self._event("message_start", {"message": message}) + self._event("ping", {})

    def event(self, delta: TextDelta) -> bytes:
        events = b"".join([self._add(part) for part in delta.parts])
        if delta.finish_reason is not None:
            self._note_stop(delta)
        return events

    def end(self, usage: Usage) -> bytes:
        events = self._close()
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        fields = {"delta": delta, "usage": message_usage(usage)}
        return events + self._event("message_delta", fields) + self._event("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        return error.event(MESSAGES_PATH)

    def answer(self, wholes: list[TextDelta], usage: Usage) -> bytes:
        self._writes = False
        self.event(wholes[0])
        self._close()
        answer = MessageAnswer(
            id=self._message_id,
            model=self._model,
            content=self._blocks,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=message_usage(usage),
        )
        encoded: bytes = json_encode(answer)
        return encoded

    def _note_stop(self, delta: TextDelta) -> None:
        called = any(isinstance(block, ToolUseAnswer) for block in self._blocks)
        if delta.finish_reason == "length":
            self._stop_reason = "max_tokens"
            if self._fills_context:
                self._stop_reason = "model_context_window_exceeded"
        elif isinstance(delta.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
        elif called:
            self._stop_reason = "tool_use"

    # Blocks.

    def _add(self, part: MessageEvent) -> bytes:
        match part:
            case ReasoningDelta(text=text):
                return self._add_thinking(text)
            case ContentDelta(text=text):
                return self._add_text(text)
            case FoundCallDelta(id=str(call_id), name=str(name)):
                tool_use_id = "toolu_" + call_id.removeprefix("call_")
                block = ToolUseAnswer(id=tool_use_id, name=name)
                return self._open(block) + self._add_arguments(part.arguments)
            case FoundCallDelta(arguments=text):
                return self._add_arguments(text)

    def _add_thinking(self, text: str) -> bytes:
        block, events = self._current(ThinkingAnswer), b""
        if block is None:
            block = ThinkingAnswer(thinking="")
            events = self._open(block)
        if self._hides_thinking:
            return events
        block.thinking += text
        return events + self._delta({"type": "thinking_delta", "thinking": text})

    def _add_text(self, text: str) -> bytes:
        block, events = self._current(TextAnswer), b""
        if block is None:
            block = TextAnswer(text="")
            events = self._open(block)
        block.text += text
        return events + self._delta({"type": "text_delta", "text": text})

    def _add_arguments(self, text: str) -> bytes:
        if not text or self._current(ToolUseAnswer) is None:
            return b""
        self._arguments += text
        return self._delta({"type": "input_json_delta", "partial_json": text})

    def _current(self, kind: type[Any]) -> Any:
        return self._blocks[-1] if self._is_open and isinstance(self._blocks[-1], kind) else None

    def _open(self, block: TextAnswer | ThinkingAnswer | ToolUseAnswer) -> bytes:
        events = self._close()
        self._blocks.append(block)
        self._is_open, self._arguments = True, ""
        return events + self._event(
            "content_block_start", {"index": len(self._blocks) - 1, "content_block": block}
        )

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        events = b""
        match block := self._blocks[-1]:
            case ThinkingAnswer():
                block.signature = hashlib.sha256(block.thinking.encode()).hexdigest()
                delta = {"type": "signature_delta", "signature": block.signature}
                events = self._delta(delta)
            case ToolUseAnswer():
                block.input = _object(self._arguments)
        self._is_open = False
        return events + self._event("content_block_stop", {"index": len(self._blocks) - 1})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return typed_event(kind, fields) if self._writes else b""

    def _delta(self, delta: dict[str, Any]) -> bytes:
        fields = {"index": len(self._blocks) - 1, "delta": delta}
        return self._event("content_block_delta", fields)


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; those that max_tokens has cut off are no JSON, and left out."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
