"""What the benchmark of KV tiers asks: synthetic conversations, or those of a Mooncake trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from tokenmill.bench.results.mooncake import TraceError, TraceRequest, read_trace

FIRST_TOKEN = 3  # below it are those that begin and end texts


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be sent now."""

    name: str
    prompt: list[int]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Conversations:
    """Each turn's prompt is all that was said before, and so many tokens more."""

    count: int
    turns: int
    turn_tokens: int
    answer_tokens: int
    at_once: int  # requests in flight
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return self.count * self.turns

    @property
    def num_tokens(self) -> int:
        """Tokens of all conversations at their end."""
        return self.count * self.longest

    @property
    def num_kept_tokens(self) -> int:
        """With answers that nobody asks for again."""
        return self.num_tokens

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.turns * (self.turn_tokens + self.answer_tokens)

    @property
    def words(self) -> str:
        return f"{self.count} conversations of {self.num_tokens:,} tokens in all"

    def play(self, vocab_size: int) -> Turns:
        return Turns(self, vocab_size)


class Turns:
    """All conversations turn by turn, so that each comes back when all others have spoken."""

    def __init__(self, load: Conversations, vocab_size: int) -> None:
        self._load, self._vocab_size = load, vocab_size
        self._source = random.Random(load.seed)
        self._spoken: list[list[int]] = [[] for _ in range(load.count)]
        self._open: set[int] = set()
        self.num_left = load.num_requests

    def take(self) -> Asked | None:
        load = self._load
        turn, index = divmod(load.num_requests - self.num_left, load.count)
        if not self.num_left or index in self._open:
            return None
        self.num_left -= 1
        self._open.add(index)
        said, token = self._spoken[index], self._source.randrange
        said += [token(FIRST_TOKEN, self._vocab_size) for _ in range(load.turn_tokens)]
        return Asked(f"{turn}-{index}", list(said), load.answer_tokens)

    def answered(self, name: str, token_ids: list[int]) -> None:
        index = int(name.split("-")[1])
        self._spoken[index] += token_ids
        self._open.remove(index)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Requests of a trace in its order: prompts share blocks exactly where the recorded ones did.

    Times are not replayed: so many requests are in flight at a time.
    """

    rows: Sequence[TraceRequest]
    block_tokens: int  # of a hash id
    at_once: int
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all blocks, each once."""
        sizes: dict[int, int] = {}
        for row in self.rows:
            for place, hash_id in enumerate(row.hash_ids):
                size = min(self.block_tokens, row.num_prompt_tokens - place * self.block_tokens)
                sizes[hash_id] = max(size, sizes.get(hash_id, 0))
        return sum(sizes.values())

    @property
    def num_kept_tokens(self) -> int:
        return self.num_tokens + sum(row.num_output_tokens for row in self.rows)

    @property
    def longest(self) -> int:
        return max(row.num_prompt_tokens + row.num_output_tokens for row in self.rows)

    @property
    def words(self) -> str:
        return f"{self.num_requests} requests of a trace, whose prompts are {self.num_tokens:,} " \
            "different tokens"  # fmt: skip

    def play(self, vocab_size: int) -> Rows:
        return Rows(self, vocab_size)


class Rows:
    def __init__(self, load: TraceLoad, vocab_size: int) -> None:
        self.load, self.vocab_size = load, vocab_size
        self.num_left = load.num_requests

    def take(self) -> Asked | None:
        if not self.num_left:
            return None
        number = self.load.num_requests - self.num_left
        row, prompt = self.load.rows[number], []
        for hash_id in row.hash_ids:
            prompt += self._block(hash_id)
        self.num_left -= 1
        return Asked(str(number), prompt[: row.num_prompt_tokens], row.num_output_tokens)

    def _block(self, hash_id: int) -> list[int]:
        source = random.Random(f"{self.load.seed} {hash_id}")
        tokens = range(FIRST_TOKEN, self.vocab_size)
        return source.choices(tokens, k=self.load.block_tokens)

    def answered(self, name: str, token_ids: list[int]) -> None:
        """A trace has its own answers."""


Load = Conversations | TraceLoad


def trace_load(
    path: str, block_tokens: int, scale: float, count: int, most_output: int, at_once: int
) -> TraceLoad:
    """The first `count` conversations of a file, with a share of their tokens.

    Each hash id stands for as many fewer; no answer is longer than `most_output`.
    """
    rows = conversations(read_trace(path, block_tokens), count)
    if not rows:
        raise TraceError(
            f"--trace {path}: no request continues another; give a trace of several turns"
        )
    size = max(1, round(block_tokens * scale))
    return TraceLoad([_scaled(row, scale, size, most_output) for row in rows], size, at_once)


def _scaled(row: TraceRequest, scale: float, size: int, most_output: int) -> TraceRequest:
    # As many tokens as the hash ids stand for, whatever is rounded.
    first, last = (len(row.hash_ids) - 1) * size + 1, len(row.hash_ids) * size
    num_prompt = min(max(round(row.num_prompt_tokens * scale), first), last)
    num_output = min(max(1, round(row.num_output_tokens * scale)), most_output)
    return TraceRequest(row.arrival_ms, num_prompt, num_output, row.hash_ids)


def conversations(rows: Sequence[TraceRequest], count: int) -> list[TraceRequest]:
    """The requests of the first `count` conversations of several turns, in the trace's order.

    A request continues the conversation that has the last block of its longest known prefix,
    unless all prompts begin with that.
    """
    places = zip(*(row.hash_ids for row in rows), strict=False)
    num_common = sum(1 for _ in takewhile(_equal, places))
    home: dict[int, list[int]] = {}  # by hash id: numbers of the requests of a conversation
    talks: list[list[int]] = []
    for number, row in enumerate(rows):
        known = sum(1 for _ in takewhile(home.__contains__, row.hash_ids))
        talk = home[row.hash_ids[known - 1]] if known > num_common else []
        if not talk:
            talks.append(talk)
        talk.append(number)
        for hash_id in row.hash_ids:
            home.setdefault(hash_id, talk)
    chosen = [talk for talk in talks if len(talk) > 1][:count]
    return [rows[number] for number in sorted(chain.from_iterable(chosen))]


def _equal(ids: tuple[int, ...]) -> bool:
    return len(set(ids)) == 1
