"""Token ids to text as they arrive: whole characters only, cut at stop strings."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Protocol

from tokenmill.text.tokenizer import JsonPieces, Tokenizer


class TextStream(Protocol):
    """Turns tokens into text that no later token can change.

    While nothing is held back, a token adds what `json_pieces` has for it, unless that is b"".
    """

    held: bytes  # of which there is no text yet

    @property
    def json_pieces(self) -> JsonPieces | None: ...

    def push(self, token_ids: Sequence[int]) -> str: ...

    def pending(self) -> str:
        """Text held back that stands as it is if no token follows; "" when it is incomplete."""

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD."""


class Detokenizer:
    """Incremental text of one sequence: the deltas join to tokenizer.decode(ids), up to a stop.

    `continues` says that the text follows a prompt directly, so a leading space belongs to it.
    """

    __slots__ = (
        *("_include_stop", "_min_tokens", "_stops"),
        *("num_tokens", "stop_reason", "stream"),
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: StopTable | None = None,
        include_stop_str: bool = False,
        min_tokens: int = 0,
        continues: bool = False,
    ) -> None:
        self.stream = _text_stream(tokenizer, skip_special_tokens, continues)
        self._stops = None if stop is None else _StopFinder(stop)
        self._include_stop = include_stop_str
        self._min_tokens = min_tokens
        self.num_tokens = 0  # consumed: up to and with the one that completed the stop string
        self.stop_reason: str | None = None  # the stop string that was found

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens; tokens after a stop are not consumed."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return self.stream.push(token_ids)
        return "".join([self._push_one(token_id, self._stops) for token_id in token_ids])

    def finish(self) -> str:
        """The text held back, once no token follows."""
        if self.stop_reason is not None:
            return ""
        held = self._stops.release() if self._stops else ""
        return held + self.stream.flush()

    def _push_one(self, token_id: int, stops: _StopFinder) -> str:
        if self.stop_reason is not None:
            return ""
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        text, self.stop_reason = stops.push(self.stream.push((token_id,)), may_stop)
        if may_stop and self.stop_reason is None and self.stream.held:
            before, self.stop_reason = stops.look_ahead(self.stream.pending())
            text += before
        if self.stop_reason is not None and self._include_stop:
            return text + self.stop_reason
        return text


