"""The parts of one choice to the fields of a chat message: reasoning, content and tool calls."""

from __future__ import annotations

from tokenmill.api.generation import TextDelta
from tokenmill.api.protocol.answers import (
    ChatDelta,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from tokenmill.text.parsers import ContentDelta, MessageEvent, ReasoningDelta
from tokenmill.text.parsers import ToolCallDelta as CallEvent


class MessageParser:
    """What was sent of one choice."""

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
        if not isinstance(event, CallEvent):
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
        if not isinstance(event, CallEvent):
            continue
        if event.id is not None and event.name is not None:
            function = FunctionCall(name=event.name, arguments=event.arguments)
            calls.append(ToolCall(id=event.id, function=function))
        else:
            calls[event.index].function.arguments += event.arguments
    return calls
