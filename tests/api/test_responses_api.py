"""The Responses API by the openai client: items, typed events, tools, turns and the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from msgspec.structs import replace as replaced
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from api.sim import DEFAULT_TEXT, MODEL, make_tokenizer
from api.sim_server import Answer, SimServer, sim_server, wait_until
from tokenmill.api.errors import ApiError
from tokenmill.api.open_call import TextDelta, join_deltas
from tokenmill.api.protocol.answers import usage_of
from tokenmill.api.responses.response_chat import messages_of, without_first
from tokenmill.api.responses.response_format import ResponseFormat
from tokenmill.api.responses.response_items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    carried,
)
from tokenmill.api.responses.response_object import ResponseObject
from tokenmill.api.responses.response_request import ReasoningConfig, TextConfig
from tokenmill.core.config import SchedulerConfig, ServerConfig
from tokenmill.core.types import TokenLogprobs

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
KEYS = ("secret", "other")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "d", "parameters": SCHEMA, "strict": False}
    for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
EVERYTHING = f"say: <think>Hmm, well.</think>Let me look. {CALL}"
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "error"}


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    config = ServerConfig(port=0, api_keys=KEYS)
    with sim_server(config, SchedulerConfig(max_model_len=1024), step_ms=1.0) as running:
        yield running


@pytest.fixture
def client(server: SimServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as opened:
        yield opened


def post(server: SimServer, fields: dict[str, Any], path: str = "/v1/responses") -> Answer:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    return server.call("POST", path, {"model": MODEL, **fields}, headers)


def read_events(body: bytes) -> list[Any]:
    """The events of a stream, each checked against the client's own types."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for number, part in enumerate(parts):
        name, data = part.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        EVENTS.validate_python(event)
        events.append(event)
    assert [e["type"] in TERMINAL for e in events] == [False] * (len(events) - 1) + [True]
    return events


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id")}
    return value


# One answer.


def test_a_whole_response(client: OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="hello", instructions="be brief", metadata={"a": "b"}, temperature=0.5
    )
    Response.model_validate(json.loads(answer.to_json()))
    assert answer.output_text == DEFAULT_TEXT and answer.status == "completed"
    (item,) = answer.output
    assert item.type == "message" and item.status == "completed" and item.role == "assistant"
    assert (answer.instructions, answer.metadata, answer.temperature) == (
        "be brief",
        {"a": "b"},
        0.5,
    )
    assert answer.id.startswith("resp_") and answer.model == MODEL and answer.error is None
    usage = answer.usage
    assert usage is not None
    assert usage.output_tokens == len(make_tokenizer().encode(DEFAULT_TEXT)) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    again = client.responses.create(model=MODEL, input="hello", instructions="be brief").usage
    assert again is not None and again.input_tokens_details.cached_tokens > 0


