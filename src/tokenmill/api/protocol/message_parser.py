"""The text of one choice to the fields of a message: reasoning, content and tool calls."""

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
from tokenmill.api.protocol.prepare import Job
from tokenmill.text.parsers import ContentDelta, Event, ReasoningParser, ToolParser


class MessageParser:
    """The parsers and the collected parts of one choice."""

    def __init__(self, job: Job) -> None:
        opened = job.reasoning_opened
        self._reasoning = ReasoningParser(opened) if opened is not None else None
        self._tools: ToolParser | None = job.tool_use.parser() if job.tool_use else None
        self.started = False
        self.called = False

    def split(self, delta: TextDelta) -> ChatDelta:
        """The delta's text as reasoning, content and tool calls."""
        content = delta.text
        message = ChatDelta()
        if self._reasoning is not None:
            reasoning, content = self._reasoning.push(content)
            if delta.finish_reason is not None:
                last_reasoning, last_content = self._reasoning.finish()
                reasoning, content = reasoning + last_reasoning, content + last_content
            if reasoning:
                message.reasoning_content = reasoning
        if self._tools is not None:
            events = self._tools.push(content)
            if delta.finish_reason is not None:
                events += self._tools.finish(delta.cut_off)
            content = "".join(e.text for e in events if isinstance(e, ContentDelta))
            self._add_calls(message, events)
        if content:
            message.content = content
        return message

    def _add_calls(self, message: ChatDelta, events: list[Event]) -> None:
        calls: list[ToolCallDelta] = []
        for event in events:
            if isinstance(event, ContentDelta):
                continue
            if event.id is not None and event.name is not None:
                self.called = True
                function = FunctionCallDelta(name=event.name, arguments=event.arguments)
                calls.append(
                    ToolCallDelta(
                        index=event.index, id=event.id, type="function", function=function
                    )
                )
            elif calls and calls[-1].index == event.index:
                calls[-1].function.arguments += event.arguments
            else:
                function = FunctionCallDelta(arguments=event.arguments)
                calls.append(ToolCallDelta(index=event.index, function=function))
        if calls:
            message.tool_calls = calls

    def message(self, delta: TextDelta) -> tuple[ChatMessage, bool]:
        """The whole message of a text, and whether it calls tools."""
        content = delta.text
        message = ChatMessage(content=content)
        if self._reasoning is not None:
            reasoning, content = self._reasoning.parse(content)
            message.content = content
            if reasoning:
                message.reasoning_content = reasoning
        if self._tools is None:
            return message, False
        content, calls = self._tools.parse(content, delta.cut_off)
        message.content = content
        if calls:
            message.content = content or None
            message.tool_calls = [
                ToolCall(id=c.id, function=FunctionCall(name=c.name, arguments=c.arguments))
                for c in calls
            ]
        return message, bool(calls)
