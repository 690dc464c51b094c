"""Structured output from noise: whatever the logits, the text obeys; what cannot, is refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from random_model import EOS, PAD_TO, PIECES, noise, sequence, text_of, vocab
from tokenmill.core.types import InvalidRequestError, StructuredOutput
from tokenmill.engine.sampling import grammar as grammar_module
from tokenmill.engine.sampling import grammar_pool as pool_module
from tokenmill.engine.sampling.free_text import GrammarError
from tokenmill.engine.sampling.grammar import Grammar, GrammarCompiler
from tokenmill.engine.sampling.grammar_pool import GrammarPool, GrammarRow
from tokenmill.engine.sampling.grammar_process import GrammarLimits
from tokenmill.engine.sampling.sampler import Sampler, allowed_ids
from tokenmill.sched.sequence import Sequence

sampler = Sampler()


@pytest.fixture(scope="module")
def backend() -> GrammarCompiler:
    return GrammarCompiler(vocab(), PAD_TO)


def generate(grammar: Grammar, salt: int = 0, temperature: float = 1.0) -> str:
    """The text that the grammar forces out of noise, up to its end."""
    matcher, seq = grammar.matcher(), sequence([salt + 2], temperature=temperature, seed=salt)
    while not matcher.is_terminated():
        logits = noise(seq.token_ids, salt)[None]
        token = sampler(logits, [seq], [matcher.allowed()])[0][0]
        matcher.accept(token)
        seq.token_ids.append(token)
        assert seq.num_output_tokens < 20_000
    assert seq.token_ids[-1] == EOS
    return text_of(seq.token_ids[1:])


def finite(digits: str) -> float:
    """JSON bounds no exponent, a float does."""
    return max(-1e300, min(float(digits), 1e300))


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the grammar takes the text, byte by byte, and then its end."""
    matcher = grammar.matcher()
    for byte in text.encode():
        if PIECES.index(bytes([byte])) not in allowed_ids(matcher.allowed(), PAD_TO):
            return False
        matcher.accept(PIECES.index(bytes([byte])))
    return EOS in allowed_ids(matcher.allowed(), PAD_TO)


def structured(kind: Any, value: Any = "") -> StructuredOutput:
    return StructuredOutput(kind, value if isinstance(value, str) else json.dumps(value))


