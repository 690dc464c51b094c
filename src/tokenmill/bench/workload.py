"""Workloads of benchmarks: cells of requests with their lengths, and the prompts of a cell."""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.bench.options import BenchConfig
from tokenmill.core.types import TokenmillError

Prompts = list[list[int]]

SHIPPED = Path(__file__).parent / "lengths"
COLUMNS = ["input_length", "output_length"]
WARMUP_PROMPTS, WARMUP_OUTPUT_LEN = 48, 8
_UNIFORM = re.compile(r"uniform:([1-9]\d*)-([1-9]\d*)")
_UNIFORM_PROMPTS = 256
# The seeds and token ranges of the peers' scripts: the same numbers give the same prompts.
_UNIFORM_SEED, _UNIFORM_TOKENS = 0, 10_000
_FILE_SEED, _FILE_TOKENS = 7, range(10, 128_000)


class BenchError(TokenmillError):
    """A benchmark cannot run, or an engine did not do what the cell asks for."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests that arrive at once, each with so many tokens in and out."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    # The first so many prompts for a vocabulary of such a size; None: new ones every round.
    draw: Callable[[int, int], Prompts] | None = None

    @classmethod
    def equal(cls, name: str, num_prompts: int, input_len: int, output_len: int) -> Cell:
        return cls(name, ((input_len, output_len),) * num_prompts)

    @property
    def num_prompts(self) -> int:
        return len(self.lengths)

    @property
    def output_lens(self) -> list[int]:
        return [output_len for _, output_len in self.lengths]

    @property
    def num_input_tokens(self) -> int:
        return sum(input_len for input_len, _ in self.lengths)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def longest(self) -> int:
        return max(sum(both) for both in self.lengths)

    @property
    def counts_prompt(self) -> bool:
        """True where the prompt tokens are the figure, not the output tokens."""
        return self.num_output_tokens == self.num_prompts

    @property
    def num_counted_tokens(self) -> int:
        return self.num_input_tokens if self.counts_prompt else self.num_output_tokens

    @property
    def shape(self) -> str:
        if len(set(self.lengths)) == 1:
            input_len, output_len = self.lengths[0]
            return f"{self.num_prompts} x ({input_len} in, {output_len} out)"
        return (
            f"{self.num_prompts:,} requests "
            f"({self.num_input_tokens:,} in, {self.num_output_tokens:,} out)"
        )

    def warmup(self) -> Cell:
        """A short run before the measured ones."""
        short = ((i, min(o, WARMUP_OUTPUT_LEN)) for i, o in self.lengths[:WARMUP_PROMPTS])
        return replace(self, lengths=tuple(short))


def make_cells(config: BenchConfig) -> list[Cell]:
    """The cells that a config asks for: one workload of many lengths, or the three of one."""
    if config.lengths is not None:
        return [_workload(config.lengths, config.num_prompts, config.output_len)]
    cells = (
        Cell.equal(
            "batch", config.num_prompts or 32, config.input_len or 128, config.output_len or 64
        ),
        Cell.equal("single", 1, 128, 128),
        Cell.equal("prefill", 1, 2048, 1),
    )
    return [cell for cell in cells if cell.name in config.cells]


def make_prompts(cell: Cell, round_index: int, seed: int, vocab_size: int) -> Prompts:
    """The workload's own prompts; else random tokens, new in every round: no cache can help.

    The ends of a vocabulary hold the special tokens; they are left out.
    """
    if cell.draw is not None:
        return cell.draw(cell.num_prompts, vocab_size)
    rng = random.Random(f"{seed}/{cell.name}/{round_index}")
    low, high = vocab_size // 32, vocab_size - vocab_size // 8
    return [[rng.randrange(low, high) for _ in range(length)] for length, _ in cell.lengths]


def _workload(source: str, num_prompts: int | None, output_len: int | None) -> Cell:
    match = _UNIFORM.fullmatch(source)
    if match is None:
        return _from_file(_find(source), num_prompts, output_len)
    low, high = int(match[1]), int(match[2])
    if low > high:
        raise BenchError(f"--lengths {source}: {low} is more than {high}")
    return _uniform(source, low, high, num_prompts or _UNIFORM_PROMPTS, output_len)


def _uniform(name: str, low: int, high: int, num_prompts: int, output_len: int | None) -> Cell:
    """nano-vllm's bench: all prompts are drawn first, then all output lengths."""
    rng = random.Random(_UNIFORM_SEED)
    prompts = [
        [rng.randint(0, _UNIFORM_TOKENS) for _ in range(rng.randint(low, high))]
        for _ in range(num_prompts)
    ]
    lengths = tuple((len(prompt), output_len or rng.randint(low, high)) for prompt in prompts)

    def draw(count: int, vocab_size: int) -> Prompts:
        return [[token % vocab_size for token in prompt] for prompt in prompts[:count]]

    return Cell(name, lengths, draw)


def _from_file(path: Path, num_prompts: int | None, output_len: int | None) -> Cell:
    """Rows drawn without replacement, in the order drawn, and then their tokens."""
    rows = read_lengths(path, output_len)
    num_rows = num_prompts or len(rows)
    if num_rows > len(rows):
        raise BenchError(f"{path}: has {len(rows)} rows, but --num-prompts asks for {num_rows}")
    chosen = random.Random(_FILE_SEED).sample(rows, num_rows)

    def draw(count: int, vocab_size: int) -> Prompts:
        rng = random.Random(_FILE_SEED)
        rng.sample(rows, num_rows)  # the tokens come after the rows in the stream of this seed
        low, high = _FILE_TOKENS.start % vocab_size, min(_FILE_TOKENS.stop, vocab_size)
        return [[rng.randrange(low, high) for _ in range(length)] for length, _ in chosen[:count]]

    return Cell(path.stem, tuple(chosen), draw)


def read_lengths(path: Path, output_len: int | None = None) -> list[tuple[int, int]]:
    """(input, output) of every row; `output_len` replaces the second column."""
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BenchError(f"{path}: cannot read the lengths: {error}") from None
    header = lines[0] if lines else []
    if header not in (COLUMNS, COLUMNS[:1]):
        found = ",".join(header) or "nothing"
        raise BenchError(f"{path}:1: expected the header {','.join(COLUMNS)}, found {found}")
    if output_len is None and header != COLUMNS:
        raise BenchError(f"{path}:1: has no {COLUMNS[1]} column: give --output-len")
    rows = [
        _read_row(row, header, f"{path}:{number}") for number, row in enumerate(lines[1:], start=2)
    ]
    if not rows:
        raise BenchError(f"{path}:2: expected a row of lengths, found nothing")
    return [(row[0], output_len or row[1]) for row in rows]


def _read_row(row: list[str], header: list[str], where: str) -> list[int]:
    if len(row) != len(header) or not all(re.fullmatch(r"0*[1-9]\d*", text) for text in row):
        expected = f"{len(header)} whole number{'s' * (len(header) > 1)} of at least 1"
        raise BenchError(f"{where}: expected {expected}, found {','.join(row) or 'nothing'}")
    return [int(text) for text in row]


def _find(source: str) -> Path:
    """A file, or one of the package's by its name."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.csv"))}
    if source in shipped:
        return shipped[source]
    raise BenchError(
        f"--lengths {source}: no such file; known are {', '.join(shipped)} and uniform:LOW-HIGH"
    )