REASONING = ["reasoning_text.delta", "reasoning_text.done"]
TEXT = ["output_text.delta", "output_text.done"]
ARGUMENTS = ["function_call_arguments.delta", "function_call_arguments.done"]
PART = ["output_item.added", "content_part.added"]
PART_DONE = ["content_part.done", "output_item.done"]


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({"input": "say: Hello there"}, [*PART, *TEXT, *PART_DONE, "completed"]),
        (
            {"input": EVERYTHING, "tools": TOOLS},
            [
                *[*PART, *REASONING, *PART_DONE, *PART, *TEXT, *PART_DONE],
                *["output_item.added", *ARGUMENTS, "output_item.done", "completed"],
            ],
        ),
        (
            {"input": "count: 20", "max_output_tokens": 4},
            [*PART, *TEXT, *PART_DONE, "incomplete"],
        ),
        (
            {"input": f"say: {CALL}{CALL}", "tools": TOOLS},
            [*["output_item.added", *ARGUMENTS, "output_item.done"] * 2, "completed"],
        ),
    ],
    ids=["text", "everything", "incomplete", "two calls"],
)
def test_streamed_events_come_in_order(
    server: SimServer, fields: dict[str, Any], order: list[str]
) -> None:
    events = read_events(post(server, fields | {"stream": True}).body)
    kinds = [e["type"].removeprefix("response.") for e in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert once == ["created", "in_progress", *order]
    final = events[-1]["response"]
    whole = post(server, fields).json
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert (final["status"], final["usage"]["output_tokens"]) == (
        whole["status"],
        whole["usage"]["output_tokens"],
    )
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    said = [e["text"] for e in events if e["type"] == "response.output_text.done"]
    assert "".join(texts) == "".join(said)


def test_the_stream_helper_understands_the_events(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=EVERYTHING, tools=TOOLS) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == "Let me look."
    reasoning, message, call = final.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text == "Hmm, well."
    assert message.type == "message" and final.output_text == "Let me look."
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Bern"}
    assert final.usage is not None
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens


def test_max_output_tokens_makes_it_incomplete(client: OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input="count: 20", max_output_tokens=4)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete" and answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert client.responses.retrieve(answer.id).status == "incomplete"


def test_an_answer_without_text_is_an_empty_message(server: SimServer) -> None:
    for stream in (False, True):
        answer = post(server, {"input": "say: ", "stream": stream})
        response = read_events(answer.body)[-1]["response"] if stream else answer.json
        (item,) = response["output"]
        assert item["content"][0]["text"] == "" and response["status"] == "completed"


class City(BaseModel):
    city: str


def test_structured_output(client: OpenAI) -> None:
    parsed = client.responses.parse(model=MODEL, input='say: {"city": "Bern"}', text_format=City)
    assert parsed.output_parsed == City(city="Bern")
    forced = client.responses.create(
        model=MODEL, input="say: *", text={"format": {"type": "json_object"}}, max_output_tokens=30
    )
    assert forced.output_text.startswith("{")


def test_a_schema_binds_the_answer_and_leaves_calls(client: OpenAI, server: SimServer) -> None:
    """What the Agents SDK sends for an agent with tools and an output type."""
    fields: Any = {"model": MODEL, "tools": TOOLS, "text_format": City}
    answered = client.responses.parse(input='say: {"city": "Bern"}', **fields)
    assert answered.output_parsed == City(city="Bern")
    called = client.responses.parse(input=f"say: {CALL}\n{CALL}", **fields)
    assert [item.type for item in called.output] == ["function_call"] * 2
    one = client.responses.parse(input=f"say: {CALL}\n{CALL}", parallel_tool_calls=False, **fields)
    assert [item.type for item in one.output] == ["function_call"]
    schema = {"type": "json_schema", "name": "c", "schema": SCHEMA}
    free = post(server, {"input": "say: free", "tools": TOOLS, "text": {"format": schema}}).json
    assert "free" not in str(free["output"])
    forced = {"input": "x", "tools": TOOLS, "tool_choice": "required", "text": {"format": schema}}
    assert post(server, forced).json["output"][0]["type"] == "function_call"


def test_tool_choice(client: OpenAI) -> None:
    named = client.responses.create(
        model=MODEL,
        input='say: {"city": "Oslo"}',
        tools=TOOLS,
        tool_choice={"type": "function", "name": "time"},
    )
    assert [item.name for item in named.output if item.type == "function_call"] == ["time"]
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "time"}],
    }
    other = client.responses.create(
        model=MODEL, input=f"say: {CALL}", tools=TOOLS, tool_choice=allowed
    )
    assert [item.type for item in other.output] == ["message"]
    one = client.responses.create(
        model=MODEL, input=f"say: {CALL}{CALL}", tools=TOOLS, parallel_tool_calls=False
    )
    assert [item.type for item in one.output] == ["function_call"]
    none = client.responses.create(
        model=MODEL, input=f"say: {CALL}", tools=TOOLS, tool_choice="none"
    )
    assert none.output_text == CALL