class StopTable:
    """The stop strings of a call as one automaton (Aho and Corasick's); its choices share it.

    A state is the longest end of the text that begins a stop string: a node of their trie.
    """

    __slots__ = ("_children", "_fallback", "ends", "firsts", "num_held")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: dict[int, int] = {}  # by state and character, as one number
        self._fallback = [0]  # by state: that of the longest end that is shorter
        self.num_held = [0]  # by state: characters that may begin a stop string still
        self.ends: dict[int, str] = {}  # by state: the longest stop string that is complete
        self.firsts = frozenset(stop[0] for stop in stops)
        alive = [(stop, 0) for stop in stops]
        for depth in range(max(map(len, stops))):
            alive = [(stop, self._add(state, stop[depth])) for stop, state in alive]
            self.ends |= {state: stop for stop, state in alive if len(stop) == depth + 1}
            alive = [(stop, state) for stop, state in alive if len(stop) > depth + 1]
            for _, state in alive:
                self.num_held[state] = depth + 1

    @classmethod
    def of(cls, stops: Sequence[str]) -> StopTable | None:
        return cls(stops) if stops else None

    def _add(self, state: int, char: str) -> int:
        """The child of a state; the states of all shorter texts are there."""
        key = _key(state, char)
        if (child := self._children.get(key)) is not None:
            return child
        fallback = self.follow(self._fallback[state], char) if state else 0
        self._children[key] = child = len(self._fallback)
        self._fallback.append(fallback)
        self.num_held.append(self.num_held[fallback])
        if fallback in self.ends:
            self.ends[child] = self.ends[fallback]
        return child

    def follow(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (child := self._children.get(_key(state, char))) is None and state:
            state = self._fallback[state]
        return child or 0


def _key(state: int, char: str) -> int:
    return state << 21 | ord(char)


class _StopFinder:
    """Holds back the longest end of the text that may begin a stop string."""

    __slots__ = ("_ahead", "_held", "_state", "_table")

    def __init__(self, table: StopTable) -> None:
        self._table = table
        self._state = 0
        self._held = ""
        self._ahead = (0, 0)  # characters that were looked at ahead, and the state after them

    def push(self, text: str, may_stop: bool) -> tuple[str, str | None]:
        """What no stop string can have as a part; or the text before one, and the string.

        It is the one that ends first, of those the longest.
        """
        if not text:
            return "", None
        self._ahead = (0, 0)
        if not self._state and self._table.firsts.isdisjoint(text):
            return text, None
        found, self._state = self._search(text, self._state, may_stop)
        if found is not None:
            return (self._held + text)[: found[0] + len(self._held)], found[1]
        text = self._held + text
        cut = len(text) - self._table.num_held[self._state]
        self._held = text[cut:]
        return text[:cut], None

    def look_ahead(self, text: str) -> tuple[str, str | None]:
        """The same of text that is not certain, where it completes a stop string.

        Until certain text comes, it only grows.
        """
        if not text:
            return "", None
        num_seen, state = self._ahead if self._ahead[0] else (0, self._state)
        found, state = self._search(text[num_seen:], state, True)
        self._ahead = (len(text), state)
        if found is None:
            return "", None
        return (self._held + text)[: found[0] + num_seen + len(self._held)], found[1]

    def release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _search(self, text: str, state: int, may_stop: bool) -> tuple[tuple[int, str] | None, int]:
        """Where in the text a stop string begins (before it: below 0), which, and the state."""
        follow, ends = self._table.follow, self._table.ends
        for size, char in enumerate(text, 1):
            state = follow(state, char)
            if may_stop and state in ends:
                return (size - len(ends[state]), ends[state]), state
        return None, state


def _text_stream(tokenizer: Tokenizer, skip_special_tokens: bool, continues: bool) -> TextStream:
    decoder = tokenizer.text_decoder
    if decoder.kind == "byte_level":
        return _ByteLevelStream(tokenizer, skip_special_tokens)
    if decoder.kind == "byte_fallback":
        num_stripped = 0 if continues else decoder.num_stripped_spaces
        return _ByteFallbackStream(tokenizer, skip_special_tokens, num_stripped)
    return _GeneralStream(tokenizer, skip_special_tokens)


class _ByteLevelStream:
    """Tokens are bytes of one UTF-8 stream; most are whole characters."""

    __slots__ = ("_json_pieces", "_pieces", "held")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._json_pieces = tokenizer.json_pieces(skip_special_tokens)
        self.held = b""

    @property
    def json_pieces(self) -> JsonPieces | None:
        return self._json_pieces

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        if len(token_ids) == 1 and not self.held and token_ids[0] < len(pieces):
            piece = pieces[token_ids[0]]
            if isinstance(piece, str):
                return piece
        texts = []
        for token_id in token_ids:
            piece = pieces[token_id] if token_id < len(pieces) else None
            if piece is None:
                continue
            if self.held or isinstance(piece, bytes):
                piece = self._decode(piece.encode() if isinstance(piece, str) else piece)
            texts.append(piece)
        return "".join(texts)

    def pending(self) -> str:
        return ""

    def flush(self) -> str:
        text = self.held.decode(errors="replace")
        self.held = b""
        return text

    def _decode(self, data: bytes) -> str:
        data = self.held + data
        text, used = utf_8_decode(data, "replace", False)
        self.held = data[used:]
        return text


class _ByteFallbackStream:
    """Tokens are text; a run of byte tokens is text when all of it is UTF-8, else U+FFFD per byte.

    A run is therefore known only when it has ended.
    """

    __slots__ = ("_json_pieces", "_num_stripped", "_pieces", "held")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, num_stripped: int) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._json_pieces = tokenizer.json_pieces(skip_special_tokens)
        self._num_stripped = num_stripped  # leading spaces still to be cut
        self.held = b""

    @property
    def json_pieces(self) -> JsonPieces | None:
        return None if self._num_stripped else self._json_pieces

    def push(self, token_ids: Sequence[int]) -> str:
        texts = []
        for token_id in token_ids:
            piece = self._pieces[token_id] if token_id < len(self._pieces) else None
            if isinstance(piece, bytes):
                self.held += piece
            elif piece is not None:
                if self.held:
                    texts.append(self._end_run())
                texts.append(piece)
        text, self._num_stripped = _strip("".join(texts), self._num_stripped)
        return text

    def pending(self) -> str:
        try:
            return _strip(self.held.decode(), self._num_stripped)[0]
        except UnicodeDecodeError:
            return ""

    def flush(self) -> str:
        text, self._num_stripped = _strip(self._end_run(), self._num_stripped)
        return text

    def _end_run(self) -> str:
        try:
            text = self.held.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self.held)
        self.held = b""
        return text


def _strip(text: str, num_spaces: int) -> tuple[str, int]:
    """The text without its first spaces, and how many of the next text's are still to be cut."""
    cut = 0
    while cut < min(num_spaces, len(text)) and text[cut] == " ":
        cut += 1
    return text[cut:], num_spaces - cut if cut == len(text) else 0


class _GeneralStream:
    """Any other decoder: decode everything again and send what is new."""

    __slots__ = ("_skip_special_tokens", "_text", "_token_ids", "_tokenizer", "held")

    json_pieces = None

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._text = ""  # sent
        self.held = b""

    def push(self, token_ids: Sequence[int]) -> str:
        size = self._tokenizer.vocab_size
        self._token_ids += [token_id for token_id in token_ids if token_id < size]
        return self._advance(self._decode().rstrip("\ufffd"))

    def pending(self) -> str:
        return ""

    def flush(self) -> str:
        return self._advance(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._token_ids, self._skip_special_tokens)

    def _advance(self, text: str) -> str:
        if not text.startswith(self._text):
            return ""
        delta = text[len(self._text) :]
        self._text = text
        return delta
