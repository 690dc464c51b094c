"""Generated tokens to the parts of one message, in order: reasoning, content and tool calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.parsers import (
    ContentDelta,
    Event,
    FoundCallDelta,
    MessageEvent,
    ReasoningDelta,
    ReasoningParser,
    ToolParser,
)

# Tags in the place of tag tokens: no text has a lone surrogate, so none can be taken for a tag.
TOKEN_TAGS = ("\ud800<", "\ud800>")


class MessageReader(ABC):
    """Reads the tokens of one choice, up to a stop string or the last call that is wanted."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.num_reasoning_tokens = 0

    @property
    def num_tokens(self) -> int:
        """The tokens that were read: up to and with the one that completed a stop string."""
        return self._detokenizer.num_tokens

    @property
    def stop_reason(self) -> str | None:
        return self._detokenizer.stop_reason

    @property
    @abstractmethod
    def done(self) -> bool:
        """True once the last call that is wanted is complete."""

    @abstractmethod
    def read(self, token_id: int) -> list[MessageEvent]:
        """What one more token makes certain."""

    @abstractmethod
    def finish(self, cut: bool) -> list[MessageEvent]:
        """What was held back, once nothing follows; `cut`: the model had more to say."""

    def push(self, token_ids: Sequence[int]) -> list[MessageEvent]:
        """What these tokens make certain; those after a stop are not read."""
        events: list[MessageEvent] = []
        for token_id in token_ids:
            if self.done or self.stop_reason is not None:
                break
            events += self.read(token_id)
        return events


class TaggedReader(MessageReader):
    """A message whose reasoning stands between tags and whose calls are written in its content.

    `tag_ids`: the tokens that are the tags, where the vocabulary has such; what only spells a tag
    is text then. `calls` reads a whole answer's or a streamed answer's content.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        reasoning: ReasoningParser | None,
        calls: ContentReader,
        tag_ids: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(detokenizer)
        self._reasoning = reasoning
        self._calls = calls
        self._tags = dict(zip(tag_ids or (), TOKEN_TAGS, strict=False))
        self._begins: list[int] = []  # of tokens that are reasoning, or spell one of its tags

    @property
    def done(self) -> bool:
        return self._calls.done

    def read(self, token_id: int) -> list[MessageEvent]:
        tag = self._tags.get(token_id)
        if tag is not None and self._reasoning is not None and not self._reasoning.ended:
            text = self._detokenizer.finish() + tag
            self._detokenizer.num_tokens += 1
            return self._split(text, counted=False)
        return self._split(self._detokenizer.push((token_id,)), counted=True)

    def finish(self, cut: bool) -> list[MessageEvent]:
        events = self._split(self._detokenizer.finish(), counted=False)
        if self._reasoning is not None:
            self.num_reasoning_tokens += len(self._begins) * self._reasoning.inside
            reasoning, content = self._reasoning.finish()
            events += [ReasoningDelta(reasoning)] if reasoning else []
            events += self._calls.push(content)
        return events + self._calls.finish(cut)

    def _split(self, text: str, counted: bool) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._reasoning is not None:
            begin, counted = self._reasoning.num_chars, counted and not self._reasoning.ended
            reasoning, text = self._reasoning.push(text)
            if reasoning:
                events.append(ReasoningDelta(reasoning))
            if counted and self._tags:
                self.num_reasoning_tokens += self._reasoning.inside
            elif counted:
                self._count_spelled(self._reasoning, begin)
        if text:
            events += self._calls.push(text)
        return events

    def _count_spelled(self, parser: ReasoningParser, begin: int) -> None:
        """Count the tokens that begin between the tags; what may spell the last one waits."""
        begins = [*self._begins, begin]
        if parser.inside or parser.ended:
            self.num_reasoning_tokens += sum(parser.first <= b < parser.end for b in begins)
            begins = [b for b in begins if b >= parser.end and not parser.ended]
        self._begins = begins


class ContentReader:
    """Finds the calls in a message's content.

    A stream sends a call as it comes. A whole answer is read at its end, so that a call that turns
    out malformed is content; `one_call` watches for the end of the first one meanwhile.
    """

    def __init__(
        self,
        make_parser: Callable[[], ToolParser] | None,
        streams: bool = True,
        one_call: bool = False,
    ) -> None:
        self._parser = make_parser() if make_parser is not None else None
        self._watch = self._parser if streams else None
        if make_parser is not None and one_call and not streams:
            self._watch = make_parser()
        self._streams = streams
        self._text = ""

    @property
    def done(self) -> bool:
        """True once the last call that is wanted is complete."""
        return self._watch is not None and self._watch.done

    def push(self, text: str) -> list[Event]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        events = self._watch.push(text) if self._watch is not None else []
        if self._streams:
            return events
        self._text += text
        return []

    def finish(self, cut: bool) -> list[Event]:
        """The rest, once nothing follows."""
        if self._parser is None:
            return []
        if self._streams:
            return self._parser.finish(cut)
        content, calls = self._parser.parse(self._text, cut)
        events: list[Event] = [ContentDelta(content)] if content else []
        for index, call in enumerate(calls):
            events.append(FoundCallDelta(index, id=call.id, name=call.name))
            events.append(FoundCallDelta(index, call.arguments))
        return events
