"""Anthropic's Messages API by the anthropic client: blocks, events, tools, thinking and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from api.sim import DEFAULT_TEXT, MODEL, make_tokenizer
from api.sim_server import Answer, SimServer, sim_server, wait_until
from tokenmill.core.config import SchedulerConfig, ServerConfig

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
KEY = "secret"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": name, "description": "d", "input_schema": SCHEMA} for name in ("weather", "time")
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
EVERYTHING = f"say: <think>Hmm, well.</think>Let me look. {CALL}"


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    config = ServerConfig(port=0, api_keys=(KEY,))
    with sim_server(config, SchedulerConfig(max_model_len=1024), step_ms=1.0) as running:
        yield running


@pytest.fixture
def client(server: SimServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as opened:
        yield opened


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def ask(client: Anthropic, content: Any, **fields: Any) -> Any:
    fields = {"max_tokens": 200, **fields}
    return client.messages.create(model=MODEL, messages=[user(content)], **fields)


def post(server: SimServer, fields: dict[str, Any], path: str = "/v1/messages") -> Answer:
    body = {"model": MODEL, "max_tokens": 200, "messages": [user("hi")], **fields}
    return server.call("POST", path, body, {"x-api-key": KEY, "anthropic-version": "2023-06-01"})


def error_of(answer: Answer) -> dict[str, str]:
    """The error, which must have Anthropic's shape."""
    body = answer.json
    assert set(body) == {"type", "error"} and body["type"] == "error", answer.body
    assert set(body["error"]) == {"type", "message"}
    error: dict[str, str] = body["error"]
    return error


