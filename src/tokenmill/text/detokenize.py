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
        stop: tuple[str, ...] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
        continues: bool = False,
    ) -> None:
        self.stream = _text_stream(tokenizer, skip_special_tokens, continues)
        self._stops = _StopFinder(stop) if stop else None
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
        text = self.stream.push((token_id,))
        if self.num_tokens > self._min_tokens:
            match = stops.find(text + self.stream.pending())
            if match is not None:
                before, self.stop_reason = match
                return before + self.stop_reason if self._include_stop else before
        return stops.push(text)


class _StopFinder:
    """Holds back the longest end of the text that may begin a stop string."""

    __slots__ = ("_chars", "_firsts", "_held", "_longest", "_prefixes", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._prefixes = frozenset(s[:size] for s in stops for size in range(1, len(s)))
        self._chars = frozenset(char for prefix in self._prefixes for char in prefix)
        self._firsts = frozenset(prefix[0] for prefix in self._prefixes)
        self._longest = max(map(len, stops)) - 1
        self._held = ""

    def find(self, text: str) -> tuple[str, str] | None:
        """The stop string that ends first, of those the longest, and the text before it."""
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return (text[: best[1]], best[2]) if best else None

    def push(self, text: str) -> str:
        """Take text that completes no stop string; return what cannot be part of one."""
        text = self._held + text
        size = self._num_held(text)
        cut = len(text) - size
        self._held = text[cut:]
        return text[:cut]

    def release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        if not text or text[-1] not in self._chars:
            return 0
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size] in self._firsts and text[-size:] in self._prefixes:
                return size
        return 0


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
