"""Harmony, the format of GPT-OSS: messages on channels, read by a state machine over token ids.

A message is `<|start|>ROLE<|channel|>CHANNEL<|message|>BODY<|end|>`. Its header may name a
recipient (`to=functions.NAME`, after the role or after the channel) and a type after
`<|constrain|>`. Models write malformed headers now and then: whatever comes is read as one message,
and nothing is raised.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from tokenmill.core.types import Branch, Channels, FreeText, ReasoningMarks
from tokenmill.text.chat_template import Message
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.message import MessageReader
from tokenmill.text.parsers import ContentDelta, FoundCallDelta, MessageEvent, ReasoningDelta
from tokenmill.text.tokenizer import Tokenizer

MAX_HEADER_TOKENS = 64  # of one section; a longer one is the text of an answer
_RECIPIENT = re.compile(r"\s*\bto=([\w.\-]+)")
_FUNCTIONS = "functions."
_ROLES = ("assistant", "user", "system", "developer", "tool")
_CHANNELS = ("analysis", "commentary", "final")
_TYPES = ("json", "code")

Kind = Literal["reasoning", "content", "call"]
_Section = Literal["role", "channel", "type"]


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """The ids of the format's special tokens, and of the words that matter in headers."""

    start: int
    end: int
    message: int
    channel: int
    constrain: int
    return_: int
    call: int
    assistant: tuple[int, ...]
    analysis: tuple[int, ...]
    final: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HarmonyTokens | None:
        """Those of a vocabulary; None where one of the special tokens is missing."""
        names = ("start", "end", "message", "channel", "constrain", "return", "call")
        ids = [tokenizer.token_to_id(f"<|{name}|>") for name in names]
        start, end, message, channel, constrain, return_, call = [
            -1 if i is None else i for i in ids
        ]
        if None in ids:
            return None
        words = [tuple(tokenizer.encode(w, False)) for w in ("assistant", "analysis", "final")]
        return cls(start, end, message, channel, constrain, return_, call, *words)

    @property
    def specials(self) -> frozenset[int]:
        marks = (self.start, self.end, self.message, self.channel, self.constrain)
        return frozenset((*marks, *self.stop_ids))

    @property
    def stop_ids(self) -> tuple[int, int]:
        """What ends a sequence: the answer is complete, or a tool is to be called."""
        return self.return_, self.call

    @property
    def until_channel(self) -> tuple[int, ...]:
        """What ends a body and lets the model choose the channel of the next."""
        return self.end, self.start, *self.assistant, self.channel

    @property
    def until_answer(self) -> tuple[int, ...]:
        """What ends a body and begins one on `final`."""
        return *self.until_channel, *self.final, self.message

    def marks(
        self, forced: tuple[tuple[int, ...], ...], bound: bool = False, calls: bool = False
    ) -> ReasoningMarks:
        """How reasoning is found on the channels, and how it is ended."""
        ends = self.end, *self.stop_ids
        return ReasoningMarks(
            forced,
            channels=Channels(
                self.start, self.channel, self.message, self.constrain, ends,
                self.assistant, self.analysis, self.final, bound, calls,
            ),
        )  # fmt: skip

    def until_final(self, banned: Collection[int]) -> FreeText:
        """Free text up to the body of a message on the channel `final`."""
        begin = (self.channel, *self.final)
        breaks = (self.start, self.end, *self.stop_ids)
        return FreeText(self.message, begin, breaks, banned=tuple(banned))

    def until_end(self, banned: Collection[int]) -> FreeText:
        """Free text up to the end of the message whose body is under way."""
        others = self.specials.difference((self.end,))
        return FreeText(self.end, banned=tuple(sorted(others.union(banned))))

    def call_branch(self, tokenizer: Tokenizer, name: str, json_schema: str) -> Branch:
        """The header of a call of a function, and the schema of its arguments."""
        text = f"commentary to={_FUNCTIONS}{name} "
        token_ids = (self.start, *self.assistant, self.channel, *tokenizer.encode(text, False))
        token_ids += (self.constrain, *tokenizer.encode("json", False), self.message)
        return Branch(token_ids, json_schema)

    def answers(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        """Whether the prompt leaves the body of a message on `final` open."""
        reader = HarmonyReader(Detokenizer(tokenizer), tokenizer, self, prompt, bound=True)
        return reader.answering

    def open_analysis(self, prompt: Sequence[int]) -> list[int]:
        """What opens a message on the channel `analysis` after a prompt."""
        header = [self.channel, *self.analysis, self.message]
        last = next((token for token in reversed(prompt) if token in self.specials), None)
        if last == self.start:
            return header
        ending = [self.end] if last == self.message else []
        return [*ending, self.start, *self.assistant, *header]


class HarmonyReader(MessageReader):
    """Reads the messages of one answer: bodies on `analysis` are reasoning, those to a function
    are calls on whatever channel, and all others are content.

    `names`: the functions there are. `bound`: a constraint binds the channel `final`; then nothing
    else is content. `prompt`: the reader goes on where it ends.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        tokenizer: Tokenizer,
        tokens: HarmonyTokens,
        prompt: Sequence[int] = (),
        names: Collection[str] = (),
        max_calls: int | None = None,
        bound: bool = False,
    ) -> None:
        super().__init__(detokenizer)
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._names = names
        self._max_calls = max_calls
        self._bound = bound
        self._specials = tokens.specials
        self._state: Literal["idle", "header", "body"] = "idle"
        self._section: _Section = "role"
        self._header: dict[_Section, list[int]] = {}
        self._kind: Kind = "content"
        self._num_calls = 0
        self._called = False  # arguments of the call under way were sent
        self._spoken: set[Kind] = set()  # kinds that had text
        self._joins = False  # a line break comes before the text of this body
        self._done = False
        self._go_on(prompt)

    def _go_on(self, prompt: Sequence[int]) -> None:
        start = self._tokens.start
        size = next((i + 1 for i, token in enumerate(reversed(prompt)) if token == start), 0)
        for token_id in prompt[len(prompt) - size :]:
            if token_id in self._specials:
                self._read_special(token_id)
            elif self._state == "header":
                self._header[self._section].append(token_id)
        if self._kind == "call":
            self._kind = "content"
        self._num_calls = 0

    @property
    def done(self) -> bool:
        return self._done

    @property
    def answering(self) -> bool:
        """True in a body that is content."""
        return self._state == "body" and self._kind == "content"

    def read(self, token_id: int) -> list[MessageEvent]:
        if token_id in self._specials:
            self._detokenizer.num_tokens += 1
            return self._read_special(token_id)
        if self._state == "header":
            self._detokenizer.num_tokens += 1
            self._header[self._section].append(token_id)
            # A bound header is as long as the constraint's: until its message begins.
            limited = self._section == "role" or not self._bound
            too_long = len(self._header[self._section]) > MAX_HEADER_TOKENS
            return self._end_header() if limited and too_long else []
        if self._state == "idle":
            self._begin_body("reasoning" if self._bound else "content")
        self.num_reasoning_tokens += self._kind == "reasoning"
        return self._say(self._detokenizer.push((token_id,)))

    def finish(self, cut: bool) -> list[MessageEvent]:
        if self._state == "header":
            return self._end_header(cut)
        return self._end_body(cut)

    def _read_special(self, token_id: int) -> list[MessageEvent]:
        tokens = self._tokens
        if token_id == tokens.start:
            events = self._leave()
            self._begin_header("role")
            return events
        if token_id == tokens.channel:
            if self._state == "header":
                self._begin_section("channel")
                return []
            events = self._leave()
            self._begin_header("channel")
            return events
        if token_id == tokens.message:
            return self._read_message()
        if token_id == tokens.constrain:
            if self._state == "header":
                self._begin_section("type")
            return []
        return self._leave()

    def _read_message(self) -> list[MessageEvent]:
        if self._state == "header":
            return self._open_body()
        if self._state == "idle":
            self._begin_body("reasoning" if self._bound else "content")
        return []

    def _leave(self) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._state == "header":
            events = self._end_header()
        if self._state == "body":
            events += self._end_body(cut=False)
        self._state = "idle"
        return events

    # Headers.

    def _begin_header(self, section: _Section) -> None:
        self._header = {}
        self._state = "header"
        self._begin_section(section)

    def _begin_section(self, section: _Section) -> None:
        self._section = section
        self._header[section] = []

    def _text(self, section: _Section) -> str:
        size = self._tokenizer.vocab_size
        ids = [token_id for token_id in self._header.get(section, ()) if token_id < size]
        return self._tokenizer.decode(ids)

    def _channel(self) -> str:
        words = _RECIPIENT.sub("", self._text("channel")).split()
        return words[0] if words else ""

    def _function(self) -> str | None:
        """The function that the header calls, if there is one of that name."""
        for section in ("channel", "role", "type"):
            found = _RECIPIENT.search(self._text(section))  # type: ignore[arg-type]
            if found is not None:
                name = found[1].removeprefix(_FUNCTIONS)
                return name if name in self._names else None
        return None

    def _open_body(self) -> list[MessageEvent]:
        """The header is complete: what comes now?"""
        name = self._function()
        if name is not None:
            self._begin_body("call")
            return self._open_call(name)
        self._begin_body(self._kind_of_header())
        return []

    def _kind_of_header(self) -> Kind:
        if self._bound:
            final = self._tokens.final
            is_final = tuple(self._header.get("channel", ())[: len(final)]) == final
            return "content" if is_final else "reasoning"
        return "reasoning" if self._channel() == "analysis" else "content"

    def _end_header(self, cut: bool = False) -> list[MessageEvent]:
        """A header without a body: what is in it beside a header's words is the body."""
        rest, name = self._rest_of_header(), self._function()
        self._state = "idle"
        if not rest or (cut and self._section != "role"):
            return []
        if name is not None:
            self._begin_body("call")
            return [*self._open_call(name), *self._say(rest.strip())]
        self._begin_body("reasoning" if self._bound else self._kind_of_header())
        return self._say(rest)

    def _rest_of_header(self) -> str:
        role = _RECIPIENT.sub("", self._text("role")).lstrip()
        if any(word.startswith(role.strip()) for word in _ROLES):
            role = ""
        channel = _without(_RECIPIENT.sub("", self._text("channel")), _CHANNELS)
        kind = _RECIPIENT.sub("", self._text("type"))
        rests = [_without(role, _ROLES), _without(channel, _TYPES), _without(kind, _TYPES)]
        return "".join([rest for rest in rests if rest.strip()])

    # Bodies.

    def _begin_body(self, kind: Kind) -> None:
        self._state, self._kind = "body", kind
        self._joins = kind in self._spoken

    def _end_body(self, cut: bool) -> list[MessageEvent]:
        events = self._say(self._detokenizer.finish()) if self._state == "body" else []
        if self._state == "body" and self._kind == "call":
            if not self._called and not cut:
                events += self._say("{}")
            self._done = self._num_calls == self._max_calls
        self._state = "idle"
        return events

    def _open_call(self, name: str) -> list[MessageEvent]:
        call_id = f"call_{uuid4().hex[:24]}"
        self._num_calls += 1
        self._called = False
        return [FoundCallDelta(self._num_calls - 1, id=call_id, name=name)]

    def _say(self, text: str) -> list[MessageEvent]:
        if not text:
            return []
        if self._kind == "call":
            self._called = True
            return [FoundCallDelta(self._num_calls - 1, text)]
        if self._joins:
            text, self._joins = "\n" + text, False
        self._spoken.add(self._kind)
        return [ReasoningDelta(text) if self._kind == "reasoning" else ContentDelta(text)]


def _without(text: str, words: Collection[str]) -> str:
    """The text without the one of these words that it begins with."""
    bare = text.lstrip()
    word = next((word for word in words if bare.startswith(word)), None)
    return text if word is None else bare[len(word) :]


def one_call_per_message(messages: Sequence[Message]) -> list[Message]:
    """The conversation as GPT-OSS's template takes it: each call before its own result.

    The template renders one call of a message, and refuses text beside reasoning there.
    """
    results = {m.get("tool_call_id"): m for m in messages if m["role"] == "tool"}
    placed: set[int] = set()
    rendered: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if not calls and id(message) not in placed:
            rendered.append(message)
        for index, call in enumerate(calls):
            said = {"role": "assistant"} if index else _with_one_text(message)
            rendered.append(said | {"tool_calls": [call]})
            result = results.get(call.get("id"))
            if result is not None and id(result) not in placed:
                placed.add(id(result))
                rendered.append(result)
    return rendered


def _with_one_text(message: Message) -> Message:
    """A message whose text is a part of its reasoning, where it has both."""
    content, name = message.get("content"), "reasoning_content"
    reasoning = message.get(name) or message.get("reasoning")
    if not content or not reasoning:
        return message
    if not isinstance(content, str):
        content = "\n".join(part.get("text") or part.get("refusal", "") for part in content)
    return message | {"content": None, "reasoning": None, name: f"{reasoning}\n\n{content}"}