PERSON: dict[str, Any] = {
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "who", "minLength": 2, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "minItems": 1},
        "mail": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]+@x$"}]},
        "child": {"$ref": "#/$defs/point"},
    },
    "required": ["name", "age", "tags", "mail"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"const": "é"}},
            "required": ["y", "x"],
        }
    },
}
SCHEMAS: list[Any] = [
    PERSON,
    {"type": "string", "format": "date", "title": "Day"},
    {"type": ["integer", "boolean"], "default": 3},
    {"type": "string", "maxLength": 40},
    {"type": "string", "pattern": r"^[^\x22\\]{3}\d+$"},
    {"type": "array", "items": {"type": "string", "pattern": r"^[ -~]\s?$"}},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False},
    {"type": "object", "patternProperties": {"^[a-c]$": {"type": "null"}}, "maxProperties": 2},
    {"type": "object", "propertyNames": {"pattern": "^k"}, "additionalProperties": {"const": 1}},
    {"type": "integer", "multipleOf": 7},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "description": "either"},
    {"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": {"type": "integer"}}},
    {"type": "string", "enum": ["red", 3, "green"], "x-unknown": True},
    {},
    {"type": "object", "minProperties": 2, "properties": {"a": {"type": "null"}}},
    {"type": "array", "minItems": 2, "maxItems": 3},
    {"type": "object", "required": ["x"], "additionalProperties": {"type": "boolean"}},
    {"type": "string", "pattern": r"^(?:a[(?!]|(?<x>b))$"},
    {
        "allOf": [
            {"$ref": "#/$defs/a"},
            {"type": ["object", "null"], "properties": {"b": {"minimum": 3, "type": "integer"}}},
            {"description": "both", "minProperties": 2},
        ],
        "required": ["b"],
        "$defs": {
            "a": {"allOf": [{"$ref": "#/$defs/n"}, {"required": ["a"]}]},
            "n": {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/$defs/i"}]}}},
            "i": {"allOf": [{"type": "number"}, {"type": "integer", "maximum": 9}]},
        },
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_json_schema_holds_whatever_the_logits(backend: GrammarCompiler, schema: Any) -> None:
    grammar = backend.compile(structured("json_schema", schema))
    for salt in range(4):
        text = generate(grammar, salt, temperature=salt % 2)
        jsonschema_rs.validate(schema, json.loads(text, parse_float=finite))


def test_json_object_is_any_object_and_nothing_else(backend: GrammarCompiler) -> None:
    grammar = backend.compile(structured("json_object"))
    for salt in range(4):
        assert isinstance(json.loads(generate(grammar, salt)), dict)
    assert accepts(grammar, '{\n  "a": [1.5e3, {"é": null}],\n  "b": {}\n}')
    assert not any(accepts(grammar, text) for text in ("[]", "1", '"a"', "", "{} "))
    spaces = grammar_module.MAX_WHITESPACE
    assert accepts(grammar, "{" + " " * spaces + '"a":1}')
    assert not accepts(grammar, "{" + " " * (spaces + 1) + '"a":1}')


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-f]+", r"(yes|no)+\.", r"é*日?", r"^a.b$"])
def test_regex_holds_whatever_the_logits(backend: GrammarCompiler, pattern: str) -> None:
    grammar = backend.compile(structured("regex", pattern))
    for salt in range(4):
        assert re.fullmatch(pattern, generate(grammar, salt))


def test_choice_takes_its_strings_literally(backend: GrammarCompiler) -> None:
    choices = ['"', "\\", "\\n", "\n", "a|b", "(", "日é", "😀", "", "yes", "yes!", "\t\x07 ]"]
    grammar = backend.compile(structured("choice", choices))
    assert all(accepts(grammar, choice) for choice in choices)
    assert not any(accepts(grammar, text) for text in ("a", "b", "ye", "n", "yes!!", "\\\\"))
    assert {generate(grammar, salt) for salt in range(30)} <= set(choices)


def test_grammar_and_structural_tag_hold(backend: GrammarCompiler) -> None:
    ebnf = 'root ::= "(" root ")" | [a-c]+'
    grammar = backend.compile(structured("grammar", ebnf))
    assert re.fullmatch(r"\(*[a-c]+\)*", generate(grammar))
    assert accepts(grammar, "((a))") and not accepts(grammar, "((a)")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "</",
            "content": {"type": "json_schema", "json_schema": schema},
            "end": "/>",
        },
    }
    text = generate(backend.compile(structured("structural_tag", tag)))
    jsonschema_rs.validate(schema, json.loads(text.removeprefix("</").removesuffix("/>")))


