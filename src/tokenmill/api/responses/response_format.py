"""A response as bytes: the typed events of a stream, and the whole answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from tokenmill.api.errors import ApiError
from tokenmill.api.open_call import TextDelta
from tokenmill.api.protocol.answers import ChatLogprob, Usage, json_encode
from tokenmill.api.protocol.format_stream import typed_event
from tokenmill.api.protocol.logprobs import chat_logprobs
from tokenmill.api.responses.response_items import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    carried,
    new_id,
)
from tokenmill.api.responses.response_object import (
    CutReason,
    FaultCode,
    IncompleteDetails,
    ResponseFault,
    ResponseObject,
    response_usage,
)
from tokenmill.api.responses.response_tools import namespaced
from tokenmill.sched.trackers import LOOP
from tokenmill.text.parsers import ContentDelta, FoundCallDelta, MessageEvent, ReasoningDelta
from tokenmill.text.tokenizer import Tokenizer

OnEnd = Callable[[ResponseObject], None]


class ResponseFormat:
    """Formats one response; the output items grow as the parts of the message come.

    At most one item is open: the next one begins when it is done. `on_end` gets the response once
    it has ended, before the client sees its end. `carries`: reasoning is wanted as
    encrypted_content, too.
    """

    counts = False

    def __init__(
        self,
        response: ResponseObject,
        tokenizer: Tokenizer,
        on_end: OnEnd,
        carries: bool,
    ) -> None:
        self._response = response
        self._namespaced = namespaced(response.tools)
        self._tokenizer = tokenizer
        self._on_end = on_end
        self._carries = carries
        self._num_events = 0
        self._writes = True  # events, which a whole answer has not
        self._is_open = False  # the last item is not done yet
        self._cut_off: CutReason | None = None

    @property
    def frame(self) -> ResponseFormat:
        return self

    def count(self, usage: Usage) -> None:
        """Usage stands in the last event alone."""

    def start(self, usage: Usage) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def event(self, delta: TextDelta) -> bytes:
        events = b"".join([self._add(part, delta) for part in delta.parts])
        if delta.finish_reason is not None:
            if delta.finish_reason == "length":
                self._cut_off = "max_output_tokens"
            elif delta.stop_reason == LOOP:
                self._cut_off = LOOP
        return events

    def end(self, usage: Usage) -> bytes:
        cut_off = self._cut_off is not None
        events = self._close(cut_off)
        if not self._response.output:  # nothing at all was said
            events += self._add(ContentDelta(""), None) + self._close(cut_off)
        self._finish(usage)
        return events + self._lifecycle(f"response.{self._response.status}")

    def failure(self, error: ApiError) -> bytes:
        response = self._response
        response.status = "failed"
        code: FaultCode = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response.error = ResponseFault(code=code, message=str(error))
        if self._is_open:
            response.output[-1].status = "incomplete"
        return self._lifecycle("response.failed")

    def answer(self, wholes: list[TextDelta], usage: Usage) -> bytes:
        self._writes = False
        self.event(wholes[0])
        self.end(usage)
        encoded: bytes = json_encode(self._response)
        return encoded

    def _finish(self, usage: Usage) -> None:
        response = self._response
        response.usage = response_usage(usage)
        response.status = "incomplete" if self._cut_off else "completed"
        if self._cut_off is not None:
            response.incomplete_details = IncompleteDetails(reason=self._cut_off)
        else:
            response.completed_at = int(time.time())
        self._on_end(response)

    # Items.

    def _add(self, part: MessageEvent, delta: TextDelta | None) -> bytes:
        match part:
            case ReasoningDelta(text=text):
                return self._add_reasoning(text)
            case ContentDelta(text=text):
                return self._add_text(text, self._logprobs(delta))
            case FoundCallDelta(id=str(call_id), name=str(name)):
                space, own = self._namespaced.get(name, (UNSET, name))
                item = FunctionCallItem(
                    id=new_id(FunctionCallItem),
                    call_id=call_id,
                    name=own,
                    namespace=space,
                    arguments="",
                    status="in_progress",
                )
                return self._open(item) + self._add_arguments(part.arguments)
            case FoundCallDelta(arguments=text):
                return self._add_arguments(text)

    def _add_reasoning(self, text: str) -> bytes:
        item = self._current(ReasoningItem)
        events = b""
        if item is None or item.content is None:
            item = ReasoningItem(id=new_id(ReasoningItem), content=[], status="in_progress")
            events = self._open(item)
            events += self._open_part(item, ReasoningText(text=""))
        assert item.content
        item.content[0].text += text
        return events + self._part_event("response.reasoning_text.delta", {"delta": text})

    def _add_text(self, text: str, logprobs: list[ChatLogprob]) -> bytes:
        item = self._current(MessageItem)
        events = b""
        if item is None:
            item = MessageItem(
                id=new_id(MessageItem), role="assistant", content=[], status="in_progress"
            )
            events = self._open(item)
            events += self._open_part(item, OutputText(text="", logprobs=[]))
        part = _text_part(item)
        part.text += text
        if part.logprobs is not None:
            part.logprobs += logprobs
        if not text:
            return events
        fields = {"delta": text, "logprobs": logprobs}
        return events + self._part_event("response.output_text.delta", fields)

    def _add_arguments(self, text: str) -> bytes:
        item = self._current(FunctionCallItem)
        if not text or item is None:
            return b""
        item.arguments += text
        return self._item_event("response.function_call_arguments.delta", {"delta": text})

    def _current(self, kind: type[Any]) -> Any:
        output = self._response.output
        return output[-1] if self._is_open and isinstance(output[-1], kind) else None

    def _open(self, item: OutputItem) -> bytes:
        events = self._close()
        self._response.output.append(item)
        self._is_open = True
        return events + self._output_event("response.output_item.added")

    def _open_part(self, item: MessageItem | ReasoningItem, part: Any) -> bytes:
        event = self._part_event("response.content_part.added", {"part": part})
        assert isinstance(item.content, list)
        item.content.append(part)
        return event

    def _close(self, cut_off: bool = False) -> bytes:
        """End the open item; `cut_off`: the model had more to say."""
        if not self._is_open:
            return b""
        item = self._response.output[-1]
        item.status = "incomplete" if cut_off else "completed"
        match item:
            case ReasoningItem(content=[part]):
                if self._carries:
                    item.encrypted_content = carried(part.text)
                events = self._part_done("response.reasoning_text.done", {"text": part.text}, part)
            case FunctionCallItem():
                fields = {"arguments": item.arguments, "name": item.name}
                events = self._item_event("response.function_call_arguments.done", fields)
            case MessageItem():
                text = _text_part(item)
                done = {"text": text.text, "logprobs": text.logprobs or []}
                events = self._part_done("response.output_text.done", done, text)
            case _:
                events = b""
        events += self._output_event("response.output_item.done")
        self._is_open = False
        return events

    def _part_done(self, kind: str, fields: dict[str, Any], part: Any) -> bytes:
        done = self._part_event(kind, fields)
        return done + self._part_event("response.content_part.done", {"part": part})

    def _logprobs(self, delta: TextDelta | None) -> list[ChatLogprob]:
        if delta is None or delta.logprobs is None:
            return []
        return chat_logprobs(self._tokenizer, delta.logprobs).content

    # Events.

    def _lifecycle(self, kind: str) -> bytes:
        return self._event(kind, {"response": self._response})

    def _output_event(self, kind: str) -> bytes:
        output = self._response.output
        return self._event(kind, {"output_index": len(output) - 1, "item": output[-1]})

    def _part_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return self._item_event(kind, {"content_index": 0, **fields})

    def _item_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        output = self._response.output
        place = {"output_index": len(output) - 1, "item_id": output[-1].id}
        return self._event(kind, place | fields)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        if not self._writes:
            return b""
        number = self._num_events
        self._num_events += 1
        return typed_event(kind, {"sequence_number": number, **fields})


def _text_part(item: MessageItem) -> OutputText:
    part = item.content[0]
    assert isinstance(part, OutputText)
    return part
