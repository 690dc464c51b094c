"""The tokenizer that a GGUF file carries, as the contents of a tokenizer.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.core.specs.gguf import Metadata, read_gguf_header
from tokenmill.core.types import ModelLoadError

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before merging; each regex splits the last's pieces."""

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token stays whole
    add_bos: bool = False  # when tokenizer.ggml.add_bos_token is absent


# Names of tokenizer.ggml.pre.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre
    for names, pre in (
        (
            ("default",),
            PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
        ),
        (("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "granite-docling"), PreTokenizer((_GPT2,))),
        (
            ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
            PreTokenizer((r"\p{N}", _GPT2)),
        ),
        (
            ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"),
            PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        ),
        (("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), PreTokenizer((_LLAMA3,))),
        (("qwen2",), PreTokenizer((_QWEN2,), nfc=True)),
        (("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), PreTokenizer((_QWEN2,))),
        (("qwen35",), PreTokenizer((_QWEN35,), nfc=True)),
        (("tekken",), PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
        (("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((_GPT4O,))),
        (
            ("deepseek-coder",),
            PreTokenizer(
                (
                    r"[\r\n]",
                    r"\s?\p{L}+",
                    r"\s?\p{P}+",
                    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
                    r"\p{N}",
                )
            ),
        ),
        (
            ("deepseek-v3", "hunyuan-dense"),
            PreTokenizer(
                (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
            ),
        ),
    )
    for name in names
}

# Tokens that end a turn although tokenizer.ggml.eos_token_id names another one.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """What a Hugging Face folder spreads over tokenizer.json and tokenizer_config.json."""

    definition: dict[str, Any]  # tokenizer.json
    named_tokens: dict[str, str]  # bos_token, eos_token, unk_token, pad_token
    add_bos: bool
    add_eos: bool
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]  # by name; the unnamed one is "default"


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    metadata = read_gguf_header(path).metadata
    try:
        return _convert(metadata)
    except KeyError as error:
        raise ModelLoadError(f"{path}: metadata key {error} is missing") from None
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None


def _convert(metadata: Metadata) -> GgufTokenizer:
    own = _strip_prefix(metadata, "tokenizer.ggml.")
    tokens: list[str] = own["tokens"]
    if own["model"] == "gpt2":
        definition, add_bos = _byte_level(own)
    elif own["model"] == "llama":
        definition, add_bos = _sentencepiece(own), True
    else:
        raise ModelLoadError(
            f"tokenizer.ggml.model: {own['model']!r} is not supported; expected 'gpt2' or 'llama'"
        )
    definition["added_tokens"] = _added_tokens(tokens, own["token_type"])
    named = {
        f"{name}_token": tokens[own[f"{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"{key}_token_id" in own
    }
    return GgufTokenizer(
        definition=definition,
        named_tokens=named,
        add_bos=own.get("add_bos_token", add_bos),
        add_eos=own.get("add_eos_token", False),
        eos_token_ids=_eos_token_ids(own),
        chat_templates=_chat_templates(metadata),
    )


def _byte_level(own: Metadata) -> tuple[dict[str, Any], bool]:
    name = own.get("pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelLoadError(f"tokenizer.ggml.pre: {name!r} is not known; expected one of {known}")
    splits = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in pre.splits
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    definition = {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, byte_level | {"use_regex": False}],
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: index for index, token in enumerate(own["tokens"])},
            "merges": own["merges"],
        },
    }
    return definition, pre.add_bos


def _sentencepiece(own: Metadata) -> dict[str, Any]:
    if own.get("remove_extra_whitespaces"):
        raise ModelLoadError("tokenizer.ggml.remove_extra_whitespaces: only false is supported")
    tokens = own["tokens"]
    prefix = own.get("add_space_prefix", True)
    vocab = {token: index for index, token in enumerate(tokens)}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[own["unknown_token_id"]] if "unknown_token_id" in own else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": own.get("merges") or _merges_from_scores(own, vocab),
        },
    }


def _merges_from_scores(own: Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to cut a piece in two, best first: SentencePiece joins by the union's score."""
    scores, types = own["scores"], own["token_type"]
    merges = []
    for piece, index in vocab.items():
        if types[index] in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], -cut, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, "special": kind != _USER_DEFINED, **flags}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _eos_token_ids(own: Metadata) -> tuple[int, ...]:
    named = (own.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    found = [index for index in named if index is not None]
    for index, (token, kind) in enumerate(zip(own["tokens"], own["token_type"], strict=True)):
        if kind == _CONTROL and token in _END_OF_TURN:
            found.append(index)
    return tuple(dict.fromkeys(found))


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    templates = _strip_prefix(metadata, "tokenizer.chat_template.")
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata["tokenizer.chat_template"]
    return templates


def _strip_prefix(metadata: Metadata, prefix: str) -> Metadata:
    return {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
