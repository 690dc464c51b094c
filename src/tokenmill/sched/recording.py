"""The flight recorder: what a scheduler was told and what it chose, as JSON lines.

A line is a list: an event's name, then its values. Requests are numbers in their order, token ids
are not kept, and block hashes are salted with a secret that nobody keeps: equal blocks of one file
have equal hashes, and nothing leads back to a text. plan/recorded.py reads the files.

A file begins with an idle scheduler and an empty prefix cache, so that it can be replayed alone.
When it has its size and nothing runs, it becomes `FILE.old`, and the next one begins.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, TextIO

from tokenmill.core.config import ExecutionConfig, SchedulerConfig
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import StepResult, TokenmillError
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.meter import StepMeter
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch, Sequence

VERSION = 1
MAX_FILES = 1000
PAUSE = 2  # times the size: a scheduler that is never idle stops being recorded there
COST_DIGITS = 9
_FLUSH_NS = 10**9
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS

_log = logging.getLogger(__name__)


class RecordFile:
    """One file and the one before it; the process that writes holds a lock on it.

    Where the disk takes no more, recording ends with a warning, and the scheduler goes on.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes, self._flush_ns = 0, 0
        self._file: TextIO | None = None
        self.path = path
        with self._stopping_where_full():
            self._file, self.path = _take(path)

    @property
    def full(self) -> bool:
        return self._file is not None and self._num_bytes >= self._max_bytes

    @property
    def over(self) -> bool:
        """True where nothing more is recorded: it has stopped, or its bound is reached."""
        return self._file is None or self._num_bytes >= PAUSE * self._max_bytes

    def write(self, line: Any) -> None:
        if self._file is None:
            return
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._num_bytes += len(text)
        with self._stopping_where_full():
            self._file.write(text)
            now_ns = time.monotonic_ns()
            if now_ns >= self._flush_ns:
                self._file.flush()
                self._flush_ns = now_ns + _FLUSH_NS

    def exchange(self) -> None:
        """Keep the file as the old one, and begin the next."""
        self.close()
        if self._file is not None:
            with self._stopping_where_full():
                os.replace(self.path, _old(self.path))
                self._file, self.path = _take(self.path)
                self._num_bytes = 0

    def close(self) -> None:
        if self._file is not None:
            with self._stopping_where_full():
                self._file.close()

    @contextmanager
    def _stopping_where_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            file, self._file = self._file, None
            _log.warning("--record %s: %s; recording stops", self.path, error.strerror)
            if file is not None:
                with suppress(OSError):  # what is left in its buffer finds no room
                    file.close()


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _take(path: Path) -> tuple[TextIO, Path]:
    """Open `path`, or `path-2` and so on where another process writes it; keep what it had."""
    for number in range(1, MAX_FILES):
        mine = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        file = mine.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            continue
        try:
            if mine.stat().st_size:
                _old(mine).write_bytes(mine.read_bytes())
                file.truncate(0)
        except OSError:
            file.close()
            raise
        return file, mine
    raise OSError(f"{path}: {MAX_FILES} processes record to it")


