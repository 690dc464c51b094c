"""JSON schemas with keywords that no grammar enforces: the rest holds, and clients are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from api.sim import MODEL
from api.sim_server import SimServer

TAG = {"type": "string", "enum": ["a", "b"]}


def of_object(**fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"tag": TAG},
        "required": ["tag"],
        "additionalProperties": False,
        **fields,
    }


# A schema, what is said to it that only the rest of the schema refuses, and what is not enforced.
LOOSE: list[tuple[dict[str, Any], list[str]]] = [
    (of_object(uniqueItems=True), ["#/uniqueItems"]),
    (of_object(**{"not": {"required": ["x"]}}), ["#/not"]),
    (of_object(**{"if": {}, "then": {}, "else": {}}), ["#/else", "#/if", "#/then"]),
    (of_object(contains={}, minContains=1), ["#/contains", "#/minContains"]),
    (of_object(dependentRequired={"x": ["tag"]}), ["#/dependentRequired"]),
    (of_object(anyOf=[{"required": ["tag"]}, {"required": ["x"]}]), ["#/anyOf"]),
    (of_object(allOf=[{"properties": {"x": {}}}, {"not": {}}]), ["#/allOf/0", "#/not"]),
    (
        of_object(
            properties={
                "tag": TAG,
                "é/x": {"type": "string", "pattern": "^(?=x)"},
                "size": {"type": "number", "multipleOf": 0.5},
            }
        ),
        ["#/properties/%C3%A9~1x/pattern", "#/properties/size/multipleOf"],
    ),
    (of_object(allOf=[{"type": "object"}, {"minProperties": 1}]), []),
]
SAID, ONLY = '{"town": 3}', '{"tag": "a"'


def json_schema(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


@pytest.mark.parametrize(("schema", "unenforced"), LOOSE, ids=lambda part: json.dumps(part)[-40:])
@pytest.mark.parametrize("stream", [False, True])
def test_the_rest_of_a_schema_holds(
    server: SimServer, schema: dict[str, Any], unenforced: list[str], stream: bool
) -> None:
    form = json_schema(schema)
    answer = server.chat(f"say: {SAID}", response_format=form, max_tokens=40, stream=stream)
    assert answer.status == 200, answer.body
    warning = f"not enforced: {', '.join(unenforced)}" if unenforced else None
    assert answer.headers.get("x-warning") == warning
    if not stream:
        content = answer.json["choices"][0]["message"]["content"]
        assert content.startswith('{"tag"'), "properties and required hold"
    strict = server.chat("x", response_format=json_schema(schema, strict=True), max_tokens=40)
    assert strict.status == (400 if unenforced else 200)
    if unenforced:
        assert strict.error["param"] == "response_format"
        assert "cannot be enforced" in strict.error["message"]


def test_a_pydantic_set_is_an_array_whose_items_hold(openai: OpenAI) -> None:
    class Tags(BaseModel):
        tags: set[int] = Field(min_length=2)

    form: Any = json_schema(Tags.model_json_schema())
    raw = openai.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": 'say: {"tags": [3, 4]}'}],
        response_format=form,
    )
    assert raw.headers["x-warning"] == "not enforced: #/properties/tags/uniqueItems"
    content = raw.parse().choices[0].message.content
    assert content is not None and Tags.model_validate_json(content).tags == {3, 4}


PARAMETERS = of_object(uniqueItems=True)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_parameters_of_forced_tools(server: SimServer, choice: Any) -> None:
    tool: dict[str, Any] = {"name": "f", "parameters": PARAMETERS}
    said = '{"tag": "b"}' if choice != "required" else '[{"name": "f", "parameters": {"tag": "b"}}]'
    fields: dict[str, Any] = {"tool_choice": choice}
    tools = [{"type": "function", "function": tool}]
    answer = server.chat(f"say: {said}", tools=tools, **fields)
    (call,) = answer.json["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"tag": "b"}
    assert answer.headers["x-warning"] == "not enforced: f#/uniqueItems"
    strict = [{"type": "function", "function": tool | {"strict": True}}]
    refused = server.chat("x", tools=strict, **fields)
    assert refused.status == 400 and refused.error["param"] == "tools"
    free = server.chat("x", tools=strict)
    assert free.status == 400 and "'uniqueItems'" in free.error["message"]


def test_an_answer_beside_tools(server: SimServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    form = json_schema(PARAMETERS)
    answer = server.chat(f"say: {SAID}", tools=tools, response_format=form, max_tokens=40)
    assert answer.json["choices"][0]["message"]["content"].startswith('{"tag"')
    assert answer.headers["x-warning"] == "not enforced: #/uniqueItems"


def test_every_other_api_says_so(server: SimServer) -> None:
    wanted = "not enforced: #/uniqueItems"
    guided = server.complete("x", guided_json=PARAMETERS)
    text = {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}
    response = server.call("POST", "/v1/responses", {"model": MODEL, "input": "x", "text": text})
    body = {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": "x"}]}
    body["output_config"] = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    message = server.call("POST", "/v1/messages", body)
    for answer in (guided, response, message):
        assert answer.status == 200 and answer.headers["x-warning"] == wanted, answer.body


REFERS = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": {"allOf": [REFERS, {"minLength": 3}]}},
        {"a": {"properties": {"x": {"allOf": [REFERS, {"required": ["x"]}]}}}},
        {f"{c}": {"allOf": [{"$ref": f"#/$defs/{chr(ord(c) + 1)}"}] * 4} for c in "abcdefghijklmn"},
        {"a": {"allOf": [{"$ref": "#/$defs/b"}, REFERS]}, "b": {"allOf": [REFERS, REFERS]}},
    ],
)
def test_references_that_turn_in_circles(server: SimServer, definitions: dict[str, Any]) -> None:
    schema = {"allOf": [REFERS, {"required": ["x"]}], "$defs": definitions}
    answer = server.chat("x", response_format=json_schema(schema), max_tokens=40)
    assert answer.status in (200, 400), answer.body


@pytest.mark.parametrize("schema", [{"items": {}}, {"properties": {"a": {}}}])
def test_a_schema_that_is_nested_too_deeply(server: SimServer, schema: dict[str, Any]) -> None:
    for _ in range(300):
        schema = {"allOf": [schema, {"minItems": 1}]}
    answer = server.chat("x", response_format=json_schema(schema))
    assert answer.status == 400 and "nested deeper" in answer.error["message"]
