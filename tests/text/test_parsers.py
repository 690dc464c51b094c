"""Reasoning and tool calls, whole and streamed in any pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageToolCallUnion
from pydantic import TypeAdapter

from tiny_tokenizers import HERMES_TEMPLATE
from tokenmill.api.protocol.tools import tool_choice_schema
from tokenmill.core.types import InvalidRequestError
from tokenmill.text.parsers import (
    TOOL_PARSERS,
    ContentDelta,
    Event,
    HermesParser,
    Llama3JsonParser,
    NamedCallParser,
    ReasoningParser,
    RequiredCallsParser,
    ToolParser,
    detect_reasoning,
    detect_tool_parser,
    opens_reasoning,
)

MANY = settings(max_examples=150, deadline=None, derandomize=True)
LLAMA3_TEMPLATE = (
    '{{- \'Respond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.' }}{{- '\"parameters\": ' }}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}

Calls = list[tuple[str, str]]


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    marks = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    return [text[start:end] for start, end in pairwise(marks)]


def collect(events: list[Event]) -> tuple[str, Calls]:
    """Content and calls of a stream, checking that it is one OpenAI's client can follow."""
    content, calls, ids = "", [], []
    for event in events:
        if isinstance(event, ContentDelta):
            assert event.text
            content += event.text
        elif event.id is not None:
            assert event.index == len(calls)
            assert event.name and not event.arguments
            assert re.fullmatch("call_[0-9a-f]{24}", event.id)
            ids.append(event.id)
            calls.append((event.name, ""))
        else:
            assert event.index == len(calls) - 1
            assert event.name is None and event.arguments
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    assert len(set(ids)) == len(ids)
    return content, calls


def stream(parser: ToolParser, deltas: Iterable[str]) -> tuple[str, Calls]:
    events = [event for delta in deltas for event in parser.push(delta)]
    return collect(events + parser.finish())


def parse(parser: ToolParser, text: str) -> tuple[str, Calls]:
    content, calls = parser.parse(text)
    for call in calls:
        TypeAdapter(ChatCompletionMessageToolCallUnion).validate_python(
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
        )
    return content, [(call.name, call.arguments) for call in calls]


class TestReasoning:
    @pytest.mark.parametrize(
        ("text", "opened", "reasoning", "content"),
        [
            ("<think>\nWhy?\n\nSo.\n</think>\n\nYes.", False, "Why?\n\nSo.", "Yes."),
            ("Why?\n</think>\n\nYes.", True, "Why?", "Yes."),
            ("\n<think>Why?</think>Yes.", True, "Why?", "Yes."),
            ("  <think></think>Yes", False, "", "Yes"),
            ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
            ("<thin ice", False, "", "<thin ice"),
            ("<think>cut off", False, "cut off", ""),
            ("cut < off </thin", True, "cut < off </thin", ""),
            ("<think>a</think>b</think>c", False, "a", "b</think>c"),
            ("\n\n", False, "", "\n\n"),
            ("<think", True, "<think", ""),
            ("", True, "", ""),
        ],
    )
    def test_split(self, text: str, opened: bool, reasoning: str, content: str) -> None:
        assert ReasoningParser(opened).parse(text) == (reasoning, content)
        letters = ReasoningParser(opened)
        deltas = [letters.push(letter) for letter in text] + [letters.finish()]
        assert "".join(delta[0] for delta in deltas) == reasoning
        assert "".join(delta[1] for delta in deltas) == content

    @MANY
    @given(
        parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "th", "\n", " ", "ab"])),
        cuts=st.sets(st.integers(0, 60)),
        opened=st.booleans(),
    )
    def test_any_pieces_give_the_same(self, parts: list[str], cuts: set[int], opened: bool) -> None:
        text = "".join(parts)
        parser = ReasoningParser(opened)
        deltas = [parser.push(piece) for piece in pieces(text, cuts)] + [parser.finish()]
        joined = ("".join(d[0] for d in deltas), "".join(d[1] for d in deltas))
        assert joined == ReasoningParser(opened).parse(text)

    def test_it_is_sent_as_it_comes(self) -> None:
        parser = ReasoningParser()
        assert parser.push("<think>Let me") == ("Let me", "")
        assert parser.push(" see</th") == (" see", "")
        assert parser.push("ink>Yes") == ("", "Yes")

    def test_detection(self) -> None:
        assert detect_reasoning(HERMES_TEMPLATE) == "think"
        assert detect_reasoning("{% if '</think>' in content %}") == "think"
        assert detect_reasoning(LLAMA3_TEMPLATE) is None
        assert detect_reasoning(None) is None
        assert opens_reasoning("<|Assistant|><think>\n")
        assert not opens_reasoning("<think>\n\n</think>\n\n")
        assert not opens_reasoning("What does <think> mean?")


