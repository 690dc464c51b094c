"""What to send: sessions of one or more turns, each a pure function of its index.

Without a tokenizer a token is a common short word; what the server counted is in its usage.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from tokenmill.bench.workload import BenchError

Message = dict[str, Any]

TRACE_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for
CORPUS_WORDS = 1 << 15
UNIQUE_WORDS = 6  # WORDS ** 6 different beginnings
_COMMON = (
    "the of and to in is that for it was on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know"
)
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: a text, or whole messages as a file has them."""

    content: str | list[Message]
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """Turns sent one after another, each with the answers before it."""

    turns: tuple[Turn, ...]
    system: str = ""


class Dataset(Protocol):
    """Sessions by index; `size` is None where there is no end to them."""

    @property
    def size(self) -> int | None: ...

    def session(self, index: int) -> Session:
        """The same for every process and every run with the same seed."""

    def warmup(self, index: int) -> Session:
        """A session that is not among the measured ones."""


@cache
def _corpus() -> tuple[str, tuple[int, ...]]:
    """A fixed text of CORPUS_WORDS words, and where each of them begins."""
    chosen = random.Random("corpus").choices(WORDS, k=CORPUS_WORDS)
    starts, at = [], 0
    for word in chosen:
        starts.append(at)
        at += len(word) + 1
    return " ".join(chosen) + " ", (*starts, at)


def words(key: str, number: int, count: int) -> str:
    """`count` words that begin unlike those of any other (key, number): no cache can help."""
    head = [WORDS[number // len(WORDS) ** place % len(WORDS)] for place in range(UNIQUE_WORDS)]
    text, starts = _corpus()
    parts = [" ".join((*head, _salt(key))[:count]) + " "]
    left = count - UNIQUE_WORDS - 1
    while left > 0:
        begin = zlib.crc32(f"{key}/{number}/{len(parts)}".encode()) % CORPUS_WORDS
        end = min(begin + left, CORPUS_WORDS)
        parts.append(text[starts[begin] : starts[end]])
        left -= end - begin
    return "".join(parts).rstrip()


@cache
def _salt(key: str) -> str:
    return random.Random(key).choice(WORDS)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random words: lengths in turn, on request behind a shared prefix or as conversations."""

    lengths: tuple[tuple[int, int], ...]  # (in, out) of request i, i modulo their number
    seed: int = 0
    num_turns: int = 1
    prefix_len: int = 0
    num_prefixes: int = 1

    @property
    def size(self) -> int | None:
        return None

    def session(self, index: int) -> Session:
        return self._session(index, "prompt")

    def warmup(self, index: int) -> Session:
        return self._session(index, "warmup")

    def _session(self, index: int, key: str) -> Session:
        turns = tuple(
            self._turn(index * self.num_turns + turn, key) for turn in range(self.num_turns)
        )
        return Session(turns, self._prefix(index))

    def _turn(self, number: int, key: str) -> Turn:
        input_len, output_len = self.lengths[number % len(self.lengths)]
        return Turn(words(f"{key}/{self.seed}", number, input_len), output_len)

    def _prefix(self, index: int) -> str:
        if not self.prefix_len:
            return ""
        return words(f"prefix/{self.seed}", index % self.num_prefixes, self.prefix_len)


_WARMUP = Synthetic(((64, 8),), seed=-1)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The lines of a file, from the start again after the last one."""

    turns: tuple[Turn, ...]

    @property
    def size(self) -> int | None:
        return len(self.turns)

    def session(self, index: int) -> Session:
        return Session((self.turns[index % len(self.turns)],))

    def warmup(self, index: int) -> Session:
        return _WARMUP.warmup(index)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Whole passes over a finite dataset, each in an order of its own."""

    dataset: Dataset
    pass_size: int
    seed: int

    @property
    def size(self) -> int | None:
        return self.pass_size

    def session(self, index: int) -> Session:
        number, place = divmod(index, self.pass_size)
        return self.dataset.session(_order(self.seed, number, self.pass_size)[place])

    def warmup(self, index: int) -> Session:
        return self.dataset.warmup(index)


@lru_cache(maxsize=4)
def _order(seed: int, number: int, size: int) -> tuple[int, ...]:
    """The samples of one pass."""
    order = list(range(size))
    random.Random(f"order/{seed}/{number}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; equal hash ids are equal blocks of tokens."""

    offset_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded load; prompts share their beginnings exactly where the recorded ones did."""

    rows: tuple[TraceRow, ...]
    seed: int = 0
    block: int = field(default=TRACE_BLOCK)

    @property
    def size(self) -> int | None:
        return len(self.rows)

    def session(self, index: int) -> Session:
        row = self.rows[index % len(self.rows)]
        return Session((Turn(" ".join(self._blocks(row)), row.output_len),))

    def warmup(self, index: int) -> Session:
        return _WARMUP.warmup(index)

    def _blocks(self, row: TraceRow) -> Iterator[str]:
        for place, hash_id in enumerate(row.hash_ids):
            length = min(self.block, row.input_len - place * self.block)
            yield words(f"block/{self.seed}", hash_id, length)


def read_trace(path: Path, speed: float = 1.0, seed: int = 0) -> Trace:
    """A Mooncake trace: timestamp (ms), input_length, output_length, hash_ids per line."""
    rows = tuple(_trace_row(line, where, speed) for line, where in _json_lines(path))
    if any(a.offset_s > b.offset_s for a, b in pairwise(rows)):
        raise BenchError(f"{path}: the timestamps are not in order")
    return Trace(rows, seed)


def _trace_row(line: Any, where: str, speed: float) -> TraceRow:
    try:
        row = TraceRow(
            float(line["timestamp"]) / 1e3 / speed,
            int(line["input_length"]),
            int(line["output_length"]),
            tuple(map(int, line["hash_ids"])),
        )
    except (KeyError, TypeError, ValueError):
        raise BenchError(
            f"{where}: expected timestamp, input_length, output_length and hash_ids"
        ) from None
    needed = -(-row.input_len // TRACE_BLOCK)
    if row.input_len < 1 or row.output_len < 1 or len(row.hash_ids) != needed:
        raise BenchError(
            f"{where}: {row.input_len} tokens in and {row.output_len} out do not go with "
            f"{len(row.hash_ids)} blocks of {TRACE_BLOCK}"
        )
    return row


def read_prompts(path: Path, output_len: int | None = None) -> Prompts:
    """Lines of {"prompt": TEXT} or {"messages": [...]}, with "output_len" or "max_tokens"."""
    return Prompts(tuple(_prompt(line, where, output_len) for line, where in _json_lines(path)))


def _prompt(line: Any, where: str, output_len: int | None) -> Turn:
    found = line if isinstance(line, dict) else {}
    content = found.get("prompt") or found.get("messages")
    limit = output_len or found.get("output_len") or found.get("max_tokens")
    if not isinstance(content, str | list) or not isinstance(limit, int | None):
        raise BenchError(f'{where}: expected {{"prompt": TEXT}} or {{"messages": [...]}}')
    return Turn(content, limit)


def _json_lines(path: Path) -> list[tuple[Any, str]]:
    """(value, "file:line") of every line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot read: {error}") from None
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append((json.loads(line), f"{path}:{number}"))
        except ValueError as error:
            raise BenchError(f"{path}:{number}: not JSON: {error}") from None
    if not rows:
        raise BenchError(f"{path}: has no lines")
    return rows
