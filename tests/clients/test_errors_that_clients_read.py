"""Clients act on the words of some errors: a prompt that is too long, a route of another server."""

from __future__ import annotations

import re
from typing import Any

import anthropic as anthropic_sdk
import openai as openai_sdk
import pytest
from anthropic import Anthropic
from openai import OpenAI

from api.sim import MODEL
from api.sim_server import SimServer

# By which words each recognises a prompt that is too long.
WORDS = {
    "LiteLLM 1.109.1, exception_mapping_utils.py": r"this model's maximum context length is",
    "langchain-openai 1.7.4, chat_models/base.py": r"prompt is too long",
    "inspect-ai 0.3.285, _litellm_proxy_errors.py": r"maximum context length",
    "inspect-ai 0.3.285, anthropic.py": r"prompt is too long",
    "Claude Code 2": r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
}
LONG = "x y " * 4600
USER: Any = [{"role": "user", "content": LONG}]
SAID = re.compile(
    r"This model's maximum context length is 8192 tokens; "
    r"the prompt is too long: (\d+) tokens > 8192 maximum"
)


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_prompt_that_is_too_long_is_recognised(
    openai: OpenAI, anthropic: Anthropic, words: str
) -> None:
    with pytest.raises(openai_sdk.BadRequestError) as chat:
        openai.chat.completions.create(model=MODEL, messages=USER)
    with pytest.raises(openai_sdk.BadRequestError) as response:
        openai.responses.create(model=MODEL, input=LONG)
    with pytest.raises(anthropic_sdk.BadRequestError) as message:
        anthropic.messages.create(model=MODEL, max_tokens=9, messages=USER)
    for caught in (chat.value, response.value, message.value):
        assert re.search(words, str(caught), re.IGNORECASE)
        found = SAID.search(str(caught))
        assert found is not None and int(found[1]) > 8192
    assert chat.value.code == response.value.code == "context_length_exceeded"


def test_a_prompt_that_leaves_no_token_for_an_answer(server: SimServer) -> None:
    error = server.complete([5] * 8192).error
    assert error["message"].endswith("the prompt is too long: 8192 tokens > 8191 maximum")
    asked = server.complete([5] * 10, max_tokens=8192).error
    assert asked["code"] == "context_length_exceeded" and asked["param"] == "max_tokens"
    assert "This model's maximum context length is 8192 tokens" in asked["message"]


@pytest.mark.parametrize(
    ("method", "path", "same"),
    [
        ("POST", "/api/chat", "POST /v1/chat/completions"),
        ("POST", "/api/generate", "POST /v1/completions"),
        ("GET", "/api/tags", "GET /v1/models"),
        ("POST", "/completion", "POST /v1/completions"),
        ("POST", "/chat/completions", "POST /v1/chat/completions"),
        ("POST", "/responses", "POST /v1/responses"),
        ("POST", "/messages", "POST /v1/messages"),
        ("GET", "/models", "GET /v1/models"),
        ("POST", "/api/embed", "GET /"),
    ],
)
def test_a_route_of_another_server(server: SimServer, method: str, path: str, same: str) -> None:
    error = server.call(method, path, {"model": MODEL}).error
    assert error["code"] == "unknown_route" and f"; {same} " in error["message"]