def test_logprobs_are_those_of_the_text(server: SimServer) -> None:
    """Where an answer may have other parts, nobody could tell which tokens are the text's."""
    include = ["message.output_text.logprobs"]
    refused = post(server, {"input": "say: Hello", "include": include, "top_logprobs": 2})
    assert refused.status == 400 and refused.error["param"] == "include"
    tokenizer = make_tokenizer()
    token_ids = tokenizer.encode("Hello there")
    deltas = [
        TextDelta(0, text, [token], [TokenLogprobs([token, 5], [-1.0, -2.0], 1)], None, end, None)
        for token, text, end in zip(token_ids, ("Hello", " there"), (None, "stop"), strict=True)
    ]
    begun = ResponseObject(
        id="a", created_at=0, model=MODEL, reasoning=ReasoningConfig(), text=TextConfig(), output=[]
    )
    form = ResponseFormat(replaced(begun, output=[]), tokenizer, lambda ended: None, carries=False)
    form.frame.start(usage_of(1, 0, 0))
    events = [form.event(deltas[0]), form.event(deltas[1]) + form.end(usage_of(1, 2, 0))]
    streamed = [json.loads(part.split("data: ")[1]) for e in events for part in split(e)]
    texts = [e for e in streamed if e["type"] == "response.output_text.delta"]
    assert [(e["delta"], e["logprobs"][0]["token"]) for e in texts] == [
        ("Hello", "Hello"),
        (" there", " there"),
    ]
    whole = ResponseFormat(replaced(begun, output=[]), tokenizer, lambda ended: None, carries=False)
    answer = json.loads(whole.answer([join_deltas(deltas)], usage_of(1, 2, 0)))
    logprobs = answer["output"][-1]["content"][0]["logprobs"]
    assert [p["token"] for p in logprobs] == ["Hello", " there"]
    assert logprobs[0]["top_logprobs"][0]["logprob"] == -2.0


def split(events: bytes) -> list[str]:
    return events.decode().split("\n\n")[:-1]


# Several turns.


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_answered(client: OpenAI, stream: bool) -> None:
    """The second turn by items handed back, by a reference and by previous_response_id."""
    if stream:
        with client.responses.stream(model=MODEL, input=EVERYTHING, tools=TOOLS) as events:
            first: Any = events.get_final_response()
    else:
        first = client.responses.create(model=MODEL, input=EVERYTHING, tools=TOOLS)
    call = first.output[-1]
    result: Any = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": "say: It rains",
    }
    question: Any = {"role": "user", "content": EVERYTHING}
    handed_back: list[Any] = [question, *(item.to_dict() for item in first.output), result]
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    stateless = client.responses.create(model=MODEL, input=handed_back, tools=TOOLS, store=False)
    referred = client.responses.create(
        model=MODEL, input=[question, *references, result], tools=TOOLS
    )
    stored = client.responses.create(
        model=MODEL, input=[result], tools=TOOLS, previous_response_id=first.id
    )
    for second in (stateless, referred, stored):
        assert second.output_text == "It rains"
        assert second.usage is not None and stateless.usage is not None
        assert second.usage.input_tokens == stateless.usage.input_tokens, "the same prompt"
    assert stored.previous_response_id == first.id
    third = client.responses.create(
        model=MODEL, input="say: bye", previous_response_id=stored.id, instructions="be brief"
    )
    assert third.output_text == "bye"
    listed = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    kinds = [item.type for item in listed]
    assert kinds == [
        *["message", "reasoning", "message", "function_call", "function_call_output"],
        *["message", "message"],
    ], "all pages, earlier turns first"
    assert [item.id for item in listed[1:4]] == [item.id for item in first.output]


def test_the_store(client: OpenAI, server: SimServer) -> None:
    num_before = server.metric("stored_responses")
    answer = client.responses.create(model=MODEL, input="say: one")
    assert server.metric("stored_responses") == num_before + 1
    assert server.metric("stored_response_bytes") > 0
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[1], max_retries=0) as other:
        with pytest.raises(openai.NotFoundError, match="no response"):
            other.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            other.responses.create(model=MODEL, input="x", previous_response_id=answer.id)
    client.responses.delete(answer.id)
    unstored = client.responses.create(model=MODEL, input="say: two", store=False)
    assert unstored.output_text == "two"
    for response_id in (answer.id, unstored.id, "resp_1"):
        with pytest.raises(openai.NotFoundError, match=f"no response '{response_id}'"):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match="send the conversation as input") as error:
            client.responses.create(model=MODEL, input="x", previous_response_id=response_id)
        assert error.value.param == "previous_response_id"


