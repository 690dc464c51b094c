"""Generated text to OpenAI's fields: reasoning, content and tool calls, whole or as a stream."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from tokenmill.text.call_json import (
    HEADER,
    NAME,
    JsonScanner,
    json_or_none,
    may_be_call,
    read_call,
)

_THINK, _END_THINK = "<think>", "</think>"
_TOOL_CALL, _END_TOOL_CALL = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_OTHER_STYLES = ("<function=", "<arg_key>")  # calls that are no JSON


@dataclass(frozen=True, slots=True)
class FoundCall:
    """One call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class FoundCallDelta:
    """The start of a call, which has id and name, or more of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


Event = ContentDelta | FoundCallDelta
MessageEvent = ReasoningDelta | Event
Tags = tuple[str, str]  # what opens the reasoning, and what ends it


def detect_tool_parser(chat_template: str | None) -> Literal["hermes", "llama3_json"] | None:
    """The style in which a model with this template writes tool calls, None when not known."""
    template = chat_template or ""
    if any(mark in template for mark in _OTHER_STYLES):
        return None
    if _TOOL_CALL in template and '"arguments' in template:
        return "hermes"
    if _PYTHON_TAG in template or '"name": function name, "parameters"' in template:
        return "llama3_json"
    return None


def detect_reasoning(chat_template: str | None) -> Literal["think"] | None:
    """The style in which a model with this template marks its reasoning, None when it does not."""
    template = chat_template or ""
    return "think" if _THINK in template or _END_THINK in template else None


def opens_reasoning(prompt: str) -> bool:
    """True when the prompt has opened the <think> block that the model is to continue."""
    return prompt.rstrip().endswith(_THINK)


def ends_reasoning(prompt: str) -> bool:
    """True when the prompt has closed a <think> block, so that the answer itself comes next."""
    return prompt.rstrip().endswith(_END_THINK)


class ReasoningParser:
    """Splits a leading <think> block from the answer; newlines next to the tags belong to neither.

    `opened`: the prompt has opened the block already.
    """

    __slots__ = ("_buffer", "_close", "_end", "_open", "_opened", "_state", "first", "num_chars")

    def __init__(self, opened: bool = False, tags: Tags = (_THINK, _END_THINK)) -> None:
        self._opened = opened
        self._open, self._close = tags
        self._buffer = ""
        self.num_chars = self.first = self._end = 0  # all so far; those before the reasoning
        self._state: Literal["start", "gap", "reasoning", "end_gap", "content"] = "start"

    @property
    def inside(self) -> bool:
        """True while the text is reasoning."""
        return self._state in ("gap", "reasoning") or (self._state == "start" and self._opened)

    @property
    def ended(self) -> bool:
        """True once all that follows is content."""
        return self._state in ("end_gap", "content")

    @property
    def end(self) -> int:
        """The characters before the end of the reasoning, or before what may be that."""
        held = _num_held(self._buffer, self._close)
        return self._end if self.ended else self.num_chars - held

    def parse(self, text: str) -> tuple[str, str]:
        """(reasoning, content) of a whole message."""
        reasoning, content = self.push(text)
        last_reasoning, last_content = self.finish()
        return reasoning + last_reasoning, content + last_content

    def push(self, delta: str) -> tuple[str, str]:
        """(reasoning, content) that this delta makes certain."""
        self._buffer += delta
        self.num_chars += len(delta)
        if self._state == "start":
            self._start()
        if self._state == "gap" and self._skip_newlines():
            self._state = "reasoning"
        reasoning = self._take_reasoning() if self._state == "reasoning" else ""
        if self._state == "end_gap" and self._skip_newlines():
            self._state = "content"
        if self._state != "content":
            return reasoning, ""
        content, self._buffer = self._buffer, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """The text held back, once nothing follows."""
        rest, self._buffer = self._buffer, ""
        if self._state == "reasoning" or (self._state == "start" and self._opened):
            return rest, ""
        return "", rest

    def _start(self) -> None:
        text = self._buffer.lstrip()
        if text.startswith(self._open):
            self._buffer = text.removeprefix(self._open)
            self.first = self.num_chars - len(self._buffer)
            self._state = "gap"
        elif not self._open.startswith(text):
            self._state = "gap" if self._opened else "content"

    def _skip_newlines(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        return bool(self._buffer)

    def _take_reasoning(self) -> str:
        text, tag, rest = self._buffer.partition(self._close)
        if tag:
            self._buffer, self._state = rest, "end_gap"
            self._end = self.num_chars - len(rest) - len(tag)
            return text.rstrip("\n")
        cut = len(text[: len(text) - _num_held(text, self._close)].rstrip("\n"))
        self._buffer = text[cut:]
        return text[:cut]


class ToolParser(ABC):
    """Reads tool calls out of one message, either by parse() or by push() and finish().

    Text that is no call is content. parse() wants a call to be complete; a stream sends arguments
    as they come, so a call that breaks off or turns out malformed once its name is sent stays a
    call, and what follows is content. A text that was cut off (`cut`: by max_tokens or a stop
    string) is read alike in both ways: a call that had begun its arguments keeps those it has, and
    what is there of one that had not is dropped. `names`: the functions there are; other names
    make no call. `max_calls`: nothing is read after so many.
    """

    _parses_partial_calls = False

    def __init__(
        self, names: Collection[str] | None = None, *, max_calls: int | None = None
    ) -> None:
        self._names = names
        self._max_calls = max_calls
        self._eager = True  # send a call before it is complete
        self._num_calls = 0
        self._buffer = ""  # not yet understood
        self._opening = ""  # what announced the call that is being read
        self._skips_space = False
        self._scanner = JsonScanner()
        self._num_scanned = 0  # of the buffer, while a call is being read
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._read_text

    @property
    def done(self) -> bool:
        """True once the last call that is wanted is complete."""
        return self._state == self._read_nothing

    def parse(self, text: str, cut: bool = False) -> tuple[str, list[FoundCall]]:
        """(content, calls) of a whole message."""
        self._eager = self._parses_partial_calls or cut
        content, calls = "", []
        for event in self.push(text) + self.finish(cut):
            if isinstance(event, ContentDelta):
                content += event.text
            elif event.id is not None and event.name is not None:
                calls.append(FoundCall(event.id, event.name, ""))
            else:
                last = calls[-1]
                calls[-1] = FoundCall(last.id, last.name, last.arguments + event.arguments)
        return content, calls

    def push(self, delta: str) -> list[Event]:
        self._buffer += delta
        while self._buffer and self._state():
            pass
        return self._take_events()

    def finish(self, cut: bool = False) -> list[Event]:
        """What was held back, once nothing follows."""
        if self._state == self._read_call and not (cut and self._may_be_known_call()):
            self._content(self._opening + self._buffer)
        elif self._state == self._read_text and not (cut and self._holds_opening()):
            self._content(self._buffer)
        self._buffer = ""
        return self._take_events()

    def _may_be_known_call(self) -> bool:
        """Whether the call that was cut off may be one of a function there is."""
        name = NAME.search(self._buffer)
        return name is None or self._callable(name[1])

    def _holds_opening(self) -> bool:
        """Whether the rest of the text is the first half of a tag that announces a call."""
        rest = self._buffer.strip()
        return len(rest) > 1 and rest[0] == "<"

    # Each state reads from the buffer and returns False when it needs more text.

    @abstractmethod
    def _read_text(self) -> bool:
        """Content, up to what announces a call."""

    def _read_separator(self) -> bool:
        return self._consume(0, self._read_text)

    def _read_call(self) -> bool:
        header = HEADER.match(self._buffer) if self._eager else None
        if header:
            return self._start_call(header)
        if not may_be_call(self._buffer):
            return self._refuse()
        end = self._scanner.scan(self._buffer, self._num_scanned)
        self._num_scanned = len(self._buffer)
        if self._scanner.broken:
            return self._refuse()
        if end is None:
            return False
        call = read_call(self._buffer[:end])
        if call is None or not self._callable(call[0]):
            return self._refuse()
        self._open_call(call[0])
        self._arguments(call[1])
        return self._consume(end, self._after_call())

    def _start_call(self, header: re.Match[str]) -> bool:
        name = json_or_none(header[1])
        if not isinstance(name, str) or not self._callable(name):
            return self._refuse()
        self._open_call(name)
        self._scanner = JsonScanner()
        return self._consume(header.end(), self._read_arguments)

    def _read_arguments(self) -> bool:
        end = self._scanner.scan(self._buffer)
        if self._scanner.broken:
            self._arguments(self._buffer[: self._scanner.num_valid])
            return self._consume(self._scanner.num_valid, self._read_text)
        self._arguments(self._buffer[:end])
        if end is None:
            self._buffer = ""
            return False
        return self._consume(end, self._read_call_end)

    def _read_call_end(self) -> bool:
        """The rest of the call's object, whose further members mean nothing."""
        if self._buffer.lstrip()[:1] not in (",", "}", ""):
            return self._consume(0, self._read_text)
        self._scanner = JsonScanner(inside_object=True)
        end = self._scanner.scan(self._buffer)
        if self._scanner.broken:
            return self._consume(0, self._read_text)
        return end is not None and self._consume(end, self._after_call())

    def _after_call(self) -> Callable[[], bool]:
        """The state after a complete call."""
        return self._read_nothing if self._num_calls == self._max_calls else self._read_separator

    def _read_nothing(self) -> bool:
        """Whatever comes after the last call that is wanted."""
        self._buffer = ""
        return False

    def _consume(self, size: int, state: Callable[[], bool]) -> bool:
        self._buffer = self._buffer[size:]
        self._state = state
        return True

    def _expect_call(self, opening: str, size: int) -> bool:
        self._opening = opening
        self._scanner, self._num_scanned = JsonScanner(), 0
        return self._consume(size, self._read_call)

    def _refuse(self) -> bool:
        """Give back what looked like a call."""
        self._content(self._opening)
        return self._consume(0, self._read_text)

    def _callable(self, name: str) -> bool:
        return bool(name) and (self._names is None or name in self._names)

    def _open_call(self, name: str) -> None:
        call_id = f"call_{uuid4().hex[:24]}"
        self._events.append(FoundCallDelta(self._num_calls, id=call_id, name=name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(FoundCallDelta(self._num_calls - 1, text))

    def _content(self, text: str) -> None:
        if not text:
            return
        if self._events and isinstance(last := self._events[-1], ContentDelta):
            self._events[-1] = ContentDelta(last.text + text)
        else:
            self._events.append(ContentDelta(text))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read_rest(self) -> bool:
        """Content after which no call can begin; space after the calls belongs to neither."""
        if self._buffer.strip() or not self._num_calls:
            self._content(self._buffer)
        self._buffer = ""
        return False

    def _find_opening(self, tag: str) -> bool:
        """Content up to a tag that announces a call; the space around calls belongs to neither."""
        if self._skips_space:
            self._buffer = self._buffer.lstrip()
        at = self._buffer.find(tag)
        size = at if at >= 0 else len(self._buffer) - _num_held(self._buffer, tag)
        text = self._buffer[:size].rstrip()
        self._content(text)
        self._skips_space = self._skips_space and not text
        if at >= 0:
            return self._expect_call(self._buffer[len(text) : at + len(tag)], at + len(tag))
        self._buffer = self._buffer[len(text) :]
        return False


class HermesParser(ToolParser):
    """Hermes and Qwen: any text, then <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

    def _read_text(self) -> bool:
        return self._find_opening(_TOOL_CALL)

    def _read_separator(self) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_END_TOOL_CALL):
            text = text.removeprefix(_END_TOOL_CALL)
        elif _END_TOOL_CALL.startswith(text):
            return False
        self._skips_space = True
        self._buffer = text
        return self._consume(0, self._read_text)


class Llama3JsonParser(ToolParser):
    """Llama 3: the message is {"name": ..., "parameters": {...}}, or several with `;` between."""

    def __init__(
        self, names: Collection[str] | None = None, *, max_calls: int | None = None
    ) -> None:
        super().__init__(names, max_calls=max_calls)
        self._at_start = True

    def _read_text(self) -> bool:
        if not self._at_start:
            return self._find_opening(_PYTHON_TAG)
        text = self._buffer.lstrip()
        if not text:
            return False
        self._at_start = False
        if text[0] != "{":
            return True
        size = len(self._buffer) - len(text)
        return self._expect_call(self._buffer[:size], size)

    def _read_separator(self) -> bool:
        text = self._buffer.lstrip().removeprefix(";").lstrip()
        if not text:
            return False
        size = len(self._buffer) - len(text)
        if text[0] == "{":
            return self._expect_call(self._buffer[:size], size)
        self._skips_space = True
        return self._consume(0, self._read_text)


class RequiredCallsParser(ToolParser):
    """The constrained output of tool_choice "required": an array of calls."""

    _parses_partial_calls = True

    def _read_text(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if self._num_calls or text[0] != "[":
            return self._consume(0, self._read_rest)
        size = len(self._buffer) - len(text) + 1
        return self._expect_call(self._buffer[:size], size)

    def _read_separator(self) -> bool:
        text = self._buffer.lstrip()
        size = len(self._buffer) - len(text) + 1
        if text.startswith(","):
            return self._expect_call(self._buffer[:size], size)
        if text:
            self._consume(size if text[0] == "]" else 0, self._read_rest)
        return bool(text)


class NamedCallParser(ToolParser):
    """The constrained output of a named tool_choice: the arguments of that function."""

    _parses_partial_calls = True

    def __init__(self, name: str, *, max_calls: int | None = None) -> None:
        super().__init__(max_calls=max_calls)
        self._name = name

    def _read_text(self) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if self._num_calls or text[0] != "{":
            return self._consume(0, self._read_rest)
        self._open_call(self._name)
        return self._consume(len(self._buffer) - len(text), self._read_arguments)

    def _read_call_end(self) -> bool:
        limited = self._num_calls == self._max_calls
        return self._consume(0, self._read_nothing if limited else self._read_rest)


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
}


def _num_held(text: str, tag: str) -> int:
    """The length of the longest end of the text that begins the tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0
