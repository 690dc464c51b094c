"""What train_mtp.py trains on: questions of many kinds, and what the model itself answers.

Two fifths of the questions are forms with gaps (mtp_questions.toml), filled with its words, any
word of the model's vocabulary or an earlier answer; of the others the model gets at most the first
words and writes the rest. A third of the conversations go on with a second question. Nothing is
asked that is a prompt of `bench mtp`, almost one, or about the same thing.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tokenmill.bench.commands.mtp import PROMPTS, read_prompts
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.models.checkpoints.store import resolve
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

QUESTIONS = Path(__file__).with_name("mtp_questions.toml")
MEASURED_KINDS = ("chat", "everyday", "unseen")
MAX_LEN = 768
MARKER = "\ue000"
TEMPERATURES = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.7, 0.7, 0.7, 1.0  # of answers, as often as here
OWN_TEMPERATURES = 0.8, 1.0, 1.0, 1.2  # of questions that the model writes
GIVEN = 0.4  # share of the questions that are forms
COMMONEST = 30_000  # tokens of which words are taken: the earlier, the more frequent
MOST_PASTED = 2000  # answers that later questions may be about
FOLLOWED = 0.35  # share of the answers that are complete which get a second question
CLOSE = 0.6  # share of common words from which a question counts as a prompt of the benchmark
# Words that do not say what a text is about.
_COMMON = """
about add after again ago all also always and another any anyone are ask away back because been
before being best better between big both bring but called came can certain come could day did
does doing done down due during each early either else end even evening ever every everyone
extra far few find first five for four free from fun get give goes going good got had half has
have help her here high him his home hour how idea into its just keep kind know last late less
let like long look lot low made main make many may mean means minute month more morning most
move much name need never new next night nine nobody not nothing now number often okay old once
one only open other our out over own pair part people per pick place play please point put real
really right said same say see set she short should show side since single six small some
someone something sound sounds start still stop such take talk tell ten than thank thanks that
the their them then there these they thing things this those three time today tomorrow too top
try turn two until use used using very want was way week weird well were what when where which
while who why will with without word work working would wrong year yes yesterday yet you your
"""
COMMON = frozenset(_COMMON.split())


@dataclass(slots=True)
class Conversation:
    """Tokens, and from where to where each of the model's answers goes."""

    token_ids: list[int]
    answers: list[tuple[int, int]]
    hidden: torch.Tensor | None = None  # [tokens, hidden], after the final norm


@dataclass(frozen=True, slots=True)
class Frame:
    """The tokens around what is said: before a first question, before a second, before answers."""

    head: list[int]
    between: list[int]
    tail: list[int]


class Questions:
    """What users might ask; `vocabulary` are words of which any may stand in a {word}."""

    def __init__(self, dice: random.Random, vocabulary: Sequence[str] = ("thing",)) -> None:
        self.dice = dice
        self.words: dict[str, list[str]] = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
        self.measured = Measured()
        avoided = self.measured.topics
        self.words["word"] = [word for word in vocabulary if not topic_words(word) & avoided]
        self.words["pasted"] = ["{passage}"]

    def paste(self, text: str) -> None:
        """Later questions may be about this text."""
        pasted = self.words["pasted"]
        if len(pasted) < MOST_PASTED:
            pasted.append(text.replace("{", "(").replace("}", ")"))

    def filled(self, kind: str) -> str:
        """One of a kind, with its gaps filled."""
        text = self.dice.choice(self.words[kind])
        return re.sub(r"\{(\w+)\}", lambda gap: self.filled(gap[1]), text)

    def whole(self) -> str:
        """A form with its gaps filled, as a hasty or a polite user might type it."""
        text, dice = self.filled("forms"), self.dice
        text = text[0].upper() + text[1:]
        if dice.random() < 0.12:
            text = f"{self.filled('greetings')} {text}"
        if dice.random() < 0.12:
            text = f"{text} {self.filled('endings')}"
        if dice.random() < 0.1:
            text = text.lower().rstrip(".?!")
        return self.mistyped(text) if dice.random() < 0.06 else text

    def mistyped(self, text: str) -> str:
        """Two letters in the wrong order, once or a few times."""
        for _ in range(self.dice.randint(1, 3)):
            at = self.dice.randrange(len(text))
            if text[at : at + 2].isalpha():
                text = text[:at] + text[at : at + 2][::-1] + text[at + 2 :]
        return text

    def beginning(self) -> str:
        """The first words of a question, few more often than many, or none."""
        drawn = self.dice.random()
        if drawn < 0.4:
            return ""
        if drawn < 0.85:
            return self.filled("openings" if drawn < 0.6 else "word_openings")
        words = self.filled("forms").split(" ")
        return " ".join(words[: int(len(words) * self.dice.random() ** 2)])

    def system(self) -> str | None:
        """A system prompt, or None for the one that the chat template has."""
        return self.filled("systems") if self.dice.random() < 0.25 else None