def test_items_become_messages() -> None:
    """Reasoning, text and calls that follow each other are one answer; outputs are tools'."""
    think = [ReasoningText(text="hm")]
    items: list[Item] = [
        MessageItem(role="developer", content="rules"),
        MessageItem(role="user", content="hi"),
        ReasoningItem(content=think),
        MessageItem(role="assistant", content="look"),
        FunctionCallItem(call_id="1", name="f", arguments="{}"),
        FunctionCallItem(call_id="2", name="g", arguments="{}"),
        FunctionCallOutputItem(call_id="1", output="one"),
        FunctionCallOutputItem(call_id="2", output="two"),
        ReasoningItem(encrypted_content=carried("carried")),
        FunctionCallItem(call_id="3", name="f", arguments="{}"),
        FunctionCallOutputItem(call_id="3", output="three"),
        ReasoningItem(encrypted_content="another server's"),
        MessageItem(role="assistant", content=[OutputText(text="done")]),
        MessageItem(role="assistant", content="more"),
    ]
    messages: list[Any] = messages_of(items)
    roles = [type(message).__struct_config__.tag for message in messages]
    assert roles == [
        *["developer", "user", "assistant", "tool", "tool", "assistant", "tool"],
        *["assistant", "assistant"],
    ]
    first, second, third = messages[2], messages[5], messages[7]
    assert (first.reasoning_content, first.content) == ("hm", "look")
    assert [call.id for call in first.tool_calls] == ["1", "2"]
    assert (second.reasoning_content, second.content) == ("carried", None)
    assert (third.reasoning_content, third.content) == (None, "done")
    assert messages[8].content == "more"
    left = without_first(items, 5)
    assert [i.call_id for i in left if isinstance(i, FunctionCallOutputItem)] == ["2", "3"]
    with pytest.raises(ApiError, match=r"input\[0\].call_id: no function_call"):
        messages_of(items[6:7])


def test_reasoning_is_carried_where_it_is_asked_for(client: OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL,
        input="say: <think>Hmm</think>Yes",
        include=["reasoning.encrypted_content"],
        store=False,
        reasoning={"effort": "low", "summary": "auto"},
    )
    reasoning = answer.output[0]
    assert reasoning.type == "reasoning" and reasoning.encrypted_content == carried("Hmm")
    assert answer.reasoning is not None and answer.reasoning.effort == "low"


def test_a_budget_and_a_loop(client: OpenAI) -> None:
    def ask(text: str, **fields: Any) -> Any:
        return client.responses.create(model=MODEL, input=text, extra_body=fields)

    answer = ask("say: <think>Hmm</think>Yes", reasoning={"max_tokens": 1})
    assert answer.output[0].content[0].text == "H" and answer.output_text.endswith("Yes")
    assert answer.usage.output_tokens_details.reasoning_tokens == 1
    loop = {"max_pattern_size": 3, "min_count": 3}
    looped = ask("say: xyxyxyxyxyxyxy", repetition_detection=loop)
    assert looped.output_text == "xyxyxy" and looped.status == "incomplete"
    assert looped.incomplete_details.reason == "repetition_detected"


def test_truncation(client: OpenAI, server: SimServer) -> None:
    turns: list[Any] = [{"role": "user", "content": f"{n} " + "x" * 400} for n in range(6)]
    turns.append({"role": "user", "content": "say: still here"})
    long = post(server, {"input": turns})
    assert long.status == 400 and long.error["param"] == "input"
    assert long.error["code"] == "context_length_exceeded"
    answer = client.responses.create(model=MODEL, input=turns, truncation="auto")
    assert answer.output_text == "still here"
    kept = client.responses.input_items.list(answer.id, order="asc").data
    assert 1 < len(kept) < len(turns), "as few as possible went"
    alone = post(server, {"input": "x" * 4000, "truncation": "auto"})
    assert alone.status == 400, "the last item stays"


