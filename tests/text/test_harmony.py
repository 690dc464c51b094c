"""Harmony's messages: well-formed, malformed and any at all, whole and token by token."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.sim import make_tokenizer
from harmony_tokenizer import SPECIAL_TOKENS, harmony_tokenizer
from tokenmill.cli.chat.chat_channels import ReasoningChannels
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.text.detokenize import Detokenizer, StopTable
from tokenmill.text.harmony import HarmonyReader, HarmonyTokens, one_call_per_message
from tokenmill.text.output_style import resolve_style
from tokenmill.text.parsers import ContentDelta, MessageEvent, ReasoningDelta

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
MANY = settings(max_examples=200, deadline=None, derandomize=True)
Said = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


@cache
def tokens() -> HarmonyTokens:
    found = HarmonyTokens.of(harmony_tokenizer())
    assert found is not None
    return found


def reader(prompt: str = PROMPT, stop: tuple[str, ...] = (), **options: Any) -> HarmonyReader:
    known = harmony_tokenizer()
    detokenizer = Detokenizer(known, stop=StopTable.of(stop))
    options = {"names": ("weather", "clock")} | options
    return HarmonyReader(detokenizer, known, tokens(), known.encode(prompt, False), **options)


def collect(events: list[MessageEvent]) -> Said:
    """The one message of a stream, as OpenAI's client puts it together."""
    reasoning, content, calls = "", "", []
    for event in events:
        if isinstance(event, ReasoningDelta):
            assert event.text
            reasoning += event.text
        elif isinstance(event, ContentDelta):
            assert event.text
            content += event.text
        elif event.id is not None:
            assert event.index == len(calls) and event.name and not event.arguments
            calls.append((event.name, ""))
        else:
            assert event.index == len(calls) - 1 and event.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return reasoning, content, calls


def read(text: str, cut: bool = False, **options: Any) -> Said:
    """Read it all at once and token by token, which must be the same."""
    ids = harmony_tokenizer().encode(text, False)
    whole, single = reader(**options), reader(**options)
    said = collect(whole.push(ids) + whole.finish(cut))
    events = [event for token_id in ids for event in single.push([token_id])]
    assert collect(events + single.finish(cut)) == said
    assert whole.num_tokens == single.num_tokens
    assert whole.num_reasoning_tokens == single.num_reasoning_tokens <= len(ids)
    return said


CALL = '{"city": "Bern"}'
WELL_FORMED = {
    "answer": ("<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "reasoning and answer": (
        "<|channel|>analysis<|message|>Well.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        ("Well.", "Hi.", []),
    ),
    "a call, recipient after the channel": (
        "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{CALL}<|call|>",
        ("Ask.", "", [("weather", CALL)]),
    ),
    "a call, recipient after the role": (
        f" to=functions.weather<|channel|>commentary json<|message|>{CALL}<|call|>",
        ("", "", [("weather", CALL)]),
    ),
    "a call on analysis": (
        f"<|channel|>analysis to=functions.weather <|constrain|>json<|message|>{CALL}<|call|>",
        ("", "", [("weather", CALL)]),
    ),
    "two calls": (
        f"<|channel|>commentary to=functions.weather<|message|>{CALL}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.clock<|message|>{}<|call|>",
        ("", "", [("weather", CALL), ("clock", "{}")]),
    ),
    "a preamble is content": (
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather<|message|>{CALL}<|call|>",
        ("", "I look it up.", [("weather", CALL)]),
    ),
    "two thoughts": (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        ("One.\nTwo.", "Hi.", []),
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.clock<|message|><|call|>",
        ("", "", [("clock", "{}")]),
    ),
}
MALFORMED = {
    "no header": ("Hello there.<|return|>", ("", "Hello there.", [])),
    "no header, long": ("word " * 50 + "<|return|>", ("", "word " * 50, [])),
    "no message, long": (
        "<|channel|>analysis" + " word" * 50 + "<|return|>",
        (" word" * 50, "", []),
    ),
    "no channel": ("<|message|>Hello.<|return|>", ("", "Hello.", [])),
    "no channel in a second header": (
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|message|>B.<|return|>",
        ("A.", "B.", []),
    ),
    "no message": ("<|channel|>final Hello.<|return|>", ("", " Hello.", [])),
    "no message in a call": (
        f"<|channel|>commentary to=functions.weather {CALL}<|call|>",
        ("", "", [("weather", CALL)]),
    ),
    "an unknown channel": ("<|channel|>thoughts<|message|>Hi.<|return|>", ("", "Hi.", [])),
    "an empty channel": ("<|channel|><|message|>Hi.<|return|>", ("", "Hi.", [])),
    "the recipient before the role": (
        "<|end|><|start|>to=functions.weather assistant<|channel|>commentary<|message|>{}<|call|>",
        ("", "", [("weather", "{}")]),
    ),
    "a recipient without functions.": (
        f"<|channel|>commentary to=weather<|message|>{CALL}<|call|>",
        ("", "", [("weather", CALL)]),
    ),
    "an unknown function": (
        "<|channel|>commentary to=functions.other<|message|>{}<|call|>",
        ("", "{}", []),
    ),
    "nested starts": (
        "<|start|>assistant<|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        ("", "Hi.", []),
    ),
    "a start inside a body": (
        "<|channel|>analysis<|message|>A.<|start|>assistant<|channel|>final<|message|>B.<|return|>",
        ("A.", "B.", []),
    ),
    "a channel inside a body": (
        "<|channel|>analysis<|message|>A.<|channel|>final<|message|>B.<|return|>",
        ("A.", "B.", []),
    ),
    "two channels": (
        "<|channel|>analysis<|channel|>final<|message|>B.<|return|>",
        ("", "B.", []),
    ),
    "text after an end": (
        "<|channel|>analysis<|message|>A.<|end|>B.<|return|>",
        ("A.", "B.", []),
    ),
    "special tokens inside arguments": (
        '<|channel|>commentary to=functions.weather<|message|>{"a": <|message|>1<|constrain|>}'
        "<|call|>",
        ("", "", [("weather", '{"a": 1}')]),
    ),
    "ends only": ("<|end|><|end|><|return|>", ("", "", [])),
    "nothing": ("", ("", "", [])),
}
CUT = {
    "in a header": ("<|channel|>comm", ("", "", [])),
    "in a role": ("<|channel|>analysis<|message|>A.<|end|><|start|>assi", ("A.", "", [])),
    "in a recipient": ("<|channel|>commentary to=functions.we", ("", "", [])),
    "in reasoning": ("<|channel|>analysis<|message|>Wel", ("Wel", "", [])),
    "in arguments": (
        '<|channel|>commentary to=functions.weather<|message|>{"ci',
        ("", "", [("weather", '{"ci')]),
    ),
    "before arguments": (
        "<|channel|>commentary to=functions.weather<|message|>",
        ("", "", [("weather", "")]),
    ),
}


