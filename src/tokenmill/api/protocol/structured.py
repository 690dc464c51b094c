"""The constraint on the generated text that a call asks for, in any of its spellings."""

from __future__ import annotations

import json
from typing import Any

from tokenmill.api.protocol.requests import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
)
from tokenmill.core.types import InvalidRequestError, StructuredOutput


def structured_output(call: GenerationRequest) -> StructuredOutput | None:
    """The one constraint that the call sets; two are refused."""
    found: dict[str, StructuredOutput] = {}
    match call.response_format:
        case JsonObjectFormat():
            found["response_format"] = StructuredOutput("json_object")
        case JsonSchemaFormat(json_schema=definition):
            found["response_format"] = _json_schema(definition.schema)
    if call.guided_json is not None:
        found["guided_json"] = _json_schema(call.guided_json)
    if call.guided_regex is not None:
        found["guided_regex"] = StructuredOutput("regex", call.guided_regex)
    if call.guided_choice is not None:
        found["guided_choice"] = StructuredOutput("choice", json.dumps(call.guided_choice))
    if call.guided_grammar is not None:
        found["guided_grammar"] = StructuredOutput("grammar", call.guided_grammar)
    if call.structured_outputs is not None:
        found["structured_outputs"] = _structured_outputs(call.structured_outputs)
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(f"{names} exclude each other; send one of them", list(found)[1])
    return next(iter(found.values()), None)


def _structured_outputs(options: StructuredOutputs) -> StructuredOutput:
    given = {f: v for f in options.__struct_fields__ if (v := getattr(options, f)) is not None}
    if len(given) != 1:
        raise InvalidRequestError(
            f"structured_outputs must set exactly one field, got {len(given)}",
            "structured_outputs",
        )
    match given:
        case {"json": schema}:
            return _json_schema(schema)
        case {"regex": pattern}:
            return StructuredOutput("regex", pattern)
        case {"choice": choices}:
            return StructuredOutput("choice", json.dumps(choices))
        case {"grammar": grammar}:
            return StructuredOutput("grammar", grammar)
        case {"structural_tag": tag}:
            return StructuredOutput("structural_tag", _json_text(tag))
        case _:
            return StructuredOutput("json_object")


def _json_schema(schema: dict[str, Any] | str) -> StructuredOutput:
    return StructuredOutput("json_schema", _json_text(schema))


def _json_text(value: dict[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value)
