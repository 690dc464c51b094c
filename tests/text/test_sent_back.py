"""Whatever the server answers can be sent back, with templates of every kind."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest

from api.sim import TEMPLATE, make_tokenizer
from tiny_tokenizers import HERMES_TEMPLATE
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import ChatCompletionRequest
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import InvalidRequestError
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.parsers import FoundCallDelta, HermesParser
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.workers.messages import ModelFacts

# As Qwen3's first one: it tests the reasoning for null, and searches the content.
SEARCHES = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{% if m.role == 'assistant' %}
{% if m.reasoning_content is defined and m.reasoning_content is not none %}{{ m.reasoning_content }}
{% elif '</think>' in m.content %}{{ m.content.split('</think>')[0] }}{% endif %}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
# The same, and it tests the content of some messages for null.
BOTH = SEARCHES + "{% if messages[0].content is none %}nothing{% endif %}"
# As Mistral's: ids of nine characters.
NINE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{% if m.tool_calls is defined %}{% for call in m.tool_calls %}
{% if call.id is not defined or call.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}
({{ call.id }}){% endfor %}
{% elif m.role == 'tool' %}
{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}
{{ raise_exception('nine!') }}{% endif %}({{ m.tool_call_id }}){{ m.content }}
{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"""
# As Gemma's: no system role, and users and models take turns.
TURNS = """{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns!') }}{% endif %}
[{{ m.role }}]{{ m.content | trim }}{% endfor %}"""
TEMPLATES = {
    "chatml": TEMPLATE,
    "hermes": HERMES_TEMPLATE,
    "searches": SEARCHES,
    "both": BOTH,
    "nine": NINE,
    "turns": TURNS,
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ARGUMENTS = ('{"n": 1}', "{}", '{"n": ')  # the last one was cut off


def prompt(source: str, messages: list[dict[str, Any]], tools: Any) -> str:
    known = make_tokenizer()
    tokenizer = Tokenizer(
        known._backend,
        named_tokens={},
        eos_token_ids=known.eos_token_ids,
        chat_templates={"default": ChatTemplate(source, "test")},
    )
    facts = ModelFacts(4096, tokenizer.vocab_size, 1, 16, "none")
    call = msgspec.convert({"messages": messages, "tools": tools}, ChatCompletionRequest)
    return Preparer(tokenizer, lambda: facts, ServerConfig()).render(
        call.messages, tools or [], None, None, None
    )


def call_ids(count: int) -> list[str]:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * count
    parser = HermesParser(["f"])
    events = [*parser.push(text), *parser.finish()]
    return [e.id for e in events if isinstance(e, FoundCallDelta) and e.id is not None]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_server_answers_can_be_sent_back(name: str) -> None:
    user = {"role": "user", "content": "hi"}
    for content, reasoning, count, arguments in product(
        (None, "", "so"), (None, "hm"), range(3), ARGUMENTS
    ):
        ids = call_ids(count)
        calls = [
            {"id": i, "type": "function", "function": {"name": "f", "arguments": arguments}}
            for i in ids
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        answer |= {"reasoning_content": reasoning} if reasoning else {}
        answer |= {"tool_calls": calls} if calls else {}
        results = [{"role": "tool", "tool_call_id": i, "content": f"is {i}"} for i in ids]
        if content is None and not calls:
            continue
        after = results or [user]
        told = prompt(TEMPLATES[name], [user, answer, *after], TOOLS)
        assert "hi" in told and all(message["content"] in told for message in after)


def test_calls_and_their_results_keep_the_same_short_id() -> None:
    (call_id,) = call_ids(1)
    function = {"name": "f", "arguments": "{}"}

    def sent(call_id: str) -> str:
        calls = [{"id": call_id, "type": "function", "function": function}]
        result = {"role": "tool", "tool_call_id": call_id, "content": "one"}
        answer = {"role": "assistant", "content": None, "tool_calls": calls}
        return prompt(NINE, [{"role": "user", "content": "hi"}, answer, result], TOOLS)

    found = sent(call_id).replace("\n", "").split("(")[1:]
    assert found[0].split(")")[0] == found[1].split(")")[0] and len(found[0]) == 10
    assert "(abc123XYZ)" in sent("abc123XYZ")


def test_a_system_prompt_that_a_template_refuses_stays_refused_without_tools() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        prompt(TURNS, messages, None)
