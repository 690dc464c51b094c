"""Answers come back as history: calls that `max_tokens` cut, empty turns, formats beside tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from api.sim import MODEL, make_tokenizer
from api.sim_server import SimServer
from tokenmill.text.chat_template import ChatTemplate

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CUT = '{"city": "Be'


def test_a_call_that_was_cut_is_taken_back(openai: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": f"say: {CALL}"}]
    create = openai.chat.completions.create
    size = len(make_tokenizer().encode(CALL.partition("rn")[0]))
    choice = create(model=MODEL, messages=asked, tools=TOOLS, max_tokens=size).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    with pytest.raises(ValueError):
        json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "say: again"}
    history = [*asked, choice.message.model_dump(), result]
    answer = create(model=MODEL, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "again"
    items: Any = [
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": CUT},
        {"type": "function_call_output", "call_id": "c", "output": "say: again"},
    ]
    assert openai.responses.create(model=MODEL, input=items).output_text == "again"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("{{ call.function.arguments | tojson }}", "{}"),
        ("{{ call.function.arguments }}", "{}"),
        (
            "{% if call.function.arguments is string %}{{ call.function.arguments }}"
            "{% else %}{{ call.function.arguments | tojson }}{% endif %}",
            "{}",
        ),
        # Templates that go through the arguments, as Qwen3-Coder's and GLM's do.
        (
            "{% for name, value in call.function.arguments | items %}<{{ name }}>{{ value }}"
            "{% endfor %}",
            "<arguments>{}",
        ),
        (
            "{% for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}"
            "{% endfor %}",
            "<arguments>{}",
        ),
    ],
)
@pytest.mark.parametrize("text", [CUT, "{", "no JSON", "[1]", '"x"', "3", "[" * 5000])
def test_arguments_are_rendered_as_they_are(template: str, written: str, text: str) -> None:
    source = "{% for call in messages[0].tool_calls %}" + template + "{% endfor %}"
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}]
    message = {"role": "assistant", "tool_calls": calls}
    assert ChatTemplate(source, "test").render([message]) == written.format(text)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": []}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": []}]}),
        ("/v1/responses", {"input": [{"type": "reasoning", "id": "r", "summary": []}]}),
    ],
)
def test_a_prompt_of_empty_lists_is_a_bad_request(
    server: SimServer, path: str, fields: dict[str, Any]
) -> None:
    tool = {"name": "weather", "input_schema": SCHEMA}
    if path == "/v1/responses":
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    call = {"model": MODEL, "tools": [tool], **fields}
    call |= {"max_tokens": 9} if path == "/v1/messages" else {}
    answer = server.call("POST", path, call)
    assert answer.status == 400, answer.body
    assert (
        "content" in answer.json["error"]["message"] or "input" in answer.json["error"]["message"]
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": TOOLS[0]}])
def test_a_format_beside_a_forced_call_is_unused(server: SimServer, choice: Any) -> None:
    said = '[{"name": "weather", "parameters": {"city": "Bern"}}]'
    if choice != "required":
        choice = {"type": "function", "function": {"name": "weather"}}
        said = '{"city": "Bern"}'
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    fields = {"tools": TOOLS, "tool_choice": choice, "response_format": form}
    message = server.chat(f"say: {said}", **fields).json["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}


@pytest.mark.parametrize("name", ["schema", "value"])
def test_a_json_object_with_a_schema_is_held_to_it(server: SimServer, name: str) -> None:
    form = {"type": "json_object", name: SCHEMA}
    for said in ('{"city": "Bern"}', '{"town": "Bern"}'):
        answer = server.chat(f"say: {said}", response_format=form, max_tokens=30)
        content = answer.json["choices"][0]["message"]["content"]
        assert (content == said) == ("city" in said) and content.startswith('{"city"')
