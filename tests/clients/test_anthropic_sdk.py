"""Anthropic's SDK: its tool runner begins a thread and goes on without one."""

from __future__ import annotations

from anthropic import Anthropic, beta_tool

from api.sim import MODEL
from api.sim_server import SimServer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@beta_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"say: It rains in {city}"


def test_the_tool_runner_falls_back_from_threads(anthropic: Anthropic) -> None:
    runner = anthropic.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        tools=[weather],
        messages=[{"role": "user", "content": f"say: {CALL}"}],
    )
    texts = [block.text for message in runner for block in message.content if block.type == "text"]
    assert texts == ["It rains in Bern"]


def test_a_thread_is_refused_with_the_code_that_clients_read(server: SimServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "max_tokens": 9, "messages": messages, "thread": {"type": "create"}}
    answer = server.call("POST", "/v1/messages?beta=true", body)
    assert answer.status == 400 and answer.json["type"] == "error"
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error" and "thread" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert server.call("POST", "/v1/messages", body | {"thread": None}).status == 200


def test_text_blocks_have_no_citations_that_are_null(server: SimServer) -> None:
    messages = [{"role": "user", "content": "say: hi"}]
    body = {"model": MODEL, "max_tokens": 9, "messages": messages}
    (block,) = server.call("POST", "/v1/messages", body).json["content"]
    assert block == {"type": "text", "text": "hi"}
    assert b"citations" not in server.call("POST", "/v1/messages", body | {"stream": True}).body
