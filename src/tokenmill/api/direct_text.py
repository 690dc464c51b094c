"""Plain text of a stream, written to its connection in the turn in which the tokens come.

Most tokens add text and nothing else. Their events are written where the worker's message is read:
no task is woken, and no layer of the app is passed. Everything else goes the way of ASGI.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol, runtime_checkable

from tokenmill.api.generation import Generation
from tokenmill.api.protocol.answers import json_encode
from tokenmill.text.tokenizer import JsonPieces

LONG_PIECE = 128  # bytes of JSON; no table has the sizes of longer ones


class Flow(Protocol):
    """Whether the client takes what is written."""

    write_paused: bool


class Transport(Protocol):
    """Where bytes are written to."""

    def write(self, data: bytes) -> None: ...


class ChunkWriter(Protocol):
    """The connection of an answer."""

    @property
    def flow(self) -> Flow: ...

    @property
    def transport(self) -> Transport: ...

    def has_begun(self) -> bool: ...

    def can_write(self) -> bool: ...

    def write(self, body: bytes) -> None: ...


@runtime_checkable
class PlainFormat(Protocol):
    """A format whose events of plain text are a JSON string between two constants."""

    def around_text(self, index: int) -> tuple[bytes, bytes] | None: ...


class DirectText:
    """Takes the tokens of one call's plain choices while its task waits for outputs.

    Most steps give one token to the only choice of a call. Its event is joined from constants: the
    frame is the stream's, and the JSON of a token's text the tokenizer's.
    """

    __slots__ = (
        *("_pieces", "_flow", "_text", "_heads", "_before", "_after", "_transport"),
        *("_metrics", "_times", "_choice", "_around", "_form", "_generation", "_writer"),
    )

    def __init__(self, generation: Generation, form: PlainFormat, writer: ChunkWriter) -> None:
        self._generation = generation
        self._form = form
        self._writer = writer
        self._around: list[tuple[bytes, bytes] | None] = [None] * len(generation.choices)
        self._flow, self._transport = writer.flow, writer.transport
        self._before = self._after = b""
        self._heads: list[bytes] = []  # of chunks, by the size of a piece
        self._choice = generation.choices[0]
        self._times = self._choice.times
        self._text = self._choice.text_stream
        self._pieces: JsonPieces | None = None  # of an only choice that is plain
        self._metrics = generation.metrics

    def write_one(self, token_ids: list[int], now_ns: int) -> bool:
        """Write the event of an only choice's tokens; False: nothing was done with them."""
        pieces = self._pieces
        if pieces is None or len(token_ids) != 1 or self._text.held:
            return self.write({0: token_ids}, now_ns)
        piece = pieces[token_ids[0]]
        if not 0 < len(piece) < LONG_PIECE:
            return self.write({0: token_ids}, now_ns)
        if self._flow.write_paused:
            return False
        parts = (self._heads[len(piece)], self._before, piece, self._after)
        self._transport.write(b"".join(parts))
        self._metrics.later_output(self._times, now_ns, 1)
        self._choice.num_tokens += 1
        return True

    def write(self, tokens: dict[int, list[int]], now_ns: int) -> bool:
        """Write the events of tokens, by choice; False: nothing was done with them."""
        if not self._writer.can_write():
            return False
        for index in tokens:
            if self._around[index] is None and not self._begin(index):
                return False
        body = b""
        for index, token_ids in tokens.items():
            text, around = self._generation.extend(index, token_ids, now_ns), self._around[index]
            if text and around is not None:
                body += b"%b%b%b" % (around[0], json_encode(text), around[1])
        if body:
            self._writer.write(body)
        return True

    def _begin(self, index: int) -> bool:
        """Look whether the events of a choice are plain by now."""
        if self._generation.choices[index].is_plain and self._writer.has_begun():
            self._around[index] = self._form.around_text(index)
        around = self._around[index]
        if around is not None and len(self._around) == 1:
            self._before, self._after = around[0], around[1] + b"\r\n"
            self._heads = _chunk_heads(len(around[0]) + len(around[1]))
            self._pieces = self._text.json_pieces
        return around is not None


@lru_cache(1024)
def _chunk_heads(size: int) -> list[bytes]:
    """The first lines of chunks of this size and a piece, by the size of the piece."""
    return [b"%x\r\n" % (size + piece) for piece in range(LONG_PIECE)]
