"""Codex: namespaces of functions, and tools that the server cannot run."""

from __future__ import annotations

import json
from typing import IO, Any

import pytest
from openai import OpenAI

from api.sim import MODEL
from api.sim_server import SimServer, sim_server
from tokenmill.core.config import ServerConfig

PARAMETERS = {"type": "object", "properties": {"title": {"type": "string"}}}
ISSUE = {"type": "function", "name": "create_issue", "strict": False, "parameters": PARAMETERS}
SHELL = {"type": "function", "name": "shell", "strict": False, "parameters": PARAMETERS}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
}
GITHUB = {
    "type": "namespace",
    "name": "mcp__github",
    "description": "Issues of a repository.",
    "tools": [{**ISSUE, "description": "Opens an issue"}, {**PATCH, "name": "edit"}],
}
TOOLS: Any = [
    SHELL,
    GITHUB,
    {"type": "namespace", "name": "functions", "tools": [{**ISSUE, "name": "plan"}]},
    PATCH,
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "x", "parameters": PARAMETERS},
]


def call_of(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"title": "t"}}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("called", "namespace", "name"),
    [
        ("mcp__github__create_issue", "mcp__github", "create_issue"),
        ("plan", None, "plan"),
        ("shell", None, "shell"),
    ],
)
def test_a_call_names_the_namespace_of_its_function(
    openai: OpenAI, called: str, namespace: str | None, name: str
) -> None:
    asked: Any = [{"role": "user", "content": f"say: {call_of(called)}"}]
    with openai.responses.stream(model=MODEL, input=asked, tools=TOOLS) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == (namespace, name)
    assert json.loads(call.arguments) == {"title": "t"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "say: done"}
    history = [*asked, call.model_dump(exclude={"parsed_arguments"}), result]
    counted = openai.responses.input_tokens.count(model=MODEL, input=history[:-1], tools=TOOLS)
    answer = openai.responses.create(model=MODEL, input=history, tools=TOOLS)
    assert answer.output_text == "done"
    flat = {**history[1], "name": called, "namespace": None}
    same = openai.responses.input_tokens.count(model=MODEL, input=[asked[0], flat], tools=TOOLS)
    assert counted.input_tokens == same.input_tokens, "the model sees the name that it called"


def test_the_model_sees_the_functions_alone(server: SimServer, openai: OpenAI) -> None:
    flat = [
        SHELL,
        ISSUE
        | {
            "name": "mcp__github__create_issue",
            "description": "Issues of a repository.\n\nOpens an issue",
        },
        {**ISSUE, "name": "plan"},
    ]
    body = {"model": MODEL, "input": "say: ok"}
    counts = [
        server.call("POST", "/v1/responses/input_tokens", body | {"tools": tools}).json
        for tools in (TOOLS, flat)
    ]
    assert counts[0] == counts[1]
    answer = server.call("POST", "/v1/responses", body | {"tools": TOOLS}).json
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace", "namespace"]
    assert [tool["name"] for tool in answer["tools"][1]["tools"]] == ["create_issue"]
    only = {"tools": [PATCH], "tool_choice": "auto"}
    assert server.call("POST", "/v1/responses", body | only).status == 200


@pytest.mark.parametrize("name", ["create_issue", "mcp__github__create_issue"])
def test_a_function_of_a_namespace_is_forced(server: SimServer, name: str) -> None:
    one = {"type": "function", "name": name}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [one]}
    for choice, said in ((one, '{"title": "t"}'), (allowed, f"[{call_of('x')}]")):
        body = {"model": MODEL, "input": f"say: {said}", "tools": TOOLS, "tool_choice": choice}
        (call,) = server.call("POST", "/v1/responses", body | {"max_output_tokens": 90}).json[
            "output"
        ]
        assert (call["namespace"], call["name"]) == ("mcp__github", "create_issue")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "apply_patch"},
        {"type": "function", "name": "edit"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "local_shell"}]},
    ],
)
def test_a_choice_of_a_skipped_tool_is_refused(server: SimServer, choice: dict[str, Any]) -> None:
    body = {"model": MODEL, "input": "x", "tools": TOOLS, "tool_choice": choice}
    error = server.call("POST", "/v1/responses", body).error
    assert error["param"] == "tool_choice" and error["code"] == "unsupported_value"
    assert "skips tools that it cannot run" in error["message"]


def test_the_log_says_once_what_is_skipped(tmp_path: Any) -> None:
    with (tmp_path / "log").open("w+") as log, sim_server(ServerConfig(port=0), log=log) as server:
        for _ in range(3):
            body = {"model": MODEL, "input": "say: ok", "tools": TOOLS}
            assert server.call("POST", "/v1/responses", body).status == 200
        _read_once(log)


def _read_once(log: IO[str]) -> None:
    log.seek(0)
    text = log.read()
    for kind in ("custom", "web_search", "local_shell", "tool_search"):
        assert text.count(f"tools[] of type {kind!r}") == 1
