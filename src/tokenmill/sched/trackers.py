"""Reads a sequence token by token: how long it reasons, whether it repeats itself, and n-grams.

A budget of reasoning follows from the tokens alone, so it holds after a preemption and in another
engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Items
from typing import Final, Literal, Protocol

import numpy as np

from tokenmill.core.types import Channels, ReasoningMarks, RepetitionDetection

NEVER = sys.maxsize
_BLANKS = " \t\r\nĠĉčĊ▁"  # as vocabularies write them
_TAGS = ("\0<", "\0>")  # in the place of tags that are tokens: no token's text is one of them
_MAX_HEADER_TOKENS = 64  # of one section; a longer one is the text of an answer
LOOP: Final = "repetition_detected"  # the stop_reason, as vLLM has it
MOST_COMPARED = 16  # tokens before a place where a pair was, the pair among them
MOST_PLACES = 8  # the latest ones of a pair


class ReasoningReader(Protocol):
    """Where a sequence stands after the tokens so far."""

    @property
    def distance(self) -> int | None:
        """Tokens until the next one may be reasoning; None: none will be any more."""

    def read(self, token: int) -> bool:
        """Take the next token; True if it is reasoning itself, and not a mark."""


class Thinking:
    """How much a sequence has reasoned, and the tokens that end it where its budget is spent."""

    __slots__ = ("_budget", "_forced", "_marks", "_num_read", "_reader", "_start", "num_tokens")

    def __init__(
        self, budget: int, marks: ReasoningMarks, prompt: Items[int], texts: Items[str]
    ) -> None:
        """`texts` of the vocabulary's tokens, if it is known."""
        self._budget, self._marks = budget, marks
        self._forced: tuple[int, ...] = ()  # the tokens from `start` on, once it is spent
        self._start = self._num_read = len(prompt)
        self.num_tokens = marks.opened or 0  # of the reasoning
        self._reader: ReasoningReader
        if marks.channels is None:
            self._reader = _ThinkBlock(marks, texts)
        else:
            self._reader = messages = _HarmonyMessages(marks.channels)
            self.num_tokens = messages.open_with(prompt)
        self._end_if_spent()

    @property
    def is_spent(self) -> bool:
        return bool(self._forced)

    def forced(self, index: int) -> int | None:
        """The token that the sequence must have at this index; None: the model's choice."""
        place = index - self._start
        return self._forced[place] if 0 <= place < len(self._forced) else None

    def read(self, token_ids: list[int]) -> int:
        """Take in the known tokens; returns up to which number of them nothing can be forced."""
        reader = self._reader
        while self._num_read < len(token_ids) and reader.distance is not None:
            self.num_tokens += reader.read(token_ids[self._num_read])
            self._num_read += 1
            self._end_if_spent()
        if reader.distance is None:
            return NEVER
        return self._num_read + reader.distance + max(self._budget - self.num_tokens, 0)

    def _end_if_spent(self) -> None:
        """Force the end of the reasoning; what is forced counts as read."""
        if self._reader.distance == 0 and self.num_tokens >= self._budget:
            self._forced = self._marks.forced[-1 if self._forced else 0]
            self._start = self._num_read
            self._num_read += len(self._forced)
            for token in self._forced:
                self._reader.read(token)


class _ThinkBlock:
    """Reasoning as one block between two tags, before all else of the answer."""

    def __init__(self, marks: ReasoningMarks, texts: Items[str]) -> None:
        tags = marks.tag_ids or ()
        self._texts, self._tag_ids = texts, dict(zip(tags, _TAGS, strict=False))
        self._open, self._close = marks.tag_texts or _TAGS
        self._text = ""  # of which the last tokens may be the first half of a tag
        self.distance: int | None = 1 if marks.opened is None else 0

    def read(self, token: int) -> bool:
        known = token < len(self._texts)
        text = self._tag_ids.get(token) or (self._texts[token] if known else "?")
        if self.distance == 1:
            self._begin(text.replace("<0x0A>", "\n"))
            return False
        self._text += text
        if self._close in self._text:
            self.distance = None
            return False
        self._text = self._text[1 - len(self._close) :]
        return token not in self._tag_ids

    def _begin(self, text: str) -> None:
        self._text = (self._text + text).lstrip(_BLANKS)
        if self._text.startswith(self._open):
            self._text, self.distance = self._text.removeprefix(self._open), 0
        elif not self._open.startswith(self._text):
            self.distance = None


