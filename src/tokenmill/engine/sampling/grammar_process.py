"""Processes that compile and follow grammars: one for each grammar, forked from one that waits.

What a grammar costs shows when it is compiled and when it is followed, and xgrammar cannot be
interrupted in either. So each has a process of its own, whose memory and CPU time the system
bounds: a process that goes beyond, and what its user has no need of any more, just ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill.core.types import (
    FreeText,
    GrammarVocab,
    InvalidRequestError,
    StructuredOutput,
    TokenRules,
)
from tokenmill.engine.sampling.free_text import (
    Follower,
    FreeTextMatcher,
    GrammarError,
    RuledMatcher,
    Source,
)
from tokenmill.engine.sampling.grammar import GrammarCompiler
from tokenmill.engine.sampling.sampler import Bitmask

HEADER = struct.Struct("<II")  # bytes of an answer's JSON, and of the masks behind it
NICENESS = 5
_HELD_S = 0.001  # answers are sent together if they are ready within it


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    compile_s: int = 10  # CPU time
    memory_bytes: int = 2**30
    # CPU time of following it: as much at once, and then as much for each mask or token.
    burst_s: float = 2.0
    mask_s: float = 0.02


@dataclass(frozen=True, slots=True)
class Begin:
    """A sequence that follows the grammar, after free text if there is any."""

    row: int
    stop_ids: list[int]
    after: FreeText | None


@dataclass(frozen=True, slots=True)
class GrammarAsk:
    """Move on by tokens; then: what may come next, and after each draft that may come?"""

    row: int
    tokens: list[int]
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class Forget:
    row: int


def main() -> None:
    """Fork a process for each socket that comes over the socket whose number is the argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how one ended
    vocab, vocab_size, limits = pickle.load(sys.stdin.buffer)
    compiler = make_compiler(vocab, vocab_size)
    gc.freeze()  # what is never collected is never copied
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(EOFError, OSError):
                serve(connection, compiler, limits)
            os._exit(0)
        connection.close()


def make_compiler(vocab: GrammarVocab, vocab_size: int | None) -> GrammarCompiler:
    """A compiler without torch and transformers, if xgrammar can be imported without them.

    It imports them for types alone: they would take seconds and 250 MB.
    """
    names = ("torch", "torch.cuda", "torch.utils", "torch.utils.cpp_extension", "transformers")
    stubs = {name: _Empty(name) for name in names}
    torch = stubs["torch"]
    torch.__dict__.update(
        __version__="0",
        __path__=[],
        cuda=stubs["torch.cuda"],
        tensor=lambda *_, **__: None,
        compile=lambda *_, **__: lambda function: function,
    )
    stubs["torch.cuda"].__dict__["is_available"] = lambda: False
    sys.modules.update(stubs)
    try:
        return GrammarCompiler(vocab, vocab_size)
    except (ImportError, AttributeError, TypeError):
        for name in [name for name in sys.modules if name in stubs or name.startswith("xgrammar")]:
            del sys.modules[name]
        return GrammarCompiler(vocab, vocab_size)


class _Empty(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def serve(connection: socket.socket, compiler: GrammarCompiler, limits: GrammarLimits) -> None:
    """Compile the grammar that comes first, and answer for the sequences that follow it."""
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    _allow_cpu(limits.compile_s)
    answers = _Answers(connection)
    messages = answers.questions()
    answers.send("started")
    try:
        structured: StructuredOutput = next(messages)
        source = compiler.compile_any(structured)
    except InvalidRequestError as refusal:
        answers.send("refused", str(refusal))
        return
    except MemoryError:
        return
    answers.send("ready")
    rows = _Rows(source, limits, structured.rules, compiler.vocab.vocab_size)
    for message in messages:
        match message:
            case Begin() as begin:
                rows.begin(begin)
            case Forget(row):
                rows.followers.pop(row, None)
            case GrammarAsk() as ask:
                _allow_cpu(1 + int(limits.burst_s))
                masks, error = rows.answer(ask)
                if rows.spare_s < 0:
                    return
                sizes = [-1 if mask is None else mask.nbytes for mask in masks]
                data = b"".join(mask.tobytes() for mask in masks if mask is not None)
                answers.add("masks", ask.row, sizes, error, data=data)


class _Rows:
    """The sequences that follow a grammar, and the CPU time that they may still take."""

    def __init__(
        self, source: Source, limits: GrammarLimits, rules: TokenRules | None, vocab_size: int
    ) -> None:
        self._source, self._limits = source, limits
        self._rules, self._vocab_size = rules, vocab_size
        self.followers: dict[int, Follower] = {}
        self.spare_s = limits.burst_s

    def begin(self, begin: Begin) -> None:
        follower = self._source.matcher(begin.stop_ids)
        banned: tuple[int, ...] = ()
        if begin.after is not None:
            follower, banned = FreeTextMatcher(follower, begin.after), begin.after.banned
        if self._rules is not None:
            follower = RuledMatcher(follower, self._rules, self._vocab_size, banned)
        self.followers[begin.row] = follower

    def answer(self, ask: GrammarAsk) -> tuple[list[Bitmask | None], str | None]:
        """The masks of a row and of its drafts, or why there is none."""
        began_s = time.thread_time()
        follower = self.followers[ask.row]
        masks: list[Bitmask | None] = []
        error = None
        try:
            for token in ask.tokens:
                follower.accept(token)
            masks = next_masks(follower, ask.drafts)
        except (GrammarError, RuntimeError, ValueError, MemoryError) as problem:
            error = str(problem) or type(problem).__name__
        num_steps = len(ask.tokens) + len(masks)
        refilled_s = min(self.spare_s + num_steps * self._limits.mask_s, self._limits.burst_s)
        self.spare_s = refilled_s - (time.thread_time() - began_s)
        return masks, error


def next_masks(matcher: Follower, drafts: list[int]) -> list[Bitmask | None]:
    """Return what may come next, and after each draft up to the first forbidden one."""
    masks: list[Bitmask | None] = [matcher.allowed()]
    try:
        for draft in drafts:
            if not _allows(masks[-1], draft):
                break
            matcher.accept(draft)
            masks.append(None)
            masks[-1] = matcher.allowed()
    except GrammarError:
        pass
    matcher.rollback(len(masks) - 1)
    return masks


def _allows(mask: Bitmask | None, token: int) -> bool:
    """Whether a token may come next; the matcher itself writes a warning when it may not."""
    return mask is None or (token < 32 * mask.size and bool(mask[token // 32] >> token % 32 & 1))


class _Answers:
    """What is asked in one message is answered together, unless that takes long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._reader = connection, connection.makefile("rb")
        self._outgoing, self._sent_s = bytearray(), 0.0

    def questions(self) -> Iterator[Any]:
        while True:
            yield from pickle.load(self._reader)
            self._flush()

    def add(self, *fields: Any, data: bytes = b"") -> None:
        text = json.dumps(fields).encode()
        self._outgoing += HEADER.pack(len(text), len(data)) + text + data
        if time.monotonic() - self._sent_s > _HELD_S:
            self._flush()

    def send(self, *fields: Any) -> None:
        """Answer at once."""
        self.add(*fields)
        self._flush()

    def _flush(self) -> None:
        if self._outgoing:
            self._connection.sendall(self._outgoing)
        self._outgoing, self._sent_s = bytearray(), time.monotonic()


def _allow_cpu(seconds: int) -> None:
    """Let the process run for so long from now on, and up to a second more; then it is killed."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, hard))


def _end_with(connection: socket.socket) -> None:
    """End the process, whatever it does, when nobody is at the other end any more."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll()
    os._exit(0)