HERMES = [
    (
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        'Sure.\n<tool_call>{"name":"f","arguments":{"s":"} </tool_call> \\" {"}}</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        "Sure.",
        [("f", '{"s":"} </tool_call> \\" {"}'), ("g", "{}")],
    ),
    (
        '<tool_call>{"arguments": {"a": [1, {"b": null}]}, "name": "é"}</tool_call> Done.',
        "Done.",
        [("é", '{"a": [1, {"b": null}]}')],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
    ('<tool_call>{"name": "f", "arguments": {}, "id": 7}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}} and more', "and more", [("f", "{}")]),
    ('a <tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "a", [("f", '{"x": 1}')]),
]
LLAMA3 = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        '\n{"name": "f", "parameters": {"a": ";"}}; {"name": "g", "parameters": {"b": {}}}\n',
        "",
        [("f", '{"a": ";"}'), ("g", '{"b": {}}')],
    ),
    ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        '{"name": "f", "arguments": {}}{"name": "g", "parameters": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ('{"name": "f", "parameters": {}}; done', "; done", [("f", "{}")]),
    ('I call <|python_tag|>{"name": "f", "parameters": {}}', "I call", [("f", "{}")]),
]
REQUIRED = [
    ('[{"name": "f", "parameters": {"a": "]"}}]', "", [("f", '{"a": "]"}')]),
    (
        ' [ {"name": "f", "parameters": {}} , {"name": "g", "parameters": {"b": [[]]}}\n]\n',
        "",
        [("f", "{}"), ("g", '{"b": [[]]}')],
    ),
    ('[{"name": "f", "parameters": {"a": "cut', "", [("f", '{"a": "cut')]),
]
NAMED = [
    ('{"city": "Oslo"}', "", [("weather", '{"city": "Oslo"}')]),
    ('\n{"a": {"b": "}"}} \n', "", [("weather", '{"a": {"b": "}"}}')]),
    ('{"city": "cut', "", [("weather", '{"city": "cut')]),
]
WELL_FORMED = [
    *((HermesParser, *case) for case in HERMES),
    *((Llama3JsonParser, *case) for case in LLAMA3),
    *((RequiredCallsParser, *case) for case in REQUIRED),
    *((lambda: NamedCallParser("weather"), *case) for case in NAMED),
]
MALFORMED = [
    (HermesParser, "no call at all"),
    (HermesParser, " <tool_call> not json </tool_call>\n"),
    (HermesParser, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HermesParser, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"nom": "f", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HermesParser, "a\n<tool_call>{}</tool_call>"),
    (HermesParser, "a\n<tool_call>\n"),
    (HermesParser, "x < y <tool"),
    (Llama3JsonParser, '{"answer": 42, "name": "f"}'),
    (Llama3JsonParser, '{"name": "Bob", "age": 7}\n'),
    (Llama3JsonParser, '<|python_tag|>import os\n{"name"'),
    (Llama3JsonParser, 'Use {"name": "f", "parameters": {}} so'),
    (Llama3JsonParser, ' {"name": "f"  '),
    (Llama3JsonParser, " {not json} "),
    (RequiredCallsParser, "[]"),
    (RequiredCallsParser, ' Hello [{"name": "f", "parameters": {}}]'),
    (lambda: NamedCallParser("f"), "I will not"),
]
BROKEN = [  # only parse() sees in time that these are no calls
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1}]</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1} oops}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "cut off',
]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": {"a": 1}', "}", "{", "["),
    *("\n", " ", "<", "text", '"', ";", "<|python_tag|>"),
]


class TestToolParsers:
    @pytest.mark.parametrize(("make", "text", "content", "calls"), WELL_FORMED)
    def test_calls(
        self, make: Callable[[], ToolParser], text: str, content: str, calls: Calls
    ) -> None:
        assert parse(make(), text) == (content, calls)
        assert stream(make(), [text]) == (content, calls)
        assert stream(make(), list(text)) == (content, calls)

    @pytest.mark.parametrize(("make", "text"), MALFORMED)
    def test_what_is_no_call_is_content(self, make: Callable[[], ToolParser], text: str) -> None:
        for content, calls in (
            parse(make(), text),
            stream(make(), [text]),
            stream(make(), list(text)),
        ):
            assert calls == []
            assert content == text

    @pytest.mark.parametrize("text", BROKEN)
    def test_parse_gives_back_a_broken_call(self, text: str) -> None:
        assert parse(HermesParser(), text) == (text, [])

    @pytest.mark.parametrize("text", BROKEN)
    def test_a_stream_loses_nothing_of_a_broken_call(self, text: str) -> None:
        content, calls = stream(HermesParser(), list(text))
        assert [name for name, _ in calls] == ["f"]
        head = text.index('{"a"')
        sent = calls[0][1]
        assert text[head:].startswith(sent)
        assert content in text[head + len(sent) :]

    def test_a_good_call_after_a_bad_one(self) -> None:
        text = '<tool_call>{"name": f}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
        expected = ('<tool_call>{"name": f}</tool_call>', [("g", "{}")])
        assert parse(HermesParser(), text) == expected
        assert stream(HermesParser(), list(text)) == expected

    def test_only_known_functions_are_called(self) -> None:
        text = '{"name": "Bob", "parameters": {"age": 7}}'
        assert parse(Llama3JsonParser({"weather"}), text) == (text, [])
        assert stream(Llama3JsonParser({"weather"}), list(text)) == (text, [])
        assert parse(Llama3JsonParser({"Bob"}), text) == ("", [("Bob", '{"age": 7}')])

    @MANY
    @given(case=st.sampled_from(WELL_FORMED), cuts=st.sets(st.integers(0, 140)))
    def test_any_pieces_give_the_same(self, case: tuple[Any, ...], cuts: set[int]) -> None:
        make, text, content, calls = case
        assert stream(make(), pieces(text, cuts)) == (content, calls)

    @MANY
    @given(
        parts=st.lists(
            st.sampled_from(FRAGMENTS),
            max_size=12,
        ),
        cuts=st.sets(st.integers(0, 120)),
        style=st.sampled_from(sorted(TOOL_PARSERS)),
    )
    def test_any_text_keeps_its_letters(self, parts: list[str], cuts: set[int], style: str) -> None:
        text = "".join(parts)
        make = TOOL_PARSERS[style]
        content, calls = parse(make(), text)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        if not calls:
            assert content == text
        assert stream(make(), pieces(text, cuts)) == stream(make(), [text])
        assert text.count("text") == content.count("text")

    @MANY
    @given(
        arguments=st.dictionaries(
            st.text(max_size=6),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                lambda values: (
                    st.lists(values, max_size=3)
                    | st.dictionaries(st.text(max_size=3), values, max_size=3)
                ),
                max_leaves=6,
            ),
            max_size=4,
        ),
        indent=st.sampled_from([None, 2]),
        ascii_only=st.booleans(),
    )
    def test_any_arguments_arrive_as_written(
        self, arguments: dict[str, Any], indent: int | None, ascii_only: bool
    ) -> None:
        written = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
        calls = [("f", written)]
        call = f'{{"name": "f", "arguments": {written}}}'
        for parser, text in (
            (HermesParser, f"<tool_call>\n{call}\n</tool_call>"),
            (Llama3JsonParser, call),
            (RequiredCallsParser, f"[{call}]"),
            (lambda: NamedCallParser("f"), written),
        ):
            assert parse(parser(), text) == ("", calls)
            assert stream(parser(), list(text)) == ("", calls)

    def test_arguments_are_sent_as_they_come(self) -> None:
        parser = HermesParser()
        assert parser.push('Hi <tool_call>{"name": "f", "argu') == [ContentDelta("Hi")]
        assert parser.push('ments": ') == []
        start, more = parser.push('{"city": "Os')
        assert (start.index, start.name, start.arguments) == (0, "f", "")
        assert (more.index, more.name, more.arguments) == (0, None, '{"city": "Os')
        assert [e.arguments for e in parser.push('lo"}}\n</tool_')] == ['lo"}']
        assert parser.push("call>") == parser.finish() == []

    def test_detection(self) -> None:
        assert detect_tool_parser(HERMES_TEMPLATE) == "hermes"
        assert detect_tool_parser(LLAMA3_TEMPLATE) == "llama3_json"
        assert detect_tool_parser("... <|python_tag|> ...") == "llama3_json"
        assert detect_tool_parser('<tool_call><function=x> "arguments"') is None
        assert detect_tool_parser('<tool_call>f<arg_key>"arguments"</arg_key>') is None
        assert detect_tool_parser("<tool_call><invoke>") is None
        assert detect_tool_parser("<function=f>... <|python_tag|>") is None
        assert detect_tool_parser("{{ messages }}") is None
        assert detect_tool_parser(None) is None