@pytest.mark.parametrize(("text", "said"), WELL_FORMED.values(), ids=WELL_FORMED)
def test_well_formed(text: str, said: Said) -> None:
    assert read(text) == said


@pytest.mark.parametrize(("text", "said"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_headers_degrade(text: str, said: Said) -> None:
    assert read(text) == said


@pytest.mark.parametrize(("text", "said"), CUT.values(), ids=CUT)
def test_cut_off(text: str, said: Said) -> None:
    assert read(text, cut=True) == said


PARTS = st.one_of(
    st.sampled_from(SPECIAL_TOKENS),
    st.sampled_from(["assistant", "analysis", "final", "commentary", " to=functions.weather"]),
    st.text("ab {}\n😀", max_size=4),
)


@MANY
@given(parts=st.lists(PARTS, max_size=14), cut=st.booleans(), bound=st.booleans())
@example(parts=["<|channel|>", "final", "<|message|>", "😀"], cut=False, bound=True)
def test_any_text_is_one_message(parts: list[str], cut: bool, bound: bool) -> None:
    reasoning, content, _ = read("".join(parts), cut, bound=bound)
    assert not any(name in reasoning + content for name in SPECIAL_TOKENS)


@MANY
@given(ids=st.lists(st.integers(0, 500), max_size=40), cut=st.booleans(), data=st.data())
def test_any_tokens_are_one_message(ids: list[int], cut: bool, data: st.DataObject) -> None:
    marks = sorted(data.draw(st.sets(st.integers(0, len(ids)))) | {0, len(ids)})
    whole, pieces = reader(max_calls=1), reader(max_calls=1)
    said = collect(whole.push(ids) + whole.finish(cut))
    events = [e for a, b in pairwise(marks) for e in pieces.push(ids[a:b])]
    assert collect(events + pieces.finish(cut)) == said


def test_it_is_sent_as_it_comes() -> None:
    one = reader()
    texts = []
    for token_id in harmony_tokenizer().encode("<|channel|>analysis<|message|>We think", False):
        texts += [event.text for event in one.push([token_id]) if hasattr(event, "text")]
    assert "".join(texts) == "We think" and len(texts) > 1
    assert one.num_reasoning_tokens == len(harmony_tokenizer().encode("We think", False))


def test_one_call_ends_the_answer() -> None:
    text = WELL_FORMED["two calls"][0]
    ids = harmony_tokenizer().encode(text, False)
    one = reader(max_calls=1)
    assert collect(one.push(ids) + one.finish(False))[2] == [("weather", CALL)]
    assert one.done and one.num_tokens == ids.index(tokens().call) + 1


def test_stop_strings_cut_content() -> None:
    ids = harmony_tokenizer().encode(
        "<|channel|>final<|message|>Hello. Stop. More<|return|>", False
    )
    one = reader(stop=("Stop",))
    assert collect(one.push(ids) + one.finish(True)) == ("", "Hello. ", [])
    assert one.stop_reason == "Stop" and one.num_tokens < len(ids)


def test_a_bound_answer_is_the_final_channel_alone() -> None:
    preamble = "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|message|>Oh.<|end|>"
    final = "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|return|>"
    assert read(preamble + final, bound=True) == ("Hm.\nOh.", "{}", [])
    assert read(preamble + final) == ("", "Hm.\nOh.\n{}", [])


def test_an_open_message_goes_on() -> None:
    assert read(" there.", prompt=PROMPT + "<|channel|>final<|message|>Hello") == (
        ("", " there.", [])
    )
    assert read("Hm.", prompt=PROMPT + "<|channel|>analysis<|message|>") == ("Hm.", "", [])
    assert read("Hm.", prompt="no tokens of the format") == ("", "Hm.", [])


def test_how_constraints_begin() -> None:
    known = harmony_tokenizer()
    prompt = known.encode(PROMPT, False)
    assert not tokens().answers(known, prompt)
    final = known.encode(PROMPT + "<|channel|>final<|message|>Yes", False)
    assert tokens().answers(known, final)
    opening = known.decode(tokens().open_analysis(prompt), skip_special_tokens=False)
    assert opening == "<|channel|>analysis<|message|>"
    ended = known.encode("<|start|>user<|message|>hi<|end|>", False)
    opening = known.decode(tokens().open_analysis(ended), skip_special_tokens=False)
    assert opening == "<|start|>assistant<|channel|>analysis<|message|>"


def test_a_terminal_shows_reasoning_and_keeps_the_answer() -> None:
    known = harmony_tokenizer()
    channels = ReasoningChannels.of(known, known.encode(PROMPT, False))
    assert channels is not None and ReasoningChannels.of(make_tokenizer(), [1]) is None
    ids = known.encode(WELL_FORMED["reasoning and answer"][0], False)
    pieces = [channels.read([token_id], None) for token_id in ids] + [channels.read([], "stop")]
    assert "".join(shown for shown, _ in pieces) == "Well.\n\nHi."
    assert "".join(kept for _, kept in pieces) == "Hi."


class TestStyle:
    def test_it_is_found_by_template_and_tokens(self) -> None:
        assert resolve_style(harmony_tokenizer(), "auto", "auto").harmony == tokens()
        assert resolve_style(harmony_tokenizer(), "auto", "none").harmony is None
        assert resolve_style(harmony_tokenizer(), "harmony", "none").harmony == tokens()

    def test_what_cannot_be_is_refused(self) -> None:
        with pytest.raises(ModelLoadError, match=r"<\|channel\|>"):
            resolve_style(make_tokenizer(), "auto", "harmony")
        assert resolve_style(make_tokenizer(), "auto", "auto").harmony is None


def call_of(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def result_of(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "I ask both.",
        "reasoning_content": "Two calls.",
        "tool_calls": [call_of("weather", "a", city="Bern"), call_of("clock", "b")],
    },
    result_of("b", "noon"),
    result_of("a", "sunny"),
]


def render(messages: list[dict[str, Any]], **variables: Any) -> str:
    variables = {"current_date": "2026-11-16"} | variables
    return harmony_tokenizer().apply_chat_template(one_call_per_message(messages), **variables)


class TestTemplate:
    def test_reasoning_stays_inside_a_tool_loop(self) -> None:
        text = render(LOOP)
        thought = "<|channel|>analysis<|message|>Two calls.\n\nI ask both.<|end|>"
        assert text.count("<|channel|>analysis") == text.count(thought) == 1

    def test_each_result_follows_its_call(self) -> None:
        text = render(LOOP)
        order = ["functions.weather<|channel|>", '"sunny"', "functions.clock<|channel|>", '"noon"']
        places = [text.index(part) for part in order]
        assert places == sorted(places)

    def test_reasoning_goes_after_the_answer(self) -> None:
        answer = {"role": "assistant", "content": "Sunny at noon.", "reasoning": "Done."}
        text = render([*LOOP, answer, {"role": "user", "content": "thanks"}])
        assert "Two calls." not in text and "Done." not in text and "Sunny at noon." in text

    def test_date_and_effort(self) -> None:
        text = render(LOOP, reasoning_effort="high")
        assert "Current date: 2026-11-16\nReasoning: high" in text
        assert render(LOOP) == render(LOOP)
        with pytest.raises(InvalidRequestError, match="YYYY-MM-DD"):
            render(LOOP, current_date="today")