class Measured:
    """The prompts of `bench mtp`, which nothing is trained on."""

    def __init__(self) -> None:
        kinds = [file.stem for file in sorted(PROMPTS.glob("*.json"))]
        prompts = [prompt for kind in kinds for prompt in read_prompts(kind)]
        texts = [text for prompt in prompts for text in (*prompt.earlier, prompt.text)]
        self.words = [_words(text) for text in texts]
        self.about = [topic_words(text) for text in texts]
        self.topics = frozenset[str]().union(*self.about)
        self._users: dict[str, list[int]] = {}  # the texts that are about a word
        for index, topics in enumerate(self.about):
            for word in topics:
                self._users.setdefault(word, []).append(index)

    def has(self, text: str) -> bool:
        """Whether it is one of the prompts, almost one, or about the same thing."""
        own = _words(text)
        if any(len(own & other) >= CLOSE * len(own | other) for other in self.words):
            return True
        shared = Counter(i for word in topic_words(text) for i in self._users.get(word, ()))
        return any(
            count >= max(min(2, len(self.about[i])), len(self.about[i]) / 3)
            for i, count in shared.items()
        )


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def topic_words(text: str) -> frozenset[str]:
    """What it is about: its words without the common ones, in the singular."""
    words = set(re.findall(r"[a-z]{3,}", text.lower())) - COMMON
    singular = (word[:-1] if word.endswith("s") and len(word) > 3 else word for word in words)
    return frozenset(singular) - COMMON


def vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """The words among the tokens, in lower case and of at least four letters."""
    texts = (tokenizer.decode([i]) for i in range(size))
    return [text.strip() for text in texts if re.fullmatch(r" [a-z]{4,14}", text)]


