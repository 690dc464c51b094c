"""Answers that are kept for a minute, so that a client that repeats its call gets the same one."""

from __future__ import annotations

import time

import msgspec

KEPT_S = 60.0
MAX_BYTES = 64 * 2**20  # of all answers; the oldest go first


class KeptAnswer(msgspec.Struct, frozen=True):
    """A whole answer to a call with an idempotency key."""

    digest: bytes  # of the call
    headers: list[tuple[bytes, bytes]]
    body: bytes


class KeptAnswers:
    """Answers by the name of their call."""

    def __init__(self) -> None:
        self._answers: dict[bytes, tuple[float, KeptAnswer]] = {}  # with their time, oldest first
        self._num_bytes = 0

    def put(self, name: bytes, answer: KeptAnswer) -> None:
        """Keep an answer."""
        self._drop(name)
        self._answers[name] = (time.monotonic(), answer)
        self._num_bytes += len(answer.body)
        while self._num_bytes > MAX_BYTES:
            self._drop(next(iter(self._answers)))

    def get(self, name: bytes) -> KeptAnswer | None:
        """The answer of this name, if it was put within the last minute."""
        since_s = time.monotonic() - KEPT_S
        while self._answers and next(iter(self._answers.values()))[0] < since_s:
            self._drop(next(iter(self._answers)))
        found = self._answers.get(name)
        return None if found is None else found[1]

    def _drop(self, name: bytes) -> None:
        _, answer = self._answers.pop(name, (0.0, None))
        self._num_bytes -= 0 if answer is None else len(answer.body)
