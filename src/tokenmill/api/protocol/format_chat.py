"""Chat completions as bytes: the streamed events, and the whole answer."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from tokenmill.api.open_call import TextDelta
from tokenmill.api.protocol.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinish,
    ChatLogprobs,
    ChatMessage,
    FinishText,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    json_encode,
)
from tokenmill.api.protocol.format_stream import EventFrame, UsageIn
from tokenmill.api.protocol.logprobs import chat_logprobs, prompt_logprobs
from tokenmill.api.protocol.prepare import PreparedCall
from tokenmill.core.types import TokenLogprobs
from tokenmill.text.parsers import ContentDelta, FoundCallDelta, MessageEvent, ReasoningDelta
from tokenmill.text.tokenizer import Tokenizer

_AFTER = b'},"logprobs":null,"finish_reason":null}'


class ChatFormat:
    """Formats one chat call: `event` and `frame` for a stream, `answer` for a whole answer."""

    def __init__(
        self, job: PreparedCall, model: str, tokenizer: Tokenizer, usage_in: UsageIn
    ) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._choices = [MessageParser(job.shows_reasoning) for _ in job.requests]
        sampling = job.requests[0].task.sampling
        self._wants_logprobs = sampling.logprobs is not None
        parses = job.make_reader is not None
        # Plain text needs no struct: only the JSON string between two constant pieces changes.
        self._plain = not (parses or self._wants_logprobs or job.return_token_ids)
        self.frame = EventFrame(job, model, "chat.completion.chunk", usage_in)
        self._before = [
            self.frame.head + b'{"index":%d,"delta":{"content":' % i
            for i in range(len(job.requests))
        ]

    def event(self, delta: TextDelta) -> bytes:
        choice = self._choices[delta.index]
        if self._plain and choice.started and delta.finish_reason is None:
            if not delta.text:
                return b""
            before, text = self._before[delta.index], json_encode(delta.text)
            return b"%b%b%b%b" % (before, text, _AFTER, self.frame.tail)
        events = [] if choice.started else [self._role_event(delta.index)]
        choice.started = True
        message = choice.split(delta)
        if self._has_content(message, delta):
            events.append(self._content_event(message, delta))
        if delta.finish_reason is not None:
            events.append(self._finish_event(choice, delta))
        return b"".join(events)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands around the JSON string of an event; None while there is more to say."""
        if not self._plain or self.frame.counts or not self._choices[index].started:
            return None
        return self._before[index], _AFTER + self.frame.tail

    def answer(self, wholes: list[TextDelta], usage: Usage) -> bytes:
        answer = ChatCompletion(
            id=self._job.job_id,
            created=self._job.created,
            model=self._model,
            choices=[self._whole(delta) for delta in wholes],
            usage=usage,
        )
        if self._job.return_token_ids:
            answer.prompt_token_ids = self._job.prompts[0].token_ids
        if self._job.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(
                self._tokenizer, wholes[0].prompt_logprobs or [], self._job.prompt_logprobs
            )
        encoded: bytes = json_encode(answer)
        return encoded

    def _has_content(self, message: ChatDelta, delta: TextDelta) -> bool:
        has_tokens = bool(delta.token_ids) and (self._wants_logprobs or self._job.return_token_ids)
        said = (message.content, message.reasoning_content, message.tool_calls)
        return has_tokens or any(part is not UNSET for part in said)

    def _role_event(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        tail = self.frame.tail
        if self._job.return_token_ids:
            prompt = json_encode(self._job.prompts[0].token_ids)
            tail = b'],"prompt_token_ids":' + prompt + tail.removeprefix(b"]")
        return self.frame.head + json_encode(ChatChunkChoice(index=index, delta=delta)) + tail

    def _content_event(self, message: ChatDelta, delta: TextDelta) -> bytes:
        choice = ChatChunkChoice(
            index=delta.index, delta=message, logprobs=self._logprobs(delta.logprobs)
        )
        if self._job.return_token_ids:
            choice.token_ids = delta.token_ids
        return self.frame.head + json_encode(choice) + self.frame.tail

    def _finish_event(self, state: MessageParser, delta: TextDelta) -> bytes:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(),
            finish_reason=_finish_reason(delta.finish_reason, state.called),
            stop_reason=delta.stop_reason,
        )
        return self.frame.head + json_encode(choice) + self.frame.tail

    def _logprobs(self, positions: Sequence[TokenLogprobs] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        return chat_logprobs(self._tokenizer, positions, self._job.tokens_as_ids)

    def _whole(self, delta: TextDelta) -> ChatChoice:
        message, called = self._choices[delta.index].message(delta)
        choice = ChatChoice(
            index=delta.index,
            message=message,
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_finish_reason(delta.finish_reason, called),
            stop_reason=delta.stop_reason,
        )
        if self._job.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice


def _finish_reason(reason: FinishText | None, called: bool) -> ChatFinish:
    return "tool_calls" if called and reason == "stop" else reason or "stop"


class MessageParser:
    def __init__(self, shows_reasoning: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self.started = False
        self.called = False

    def split(self, delta: TextDelta) -> ChatDelta:
        """What the delta adds to reasoning, content and tool calls."""
        message = ChatDelta()
        if self._shows_reasoning and (reasoning := _reasoning(delta.parts)):
            message.reasoning_content = reasoning
        if content := _content(delta.parts):
            message.content = content
        if calls := _call_deltas(delta.parts):
            self.called = True
            message.tool_calls = calls
        return message

    def message(self, delta: TextDelta) -> tuple[ChatMessage, bool]:
        """The message of a whole delta, and whether it calls tools."""
        message = ChatMessage(content=_content(delta.parts))
        if self._shows_reasoning and (reasoning := _reasoning(delta.parts)):
            message.reasoning_content = reasoning
        calls = _calls(delta.parts)
        if calls:
            message.content = message.content or None
            message.tool_calls = calls
        return message, bool(calls)


def _reasoning(parts: list[MessageEvent]) -> str:
    return "".join([part.text for part in parts if isinstance(part, ReasoningDelta)])


def _content(parts: list[MessageEvent]) -> str:
    return "".join([part.text for part in parts if isinstance(part, ContentDelta)])


def _call_deltas(parts: list[MessageEvent]) -> list[ToolCallDelta]:
    calls: list[ToolCallDelta] = []
    for event in parts:
        if not isinstance(event, FoundCallDelta):
            continue
        if event.id is not None and event.name is not None:
            function = FunctionCallDelta(name=event.name, arguments=event.arguments)
            calls.append(
                ToolCallDelta(index=event.index, id=event.id, type="function", function=function)
            )
        elif calls and calls[-1].index == event.index:
            calls[-1].function.arguments += event.arguments
        else:
            function = FunctionCallDelta(arguments=event.arguments)
            calls.append(ToolCallDelta(index=event.index, function=function))
    return calls


def _calls(parts: list[MessageEvent]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for event in parts:
        if not isinstance(event, FoundCallDelta):
            continue
        if event.id is not None and event.name is not None:
            function = FunctionCall(name=event.name, arguments=event.arguments)
            calls.append(ToolCall(id=event.id, function=function))
        else:
            calls[event.index].function.arguments += event.arguments
    return calls