def make_frame(tokenizer: Tokenizer, system: str | None) -> Frame:
    """Take a rendered conversation apart."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": role, "content": MARKER} for role in ("user", "assistant", "user")]
    whole, inner = tokenizer.encode_chat(messages), tokenizer.encode(MARKER)
    size = len(inner)
    first, second, third = (i for i in range(len(whole)) if whole[i : i + size] == inner)
    return Frame(whole[:first], whole[second + size : third], whole[third + size :])


class Writer:
    """One engine that writes conversations."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        path = str(resolve(args.model))
        self.args, self.dice = args, random.Random(seed)
        self.tokenizer = load_tokenizer(path)
        self.built = build_engine(
            resolve_setup(
                Setup(
                    ModelConfig(path, "auto", args.device, max_model_len=2048),
                    CacheConfig(memory_bytes=int(args.kv_gib * 2**30)),
                    SchedulerConfig(max_num_seqs=args.batch, max_waiting=2**31),
                )
            )
        )
        size = min(self.built.spec.vocab_size, COMMONEST)
        self.questions = Questions(self.dice, vocabulary(self.tokenizer, size))
        self.frames: dict[str | None, Frame] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.end = min(time.monotonic() + args.generate_s, args.write_until)

    def frame(self) -> Frame:
        system = self.questions.system()
        if system not in self.frames:
            self.frames[system] = make_frame(self.tokenizer, system)
        return self.frames[system]

    def wave(self) -> list[Conversation]:
        """As many conversations as the engine has places, twice: given questions and its own."""
        asked = self._given() + self._own()
        asked = [(frame, user) for frame, user in asked if len(user) > 2 and user not in self.seen]
        self.seen.update(user for _, user in asked)
        frames = [frame for frame, _ in asked]
        talks = [Conversation([*frame.head, *user, *frame.tail], []) for frame, user in asked]
        self._answer(talks)
        ended = [
            i
            for i, (frame, talk) in enumerate(zip(frames, talks, strict=True))
            if talk.answers and talk.token_ids[-1] in frame.between[:1]
            if self.dice.random() < FOLLOWED
        ]
        self._follow([frames[i] for i in ended], [talks[i] for i in ended])
        kept = [talk for talk in talks if talk.answers]
        self._paste(kept)
        for talk in kept:  # a second question may have no answer
            del talk.token_ids[talk.answers[-1][1] :]
        return kept

    def _paste(self, talks: list[Conversation]) -> None:
        """Let later questions be about some of the answers."""
        for talk in self.dice.sample(talks, min(len(talks), 200)):
            first, end = talk.answers[0]
            if end - first >= 40:
                text = self.tokenizer.decode(talk.token_ids[first : min(end - 1, first + 160)])
                self.questions.paste(text.strip())

    def measured(self) -> dict[str, list[Conversation]]:
        """The benchmark's own prompts with greedy answers, to measure with, by their kind."""
        sets = {}
        for kind in MEASURED_KINDS:
            talks = [Conversation(list(prompt.token_ids), []) for prompt in read_prompts(kind)]
            most = min(128, self.args.answer)
            how = [SamplingParams(temperature=0.0, max_tokens=most)] * len(talks)
            prompts = [talk.token_ids for talk in talks]
            answers = complete(self.built, prompts, how, self.dice, self.end)
            for talk, answer in zip(talks, answers, strict=True):
                first = len(talk.token_ids)
                talk.token_ids += answer
                talk.answers.append((first, len(talk.token_ids)))
            sets[kind] = talks
        return sets

    def _given(self) -> list[tuple[Frame, tuple[int, ...]]]:
        texts = [self.questions.whole() for _ in range(int(2 * GIVEN * self.args.batch))]
        return [
            (self.frame(), tuple(self.tokenizer.encode(text)))
            for text in texts
            if not self.questions.measured.has(text)
        ]

    def _own(self) -> list[tuple[Frame, tuple[int, ...]]]:
        frames = [self.frame() for _ in range(int(2 * (1 - GIVEN) * self.args.batch))]
        begun = [self.tokenizer.encode(self.questions.beginning()) for _ in frames]
        turns = self._written([f.head + b for f, b in zip(frames, begun, strict=True)])
        users = []
        for frame, start, turn in zip(frames, begun, turns, strict=True):
            user = (*start, *turn[:-1])
            ended = turn and turn[-1] in frame.tail[:1]
            if ended and not self.questions.measured.has(self.tokenizer.decode(list(user))):
                users.append((frame, user))
        return users

    def _follow(self, frames: list[Frame], talks: list[Conversation]) -> None:
        """Ask a second question, every other time one that the model writes."""
        own = self._written(
            [t.token_ids + f.between[1:] for f, t in zip(frames[::2], talks[::2], strict=True)]
        )
        for frame, talk, turn in zip(frames[::2], talks[::2], own, strict=True):
            if len(turn) > 2 and turn[-1] in frame.tail[:1]:
                talk.token_ids += [*frame.between[1:], *turn[:-1], *frame.tail]
        for frame, talk in zip(frames[1::2], talks[1::2], strict=True):
            user = self.tokenizer.encode(self.questions.filled("followups"))
            talk.token_ids += [*frame.between[1:], *user, *frame.tail]
        self._answer(talks)

    def _written(self, prompts: list[list[int]]) -> list[list[int]]:
        """A user's turn in the model's words."""
        how = [
            SamplingParams(
                temperature=self.dice.choice(OWN_TEMPERATURES), top_p=0.95, max_tokens=96
            )
            for _ in prompts
        ]
        return complete(self.built, prompts, how, self.dice, self.end)

    def _answer(self, talks: list[Conversation]) -> None:
        """Let the model answer, and note where; what is too long ends earlier."""
        talks = [t for t in talks if len(t.token_ids) + 8 < MAX_LEN and not _is_answered(t)]
        most = self.args.answer
        how = [
            SamplingParams(
                temperature=self.dice.choice(TEMPERATURES),
                max_tokens=self.dice.randint(most // 3, most),
            )
            for _ in talks
        ]
        prompts = [talk.token_ids for talk in talks]
        answers = complete(self.built, prompts, how, self.dice, self.end)
        for talk, answer in zip(talks, answers, strict=True):
            if len(answer) > 4:
                first = len(talk.token_ids)
                talk.token_ids = (talk.token_ids + answer)[:MAX_LEN]
                talk.answers.append((first, len(talk.token_ids)))


def _is_answered(talk: Conversation) -> bool:
    return bool(talk.answers) and talk.answers[-1][1] == len(talk.token_ids)


def complete(
    built: BuiltEngine,
    prompts: list[list[int]],
    how: list[SamplingParams],
    dice: random.Random,
    end: float,
) -> list[list[int]]:
    """What the engine adds to each prompt, as far as it comes."""
    answers: dict[str, list[int]] = {}
    for i, (prompt, sampling) in enumerate(zip(prompts, how, strict=True)):
        own = SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p,
            max_tokens=sampling.max_tokens, seed=dice.randrange(2**31),
        )  # fmt: skip
        answers[str(i)] = []
        built.engine.submit(Request(str(i), Generate(prompt, own)))
    while built.engine.has_work() and time.monotonic() < end:
        for output in built.engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def write_files(args: argparse.Namespace, seed: int, folder: Path, first: bool) -> None:
    """Write conversations until the time is over, a file after every wave.

    The first writer answers the prompts of the benchmark before.
    """
    writer = Writer(args, seed)
    if first:
        for kind, talks in writer.measured().items():
            _save(talks, folder / f"{kind}.pt")
    for number in itertools.count():
        if time.monotonic() >= writer.end:
            return
        _save(writer.wave(), folder / f"wave-{seed}-{number}.pt")


