"""Prompts to send: sessions of one or more turns, each a pure function of its index.

Without a tokenizer a token is a common short word, and the server's usage says how many tokens it
counted. Two seeds give prompts with different beginnings, so a server cannot have cached them in an
earlier run. The sessions of one seed share exactly the prefixes that the dataset describes.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tokenmill.bench.client.synthetic_images import given_images, synthetic_image
from tokenmill.bench.results.mooncake import TRACE_BLOCK_TOKENS, TraceRequest
from tokenmill.bench.workload import BenchError

Message = dict[str, Any]

CORPUS_WORDS = 1 << 15
UNIQUE_WORDS = 6  # WORDS ** 6 different beginnings
SALT_WORDS, MAX_SALT_WORDS = 4, 12  # before a given prompt, or in the place of its first words
CHUNK = 64  # characters of a given prompt that are compared at once
CHARS_PER_TOKEN = 8.0  # more than any tokenizer has over a whole prompt
ANSWER_CHARS = 4  # of a token, about, in the answers of a conversation
HUB = "hf:"  # before the name of a dataset on the Hugging Face Hub
_COMMON = (
    "the of and to in is that for it was on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their said if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find "
    "use may water long little very after words called just where most know"
)
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """One request: a text, or whole messages as a file has them."""

    content: str | list[Message]
    max_tokens: int | None = None
    images: tuple[str, ...] = ()  # URLs; they stand before the text

    @property
    def spoken(self) -> str | list[Message]:
        if not self.images:
            return self.content
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return [*parts, {"type": "text", "text": self.content}]

    @property
    def said(self) -> str | list[Message]:
        return [{"role": "user", "content": self.spoken}] if self.images else self.content


@dataclass(frozen=True, slots=True)
class Session:
    """Turns sent one after another, each with the answers before it."""

    turns: tuple[PromptTurn, ...]
    system: str = ""


Part = tuple[Hashable, int]  # what stands there, and its length


class Dataset(Protocol):
    """Sessions by index; `size` is None where there is no end to them."""

    @property
    def size(self) -> int | None: ...

    @property
    def units_per_token(self) -> float:
        """A prompt of n units has n / units_per_token tokens at least."""

    @property
    def warmup_words(self) -> int | None:
        """Words of a warm-up prompt; None where they are as the measured ones."""

    def session(self, index: int) -> Session:
        """The same for every process and every run with the same seed."""

    def warmup(self, index: int) -> Session:
        """A session that is not among the measured ones."""

    def parts(self, index: int) -> list[Part]:
        """A session's first prompt in parts: prompts share a beginning where these are equal."""


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
    """`count` words whose beginning differs for every (key, number), so that no cache has them."""
    size = len(WORDS)
    head = [WORDS[(number // size**i + first) % size] for i, first in enumerate(_firsts(key))]
    text, starts = _corpus()
    parts = [" ".join(head[:count]) + " "]
    left = count - UNIQUE_WORDS
    while left > 0:
        begin = zlib.crc32(f"{key}/{number}/{len(parts)}".encode()) % CORPUS_WORDS
        end = min(begin + left, CORPUS_WORDS)
        parts.append(text[starts[begin] : starts[end]])
        left -= end - begin
    return "".join(parts).rstrip()


@lru_cache(maxsize=1024)
def _firsts(key: str) -> tuple[int, ...]:
    """Where the beginnings of a key are counted from: those of two keys differ from the start."""
    return tuple(random.Random(key).choices(range(len(WORDS)), k=UNIQUE_WORDS))


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random words of given lengths, optionally with shared prefixes or as conversations."""

    lengths: tuple[tuple[int, int], ...]  # (in, out) of request i, i modulo their number
    seed: int = 0
    num_turns: int = 1
    prefix_len: int = 0
    num_prefixes: int = 1
    num_images: int = 0  # of every turn
    image_size: tuple[int, int] = (0, 0)  # width and height
    template_tokens: int = 0  # of each length, which the server adds to the prompt

    size: ClassVar[int | None] = None
    units_per_token: ClassVar[float] = 1.0
    warmup_words: ClassVar[int | None] = None

    def parts(self, index: int) -> list[Part]:
        number = index * self.num_turns
        own: Part = (number, self.lengths[number % len(self.lengths)][0] - self.template_tokens)
        shared: Part = (("prefix", index % self.num_prefixes), self.prefix_len)
        return [shared, own] if self.prefix_len else [own]

    def session(self, index: int) -> Session:
        return self._session(index, "prompt")

    def warmup(self, index: int) -> Session:
        return self._session(index, "warmup")

    def _session(self, index: int, key: str) -> Session:
        turns = tuple(
            self._turn(index * self.num_turns + turn, key) for turn in range(self.num_turns)
        )
        return Session(turns, self._prefix(index))

    def _turn(self, number: int, key: str) -> PromptTurn:
        input_len, output_len = self.lengths[number % len(self.lengths)]
        text = words(f"{key}/{self.seed}", number, input_len - self.template_tokens)
        numbers = range(number * self.num_images, (number + 1) * self.num_images)
        images = [synthetic_image(f"{key}/{self.seed}", n, self.image_size) for n in numbers]
        return PromptTurn(text, output_len, tuple(images))

    def _prefix(self, index: int) -> str:
        if not self.prefix_len:
            return ""
        return words(f"prefix/{self.seed}", index % self.num_prefixes, self.prefix_len)


WARMUP_WORDS = 64


def _warmup(seed: int | None, index: int) -> Session:
    return Synthetic(((WARMUP_WORDS, 8),), seed=-1 if seed is None else seed).warmup(index)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The lines of a file; after the last one they start again.

    With a seed, all prompts of a pass begin with the same salt, which differs between passes. So no
    cache has them from an earlier pass, and they still share what they share in the file.
    """

    turns: tuple[PromptTurn, ...]
    seed: int | None = None  # of the salts; None: as the file has them
    cuts: tuple[SaltCut, ...] = ()  # of each turn; without them a salt is put before

    @property
    def size(self) -> int | None:
        return len(self.turns)

    units_per_token: ClassVar[float] = CHARS_PER_TOKEN
    warmup_words: ClassVar[int | None] = WARMUP_WORDS

    def session(self, index: int) -> Session:
        number, place = divmod(index, len(self.turns))
        turn = self.turns[place]
        if self.seed is None:
            return Session((turn,))
        cut = self.cuts[place] if self.cuts else SaltCut()
        content = salted(turn.said, f"{self.seed}/{number}", cut)
        return Session((replace(turn, content=content, images=()),))

    def warmup(self, index: int) -> Session:
        return _warmup(self.seed, index)

    def parts(self, index: int) -> list[Part]:
        number, place = divmod(index, len(self.turns))
        turn = self.turns[place]
        text = "".join(turn.images) + whole_text(turn.content)
        chunks: list[Part] = [
            (text[at : at + CHUNK], len(text[at : at + CHUNK])) for at in range(0, len(text), CHUNK)
        ]
        return chunks if self.seed is None else [(number, 0), *chunks]


@dataclass(frozen=True, slots=True)
class SaltCut:
    """The beginning of a prompt that a salt replaces; if it is empty, the salt is put before it."""

    num_chars: int = 0
    num_words: int = SALT_WORDS  # of the salt: as many as the tokens that it replaces


def salted(content: str | list[Message], key: str, cut: SaltCut) -> str | list[Message]:
    """The prompt with a salt at its beginning; equal beginnings get equal salts."""
    if isinstance(content, list) and (place := _image_first(content)) is not None:
        salt = words(f"salt/{key}/", 0, SALT_WORDS)
        return _with_part(content, place, {"type": "text", "text": salt})
    text = first_text(content)
    head, rest = text[: cut.num_chars], text[cut.num_chars :]
    salt = words(f"salt/{key}/{head}", 0, cut.num_words)
    return _with_first_text(content, salt + (rest if head else f" {rest}"))


def _image_first(content: str | list[Message]) -> int | None:
    """The message that begins with an image, if no text is before it."""
    for place, message in enumerate([] if isinstance(content, str) else content):
        said = message.get("content")
        if said:
            begins = (
                isinstance(said, list) and isinstance(said[0], dict) and not said[0].get("text")
            )
            return place if begins else None
    return None


def _with_part(messages: list[Message], place: int, part: Message) -> list[Message]:
    message = messages[place]
    message = message | {"content": [part, *message["content"]]}
    return [*messages[:place], message, *messages[place + 1 :]]


def first_text(content: str | list[Message]) -> str:
    if isinstance(content, str):
        return content
    for message in content:
        said = message.get("content")
        for part in [said] if isinstance(said, str) else said or []:
            text = part if isinstance(part, str) else part.get("text")
            if text:
                return str(text)
    return ""


def _with_first_text(content: str | list[Message], text: str) -> str | list[Message]:
    if isinstance(content, str):
        return text
    old, messages, is_done = first_text(content), [], False
    for message in content:
        said = message.get("content")
        if not is_done and said == old:
            said, is_done = text, True
        elif not is_done and isinstance(said, list):
            at = next((i for i, part in enumerate(said) if part.get("text") == old), None)
            if at is not None:
                said, is_done = [*said[:at], said[at] | {"text": text}, *said[at + 1 :]], True
        messages.append(message | {"content": said} if "content" in message else message)
    return messages


def whole_text(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "".join(map(json.dumps, content))


def find_cuts(turns: tuple[PromptTurn, ...], count: Callable[[str], int]) -> tuple[SaltCut, ...]:
    """Cuts at which salts keep the number of tokens; () if a word of a salt is not one token."""
    if any(count(f"{word} {word}") != 2 for word in WORDS):
        return ()
    return tuple(
        SaltCut() if _image_first(turn.said) is not None else _cut(first_text(turn.content), count)
        for turn in turns
    )


def _cut(text: str, count: Callable[[str], int]) -> SaltCut:
    for word in re.finditer(r"\S+(?= )", text[: MAX_SALT_WORDS * CHUNK]):
        end = word.end()
        num_tokens, until = count(text[:end]), end + CHUNK
        if num_tokens > MAX_SALT_WORDS:
            break
        salt = words("salt", 0, num_tokens)
        if num_tokens >= SALT_WORDS and count(salt + text[end:until]) == count(text[:until]):
            return SaltCut(end, num_tokens)
    return SaltCut()


@dataclass(frozen=True, slots=True)
class Shuffled:
    """Passes over a finite dataset, each in a different order."""

    dataset: Dataset
    pass_size: int
    seed: int

    @property
    def size(self) -> int | None:
        return self.pass_size

    @property
    def units_per_token(self) -> float:
        return self.dataset.units_per_token

    @property
    def warmup_words(self) -> int | None:
        return self.dataset.warmup_words

    def session(self, index: int) -> Session:
        return self.dataset.session(self._index(index))

    def warmup(self, index: int) -> Session:
        return self.dataset.warmup(index)

    def parts(self, index: int) -> list[Part]:
        return self.dataset.parts(self._index(index))

    def _index(self, index: int) -> int:
        number, place = divmod(index, self.pass_size)
        return number * self.pass_size + _order(self.seed, number, self.pass_size)[place]


@lru_cache(maxsize=4)
def _order(seed: int, number: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"order/{seed}/{number}").shuffle(order)
    return tuple(order)


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded load; prompts share their beginnings exactly where the recorded ones did."""

    rows: tuple[TraceRequest, ...]
    seed: int = 0
    block: int = TRACE_BLOCK_TOKENS  # tokens of a hash id

    @property
    def size(self) -> int | None:
        return len(self.rows)

    units_per_token: ClassVar[float] = 1.0
    warmup_words: ClassVar[int | None] = WARMUP_WORDS

    def session(self, index: int) -> Session:
        number, place = divmod(index, len(self.rows))
        row = self.rows[place]
        key = f"block/{self.seed}/{number}"  # a second pass is not the first one again
        text = " ".join(words(key, hash_id, length) for hash_id, length in self._blocks(row))
        return Session((PromptTurn(text, row.num_output_tokens),))

    def warmup(self, index: int) -> Session:
        return _warmup(self.seed, index)

    def parts(self, index: int) -> list[Part]:
        number, place = divmod(index, len(self.rows))
        return [((number, hash_id), n) for hash_id, n in self._blocks(self.rows[place])]

    def _blocks(self, row: TraceRequest) -> Iterator[tuple[int, int]]:
        for place, hash_id in enumerate(row.hash_ids):
            yield hash_id, min(self.block, row.num_prompt_tokens - place * self.block)


def fresh(dataset: Dataset, seed: int) -> Dataset:
    """The same data with prompts of another seed; given prompts get a salt."""
    if isinstance(dataset, Shuffled):
        return replace(dataset, dataset=fresh(dataset.dataset, seed))
    if isinstance(dataset, Synthetic | Prompts | Trace):
        return replace(dataset, seed=seed)
    raise TypeError(f"no fresh prompts of {type(dataset).__name__}")


def read_prompts(source: str, output_len: int | None = None) -> Prompts:
    """Lines of {"prompt": TEXT} or {"messages": [...]}, with "output_len" or "max_tokens".

    A prompt may have "images": files, relative to the file, or URLs. ShareGPT's {"conversations":
    [...]} give their first question; those that begin with an answer are left out.
    """
    path = Path(source).expanduser()
    lines = _hub_rows(source) if source.startswith(HUB) else _json_lines(path)
    asked = [(found, where) for line, where in lines if (found := _asked(line)) is not None]
    turns = [_prompt(line, where, output_len, path.parent) for line, where in asked]
    if not turns:
        raise BenchError(f"{source}: no conversation begins with a question and its answer")
    return Prompts(tuple(turns))


def _asked(line: Any) -> Any:
    """The line, whose conversation has become a prompt; None where it does not begin with one."""
    talk = line.get("conversations") if isinstance(line, dict) else None
    if not isinstance(talk, list):
        return line or {}
    match talk[:2]:
        case [{"from": "human" | "user", "value": str(asked)}, {"value": str(answer)}] if asked:
            return {"prompt": asked, "output_len": max(1, len(answer) // ANSWER_CHARS)}
    return None


def _hub_rows(source: str) -> list[tuple[Any, str]]:
    """The rows of hf:OWNER/NAME or hf:OWNER/NAME:SPLIT."""
    name, _, split = source.removeprefix(HUB).partition(":")
    try:
        from datasets import load_dataset

        rows = load_dataset(name, split=split or "train")
    except ModuleNotFoundError:
        raise BenchError(f"--prompts {source} needs a package: pip install datasets") from None
    except (OSError, ValueError) as error:
        raise BenchError(f"--prompts {source}: cannot read: {error}") from None
    return [(row, f"{source}, row {number}") for number, row in enumerate(rows)]


def _prompt(line: Any, where: str, output_len: int | None, folder: Path) -> PromptTurn:
    found = line if isinstance(line, dict) else {}
    content = found.get("prompt") or found.get("messages")
    limit = output_len or found.get("output_len") or found.get("max_tokens")
    if not isinstance(content, str | list) or not isinstance(limit, int | None):
        kinds = '{"prompt": TEXT}, {"messages": [...]} or {"conversations": [...]}'
        raise BenchError(f"{where}: expected {kinds}")
    images = given_images(found.get("images") or found.get("image"), folder, where)
    if images and not isinstance(content, str):
        raise BenchError(f'{where}: "images" go with "prompt"; put them into "messages" as parts')
    return PromptTurn(content, limit, images)


def _json_lines(path: Path) -> list[tuple[Any, str]]:
    """(value, "file:line") of every line that is not empty; of every entry of a .json file."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return [(row, f"{path}, entry {n}") for n, row in enumerate(json.loads(text))]
    except (OSError, ValueError, TypeError) as error:
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
        raise BenchError(f"{path}: the file has no prompts")
    return rows
