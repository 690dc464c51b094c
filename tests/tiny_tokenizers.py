"""Tiny tokenizers of both kinds, saved by transformers as folders and by gguf as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Hello world! Hello there, how are you today? I'm fine, we'll see.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 22))",
    "naïve café, größer, señor, été: accents everywhere",
    "数字 123 和文字 мир 😀 👍",
    'JSON {"name": "f", "arguments": {"x": [1, 2, 3]}}',
]

HERMES_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "You may call functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\nAnswer with <tool_call>\\n{\\"name\\": ...}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content %}
        {{- '\\n' + message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def byte_level() -> Tokenizer:
    """GPT-2's kind, with chat tokens and two added tokens that are not special."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind: spaces are ▁ and what the vocabulary lacks is spelled in bytes."""
    trained = Tokenizer(BPE())
    trained.normalizer = _SENTENCEPIECE_NORMALIZER
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(
        CORPUS[:4], trainers.BpeTrainer(vocab_size=160, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(
        BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = _SENTENCEPIECE_NORMALIZER
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


_SENTENCEPIECE_NORMALIZER = normalizers.Sequence(
    [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
)


def save_folder(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """What transformers' save_pretrained writes."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **config).save_pretrained(folder)
    return folder


def save_gguf(tokenizer: Tokenizer, file: Path, **fields: Any) -> Path:
    """A GGUF file with this vocabulary; `fields` are further tokenizer.ggml.* entries."""
    model = json.loads(tokenizer.to_str())["model"]
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    added = tokenizer.get_added_tokens_decoder()
    byte_tokens = model["byte_fallback"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama" if byte_tokens else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([_token_type(added.get(i), t) for i, t in enumerate(tokens)])
    if byte_tokens:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    else:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        (writer.add_bool if isinstance(value, bool) else add)(f"tokenizer.{name}", value)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        getattr(writer, f"add_{name}")(8)
    writer.add_head_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def _token_type(added: AddedToken | None, token: str) -> gguf.TokenType:
    if added is not None:
        kind = gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED
        return gguf.TokenType.UNKNOWN if token == "<unk>" else kind
    if token.startswith("<0x") and len(token) == 6:
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL
