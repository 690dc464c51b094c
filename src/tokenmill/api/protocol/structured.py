"""The constraint on the generated text that a call asks for, in any of its spellings."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from tokenmill.api.protocol.requests import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextRequest,
)
from tokenmill.core.json_schema import check_depth, check_schema, enforceable, parse_json
from tokenmill.core.types import InvalidRequestError, StructuredOutput

_LARK_RULE = re.compile(r"^\s*[?!]?\w+(\.\d+)?\s*:", re.MULTILINE)
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def structured_output(call: TextRequest) -> StructuredOutput | None:
    """The one constraint that the call sets; two are refused."""
    found: dict[str, StructuredOutput] = {}
    match call.response_format:
        case JsonObjectFormat(json_schema=schema):
            found["response_format"] = _json_schema(schema)
        case JsonSchemaFormat(json_schema=definition):
            found["response_format"] = _json_schema(definition.schema, bool(definition.strict))
    if call.guided_json is not None:
        found["guided_json"] = _json_schema(call.guided_json, param="guided_json")
    if call.guided_regex is not None:
        found["guided_regex"] = StructuredOutput("regex", call.guided_regex)
    if call.guided_choice is not None:
        found["guided_choice"] = StructuredOutput("choice", json.dumps(call.guided_choice))
    if call.guided_grammar is not None:
        found["guided_grammar"] = _grammar(call.guided_grammar, "guided_grammar")
    if call.structured_outputs is not None:
        found["structured_outputs"] = _structured_outputs(call.structured_outputs)
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(f"{names} exclude each other; send one of them", list(found)[1])
    return next(iter(found.values()), None)


def _structured_outputs(options: StructuredOutputs) -> StructuredOutput:
    given = {f: v for f in _KINDS if (v := getattr(options, f)) is not None}
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs must set exactly one field, got {len(given)}",
            "structured_outputs",
        )
    match given:
        case {"json": schema}:
            return _json_schema(schema, param="structured_outputs.json")
        case {"regex": pattern}:
            return StructuredOutput("regex", pattern)
        case {"choice": choices}:
            return StructuredOutput("choice", json.dumps(choices))
        case {"grammar": grammar}:
            return _grammar(grammar, "structured_outputs.grammar")
        case {"structural_tag": tag}:
            return StructuredOutput("structural_tag", _json_text(tag))
        case _:
            return StructuredOutput("json_object")


def _grammar(text: str, param: str) -> StructuredOutput:
    """An EBNF grammar; Lark's, which outlines sends, have other rules."""
    if "::=" not in text and _LARK_RULE.search(text):
        raise InvalidRequestError(
            f"{param}: this is a grammar in Lark's form, which is not read here; send EBNF, such "
            'as root ::= "yes" | "no", or a regex or a JSON schema',
            param,
        )
    return StructuredOutput("grammar", text)


def _json_schema(
    schema: dict[str, Any] | str, strict: bool = False, param: str = "response_format"
) -> StructuredOutput:
    read = parse_json(schema, param) if isinstance(schema, str) else schema
    enforced, unenforced = enforced_schema(read, strict, param)
    return StructuredOutput("json_schema", json.dumps(enforced), unenforced=unenforced)


def enforced_schema(
    schema: Any, strict: bool, param: str, name: str = ""
) -> tuple[Any, tuple[str, ...]]:
    """What a grammar can enforce of a schema, and pointers to the keywords that it cannot.

    InvalidRequestError names the first of them where the call is strict. A pointer begins with the
    function's name.
    """
    check_depth(schema, f"{param}: the JSON schema")
    if strict:
        return check_schema(schema, param), ()
    enforced, found = enforceable(schema)
    return enforced, tuple(quote(name) + each.pointer for each in found)


def _json_text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)