class RecordedScheduler(Scheduler):
    """A scheduler that writes what it is told and chooses."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        eos_token_ids: frozenset[int],
        file: RecordFile,
        meter: StepMeter | None = None,
    ) -> None:
        super().__init__(config, pool, eos_token_ids, meter)
        self._file = file
        self._begin()

    def _begin(self) -> None:
        """Start a file: the scheduler is idle and its cache empty."""
        self._secret = os.urandom(16)
        self._numbers: dict[str, int] = {}
        self._recorded: dict[str, Sequence] = {}
        self._num_added = self._num_chosen = 0
        self._last_singles: list[int] = []
        self._was_idle = False
        self._batches: dict[int, int] = {}  # number of a batch under way, by its id()
        self._began_ns: dict[int, int] = {}
        self._file.write(
            {
                "version": VERSION,
                "scheduler": asdict(self.config),
                "num_blocks": self.pool.num_blocks,
                "block_size": self.pool.block_size,
                "prefix_cache": self.pool.prefix_cache,
                "sliding": self.pool.sliding,
                "progress": self.progress,
                "num_gpus": self.meter.num_gpus,
            }
        )

    def _rotate(self) -> None:
        if self._file.full and not len(self._queues) and not self._batches:
            self._file.exchange()
            self.pool.clear()
            self._begin()

    # Each call is written before or after the scheduler has done it.

    def add(self, request: Request) -> None:
        """Queue a request, and write what decides on its turn."""
        self._rotate()
        if (
            self._file.over
            or request.task.kv_from is not None
            or request.task.hold_kv_s is not None
        ):
            return super().add(request)
        number = self._num_added
        super().add(request)
        seq = self._queues.get(request.request_id)
        if seq is None or request.request_id in self._recorded:
            return None
        self._num_added += 1
        self._numbers[request.request_id], self._recorded[request.request_id] = number, seq
        sampling = request.task.sampling
        self._file.write(
            [
                "add",
                number,
                request.arrival_ns,
                request.deadline_ns,
                request.priority,
                len(request.task.prompt_token_ids),
                len(request.task.output_token_ids),
                sampling.max_tokens,
                sampling.min_tokens,
                sampling.prompt_logprobs is not None,
            ]
        )

    def abort(self, request_id: str) -> None:
        """End a request, and write that the caller did."""
        self._write_abort(request_id)
        super().abort(request_id)

    def end_in_error(self, request_id: str, stop_reason: str, message: str) -> None:
        self._write_abort(request_id)
        super().end_in_error(request_id, stop_reason, message)

    def hold(self, request_ids: set[str]) -> None:
        """Let requests sit out steps, and write which."""
        if request_ids != self._held:
            numbers = [self._numbers[name] for name in request_ids if name in self._numbers]
            self._file.write(["hold", numbers])
        super().hold(request_ids)

    def _write_abort(self, request_id: str) -> None:
        if request_id in self._numbers:
            self._file.write(["abort", self._numbers[request_id]])

    def schedule(self, now_ns: int, hold_context: bool = False) -> Batch:
        batch = super().schedule(now_ns, hold_context)
        idle = not batch.items and self._was_idle
        self._was_idle = not batch.items
        if self._file.over or idle:  # one empty step says as much as many
            return batch
        items = [[self._numbers[seq.request_id], num_new] for seq, num_new in batch.items]
        num_singles = batch.num_singles()
        singles = [number for number, _ in items[:num_singles]]
        changed: list[int] | None = singles if singles != self._last_singles else None
        self._last_singles = singles
        self._file.write(["schedule", now_ns, int(hold_context), changed, items[num_singles:]])
        if batch.items:
            self._batches[id(batch)] = self._num_chosen
            self._began_ns[id(batch)] = time.monotonic_ns()
        self._num_chosen += 1
        return batch

    def advance(self, batch: Batch) -> None:
        """Count a launched batch, and write that it was launched ahead."""
        if id(batch) in self._batches:
            self._write_unsampled(batch)
            self._file.write(["advance", self._batches[id(batch)]])
        super().advance(batch)

    def _write_unsampled(self, batch: Batch) -> None:
        if batch.unsampled:
            self._file.write(["unsampled", self._batches[id(batch)], batch.unsampled])

    def update(self, batch: Batch, result: StepResult) -> list[RequestOutput]:
        """Account for a step, and write its time, how many tokens came and who ended."""
        if id(batch) not in self._batches:
            return super().update(batch, result)
        if batch.samples is None:
            self._write_unsampled(batch)
        number = self._batches.pop(id(batch))
        began_ns, ended_ns = self._began_ns.pop(id(batch)), time.monotonic_ns()
        counts = [len(tokens) for tokens in result.token_ids]
        for index in result.errors:
            counts[index] = -1
        outputs = super().update(batch, result)
        drafts = None
        if result.draft_ids is not None:
            drafts = [len(seq.draft_ids) for seq, _ in batch.items]
        self._file.write(["update", number, began_ns, ended_ns, counts, drafts])
        self._write_ends(outputs)
        return outputs

    def preempt(self, batch: Batch, message: str) -> list[RequestOutput]:
        """Run a batch again that did not fit, and write it."""
        return self._lost("preempt", batch, super().preempt, message)

    def fail(self, batch: Batch, message: str) -> list[RequestOutput]:
        return self._lost("fail", batch, super().fail, message)

    def take_finished(self) -> list[RequestOutput]:
        """The terminal outputs that no batch produces; their ends are written."""
        outputs = super().take_finished()
        self._write_ends(outputs)
        return outputs

    def _lost(self, name: str, batch: Batch, call: Any, message: str) -> list[RequestOutput]:
        number = self._batches.pop(id(batch), None)  # none: preempt() has called fail()
        self._began_ns.pop(id(batch), None)
        if number is not None:
            self._file.write([name, number])
        outputs: list[RequestOutput] = call(batch, message)
        self._write_ends(outputs)
        return outputs

    def _write_ends(self, outputs: list[RequestOutput]) -> None:
        """Write the salted hashes of the blocks of those that ended, and how many tokens came."""
        for output in outputs:
            if output.finish_reason is None:
                continue
            seq = self._recorded.pop(output.request_id, None)
            number = self._numbers.pop(output.request_id, None)
            if seq is not None:
                hashes = [self._salted(block_hash) for block_hash in seq.chain[1:]]
                reason = output.finish_reason.value
                cost = [round(part, COST_DIGITS) for part in astuple(seq.cost)]
                self._file.write(["end", number, reason, seq.num_output_tokens, hashes, cost])

    def _salted(self, block_hash: int) -> str:
        data = (block_hash & (2**64 - 1)).to_bytes(8, "little")
        return hashlib.blake2b(data, key=self._secret, digest_size=6).hexdigest()


def make_scheduler(
    config: SchedulerConfig,
    pool: BlockPool,
    eos_token_ids: frozenset[int],
    execution: ExecutionConfig,
    moves_kv: bool = False,
    meter: StepMeter | None = None,
) -> Scheduler:
    """A scheduler; one that is recorded where the settings ask for it."""
    if execution.record_path is None:
        return Scheduler(config, pool, eos_token_ids, meter)
    if moves_kv:
        raise TokenmillError(
            "--record does not go with a KV connector or --kv-offloading: what is computed "
            "elsewhere or loaded is not recorded; leave out --prefill, --decode and "
            "--kv-offloading, or --record"
        )
    path = Path(execution.record_path).expanduser()
    try:
        file = RecordFile(path, execution.record_bytes)
    except OSError as error:
        raise TokenmillError(f"--record {path}: {error.strerror or error}") from None
    return RecordedScheduler(config, pool, eos_token_ids, file, meter)
