"""A tiny tokenizer with the special tokens and the chat format of GPT-OSS."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.tokenizer import Tokenizer

# After the published format of GPT-OSS, in fewer words.
TEMPLATE = """\
{%- macro call(function) -%}
    {{- "<|start|>assistant to=functions." + function.name + "<|channel|>commentary json" -}}
    {{- "<|message|>" + (function.arguments | tojson) + "<|call|>" -}}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") }}
{{- "\\nReasoning: " + (reasoning_effort or "medium") }}
{{- "\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- set first = messages[0].content if messages[0].role in ("developer", "system") else "" %}
{%- if first or tools %}
    {{- "<|start|>developer<|message|>" + first }}
    {%- for tool in tools or [] %}
        {{- "\\ntype " + tool.function.name + " = " + (tool.function.parameters | tojson) }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none, final=-1) %}
{%- for message in messages if message.role == "assistant" and "tool_calls" not in message %}
    {%- set last.final = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- (message.content | tojson) + "<|end|>" }}
    {%- elif message.role == "assistant" and "tool_calls" in message %}
        {%- if message.content and message.thinking %}
            {{- raise_exception("Cannot pass both content and thinking") }}
        {%- endif %}
        {%- set thought = message.content or message.thinking %}
        {%- if thought and loop.index0 > last.final %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" }}
        {%- endif %}
        {{- call(message.tool_calls[0].function) }}
        {%- set last.name = message.tool_calls[0].function.name %}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
NAMES = ("return", "constrain", "channel", "start", "end", "message", "call", "pad")
SPECIAL_TOKENS = [f"<|{name}|>" for name in NAMES]
CORPUS = [
    "assistant analysis commentary final to=functions.weather json",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    'JSON {"name": "f", "arguments": {"x": [1, 2, 3]}}',
]


@cache
def harmony_tokenizer() -> Tokenizer:
    """Byte-level, of 400 tokens and the special ones."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(SPECIAL_TOKENS)
    stops = (backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>"))
    return Tokenizer(
        backend,
        named_tokens={"eos_token": "<|return|>"},
        eos_token_ids=stops,
        chat_templates={"default": ChatTemplate(TEMPLATE, "test")},
    )