def test_input_tokens_are_those_of_the_prompt(client: OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": EVERYTHING, "tools": TOOLS, "instructions": "x"}
    count = client.responses.input_tokens.count(**fields)
    usage = client.responses.create(**fields).usage
    assert usage is not None and count.input_tokens == usage.input_tokens


# What clients send, and what cannot be done.

CODEX = {
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "say: ok"}],
            "id": None,
        },
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "include": [],
    "prompt_cache_key": "c6b1",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x": "y"},
}
AGENTS = {
    "input": [{"role": "user", "content": "say: ok"}],
    "include": ["reasoning.encrypted_content", "file_search_call.results"],
    "max_tool_calls": 3,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "medium", "summary": "detailed", "context": "auto"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "stream_options": {"include_obfuscation": False},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tools": [],
    "tool_choice": "auto",
    "top_p": 1,
    "truncation": "disabled",
    "user": "u",
    "background": False,
    "conversation": None,
    "prompt": None,
    "a_field_of_next_year": None,
}


@pytest.mark.parametrize("body", [CODEX, AGENTS], ids=["codex", "agents"])
def test_bodies_of_clients_are_taken(server: SimServer, body: dict[str, Any]) -> None:
    answer = post(server, body)
    assert answer.status == 200, answer.body
    assert answer.json["output"][0]["content"][0]["text"] == "ok"
    events = read_events(post(server, body | {"stream": True}).body)
    assert events[-1]["type"] == "response.completed"


def items(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"input": list(fields)}


