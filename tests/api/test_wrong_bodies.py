"""Bodies that cannot be answered: each error names the field, its value and what to send."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from api.sim import MODEL
from api.sim_server import SimServer, sim_server

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    with sim_server() as running:
        yield running


def user(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi", **fields}]


CHAT = [
    ({"nonsense": 1}, "nonsense", "leave it out"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"beam_width": 4}, "beam_width", "leave it out"),
    ({"max_new_tokens": 4}, "max_new_tokens", "send max_tokens"),
    ({"enable_thinking": False}, "enable_thinking", "chat_template_kwargs"),
    ({"extra_body": {"top_k": 1}}, "extra_body", "top level"),
    ({"prompt": "x"}, "prompt", "/v1/completions"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": {"name": "f"}}, "function_call", "use tools"),
    ({"audio": {"voice": "alloy"}}, "audio", "text only"),
    ({"modalities": ["audio"]}, "modalities[0]", "'text'"),
    ({"web_search_options": {}}, "web_search_options", "cannot search the web"),
    ({"use_beam_search": True}, "use_beam_search", "several answers by n"),
    ({"chat_template": "{{ x }}"}, "chat_template", "--client-chat-templates"),
    ({"logprob_token_ids": [3]}, "logprob_token_ids", "top_logprobs"),
    ({"bad_words": [""]}, "bad_words[0]", "a string"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids", "not in the vocabulary"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "send a grammar",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "additionalProperties false",
    ),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "a regex",
    ),
    ({"logits_processors": ["x"]}, "logits_processors", "logit_bias"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "one of 'high', 'low', 'max', 'medium'"),
    ({"verbosity": 3}, "verbosity", "one of 'high', 'low', 'medium'"),
    ({"store": "yes"}, "store", "true or false"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "leave it out"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream to be true"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "role 'tool'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "a string or a list"),
    ({"messages": user(content=3)}, "messages[0].content", "a string or a list"),
    ({"messages": user(images=["x"])}, "messages[0].images", "'image_url' in content"),
    (
        {"messages": user(content=[{"type": "text", "text": "x"}, IMAGE])},
        "messages[0].content[1].type",
        "'image_url' is not supported: this model takes text only; send parts of type 'text'",
    ),
    (
        {"messages": user(content=[{"type": "input_audio", "input_audio": {}}])},
        "messages[0].content[0].type",
        "audio is not heard here; send its text",
    ),
    (
        {"messages": user(content=[{"type": "text"}])},
        "messages[0].content[0].text",
        "the field is missing; send a string",
    ),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
        "send tool_calls",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "prefix": True}]},
        "messages[0].prefix",
        "continue_final_message",
    ),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "the field is missing; send a string",
    ),
    (
        {"priority": -1},
        "priority",
        "takes none from clients; leave it out, or start",
    ),
    ({"temperature": -0.1}, "temperature", "-0.1 is not valid; send a number from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "'hot' is not valid; send a number from 0 to 100"),
    ({"top_p": 0}, "top_p", "a number above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p", "a number above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "a whole number of at least -1"),
    ({"min_p": 2}, "min_p", "a number from 0 to 1"),
    ({"n": 0}, "n", "a whole number from 1 to 128"),
    ({"n": 1.5}, "n", "a whole number from 1 to 128"),
    ({"n": 1000}, "n", "a whole number from 1 to 128"),
    ({"seed": 2**64}, "seed", "a whole number"),
    ({"presence_penalty": 3}, "presence_penalty", "a number from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "a number from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "a number above 0"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]", "101 is not valid; send a number from -100"),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "not in the vocabulary"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "send stream false"),
    ({"max_tokens": 0}, "max_tokens", "a whole number of at least 1"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens", "a whole number"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "must not exceed max_tokens"),
    ({"stop": [""]}, "stop", "must not be empty"),
    ({"stop": 1}, "stop", "a string or a list"),
    ({"stop": "x" * 60_000}, "stop", "stop[0] has 60000 bytes, at most 1024 fit"),
    ({"stop": ["x", "é" * 513]}, "stop", "stop[1] has 1026 bytes"),
    ({"stop": ["x" * 1000] * 5}, "stop", "5000 bytes in all, at most 4096 fit"),
    ({"stop_token_ids": [100000]}, "stop_token_ids", "not in the vocabulary"),
    ({"timeout": 0}, "timeout", "a number above 0"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "send 'required'"),
    (
        {"tools": [TOOL], "tool_choice": "always"},
        "tool_choice",
        "one of 'auto', 'none', 'required'",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "send one of 'f'",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "web_search"}},
        "tool_choice.type",
        "'function' or 'allowed_tools'",
    ),
    ({"tools": [TOOL, TOOL]}, "tools", "a name of its own"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "tools of type 'function'"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].name", "inside 'function'"),
    ({"include_usage": True}, "include_usage", "send it inside 'stream_options'"),
    (
        {"response_format": {"type": "text", "schema": {}}},
        "response_format.schema",
        "send type 'json_schema'",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "an object with 'name'"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "letters, digits",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'text', 'json_object'"),
    ({"response_format": "json"}, "response_format", "an object whose 'type' is"),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "an object with 'schema'",
    ),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "exclude each other"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one field"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "exactly one field",
    ),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not set messages"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "exclude each other",
    ),
    ({"suffix": "x"}, "suffix", "leave the field out"),
    ({"best_of": 2}, "best_of", "leave it out"),
]
COMPLETIONS = [
    ({"suffix": "x"}, "suffix", "leave the field out"),
    ({"best_of": 2}, "best_of", "equals n"),
    ({"messages": USER}, "messages", "/v1/chat/completions"),
    ({"prompt": []}, "prompt", "at least 1"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": [1, "a"]}, "prompt", "not a mixture"),
    ({"prompt": [[1], "a"]}, "prompt", "not a mixture"),
    ({"prompt": [-1]}, "prompt[0]", "a whole number of at least 0"),
    ({"prompt": [100000]}, "prompt", "not in the vocabulary"),
    ({"prompt": None}, "prompt", "a string or a list"),
    ({"logprobs": True}, "logprobs", "a whole number from 0 to 20"),
    ({"max_tokens": 0}, "max_tokens", "at least 1 without echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "send stream false"),
]


@pytest.mark.parametrize(("fields", "param", "way_out"), CHAT)
def test_chat(server: SimServer, fields: dict[str, Any], param: str, way_out: str) -> None:
    body = {"model": MODEL, "messages": USER, **fields}
    check(server, "/v1/chat/completions", body, param, way_out)


@pytest.mark.parametrize(("fields", "param", "way_out"), COMPLETIONS)
def test_completions(server: SimServer, fields: dict[str, Any], param: str, way_out: str) -> None:
    body = {"model": MODEL, "prompt": "hi", **fields}
    check(server, "/v1/completions", body, param, way_out)


def test_a_body_that_is_no_object(server: SimServer) -> None:
    for body, way_out in ((b"", "is empty"), (b"[]", "a JSON object"), (b"{", "not valid JSON")):
        answer = server.call("POST", "/v1/chat/completions", body)
        assert answer.status == 400 and way_out in answer.error["message"]


def check(server: SimServer, path: str, body: dict[str, Any], param: str, way_out: str) -> None:
    answer = server.call("POST", path, body)
    assert answer.status == 400, answer.body
    message = answer.error["message"]
    assert answer.error["param"] == param, message
    assert param.rpartition(".")[2].split("[")[0] in message
    assert way_out in message
    assert "`" not in message, "msgspec's own words"