REFUSED: list[tuple[str, Any, str]] = [
    ("json_schema", "{bad", "not valid JSON"),
    ("json_schema", "[" * 100_000, "not valid JSON"),
    ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "nested deeper"),
    ("json_schema", [], "object or bool"),
    ("json_schema", False, "cannot accept any value"),
    ("json_schema", {"type": "text"}, 'Unsupported type "text"'),
    ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ("json_schema", {"enum": []}, "enum"),
    ("json_schema", {"$ref": "#/$defs/nope"}, "nope"),
    ("json_schema", {"$ref": "https://example.com/s.json"}, "must point into the schema"),
    ("json_schema", {"$ref": "#anchor"}, "must point into the schema"),
    ("json_schema", {"not": {"type": "string"}}, "'not' is not supported at #"),
    ("json_schema", {"properties": {"a": {"if": {}, "then": {}}}}, "'if' .* #/properties/a"),
    ("json_schema", {"type": "array", "contains": {}}, "'contains'"),
    ("json_schema", {"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ("json_schema", {"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ("json_schema", {"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
    ("json_schema", {"type": "integer", "multipleOf": 2, "minimum": 3}, "'multipleOf'"),
    ("json_schema", {"type": "string", "pattern": "a", "maxLength": 3}, "'pattern' beside"),
    ("json_schema", {"type": "string", "format": "date", "minLength": 3}, "'format' beside"),
    ("json_schema", {"minLength": 3}, "needs 'type': 'string'"),
    ("json_schema", {"type": "string", "minimum": 3}, "needs 'type': 'number'"),
    ("json_schema", {"anyOf": [{}], "properties": {}}, "'properties' beside 'anyOf'"),
    ("json_schema", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "cannot be merged at #"),
    ("json_schema", {"type": "string", "enum": [2, 1]}, "not of the 'type'"),
    ("json_schema", {"type": "integer", "const": True}, "not of the 'type'"),
    (
        "json_schema",
        {"type": "object", "required": ["x"], "additionalProperties": False},
        "'required' names 'x'",
    ),
    ("json_schema", {"minItems": 1}, "'minItems' needs 'type': 'array'"),
    *(
        ("json_schema", {"items": {"type": "string", "pattern": pattern}}, "in 'pattern' is not")
        for pattern in ("(?=a)b", "^(?!a)b", "(?<=a)b", "a\\bb", "(a)\\1", "(?i)a", "\\p{L}")
    ),
    ("json_schema", {"type": "string", "pattern": "("}, "parenthesis"),
    *(
        ("json_schema", {"type": "string", "pattern": pattern}, "in 'pattern' is not supported")
        for pattern in ('a"b', r"a\\b", r"\t", r"[a\x22]", r"\u0005", "a\nb")
    ),
    ("json_schema", {"type": "object", "patternProperties": {'"': {}}}, "in 'patternProperties'"),
    (
        "json_schema",
        {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": True},
        "'patternProperties' beside",
    ),
    (
        "json_schema",
        {"properties": {"abc": {}}, "propertyNames": {"maxLength": 2, "type": "string"}},
        "'propertyNames' beside",
    ),
    ("regex", "(", "parenthesis"),
    ("regex", "a{2", "repetition"),
    ("regex", r"(a)\1", "Backreference"),
    ("regex", "(?=a)b", "Lookahead"),
    ("regex", r"\bfoo", "Word boundary"),
    ("regex", "\ud800", "surrogates"),
    ("regex", "a" * (256 * 1024 + 1), "bytes long"),
    ("choice", "[]", "at least one"),
    ("choice", '{"a": 1}', "JSON list"),
    ("choice", '["a", 1]', "strings"),
    ("choice", "yes", "not valid JSON"),
    ("grammar", "", "root"),
    ("grammar", "root ::= other", "other"),
    ("grammar", "root ::= root", "no token"),
    ("structural_tag", "{}", "format"),
    (
        "structural_tag",
        {"format": {"type": "json_schema", "json_schema": {"not": {}}}},
        "'not' is not supported",
    ),
]


@pytest.mark.parametrize(("kind", "value", "reason"), REFUSED, ids=lambda part: repr(part)[:40])
def test_what_cannot_be_enforced_is_refused(
    backend: GrammarCompiler, kind: str, value: Any, reason: str
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        backend.compile(structured(kind, value))
    assert "/project/" not in str(caught.value), "no source paths of the library"


def test_a_grammar_whose_masks_take_too_long_is_refused(
    backend: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MAX_MASK_S", -1.0)
    with pytest.raises(InvalidRequestError, match="too ambiguous"):
        backend.compile(structured("regex", "[a-z]+"))


def test_a_complete_text_allows_the_stop_token_alone(backend: GrammarCompiler) -> None:
    matcher = backend.compile(structured("choice", ["ab"])).matcher()
    with pytest.raises(GrammarError, match=f"token {EOS} "):
        matcher.accept(EOS)
    for byte in b"ab":
        matcher.accept(PIECES.index(bytes([byte])))
    assert allowed_ids(matcher.allowed(), PAD_TO).tolist() == [EOS]
    assert not matcher.is_terminated()
    matcher.accept(EOS)
    assert matcher.is_terminated()
    with pytest.raises(GrammarError, match="after the end"):
        matcher.allowed()
    with pytest.raises(GrammarError):
        matcher.accept(PIECES.index(b"a"))
    matcher.rollback(2)
    assert allowed_ids(matcher.allowed(), PAD_TO).tolist() == [PIECES.index(b"b")]


def test_the_sequence_may_have_stop_tokens_of_its_own(backend: GrammarCompiler) -> None:
    matcher = backend.compile(structured("choice", ["a"])).matcher([1])
    matcher.accept(PIECES.index(b"a"))
    assert allowed_ids(matcher.allowed(), PAD_TO).tolist() == [1]


@pytest.mark.parametrize("size", [len(PIECES), PAD_TO, 352, 1000, 200])
def test_special_and_padding_ids_are_never_allowed(size: int) -> None:
    matcher = GrammarCompiler(vocab(), size).compile(structured("regex", "(.|\n)*")).matcher()
    mask = matcher.allowed()
    assert mask.size == -(-size // 32)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert EOS in allowed and 1 not in allowed
    assert allowed.max() < min(size, len(PIECES))


def test_a_model_without_end_of_text_has_no_structured_output() -> None:
    with pytest.raises(InvalidRequestError, match="end-of-text"):
        GrammarCompiler(vocab(stop_token_ids=())).compile(structured("json_object"))


# Processes.


@pytest.fixture(scope="module")
def pool() -> GrammarPool:
    return GrammarPool(vocab(), PAD_TO)


def compiled(pool: GrammarPool, *rows: GrammarRow) -> list[str | None]:
    """Wait for the grammars; why each is not taken."""
    while not all(row.process.is_ready or row.process.end for row in rows):
        pool.poll(10.0)
    return [None if row.process.end is None else row.process.end.error for row in rows]


def masks_of(pool: GrammarPool, row: GrammarRow, seq: Sequence) -> list[int] | None:
    """What may come next, or None where the grammar was given up."""
    row.ask(seq, [])
    while row.pending:
        pool.poll(10.0)
    masks = row.masks(seq, [])
    return None if masks is None or masks[0] is None else allowed_ids(masks[0], PAD_TO).tolist()


def test_equal_requests_of_one_account_share_a_process(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_IDLE", 1)
    a = structured("regex", "a")
    first, second, other = pool.open(a, "x"), pool.open(a, "x"), pool.open(a, "y")
    assert compiled(pool, first, other) == [None, None]
    assert first.process is second.process is not other.process
    for row in (first, second):
        pool.close(row)
    again = pool.open(a, "x")
    assert again.process is first.process and again.process.connection is not None
    pool.close(again)
    pool.close(other)  # the one that was opened last is kept
    assert first.process.connection is not None and other.process.connection is None
    refused = pool.open(structured("regex", "("), "x")
    assert "parenthesis" in str(compiled(pool, refused))
    pool.close(refused)
    assert pool.open(structured("regex", "("), "x").process is not refused.process


def test_who_costs_too_much_is_ended_and_others_are_not(pool: GrammarPool) -> None:
    """What takes too long is killed: in a real attack by the system, here by a limit of zero."""
    strict = GrammarPool(vocab(), PAD_TO, GrammarLimits(burst_s=0.0, mask_s=0.0))
    digits = structured("regex", "[0-9]+")
    rows = [strict.open(digits, "x"), strict.open(digits, "x"), pool.open(digits, "x")]
    assert compiled(strict, *rows[:2]) == [None, None] and compiled(pool, rows[2]) == [None]
    seq = sequence(structured=digits)
    assert masks_of(strict, rows[0], seq) is None
    for row in rows[:2]:
        assert "the regex is too ambiguous: to follow it took more than 0 s" in str(row.error)
    assert PIECES.index(b"7") in (masks_of(pool, rows[2], seq) or [])


def test_waiting_costs_no_patience_while_a_step_runs(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = structured("regex", "[0-9]+")
    row = pool.open(digits, "patient")
    assert compiled(pool, row) == [None]
    pool.wait([])  # as much patience as there can be
    polled: list[float] = []

    def poll(timeout_s: float = 0.0) -> None:
        polled.append(timeout_s)
        time.sleep(pool_module.PATIENCE_S / 2)

    turns = iter([True] * 6)
    monkeypatch.setattr(pool, "poll", poll)
    row.pending = True
    pool.wait([row], lambda: next(turns, False))
    assert polled[:7] == [0.0, *[pool_module._RUNNING_POLL_S] * 6] and len(polled) > 7
    assert polled[7] > pool_module.PATIENCE_S / 2 and row.process.account.patience_s <= 0
    row.pending = False
    pool.close(row)


def test_a_compilation_has_limits_and_ends_with_its_client(pool: GrammarPool) -> None:
    limited = GrammarPool(vocab(), PAD_TO, GrammarLimits(compile_s=0))
    slow = structured("regex", "(" * 1000 + "".join("[a-z]*)*" for _ in range(1000)))
    row = limited.open(slow, "x")
    assert "to compile it took more than 0 s of CPU time" in str(compiled(limited, row))
    gone, next_one = pool.open(slow, "x"), pool.open(structured("regex", "b"), "x")
    process = gone.process
    pool.close(gone)
    assert process.connection is None
    assert compiled(pool, next_one) == [None]


def test_an_account_leaves_places_to_others(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_OF_ACCOUNT", 1)
    rows = [pool.open(structured("regex", f"c{i}"), name) for i, name in enumerate("aab")]
    compiled(pool, rows[0], rows[2])
    assert rows[1].process.connection is None
    pool.close(rows[0])
    monkeypatch.setattr(pool_module, "MAX_OF_ACCOUNT", 9)
    assert compiled(pool, rows[1]) == [None]


def test_where_no_process_starts_the_fault_is_not_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    pool = GrammarPool(vocab())
    row = pool.open(structured("regex", "a"), "")
    compiled(pool, row)
    assert row.process.end is not None and row.process.end.stop_reason == "grammar_busy"
