"""What tools make of a call; constraints are checked by xgrammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from api.sim import make_tokenizer
from tokenmill.api.protocol.prepare import Preparer
from tokenmill.api.protocol.requests import ChatCompletionRequest
from tokenmill.api.protocol.tools import ToolUse, plan_tool_use
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import InvalidRequestError, StructuredOutput
from tokenmill.engine.sampling.free_text import GrammarError
from tokenmill.engine.sampling.grammar import GrammarCompiler
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.output_style import resolve_style
from tokenmill.text.parsers import HermesParser, Llama3JsonParser
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.workers.messages import ModelFacts

PLAIN_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LLAMA_TEMPLATE = "{{ tools }} <|python_tag|>"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
HERMES_CALL = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'


def call(**fields: Any) -> ChatCompletionRequest:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    base = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    return msgspec.convert(base | fields, ChatCompletionRequest)


def plan(request: ChatCompletionRequest, template: str | None, style: str) -> ToolUse | None:
    templates = {} if template is None else {"default": ChatTemplate(template, "test")}
    known = make_tokenizer()
    tokenizer = Tokenizer(
        known._backend,
        named_tokens={},
        eos_token_ids=known.eos_token_ids,
        chat_templates=templates,
    )
    return plan_tool_use(request, resolve_style(tokenizer, style, "auto"), tokenizer)


def accepts(structured: StructuredOutput, text: str) -> bool:
    """Whether the grammar allows the text, to its end."""
    tokenizer = make_tokenizer()
    matcher = GrammarCompiler(tokenizer.grammar_vocab()).compile(structured).matcher()
    try:
        for token in [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]:
            matcher.accept(token)
    except GrammarError:
        return False
    return True


def test_strict_tools_constrain_calls_and_nothing_else() -> None:
    use = plan(call(), None, "auto")
    assert use is not None and use.structured is not None
    assert accepts(use.structured, "No call at all.")
    assert accepts(use.structured, "First. " + HERMES_CALL.format('{"n": 1}'))
    assert not accepts(use.structured, HERMES_CALL.format('{"n": "one"}'))
    assert not accepts(use.structured, HERMES_CALL.format("{}").replace('"f"', '"g"'))


def test_required_and_named_calls_follow_the_schema() -> None:
    required = plan(call(tool_choice="required"), None, "auto")
    assert required is not None and required.structured is not None
    assert accepts(required.structured, '[{"name": "f", "parameters": {"n": 1}}]')
    assert not accepts(required.structured, '[{"name": "f", "parameters": {}}]')
    choice = {"type": "function", "function": {"name": "f"}}
    named = plan(call(tool_choice=choice), None, "none")
    assert named is not None and named.structured is not None
    assert accepts(named.structured, '{"n": 1}') and not accepts(named.structured, "{}")


def test_the_parser_follows_the_template_and_the_setting() -> None:
    loose = call(tools=[{"type": "function", "function": {"name": "f"}}])
    styles = [
        (PLAIN_TEMPLATE, "auto", HermesParser),
        (LLAMA_TEMPLATE, "auto", Llama3JsonParser),
        (LLAMA_TEMPLATE, "hermes", HermesParser),
    ]
    for template, style, parser in styles:
        use = plan(loose, template, style)
        assert use is not None and use.structured is None
        assert use.parser is not None and type(use.parser()) is parser
    for template, style in ((PLAIN_TEMPLATE, "none"), ("{{ tools }} in some new way", "auto")):
        with pytest.raises(InvalidRequestError, match="--tool-parser") as caught:
            plan(loose, template, style)
        assert caught.value.param == "tool_choice"
    with pytest.raises(InvalidRequestError, match="strict"):
        plan(call(), LLAMA_TEMPLATE, "auto")


def test_tools_take_the_template_that_is_named_for_them() -> None:
    known, source = make_tokenizer(), '{{ tools | length }} tools, "arguments": <tool_call>'
    sources = {"default": PLAIN_TEMPLATE, "tool_use": source}
    templates = {name: ChatTemplate(text, "test") for name, text in sources.items()}
    tokenizer = Tokenizer(
        known._backend, named_tokens={}, eos_token_ids=known.eos_token_ids, chat_templates=templates
    )
    facts = ModelFacts(4096, tokenizer.vocab_size, 1, 16, "none")
    preparer = Preparer(tokenizer, lambda: facts, ServerConfig())
    (answered,) = asyncio.run(preparer.chat(call())).prompts
    assert answered.text == '1 tools, "arguments": <tool_call>'
    (answered,) = asyncio.run(preparer.chat(call(tools=None))).prompts
    assert answered.text == "[user]hi"
    assert resolve_style(tokenizer, "auto", "auto").tools == "hermes"


def test_tools_reach_a_template_without_a_place_for_them() -> None:
    known = make_tokenizer()
    tokenizer = Tokenizer(
        known._backend,
        named_tokens={},
        eos_token_ids=known.eos_token_ids,
        chat_templates={"default": ChatTemplate(PLAIN_TEMPLATE, "test")},
    )
    facts = ModelFacts(4096, tokenizer.vocab_size, 1, 16, "none")
    arguments = '{"n": 2}'
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    preparer = Preparer(tokenizer, lambda: facts, ServerConfig())
    text = asyncio.run(preparer.chat(call(messages=messages))).prompts[0].text
    system, user = text.split("[user]", 1)
    assert system.startswith("[system]Be brief.") and "<tools>" in system
    assert json.dumps(SCHEMA) in system and "strict" not in system
    assert user == (
        f"hi[assistant]{HERMES_CALL.format(arguments)}[user]<tool_response>\n4\n</tool_response>"
    )
    alone = asyncio.run(preparer.chat(call())).prompts[0].text
    assert alone.startswith("[system]You may call functions")
    none = asyncio.run(preparer.chat(call(tool_choice="none"))).prompts[0].text
    assert none == "[user]hi"
    messages[2]["tool_calls"][0]["function"]["arguments"] = "{"  # type: ignore[index]
    cut = asyncio.run(preparer.chat(call(messages=messages))).prompts[0].text
    assert HERMES_CALL.format("{") in cut