def _save(talks: list[Conversation], file: Path) -> None:
    """Write a file in one piece: what is there is whole."""
    flat = torch.tensor([i for talk in talks for i in talk.token_ids], dtype=torch.int32)
    rows = [(len(talk.token_ids), talk.answers) for talk in talks]
    torch.save((flat, rows), file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def read_written(file: Path) -> list[Conversation]:
    """What a writer left in a file."""
    flat, rows = torch.load(file)
    parts = flat.split([length for length, _ in rows])
    return [Conversation(p.tolist(), own) for p, (_, own) in zip(parts, rows, strict=True)]


def write_together(
    args: argparse.Namespace,
) -> tuple[list[Conversation], dict[str, list[Conversation]]]:
    """The conversations of several processes, for one alone does not keep the GPU busy.

    Beside them stand those of the benchmark's own prompts, by kind.
    """
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(
                target=write_files, args=(args, args.seed * 1000 + i, folder, i == 0), daemon=True
            )
            for i in range(args.writers)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(1.0, args.write_until + 20 - time.monotonic()))
            if process.is_alive():
                process.kill()
        together = [t for file in sorted(folder.glob("wave-*.pt")) for t in read_written(file)]
        measured = {
            kind: read_written(folder / f"{kind}.pt")
            for kind in MEASURED_KINDS
            if (folder / f"{kind}.pt").exists()
        }
    if not together:
        raise SystemExit("no writer left a conversation; their errors stand above")
    print(f"{len(together)} conversations, {num_tokens(together)} tokens", flush=True)
    return together, measured


def num_tokens(conversations: list[Conversation]) -> int:
    return sum(len(c.token_ids) for c in conversations)
