"""Plain text of a stream, written to its connection in the turn in which the tokens come.

Most tokens add text and nothing else. Their events are written where the worker's message is read:
no task is woken, and no layer of the app is passed. Everything else goes the way of ASGI.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tokenmill.api.generation import Generation
from tokenmill.api.protocol.answers import json_encode


class ChunkWriter(Protocol):
    """The connection of an answer."""

    def has_begun(self) -> bool: ...

    def can_write(self) -> bool: ...

    def write(self, body: bytes) -> None: ...


@runtime_checkable
class PlainFormat(Protocol):
    """A format whose events of plain text are a JSON string between two constants."""

    def around_text(self, index: int) -> tuple[bytes, bytes] | None: ...


class DirectText:
    """Takes the tokens of one call's plain choices while its task waits for outputs."""

    __slots__ = ("_around", "_form", "_generation", "_writer")

    def __init__(self, generation: Generation, form: PlainFormat, writer: ChunkWriter) -> None:
        self._generation = generation
        self._form = form
        self._writer = writer
        self._around: list[tuple[bytes, bytes] | None] = [None] * len(generation.choices)

    def __call__(self, tokens: dict[int, list[int]], now_ns: int) -> bool:
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
        return self._around[index] is not None