class _HarmonyMessages:
    """GPT-OSS's messages on channels, as text/harmony.py reads them."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._specials = {channels.start, channels.channel, channels.message, channels.constrain}
        self._specials.update(channels.ends)
        self._state: Literal["idle", "header", "reasoning", "other"] = "idle"
        self._header: dict[int, list[int]] = {}  # its sections by the token that begins them
        self._section = channels.start

    def open_with(self, prompt: Items[int]) -> int:
        """Take up the message that a prompt leaves open; returns its tokens of reasoning."""
        start, size = self._channels.start, len(prompt)
        first = next((i for i in range(size - 1, -1, -1) if prompt[i] == start), size)
        counts = [self.read(prompt[index]) for index in range(first, size)]
        return sum(counts) if self._state == "reasoning" else 0

    @property
    def distance(self) -> int:
        """Tokens until the next one may be reasoning; a header is its mark, words and <|message|>.

        A constraint on the channel `final` makes reasoning of a message without a channel, too.
        """
        bound, about_to = self._channels.bound, self._state == "header" and self._reasons()
        match self._state:
            case "reasoning":
                return 0
            case "idle" if bound:
                return 1
            case "header" if about_to or bound:
                return 1
            case "header" if self._section == self._channels.channel:
                return 2
            case _:
                return 2 if bound else 3

    def read(self, token: int) -> bool:
        channels = self._channels
        if token not in self._specials:
            return self._read_plain(token)
        begins = token == channels.start or (token == channels.channel and self._state != "header")
        if begins or token in channels.ends:
            self._header = {}
            self._state = "header" if begins else "idle"
        if self._state == "header" and token != channels.message:
            self._section = token
            self._header[token] = []
        elif token == channels.message and self._state in ("header", "idle"):
            self._begin_body()
        return False

    def _read_plain(self, token: int) -> bool:
        if self._state == "header":
            section = self._header[self._section]
            section.append(token)
            limited = self._section == self._channels.start or not self._channels.bound
            if limited and len(section) > _MAX_HEADER_TOKENS:
                self._begin_body()
            return False
        if self._state == "idle":
            self._state = "reasoning" if self._channels.bound else "other"
            return self._channels.bound
        return self._state == "reasoning"

    def _begin_body(self) -> None:
        self._state = "reasoning" if self._reasons() else "other"

    def _reasons(self) -> bool:
        """Whether a body after this header is reasoning."""
        channels, role = self._channels, self._header.get(self._channels.start, ())
        channel = tuple(self._header.get(channels.channel, ()))
        if channels.bound:
            return channel[: len(channels.final)] != channels.final
        called = len(channel) > len(channels.analysis) or len(role) > len(channels.role)
        is_analysis = channel[: len(channels.analysis)] == channels.analysis
        return is_analysis and not (channels.calls and called)


class LoopFinder:
    """Finds a pattern that the last tokens repeat; its cost and memory depend on its size alone.

    For each size of a pattern it counts how many tokens in a row are those so far before them.
    """

    __slots__ = ("_at", "_latest", "_needed", "_runs", "_sizes", "num_read")

    def __init__(self, detection: RepetitionDetection) -> None:
        first, last = max(detection.min_pattern_size, 1), detection.max_pattern_size
        self._sizes = slice(first, last + 1)
        self._needed = np.arange(first, last + 1) * (detection.min_count - 1)
        self._runs = np.zeros_like(self._needed)
        # The token before the next one lies at `_at`, those before it behind it; -1: there is none.
        self._latest, self._at = np.full(3 * last + 1, -1), 2 * last
        self.num_read = 0

    def read(self, token: int) -> bool:
        """Take the next token; True if it completes a loop."""
        if self._at == 0:
            size = self._sizes.stop
            self._at = len(self._latest) - size
            self._latest[self._at :] = self._latest[:size]
        self._at -= 1
        self._latest[self._at] = token
        self._runs += 1
        self._runs *= self._latest[self._at :][self._sizes] == token
        self.num_read += 1
        return bool((self._runs >= self._needed).any())


class NgramIndex:
    """Where each pair of neighbouring tokens of one sequence was, as far as it has been read."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}  # of the token after the pair
        self._num_read = 2

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """The `count` tokens after the place that has most in common with the end, or none.

        Where fewer follow, what is drafted goes on from its own beginning: the text repeats itself.
        """
        for place in range(self._num_read, len(token_ids)):
            pair = token_ids[place - 2], token_ids[place - 1]
            self._places.setdefault(pair, []).append(place)
        self._num_read = max(self._num_read, len(token_ids))
        end = len(token_ids)
        places = self._places.get((token_ids[-2], token_ids[-1]), ()) if end > 1 else ()
        if not places:
            return []
        # Of equals the latest.
        place = max(reversed(places[-MOST_PLACES:]), key=lambda at: _num_common(token_ids, at))
        drafts: list[int] = []
        for at in range(place, place + count):
            drafts.append(token_ids[at] if at < end else drafts[at - end])
        return drafts


def _num_common(token_ids: list[int], place: int) -> int:
    """How many tokens before a place are those at the end."""
    end, count = len(token_ids), 2
    most = min(MOST_COMPARED, place)
    while count < most and token_ids[place - 1 - count] == token_ids[end - 1 - count]:
        count += 1
    return count