REFERENCES = {
    "type": "function",
    "function": {
        "name": "tree",
        "parameters": {
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/node"}},
            "required": ["root"],
            "additionalProperties": False,
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "child": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
                    },
                    "required": ["child"],
                    "additionalProperties": False,
                }
            },
        },
    },
}


@pytest.fixture(scope="module")
def accepts() -> Callable[[dict[str, Any], str], bool]:
    letters = [chr(code) for code in range(256)] + [""]
    info = xgrammar.TokenizerInfo(letters, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info)

    def accepts(schema: dict[str, Any], text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
        return matcher.accept_string(text) and matcher.accept_token(256)

    return accepts


class TestToolChoice:
    def test_free_choices_have_no_schema(self) -> None:
        for choice in (None, "none", "auto"):
            assert tool_choice_schema([WEATHER], choice) is None

    def test_required(self, accepts: Callable[[dict[str, Any], str], bool]) -> None:
        schema = tool_choice_schema([WEATHER, CLOCK], "required")
        assert schema is not None
        weather = '{"name": "weather", "parameters": {"city": "Oslo"}}'
        clock = '{"name": "clock", "parameters": {}}'
        assert accepts(schema, f"[{weather}]")
        assert accepts(schema, f"[{clock}, {weather}]")
        for refused in (
            "[]",
            weather,
            '[{"name": "weather", "parameters": {}}]',
            '[{"name": "other", "parameters": {}}]',
            '[{"name": "clock", "parameters": {"city": "Oslo"}}]',
        ):
            assert not accepts(schema, refused)
        content, calls = parse(RequiredCallsParser(), f"[{clock}, {weather}]")
        assert (content, calls) == ("", [("clock", "{}"), ("weather", '{"city": "Oslo"}')])

    def test_named(self, accepts: Callable[[dict[str, Any], str], bool]) -> None:
        schema = tool_choice_schema(
            [WEATHER, CLOCK], {"type": "function", "function": {"name": "weather"}}
        )
        assert schema == WEATHER["function"]["parameters"]
        schema = tool_choice_schema([CLOCK], {"type": "function", "function": {"name": "clock"}})
        assert schema is not None
        assert accepts(schema, "{}")
        assert not accepts(schema, '{"a": 1}')

    def test_references_inside_parameters(
        self, accepts: Callable[[dict[str, Any], str], bool]
    ) -> None:
        schema = tool_choice_schema([REFERENCES, WEATHER], "required")
        assert schema is not None
        call = '[{"name": "tree", "parameters": {"root": {"child": {"child": null}}}}]'
        assert accepts(schema, call)
        assert not accepts(schema, call.replace("null", "7"))
        assert accepts(schema, '[{"name": "weather", "parameters": {"city": "Oslo"}}]')

    @pytest.mark.parametrize(
        ("tools", "choice", "words"),
        [
            ([], "required", "needs tools"),
            ([WEATHER], {"type": "function", "function": {"name": "nope"}}, "'nope'"),
            ([WEATHER], "always", "must be"),
            ([WEATHER], {"type": "custom"}, "must be"),
        ],
    )
    def test_refusals(self, tools: list[dict[str, Any]], choice: Any, words: str) -> None:
        with pytest.raises(InvalidRequestError, match=words) as caught:
            tool_choice_schema(tools, choice)
        assert caught.value.param == "tool_choice"
