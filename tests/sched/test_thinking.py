"""Reasoning and loops, followed token by token: the counts are those that readers make of them."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.sim import make_tokenizer
from harmony_tokenizer import SPECIAL_TOKENS, harmony_tokenizer
from tokenmill.core.types import InvalidRequestError, ReasoningMarks, RepetitionDetection
from tokenmill.sched.trackers import NEVER, LoopFinder, Thinking
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.harmony import HarmonyReader, HarmonyTokens
from tokenmill.text.message import ContentReader, TaggedReader
from tokenmill.text.output_style import OutputStyle, resolve_style
from tokenmill.text.parsers import ReasoningParser
from tokenmill.text.tokenizer import Tokenizer

MANY = settings(max_examples=200, deadline=None, derandomize=True)
PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@cache
def harmony() -> HarmonyTokens:
    found = HarmonyTokens.of(harmony_tokenizer())
    assert found is not None
    return found


def steps(thinking: Thinking, prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
    """The answer with what is forced, and each limit; looked at as late as the limits allow."""
    known, limits = list(prompt), [thinking.read(prompt)]
    for token in answer:
        forced = thinking.forced(len(known))
        known.append(token if forced is None else forced)
        if len(known) >= limits[-1] - 1:
            limits.append(thinking.read(known))
            assert limits[-1] > len(known)
    return known[len(prompt) :], limits


def counted(thinking: Thinking, tokens: list[int]) -> int:
    thinking.read(tokens)
    return thinking.num_tokens


WORDS = [*SPECIAL_TOKENS, "assistant", "analysis", "final", "commentary", " x", " dog"]


@MANY
@given(
    st.lists(st.sampled_from(WORDS), max_size=40),
    st.sampled_from(["", "<|channel|>analysis<|message|>ab"]),
    st.booleans(),
)
def test_the_reasoning_on_channels_is_what_its_reader_counts(
    words: list[str], opening: str, bound: bool
) -> None:
    known = harmony_tokenizer()
    prompt = known.encode(PROMPT + opening, False)
    tokens = [token for word in words for token in known.encode(word, False)]
    reader = HarmonyReader(Detokenizer(known), known, harmony(), prompt, bound=bound)
    for token in tokens:
        reader.read(token)
    thinking = Thinking(10_000, harmony().marks(((1,),), bound), prompt, ())
    before = thinking.num_tokens
    assert before == (len(known.encode("ab", False)) if opening else 0)
    assert counted(thinking, prompt + tokens) - before == reader.num_reasoning_tokens


@MANY
@given(st.lists(st.sampled_from(WORDS), max_size=60), st.integers(0, 6), st.booleans())
def test_no_limit_on_channels_is_passed_unseen(words: list[str], budget: int, bound: bool) -> None:
    """Looking at every token gives the same answer as looking when the limit says so."""
    known = harmony_tokenizer()
    prompt = known.encode(PROMPT, False)
    tokens = [token for word in words for token in known.encode(word, False)]
    marks = harmony().marks((harmony().until_channel, harmony().until_answer), bound, True)
    late, _ = steps(Thinking(budget, marks, prompt, ()), prompt, tokens)
    thinking, at_once = Thinking(budget, marks, prompt, ()), list(prompt)
    for token in tokens:
        thinking.read(at_once)
        forced = thinking.forced(len(at_once))
        at_once.append(token if forced is None else forced)
    assert late == at_once[len(prompt) :]
    reader = HarmonyReader(Detokenizer(known), known, harmony(), prompt, ["dog"], bound=bound)
    for token in late:
        reader.read(token)
    assert reader.num_reasoning_tokens <= budget or bound  # where text without a header counts
    moved = Thinking(budget, marks, prompt, ())  # to another engine, which knows all of it
    moved.read(prompt + late)
    assert moved.num_tokens == reader.num_reasoning_tokens


def test_a_call_on_the_channel_of_reasoning_is_none() -> None:
    known = harmony_tokenizer()
    prompt = known.encode(PROMPT, False)
    for text in (
        "<|channel|>analysis to=functions.weather<|message|>{}",
        " to=functions.weather<|channel|>analysis<|message|>{}",
    ):
        tokens = prompt + known.encode(text, False)
        assert counted(Thinking(9, harmony().marks(((1,),), calls=True), prompt, ()), tokens) == 0


def spelled(tokenizer: Tokenizer) -> OutputStyle:
    """A model whose tags are no tokens of their own."""
    return OutputStyle(thinks=True, think_end=tuple(pieces(tokenizer, "</think>")))


def pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text in single characters, as tokens."""
    return [token for char in text for token in tokenizer.encode(char, False)]