def read_events(body: bytes) -> list[Any]:
    """The events of a stream, each checked against the client's own types."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, data = part.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENTS.validate_python(event)
        events.append(event)
    terminal = [e["type"] in ("message_stop", "error") for e in events]
    assert terminal == [False] * (len(events) - 1) + [True]
    return events


# One answer.


def test_a_whole_message(client: Anthropic) -> None:
    message = ask(
        client,
        "hello",
        system="be brief",
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )
    Message.model_validate(json.loads(message.to_json()))
    (block,) = message.content
    assert (block.type, block.text) == ("text", DEFAULT_TEXT)
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "end_turn",
        None,
    )
    assert message.id.startswith("msg_") and message.model == MODEL
    assert message.usage.output_tokens == len(make_tokenizer().encode(DEFAULT_TEXT)) + 1
    again = ask(client, "hello", system="be brief").usage
    assert again.cache_read_input_tokens > 0
    assert again.input_tokens + again.cache_read_input_tokens == message.usage.input_tokens


def test_the_events_come_in_order(server: SimServer) -> None:
    fields = {"messages": [user(EVERYTHING)], "tools": TOOLS}
    events = read_events(post(server, fields | {"stream": True}).body)
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert once == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    started = [e["content_block"]["type"] for e in events if e["type"] == block[0]]
    assert started == ["thinking", "text", "tool_use"]
    assert [e["index"] for e in events if e["type"] == block[2]] == [0, 1, 2]
    deltas = [e["delta"]["type"] for e in events if e["type"] == block[1]]
    assert list(dict.fromkeys(deltas)) == [
        *["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    ]
    whole = post(server, fields).json
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_the_stream_helper_understands_the_events(client: Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, tools=TOOLS, messages=[user(EVERYTHING)]
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Let me look."
    whole = ask(client, EVERYTHING, tools=TOOLS)
    for message in (final, whole):
        thinking, said, call = message.content
        assert thinking.type == "thinking" and thinking.thinking == "Hmm, well."
        assert thinking.signature
        assert said.type == "text" and said.text == "Let me look."
        assert call.type == "tool_use" and call.input == {"city": "Bern"}
        assert call.name == "weather" and call.id.startswith("toolu_")
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens > 0
    assert final.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_why_it_stopped(client: Anthropic, stream: bool) -> None:
    def stopped(content: str, **fields: Any) -> tuple[str, Any, Any]:
        fields = {"model": MODEL, "max_tokens": 100, "messages": [user(content)], **fields}
        if stream:
            with client.messages.stream(**fields) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**fields)
        text = "".join(block.text for block in message.content if block.type == "text")
        return text, message.stop_reason, message.stop_sequence

    assert stopped("hello") == (DEFAULT_TEXT, "end_turn", None)
    assert stopped("hello", stop_sequences=["never", "fox"]) == (
        "The quick brown ",
        "stop_sequence",
        "fox",
    )
    assert stopped("hello", max_tokens=2) == ("The quick", "max_tokens", None)
    longest = stopped("count: 2000", max_tokens=5000)
    assert longest[1:] == ("model_context_window_exceeded", None), "as long as the context"


def test_thinking(client: Anthropic) -> None:
    said = "say: <think>Hmm</think>Yes"
    enabled = ask(client, said, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in enabled.content] == ["thinking", "text"]
    hidden = ask(client, said, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert hidden.content[0].thinking == "" and hidden.content[1].text == "Yes"
    limited = ask(client, said, thinking={"type": "enabled", "budget_tokens": 1})
    assert (limited.content[0].thinking, limited.content[1].text[-3:]) == ("H", "Yes")
    assert limited.usage.output_tokens_details.thinking_tokens == 1
    off = ask(client, "say: Yes", thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"]


class City(BaseModel):
    city: str


def test_structured_output(client: Anthropic) -> None:
    parsed = client.messages.parse(
        model=MODEL, max_tokens=50, messages=[user('say: {"city": "Bern"}')], output_format=City
    )
    assert parsed.parsed_output == City(city="Bern")
    output_config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    forced = ask(client, "say: *", output_config=output_config, max_tokens=40)
    assert forced.content[0].text.startswith("{")


def test_tool_choice(client: Anthropic) -> None:
    calls = json.dumps([{"name": "time", "parameters": {"city": "Rome"}}])
    required = ask(client, f"say: {calls}", tools=TOOLS, tool_choice={"type": "any"})
    assert [block.name for block in required.content] == ["time"]
    named = ask(
        client, 'say: {"city": "Oslo"}', tools=TOOLS, tool_choice={"type": "tool", "name": "time"}
    )
    assert [(block.name, block.input) for block in named.content] == [("time", {"city": "Oslo"})]
    assert named.stop_reason == "tool_use"
    none = ask(client, f"say: {CALL}", tools=TOOLS, tool_choice={"type": "none"})
    assert none.content[0].text == CALL
    one = {"type": "auto", "disable_parallel_tool_use": True}
    single = ask(client, f"say: {CALL}{CALL}", tools=TOOLS, tool_choice=one)
    assert [block.type for block in single.content] == ["tool_use"]


# Several turns.


def test_a_tool_is_called_and_answered(client: Anthropic) -> None:
    first = ask(client, EVERYTHING, tools=TOOLS)
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": [{"type": "text", "text": "12 degrees", "cache_control": {"type": "ephemeral"}}],
    }
    messages: Any = [
        user([{"type": "text", "text": EVERYTHING}]),
        {"role": "assistant", "content": first.content},
        user([result, {"type": "text", "text": "say: It rains"}]),
    ]
    system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    fields: Any = {"model": MODEL, "system": system, "messages": messages, "tools": TOOLS}
    second = client.messages.create(max_tokens=50, **fields)
    assert second.content[0].text == "It rains"  # type: ignore[union-attr]
    usage = second.usage
    count = client.messages.count_tokens(**fields)
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_turn_of_the_assistant_is_continued(client: Anthropic) -> None:
    messages: Any = [user("hi"), {"role": "assistant", "content": "say: Hello"}]
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=messages)
    assert answer.content[0].text == "Hello"  # type: ignore[union-attr]


def test_turns_of_the_user_that_follow_each_other_are_one(client: Anthropic) -> None:
    twice = [user("one"), user([{"type": "text", "text": "two"}])]
    once = [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])]
    counts = [
        client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        for messages in (twice, once)
    ]
    assert counts[0] == counts[1]


# What clients send, and what cannot be done.


def test_both_headers_have_the_key(server: SimServer) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [user("hi")]}
    keys = [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"x-api-key": "no"}, {}]
    answers = [server.call("POST", "/v1/messages", body, headers) for headers in keys]
    assert [answer.status for answer in answers] == [200, 200, 401, 401]
    assert error_of(answers[2])["type"] == "authentication_error"
    assert server.call("GET", "/v1/models", headers={"x-api-key": KEY}).status == 200
    with Anthropic(base_url=server.url, auth_token=KEY, max_retries=0) as client:
        assert ask(client, "say: ok").content[0].text == "ok"


CLAUDE_CODE = {
    "system": [
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}
    ],
    "messages": [
        user([{"type": "text", "text": "say: ok", "cache_control": {"type": "ephemeral"}}])
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command",
            "input_schema": {"$schema": "x", "type": "object", "properties": {}},
            "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True,
        }
    ],
    "metadata": {"user_id": "u"},
    "max_tokens": 32_000,
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "temperature": 1,
    "service_tier": "auto",
    "container": None,
    "mcp_servers": [],
    "a_field_of_next_year": None,
}


def test_a_body_of_a_client_is_taken(server: SimServer) -> None:
    path = "/v1/messages?beta=true"
    answer = post(server, CLAUDE_CODE, path)
    assert answer.status == 200, answer.body
    assert answer.json["content"][0]["text"] == "ok"
    events = read_events(post(server, CLAUDE_CODE | {"stream": True}, path).body)
    assert events[-1]["type"] == "message_stop"


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: null is not valid; send a whole number of at least 1"),
    ({"max_tokens": 0}, "max_tokens: 0 is not valid"),
    ({"max_tokens": "many"}, "max_tokens: 'many'"),
    ({"messages": []}, "messages: [] is not valid"),
    ({"messages": "hi"}, "messages: 'hi'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: 'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: the field is missing"),
    ({"system": 3}, "system: 3"),
    ({"stop": "x"}, "stop: unknown or unsupported field; send stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences: 'x'"),
    ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0] has 1025 bytes, at most 1024 fit"),
    ({"temperature": 3}, "temperature: 3 is not valid; send a number from 0 to 2"),
    ({"top_p": 0}, "top_p: 0"),
    ({"top_k": "x"}, "top_k: 'x'"),
    ({"n": 2}, "n: unknown or unsupported field; send several calls"),
    ({"instructions": "x"}, "instructions: unknown or unsupported field; send system"),
    ({"response_format": {}}, "response_format: unknown or unsupported field; send output_config"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: the field is missing"),
    ({"thinking": {"type": "deep"}}, "thinking.type: 'deep'"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort: 'huge'"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: 'xml'"),
    ({"container": "c"}, "container: 'c' is not supported"),
    ({"mcp_servers": [{"url": "u"}]}, "mcp_servers:"),
    (
        {"tools": [{"max_uses": 3, "name": "web_search", "type": "web_search_20250305"}]},
        "tools[0].type: 'web_search_20250305' is not supported",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: the field is missing"),
    ({"tools": [{"name": "f", "parameters": {}}]}, "tools[0].parameters: unknown"),
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name: 'f g'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "all"}}, "tool_choice.type: 'all'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: the field is missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nobody"}}, "nobody"),
    ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice: 'auto'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools: two functions have the same name"),
    (
        blocks({"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}),
        "messages[0].content[0].type: 'image' is not supported: this model takes text only; send "
        "blocks of type 'text'",
    ),
    (blocks({"type": "image", "source": {"type": "file"}}), "messages[0].content[0].source.type"),
    (blocks({"type": "video", "source": {}}), "videos are not taken; send some of their frames"),
    (blocks({"type": "document", "source": {}}), "messages[0].content[0].type: 'document'"),
    (blocks({"type": "text"}), "messages[0].content[0].text: the field is missing"),
    (
        blocks({"type": "tool_result", "tool_use_id": "t", "content": "x"}),
        "messages[0].content[0].tool_use_id: no tool_use block before it has the id 't'",
    ),
    (
        blocks({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}, role="assistant"),
        "messages[0].content[0].input: '{}'",
    ),
    (
        blocks({"type": "tool_use", "id": "t", "name": "f", "input": {}}),
        "messages[0].content[0].type: 'tool_use'",
    ),
    ({"messages": [user("x" * 5000)]}, "context length is 1024 tokens"),
    ({"metadata": "u"}, "metadata: 'u'"),
]


@pytest.mark.parametrize(("fields", "says"), WRONG)
def test_wrong_bodies_are_named(server: SimServer, fields: dict[str, Any], says: str) -> None:
    for more in ({}, {"stream": True}):
        answer = post(server, fields | more)
        assert answer.status == 400, answer.body
        error = error_of(answer)
        assert error["type"] == "invalid_request_error" and says in error["message"]


def test_errors_have_anthropics_shape(client: Anthropic, server: SimServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="the model 'other' does not exist"):
        client.messages.create(model="other", max_tokens=5, messages=[user("hi")])
    body = {"messages": [user("hi")], "max_tokens": 5}
    missing = server.call("POST", "/v1/messages", body, {"x-api-key": KEY})
    assert missing.status == 400 and "model: the field is missing" in error_of(missing)["message"]
    broken = server.call("POST", "/v1/messages", b"{", {"x-api-key": KEY})
    assert broken.status == 400 and "not valid JSON" in error_of(broken)["message"]
    assert error_of(server.call("GET", "/v1/messages", headers={"x-api-key": KEY}))
    crash = post(server, {"messages": [user("crash: now")]})
    assert crash.status == 500 and error_of(crash)["type"] == "api_error"


# How a stream ends.


def test_a_late_stream_ends_in_one_error(client: Anthropic, server: SimServer) -> None:
    fields = {"messages": [user("count: 900")], "timeout": 0.2, "max_tokens": 900}
    events = read_events(post(server, fields | {"stream": True}).body)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "timeout_error"
    with (
        pytest.raises(anthropic.APIStatusError, match="deadline"),
        client.messages.stream(
            model=MODEL,
            max_tokens=900,
            messages=[user("count: 900")],
            extra_body={"timeout": 0.2},
        ) as stream,
    ):
        stream.until_done()


def test_a_client_that_goes_ends_its_request(server: SimServer) -> None:
    def num_aborted() -> float:
        return server.metric("request_failure_total", 'finished_reason="abort"')

    before = num_aborted()
    for stream in (True, False):
        call = {"model": MODEL, "max_tokens": 900, "messages": [user("count: 900")]}
        with server.open_call("/v1/messages", call | {"stream": stream}, f"x-api-key: {KEY}\r\n"):
            wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
    wait_until(lambda: num_aborted() == before + 2, "both are aborted")
    calls = server.metric("requests_total", 'endpoint="/v1/messages"')
    assert calls > 0, "counted by endpoint"
