"""The first calls of agents and chat pages, with the fields that they send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.sim import MODEL
from api.sim_server import SimServer

Json = dict[str, Any]

EPHEMERAL = {"type": "ephemeral"}
BASH = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command to execute"},
        "timeout": {"type": "number", "description": "Optional timeout in milliseconds"},
        "run_in_background": {"type": "boolean"},
    },
    "required": ["command"],
    "additionalProperties": False,
    "$schema": "http://json-schema.org/draft-07/schema#",
}
PLAN = {
    "type": "object",
    "properties": {
        "explanation": {"type": "string"},
        "plan": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                "required": ["step", "status"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["plan"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"command": "ls"}}\n</tool_call>'

# codex-rs/core/src/client.rs builds it; a provider that is not OpenAI's gets no stream_options.
CODEX: Json = {
    "model": MODEL,
    "instructions": "You are Codex, a coding agent running in a terminal.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": f"say: {CALL % 'shell_command'}"}],
        },
    ],
    "tools": [
        {"type": "function", "name": "shell_command", "strict": False, "parameters": BASH},
        {"type": "function", "name": "update_plan", "strict": False, "parameters": PLAN},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edits files",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
        },
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "Tools in the mcp__docs namespace.",
            "tools": [
                {
                    "type": "function",
                    "name": "search",
                    "description": "Finds pages",
                    "strict": False,
                    "defer_loading": False,
                    "parameters": {"type": "object", "properties": {}},
                }
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "7d"},
}
CLAUDE_CODE: Json = {
    "model": MODEL,
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                {
                    "type": "text",
                    "text": f"say: {CALL % 'Bash'}",
                    "cache_control": EPHEMERAL | {"ttl": "1h"},
                },
            ],
        }
    ],
    "tools": [{"name": "Bash", "description": "Runs a command", "input_schema": BASH}],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}
# Through @ai-sdk/openai-compatible.
OPENCODE: Json = {
    "model": MODEL,
    "max_tokens": 4096,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": "You are opencode, an interactive CLI agent."},
        {"role": "user", "content": f"say: {CALL % 'bash'}"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": BASH}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPEN_WEBUI: Json = {
    "stream": True,
    "model": MODEL,
    "messages": [{"role": "user", "content": "say: hello"}],
    "stream_options": {"include_usage": True},
}
TITLE: Json = {
    "model": MODEL,
    "messages": [{"role": "user", "content": 'say: {"title": "Hi"}'}],
    "stream": False,
    "max_completion_tokens": 1000,
}


def events_of(body: bytes) -> list[Json]:
    lines = [line for line in body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_codex_calls_a_tool_and_hands_its_items_back(server: SimServer) -> None:
    answer = server.call("POST", "/v1/responses", CODEX)
    assert answer.status == 200, answer.body
    events = events_of(answer.body)
    assert events[-1]["type"] == "response.completed"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    (call,) = items
    assert (call["type"], call["name"]) == ("function_call", "shell_command")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "say: done"}
    second = CODEX | {"input": [*CODEX["input"], call, result]}
    done = events_of(server.call("POST", "/v1/responses", second).body)[-1]["response"]
    assert done["output"][0]["content"][0]["text"] == "done"


def test_claude_code_counts_calls_a_tool_and_answers_its_result(server: SimServer) -> None:
    path, beta = "/v1/messages?beta=true", {"anthropic-beta": "claude-code-20250219"}
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "tools")}
    count = server.call("POST", "/v1/messages/count_tokens?beta=true", counted, beta)
    assert count.status == 200 and count.json["input_tokens"] > 0
    answer = server.call("POST", path, CLAUDE_CODE, beta)
    assert answer.status == 200, answer.body
    events = events_of(answer.body)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    (block,) = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert (block["type"], block["name"]) == ("tool_use", "Bash")
    texts = [e["delta"].get("partial_json", "") for e in events if e["type"].endswith("_delta")]
    assert json.loads("".join(texts)) == {"command": "ls"}
    use = {"type": "tool_use", "id": block["id"], "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "say: done"}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    second = CLAUDE_CODE | {"messages": [*CLAUDE_CODE["messages"], *turns], "stream": False}
    said = server.call("POST", path, second, beta)
    assert said.json["content"] == [{"type": "text", "text": "done"}], said.body


def test_opencode_joins_a_streamed_call(server: SimServer) -> None:
    answer = server.call("POST", "/v1/chat/completions", OPENCODE)
    assert answer.status == 200, answer.body
    events = events_of(answer.body)
    assert events[-1]["usage"]["completion_tokens"] > 0 and events[-1]["choices"] == []
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "bash" and calls[0]["id"]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"command": "ls"}


def test_open_webui_lists_models_chats_and_asks_for_a_title(server: SimServer) -> None:
    (model,) = server.call("GET", "/v1/models").json["data"]
    assert model["id"] == MODEL and model["object"] == "model"
    chat = server.call("POST", "/v1/chat/completions", OPEN_WEBUI)
    deltas = [e["choices"][0]["delta"] for e in events_of(chat.body) if e["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "hello"
    title = server.call("POST", "/v1/chat/completions", TITLE).json["choices"][0]["message"]
    assert json.loads(title["content"]) == {"title": "Hi"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_agents_look_whether_the_server_is_there(server: SimServer, method: str) -> None:
    assert server.call(method, "/").status == 200