STYLES = {"tokens": resolve_style, "spelled": lambda tokenizer, *_: spelled(tokenizer)}
TEXTS = [
    "<think>\nab c</think>\n\nd",
    "\n <think>ab</ th</think",
    "<think>a</thi</think>b</think>",
    "no <think>block</think>",
    "ab</think>c<think>",
    "<think></think>",
    "<",
]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("text", "opened"), list(product(TEXTS, [False, True])))
def test_a_block_has_the_tokens_that_its_reader_counts(style: str, text: str, opened: bool) -> None:
    known = make_tokenizer()
    vocabulary = known.grammar_vocab().encoded_vocab
    found = STYLES[style](known, "auto", "auto")
    marks = found.chat_marks("<think>" if opened else "")
    assert marks is not None
    tokens = pieces(known, text) if style == "spelled" else known.encode(text, False)
    for budget in (0, 1, 2, 3, 100):
        thinking = Thinking(budget, marks, [7], vocabulary)
        said, _ = steps(thinking, [7], tokens + [5] * 20)
        parser = ReasoningParser(opened) if style == "spelled" else None
        reader = found_reader(known, found, opened, parser)
        for token in said:
            reader.read(token)
        reader.finish(True)
        assert reader.num_reasoning_tokens <= budget
        if thinking.is_spent:
            assert reader.num_reasoning_tokens == budget
            at = next(i for i in range(len(said)) if thinking.forced(1 + i) is not None)
            assert said[at : at + len(found.think_end)] == list(found.think_end)
        else:
            assert thinking.read([7, *said]) == NEVER or said == tokens + [5] * 20


def found_reader(
    known: Tokenizer, style: OutputStyle, opened: bool, parser: ReasoningParser | None
) -> TaggedReader:
    from tokenmill.text.message import TOKEN_TAGS

    parser = parser or ReasoningParser(opened, TOKEN_TAGS)
    return TaggedReader(Detokenizer(known), parser, ContentReader(None), style.think_ids)


def test_a_raw_prompt_may_end_within_a_block() -> None:
    known = make_tokenizer()
    for style in (resolve_style(known, "auto", "auto"), spelled(known)):
        for text, opened in (("a", None), ("<think>ab", 2), ("<think>a</think>b", None)):
            marks = style.text_marks(text, known.encode(text, False))
            assert marks is not None
            assert (marks.opened is None) == (opened is None)
            assert style.think_ids is None or marks.opened == opened
    marks = ReasoningMarks(((9,),), 2, (8, 9))
    assert Thinking(2, marks, [8, 1, 1], ()).forced(3) == 9


# Repetitions.


def naive(tokens: list[int], detection: RepetitionDetection) -> bool:
    """vLLM's definition: some last tokens, as often as asked for."""
    for size in range(max(detection.min_pattern_size, 1), detection.max_pattern_size + 1):
        pattern, count = tokens[-size:], detection.min_count
        if len(tokens) >= size * count and tokens[-size * count :] == pattern * count:
            return True
    return False


@MANY
@given(st.data())
def test_a_loop_is_found_where_the_definition_finds_it(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 9))
    least, count = data.draw(st.integers(0, most)), data.draw(st.integers(2, 5))
    detection = RepetitionDetection(most, least, count)
    finder, tokens = LoopFinder(detection), list[int]()
    part = st.lists(st.integers(0, 3), min_size=1, max_size=10)
    for pattern in data.draw(st.lists(part, max_size=12)):
        for token in pattern * data.draw(st.integers(1, 4)):
            tokens.append(token)
            assert finder.read(token) == naive(tokens, detection)


def test_what_a_token_costs_does_not_grow() -> None:
    """Each token is compared with as many before it as the pattern has sizes, and none is kept."""
    finder = LoopFinder(RepetitionDetection(64, 3, 4))

    class Counted(np.ndarray):
        def __eq__(self, other: object) -> Any:
            sizes.append(self.size)
            return np.asarray(self) == other

    sizes: list[int] = []
    finder._latest = finder._latest.view(Counted)
    held = [getattr(finder, name).nbytes for name in ("_latest", "_runs", "_needed")]
    for number in range(5000):
        finder.read(number % 1000)
    assert sizes == [62] * 5000
    assert held == [getattr(finder, name).nbytes for name in ("_latest", "_runs", "_needed")]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 2000, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "min_pattern_size"),
    ],
)
def test_a_wrong_detection_is_refused_by_name(fields: dict[str, int], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"repetition_detection.{name} must be"):
        RepetitionDetection(**fields)
