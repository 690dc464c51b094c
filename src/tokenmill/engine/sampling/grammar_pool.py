"""The grammars of an engine: each compiled and followed by a process of its own; see there.

Nothing here blocks but wait(). A mask is asked for when the tokens before it are known; who has
none when a step samples sits out that step. An account's processes share half of the cores, and
may hold up steps for half of the time, so that others are slowed down by a factor at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tokenmill.core.requests import End
from tokenmill.core.types import FinishReason, GrammarVocab, StructuredOutput
from tokenmill.engine.sampling.grammar_process import (
    HEADER,
    Begin,
    Forget,
    GrammarAsk,
    GrammarLimits,
)
from tokenmill.engine.sampling.sampler import Bitmask
from tokenmill.sched.sequence import Sequence

MAX_PROCESSES = 128
MAX_OF_ACCOUNT = 96
MAX_IDLE = 32  # compiled grammars that nobody follows now
PATIENCE_S, PATIENCE_SHARE = 0.05, 0.5  # time for which an account may hold up steps
_CHILD = "from tokenmill.engine.sampling.grammar_process import main; main()"
_READ_BYTES = 2**20
_RUNNING_POLL_S = 0.001  # between two looks at whether a step still runs
NO_PROCESS = End(FinishReason.REJECT, "grammar_busy", "no process for grammars can be started")


class _Account:
    """Who pays for grammars: its processes take turns."""

    def __init__(self) -> None:
        self.num_processes = self.num_active = 0
        self.turns: deque[GrammarProcess] = deque()  # that have something to do
        self.patience_s = PATIENCE_S

    def start_next(self) -> None:
        """Let processes run, as long as the account's share of the cores lasts."""
        while self.turns and self.num_active < max(1, (os.cpu_count() or 1) // 2):
            process = self.turns.popleft()
            if process.connection is not None:
                process.active = True
                self.num_active += 1
                process.flush()


class GrammarRow:
    """A request that waits for its grammar or follows it."""

    def __init__(self, process: GrammarProcess, number: int) -> None:
        self.process, self.number = process, number
        self.error: str | None = None  # it cannot go on
        self.pending = False  # its question is not answered
        self._masks: list[Bitmask | None] = []
        self._num_told = -1  # tokens of the sequence; -1: the process does not know it
        self._drafts: list[int] = []  # of the last question

    def ask(self, seq: Sequence, drafts: list[int]) -> bool:
        """Ask for the masks after a sequence's tokens and after drafts; False if that was done."""
        if self.pending or self.error or self.masks(seq, drafts) is not None:
            return False
        told = self._num_told
        if told < 0:
            structured = seq.request.task.sampling.structured
            after = None if structured is None else structured.after
            self.process.send(Begin(self.number, _ending_ids(seq), after))
            told = seq.num_prompt_tokens
        self._num_told, self._drafts = len(seq.token_ids), drafts
        self.pending = True
        self.process.ask(GrammarAsk(self.number, seq.token_ids[told:], drafts))
        return True

    def masks(self, seq: Sequence, drafts: list[int]) -> list[Bitmask | None] | None:
        """The masks after its tokens and drafts, up to the first forbidden one, if they are here.

        Of later drafts there may be masks, too.
        """
        known = self._num_told == len(seq.token_ids) and self._drafts[: len(drafts)] == drafts
        return self._masks if known and not self.pending and not self.error else None

    def take(self, masks: list[Bitmask | None], error: str | None) -> None:
        self.pending, self._masks, self.error = False, masks, error


def _ending_ids(seq: Sequence) -> list[int]:
    """What ends the grammar's text is what ends the sequence: EOS."""
    return sorted(seq.stop_ids.difference(seq.request.task.sampling.stop_token_ids) or seq.stop_ids)


class GrammarProcess:
    def __init__(self, structured: StructuredOutput, account: _Account) -> None:
        self.structured, self.account = structured, account
        self.connection: socket.socket | None = None  # None: not begun, or over
        self.active = self.is_ready = False
        self.end: End | None = None  # it is over: how a request ends that waits for it
        self.rows: dict[int, GrammarRow] = {}
        self._has_begun = False
        self._num_open = 0  # questions without an answer
        self._messages: list[Any] = []  # to be sent as one
        self._outgoing, self._incoming = b"", bytearray()

    def begin(self, connection: socket.socket) -> None:
        self.connection = connection
        self.account.num_processes += 1
        self.ask(self.structured)

    def send(self, message: Any) -> None:
        """Say what has no answer; it is sent by the next poll, with all else that is said."""
        self._messages.append(message)

    def ask(self, message: Any) -> None:
        """Say what will be answered, when it is the process's turn."""
        self._num_open += 1
        self.send(message)
        if not self.active and self not in self.account.turns:
            self.account.turns.append(self)
            self.account.start_next()

    def flush(self) -> None:
        """Send as much as the socket takes; a process that reads nothing holds nobody up."""
        if self.connection is None or not (self._messages or self._outgoing):
            return
        if self._messages:
            self._outgoing += pickle.dumps(self._messages)
            self._messages = []
        with contextlib.suppress(OSError):  # of one that has ended the end will be read
            self._outgoing = self._outgoing[self.connection.send(self._outgoing) :]

    def read(self) -> bool:
        """Take what has been answered; False when the process has ended."""
        assert self.connection is not None
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._incoming += data
        begin = 0
        while len(self._incoming) - begin >= HEADER.size:
            num_text, num_data = HEADER.unpack_from(self._incoming, begin)
            text = begin + HEADER.size
            masks, end = text + num_text, text + num_text + num_data
            if len(self._incoming) < end:
                break
            fields = json.loads(self._incoming[text:masks])
            self._take(*fields, data=bytes(self._incoming[masks:end]))
            begin = end
        del self._incoming[:begin]
        return bool(data)

    def _take(self, what: str, *fields: Any, data: bytes) -> None:
        match what:
            case "started":
                self._has_begun = True
                return
            case "refused":
                self.end = End(FinishReason.REJECT, "invalid_grammar", *fields)
            case "ready":
                self.is_ready = True
            case "masks":
                number, sizes, error = fields
                if number in self.rows:
                    self.rows[number].take(_split(data, sizes), error)
        self._num_open -= 1
        if not self._num_open:
            self.rest()

    def rest(self) -> None:
        if self.active:
            self.active = False
            self.account.num_active -= 1
            self.account.start_next()

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
            self.account.num_processes -= 1
            self.rest()

    def fail(self, limits: GrammarLimits) -> None:
        """End who waits for the process or follows it: it has ended."""
        kind, memory = self.structured.kind, f"{limits.memory_bytes >> 20} MiB of memory"
        if self.is_ready:
            message = (
                f"the {kind} is too ambiguous: to follow it took more than {limits.burst_s:g} s "
                f"of CPU time and {1000 * limits.mask_s:g} ms a token, or {memory}"
            )
            for row in self.rows.values():
                row.take([], message)
            self.end = End(FinishReason.ERROR, "grammar", message)
        elif self.end is None and self._has_begun:
            message = (
                f"the {kind} is not usable: to compile it took more than {limits.compile_s} s of "
                f"CPU time or {memory}"
            )
            self.end = End(FinishReason.REJECT, "invalid_grammar", message)
        elif self.end is None:
            self.end = NO_PROCESS


def _split(data: bytes, sizes: list[int]) -> list[Bitmask | None]:
    masks: list[Bitmask | None] = []
    begin = 0
    for size in sizes:
        masks.append(None if size < 0 else np.frombuffer(data, np.int32, size // 4, begin))
        begin += max(size, 0)
    return masks


class GrammarPool:
    """The processes of one engine's grammars; the requests of an account share them."""

    def __init__(
        self,
        vocab: GrammarVocab,
        vocab_size: int | None = None,
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._order = vocab, vocab_size, self._limits
        self._accounts: dict[str, _Account] = {}
        # By use, the latest last.
        self._processes: dict[tuple[str, StructuredOutput], GrammarProcess] = {}
        self._waiting: list[GrammarProcess] = []  # for a place among so many
        self._selector = selectors.DefaultSelector()
        self._parent: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._num_rows = 0
        self._refilled_s = time.monotonic()

    def warm_up(self) -> None:
        """Start what the first grammar would wait for: a process that has read the vocabulary."""
        if self._parent is not None and self._parent[0].poll() is None:
            return
        ours, theirs = socket.socketpair()
        # -P: a folder named tokenmill in the working directory is not the package.
        command = [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())]
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot fork
        with theirs, tempfile.TemporaryFile() as file:
            pickle.dump(self._order, file)
            file.seek(0)
            parent = subprocess.Popen(command, env=env, stdin=file, pass_fds=[theirs.fileno()])
        self._parent = parent, ours
        weakref.finalize(self, _end, parent, ours)

    def open(self, structured: StructuredOutput, account: str) -> GrammarRow:
        """A request that waits for a grammar, and then follows it; equal ones share a process."""
        self.poll()
        key = account, replace(structured, after=None, unenforced=())
        process = self._processes.pop(key, None)
        if process is None or process.end is not None:
            process = GrammarProcess(key[1], self._accounts.setdefault(account, _Account()))
            self._waiting.append(process)
        self._processes[key] = process
        self._num_rows += 1
        row = process.rows[self._num_rows] = GrammarRow(process, self._num_rows)
        self._begin_waiting()
        return row

    def close(self, row: GrammarRow) -> None:
        """Forget a request; what is compiled for nobody else any more is not compiled on."""
        process = row.process
        del process.rows[row.number]
        process.send(Forget(row.number))
        if not process.rows and not process.is_ready:
            self._close(process)
        idle = self._idle()
        if len(idle) > MAX_IDLE:
            self._close(idle[0])

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take what the processes have answered; wait for the first answer where there is none."""
        self._begin_waiting()
        for process in self._processes.values():
            if process.active:
                process.flush()
        for key, _ in self._selector.select(timeout_s):
            process = key.data
            if not process.read():
                process.fail(self._limits)
                self._close(process)

    def wait(self, rows: list[GrammarRow], runs: Callable[[], bool] = lambda: False) -> None:
        """Wait for answers, as long as the patience with their accounts lasts.

        While the step still `runs` on the device, waiting holds nobody up.
        """
        if rows:
            self.poll()
        while any(row.pending for row in rows) and runs():
            self.poll(_RUNNING_POLL_S)
        now_s = time.monotonic()
        for account in self._accounts.values():
            refilled_s = account.patience_s + PATIENCE_SHARE * (now_s - self._refilled_s)
            account.patience_s = min(refilled_s, PATIENCE_S)
        self._refilled_s = now_s
        while rows := [row for row in rows if row.pending and row.process.account.patience_s > 0]:
            accounts = {row.process.account for row in rows}
            self.poll(max(account.patience_s for account in accounts))
            began_s, now_s = now_s, time.monotonic()
            for account in accounts:
                account.patience_s -= now_s - began_s

    def _begin_waiting(self) -> None:
        """Begin the processes that there is a place for, those of nobody ending for them."""
        for process in list(self._waiting):
            if process.account.num_processes >= MAX_OF_ACCOUNT:
                continue
            if len(self._selector.get_map()) >= MAX_PROCESSES:
                if not (idle := self._idle()):
                    return
                self._close(idle[0])
            self._waiting.remove(process)
            self._begin(process)

    def _begin(self, process: GrammarProcess) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                self.warm_up()
                assert self._parent is not None
                socket.send_fds(self._parent[1], [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                process.end = NO_PROCESS
                return
        self._selector.register(ours, selectors.EVENT_READ, process)
        process.begin(ours)

    def _idle(self) -> list[GrammarProcess]:
        """Those that nobody follows, the longest unused first."""
        return [process for process in self._processes.values() if not process.rows]

    def _close(self, process: GrammarProcess) -> None:
        if process.connection is not None:
            self._selector.unregister(process.connection)
            process.close()
        if process in self._waiting:
            self._waiting.remove(process)
        self._processes = {k: known for k, known in self._processes.items() if known is not process}


def _end(parent: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    parent.kill()
    parent.wait()