USER = {"role": "user", "content": "hi"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "missing"),
    ({"input": 3}, "input", "a string or a list"),
    ({"input": []}, "input", "at least 1"),
    ({"input": {}}, "input", "a string or a list"),
    ({"messages": [USER]}, "messages", "send input"),
    ({"input": "x", "max_tokens": 3}, "max_tokens", "send max_output_tokens"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"input": "x", "max_output_tokens": 99999}, "max_output_tokens", "context length is 1024"),
    ({"input": "x", "background": True}, "background", "leave the field out"),
    ({"input": "x", "conversation": "c"}, "conversation", "previous_response_id"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "instructions and input"),
    ({"input": "x", "moderation": {"model": "m"}}, "moderation", "does not moderate"),
    ({"input": "x", "context_management": [{}]}, "context_management", "truncation"),
    ({"input": "x", "instructions": ["x"]}, "instructions", "a string"),
    ({"input": "x", "response_format": {}}, "response_format", "text.format"),
    ({"input": "x", "reasoning_effort": "low"}, "reasoning_effort", "reasoning.effort"),
    ({"input": "x", "reasoning": {"effort": "huge"}}, "reasoning.effort", "'high'"),
    ({"input": "x", "reasoning": "low"}, "reasoning", "an object"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
    ({"input": "x", "text": {"tone": "kind"}}, "text.tone", "leave it out"),
    ({"input": "x", "temperature": -1}, "temperature", "from 0 to 100"),
    ({"input": "x", "top_p": 0}, "top_p", "above 0"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "include"),
    ({"input": "x", "include": ["everything"]}, "include[0]", "one of"),
    ({"input": "x", "truncation": "some"}, "truncation", "'auto' or 'disabled'"),
    ({"input": "x", "store": "no"}, "store", "true or false"),
    ({"input": "x", "metadata": {"a": 1}}, "metadata[...]", "a string"),
    (
        {"input": "x", "tools": [{"vector_store_ids": ["v"], "type": "file_search"}]},
        "tools[0].type",
        "'file_search' is not supported",
    ),
    ({"input": "x", "tools": [{"type": "mcp", "server_label": "l"}]}, "tools[0].type", "'mcp'"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    (
        {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools[0].function",
        "beside its type",
    ),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
    (
        {"input": "x", "tools": TOOLS, "tool_choice": {"type": "web_search"}},
        "tool_choice",
        "the server skips tools that it cannot run",
    ),
    (
        {"input": "x", "tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}},
        "tool_choice",
        "nobody",
    ),
    (items({"role": "wizard", "content": "x"}), "input[0].role", "'user'"),
    (items({"role": "user"}), "input[0].content", "missing"),
    (items({"type": "web_search_call", "id": "w"}), "input[0].type", "'function_call'"),
    (
        items({"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}),
        "input[0].content[0].type",
        "'input_image' is not supported: this model takes text only; send parts of type "
        "'input_text'",
    ),
    (
        items({"role": "user", "content": [{"type": "text", "text": "u"}]}),
        "input[0].content[0].type",
        "'input_text'",
    ),
    (items({"type": "function_call", "name": "f"}), "input[0].call_id", "missing"),
    (
        items(USER, {"type": "function_call_output", "call_id": "c", "output": "x"}),
        "input[1].call_id",
        "no function_call before it",
    ),
    (
        items({"type": "function_call_output", "call_id": "c", "output": 3}),
        "input[0].output",
        "a string",
    ),
    (items({"type": "reasoning", "summary": "x"}), "input[0].summary", "a list"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
def test_wrong_bodies_are_named(
    server: SimServer, fields: dict[str, Any], param: str, says: str
) -> None:
    for more in ({}, {"stream": True}):
        answer = post(server, fields | more)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == param
        assert says in answer.error["message"] and param.split("[")[0] in answer.error["message"]


def test_what_is_not_there_is_a_404(server: SimServer) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    answers = [
        server.call("GET", "/v1/responses/resp_1", headers=headers),
        server.call("DELETE", "/v1/responses/resp_1", headers=headers),
        server.call("POST", "/v1/responses/resp_1/cancel", b"", headers),
        server.call("GET", "/v1/responses/resp_1/input_items", headers=headers),
        post(server, {"input": "x", "previous_response_id": "resp_1"}),
        post(server, items({"type": "item_reference", "id": "msg_1"})),
        post(server, items({"id": "msg_1"})),
        post(server, {"input": "x", "model": "another"}),
    ]
    assert [answer.status for answer in answers] == [404] * len(answers)
    assert [answer.error["param"] for answer in answers] == [
        *["response_id"] * 4,
        *["previous_response_id", "input[0].id", "input[0].id", "model"],
    ]
    assert server.call("GET", "/v1/responses/resp_1").status == 401


def test_wrong_queries(server: SimServer) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    stored = post(server, {"input": "say: x"}).json["id"]
    for query, param in (
        ("input_items?limit=0", "limit"),
        ("input_items?limit=x", "limit"),
        ("input_items?order=up", "order"),
        ("input_items?after=nobody", "after"),
        ("?stream=true", "stream"),
    ):
        path = f"/v1/responses/{stored}" + (query if query[0] == "?" else f"/{query}")
        answer = server.call("GET", path, headers=headers)
        assert (answer.status, answer.error["param"]) == (400, param)


# How a stream ends.


def test_a_late_stream_fails_in_one_event(server: SimServer) -> None:
    answer = post(server, {"input": "count: 900", "timeout": 0.2, "stream": True})
    events = read_events(answer.body)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["status"] == "failed" and "deadline" in response["error"]["message"]
    late = post(server, {"input": "count: 900", "timeout": 0.2})
    assert late.status == 408 and late.error["code"] == "deadline"


def test_a_client_that_goes_ends_its_request(server: SimServer) -> None:
    def num_aborted() -> float:
        return server.metric("request_failure_total", 'finished_reason="abort"')

    before = num_aborted()
    for stream in (True, False):
        call = {"model": MODEL, "input": "count: 900", "stream": stream}
        key = f"Authorization: Bearer {KEYS[0]}\r\n"
        with server.open_call("/v1/responses", call, key):
            wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
    wait_until(lambda: num_aborted() == before + 2, "both are aborted")
    wait_until(lambda: server.metric("num_requests_running") == 0, "nothing runs on")
