"""What train_mtp.py trains on: questions of many kinds, and what the model itself answers.

Half of the questions are forms with gaps (mtp_questions.toml); of the others the model gets at most
the first words and writes the rest. A third of the conversations go on with a second question.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import re
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tokenmill.bench.commands.mtp import read_prompts
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.types import Request, SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.models.checkpoints.store import resolve
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

QUESTIONS = Path(__file__).with_name("mtp_questions.toml")
MAX_LEN = 768
MARKER = "\ue000"
GREEDY = 0.7  # share of the answers; the others are drawn
FOLLOWED = 0.35  # share of the answers that are complete which get a second question
CLOSE = 0.6  # share of common words from which a question counts as a prompt of the benchmark


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
    """What users might ask."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.words: dict[str, list[str]] = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
        kinds = ("chat", "everyday", "documents")
        self.measured = [_words(prompt.text) for kind in kinds for prompt in read_prompts(kind)]

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
        if self.dice.random() < 0.6:
            return self.filled("openings")
        words = self.filled("forms").split(" ")
        return " ".join(words[: int(len(words) * self.dice.random() ** 2)])

    def system(self) -> str | None:
        """A system prompt, or None for the one that the chat template has."""
        return self.filled("systems") if self.dice.random() < 0.25 else None

    def is_measured(self, text: str) -> bool:
        """Whether it is a prompt of `bench mtp`, or almost."""
        own = _words(text)
        return any(len(own & other) >= CLOSE * len(own | other) for other in self.measured)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


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
        self.questions = Questions(self.dice)
        self.built = build_engine(
            resolve_setup(
                Setup(
                    ModelConfig(path, "auto", args.device, max_model_len=2048),
                    CacheConfig(memory_bytes=int(args.kv_gib * 2**30)),
                    SchedulerConfig(max_num_seqs=args.batch, max_waiting=2**31),
                )
            )
        )
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
        for talk in kept:  # a second question may have no answer
            del talk.token_ids[talk.answers[-1][1] :]
        return kept

    def _given(self) -> list[tuple[Frame, tuple[int, ...]]]:
        texts = [self.questions.whole() for _ in range(self.args.batch)]
        return [
            (self.frame(), tuple(self.tokenizer.encode(text)))
            for text in texts
            if not self.questions.is_measured(text)
        ]

    def _own(self) -> list[tuple[Frame, tuple[int, ...]]]:
        frames = [self.frame() for _ in range(self.args.batch)]
        begun = [self.tokenizer.encode(self.questions.beginning()) for _ in frames]
        turns = self._written([f.head + b for f, b in zip(frames, begun, strict=True)])
        users = []
        for frame, start, turn in zip(frames, begun, turns, strict=True):
            user = (*start, *turn[:-1])
            ended = turn and turn[-1] in frame.tail[:1]
            if ended and not self.questions.is_measured(self.tokenizer.decode(list(user))):
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
        how = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=80)
        return complete(self.built, prompts, [how] * len(prompts), self.dice, self.end)

    def _answer(self, talks: list[Conversation]) -> None:
        """Let the model answer, and note where; what is too long ends earlier."""
        talks = [t for t in talks if len(t.token_ids) + 8 < MAX_LEN and not _is_answered(t)]
        most = self.args.answer
        how = [
            SamplingParams(
                temperature=0.0 if self.dice.random() < GREEDY else 0.7,
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
        built.engine.submit(Request(str(i), prompt, own))
    while built.engine.has_work() and time.monotonic() < end:
        for output in built.engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


def write_file(args: argparse.Namespace, seed: int, file: Path) -> None:
    """Write conversations until the time is over; after every wave the file has all of them."""
    writer, done = Writer(args, seed), list[Conversation]()
    while time.monotonic() < writer.end:
        done += writer.wave()
        flat = torch.tensor([i for talk in done for i in talk.token_ids], dtype=torch.int32)
        rows = [(len(talk.token_ids), talk.answers) for talk in done]
        torch.save((flat, rows), file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def read_written(file: Path) -> list[Conversation]:
    """What a writer left, also one that did not come to its end."""
    if not file.exists():
        return []
    flat, rows = torch.load(file)
    parts = flat.split([length for length, _ in rows])
    return [Conversation(p.tolist(), own) for p, (_, own) in zip(parts, rows, strict=True)]


def write_together(args: argparse.Namespace) -> list[Conversation]:
    """The conversations of several processes: one alone does not keep the GPU busy."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.pt" for i in range(args.writers)]
        seeds = itertools.count(args.seed * 1000)
        processes = [
            context.Process(target=write_file, args=(args, seed, file), daemon=True)
            for seed, file in zip(seeds, files, strict=False)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(1.0, args.write_until + 20 - time.monotonic()))
            if process.is_alive():
                process.kill()
        together = [talk for file in files for talk in read_written(file)]
    if not together:
        raise SystemExit("no writer left a conversation; their errors stand above")
    print(f"{len(together)} conversations, {num_tokens(together)} tokens", flush=True)
    return together


def num_tokens(conversations: list[Conversation]) -> int:
    return sum(len(c.token_ids) for c in conversations)
