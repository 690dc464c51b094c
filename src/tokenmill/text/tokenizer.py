"""Text to token ids and back, and chat messages to a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers.processors import TemplateProcessing

from tokenmill.core.types import (
    GrammarVocab,
    InvalidRequestError,
    ModelLoadError,
    SamplingParams,
)
from tokenmill.text.chat_template import ChatTemplate, Message, check_unicode, load_source
from tokenmill.text.gguf_tokenizer import GgufTokenizer, read_gguf_tokenizer

Piece = str | bytes | None  # text, a fragment of UTF-8, or nothing

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_GENERATION_FILE = "generation_config.json"
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TextDecoder:
    """How tokens become text: which encoding, and how many leading spaces are cut."""

    kind: Literal["byte_level", "byte_fallback", "other"]
    num_stripped_spaces: int = 0


@dataclass(frozen=True, slots=True)
class TokenizerOrigin:
    """What load_tokenizer() was given: another process loads the same tokenizer by it."""

    path: Path
    chat_template: str | None


class JsonPieces(dict[int, bytes]):
    """The JSON string of each token's text, made when it first comes; b"" where it has none."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = self._pieces[token_id] if token_id < len(self._pieces) else None
        is_text = isinstance(piece, str) and piece
        text = json.dumps(piece, ensure_ascii=False) if is_text else ""
        encoded = self[token_id] = text.encode()
        return encoded


class Tokenizer:
    """A tokenizer and its chat templates. Methods may be called from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: dict[str, str],
        eos_token_ids: tuple[int, ...],
        chat_templates: dict[str, ChatTemplate],
        origin: TokenizerOrigin | None = None,
        sampling_defaults: dict[str, float] | None = None,
    ) -> None:
        self.origin = origin
        self._sampling_defaults = sampling_defaults or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_templates = chat_templates
        self._pieces: dict[bool, list[Piece]] = {}
        self._json_pieces: dict[bool, JsonPieces] = {}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.named_tokens = named_tokens
        self.eos_token_ids = eos_token_ids
        self.vocab_size = max(vocab.values(), default=-1) + 1  # the model's may be padded beyond it
        self.text_decoder = _text_decoder(backend)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)

    @property
    def bos_token_id(self) -> int | None:
        return self.token_to_id(self.named_tokens.get("bos_token", ""))

    @property
    def chat_template(self) -> str | None:
        template = self._chat_templates.get("default")
        return template.source if template else None

    def sampling_defaults(self, generation_config: str = "auto") -> dict[str, float]:
        """The model's own, by its generation_config.json, of calls that leave them out."""
        return self._sampling_defaults if generation_config == "auto" else {}

    @property
    def tools_template(self) -> str | None:
        template = self._chat_templates.get("tool_use")
        return template.source if template else self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as such."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text. The GIL is free meanwhile."""
        for text in texts:
            check_unicode(text, "prompt")
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequestError(
                f"token ids must be in the vocabulary, 0 to {self.vocab_size - 1}, "
                f"got {low if low < 0 else high}",
                "tokens",
            )
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry, in the vocabulary's own spelling."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, None when there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def token_to_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, be it half a character; special tokens spelled out."""
        pieces = self.pieces(skip_special_tokens=False)
        piece = pieces[token_id] if token_id < len(pieces) else None
        return piece.encode() if isinstance(piece, str) else piece or b""

    def pieces(self, skip_special_tokens: bool) -> list[Piece]:
        """What each token id adds to a text, built once."""
        if skip_special_tokens not in self._pieces:
            hidden = self.special_token_ids if skip_special_tokens else frozenset()
            pieces: list[Piece] = [None] * self.vocab_size
            for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
                if token_id not in hidden:
                    pieces[token_id] = _piece(token, self.text_decoder.kind)
            self._pieces[skip_special_tokens] = pieces
        return self._pieces[skip_special_tokens]

    def json_pieces(self, skip_special_tokens: bool) -> JsonPieces:
        """The same as JSON, for texts of which nothing is held back."""
        if skip_special_tokens not in self._json_pieces:
            self._json_pieces[skip_special_tokens] = JsonPieces(self.pieces(skip_special_tokens))
        return self._json_pieces[skip_special_tokens]

    def grammar_vocab(self, vocab_size: int | None = None) -> GrammarVocab:
        """What a grammar compiler must know; `vocab_size` is the width of the model's logits."""
        size = vocab_size or self.vocab_size
        vocab = [""] * size
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            if token_id < size and token_id not in self.special_token_ids:
                vocab[token_id] = token
        kinds: dict[str, Literal["RAW", "BYTE_FALLBACK", "BYTE_LEVEL"]] = {
            "byte_level": "BYTE_LEVEL",
            "byte_fallback": "BYTE_FALLBACK",
        }
        first = self._backend.encode("a", add_special_tokens=False).tokens[:1]
        return GrammarVocab(
            encoded_vocab=vocab,
            vocab_type=kinds.get(self.text_decoder.kind, "RAW"),
            vocab_size=size,
            stop_token_ids=list(self.eos_token_ids),
            add_prefix_space=bool(first) and first[0][:1] in ("▁", "Ġ"),
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template: ChatTemplate | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation, its special tokens included: encode it without adding any.

        A generation prompt is added unless the final message is to be continued. `template`
        replaces the model's own.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other",
                "continue_final_message",
            )
        return (template or self._template(bool(tools))).render(
            messages,
            continue_final_message=continue_final_message,
            **self.named_tokens | kwargs,
            tools=list(tools) if tools else None,
            add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
        )

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Token ids of apply_chat_template(messages, **kwargs)."""
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def _template(self, with_tools: bool) -> ChatTemplate:
        template = self._chat_templates.get("tool_use") if with_tools else None
        template = template or self._chat_templates.get("default")
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template; give one with --chat-template, "
                "or use text completions",
                "messages",
            )
        return template


def load_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """Load from a Hugging Face folder or a .gguf file.

    `chat_template` replaces the model's own: a file, or the template itself when it has a brace.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        gguf = read_gguf_tokenizer(path)
        backend = _backend_from_gguf(gguf)
        named, eos, sources = gguf.named_tokens, gguf.eos_token_ids, gguf.chat_templates
    else:
        backend, named, eos, sources = _load_folder(path)
    origin = str(path)
    if chat_template is not None:
        sources, origin = {"default": load_source(chat_template)}, "chat template"
    templates = {name: ChatTemplate(text, f"{origin} ({name})") for name, text in sources.items()}
    return Tokenizer(
        backend,
        named_tokens=named,
        eos_token_ids=eos,
        chat_templates=templates,
        origin=TokenizerOrigin(path, chat_template),
        sampling_defaults=_sampling_defaults(path / _GENERATION_FILE),
    )


def _backend_from_gguf(gguf: GgufTokenizer) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(gguf.definition))
    _set_bos_eos(backend, gguf.named_tokens, gguf.add_bos, gguf.add_eos)
    return backend


def _load_folder(
    folder: Path,
) -> tuple[tokenizers.Tokenizer, dict[str, str], tuple[int, ...], dict[str, str]]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(f"{file}: not found; a model folder must hold a tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{file}: not a usable tokenizer ({error})") from None
    config = _read_json(folder / "special_tokens_map.json")
    config |= _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(config)
    _add_tokens(backend, config, named, folder / "tokenizer_config.json")
    if "add_bos_token" in config or "add_eos_token" in config:
        add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        _set_bos_eos(backend, named, bool(add_bos), bool(add_eos))
    return backend, named, _eos_token_ids(backend, named, folder), _chat_templates(folder, config)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like; values are strings or serialised AddedTokens."""
    named = {}
    extra = config.get("extra_special_tokens")
    for key, value in (config | (extra if isinstance(extra, dict) else {})).items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            named[key] = content
    return named


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str], file: Path
) -> None:
    """Add the tokens that only tokenizer_config.json knows, and mark the named ones special."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = config.get("added_tokens_decoder", {})
    for index, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        if entry["content"] in known:
            continue
        fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        backend.add_tokens([tokenizers.AddedToken(**{f: entry[f] for f in fields if f in entry})])
        if backend.token_to_id(entry["content"]) != int(index):
            raise ModelLoadError(
                f"{file}: added_tokens_decoder[{index}] ({entry['content']!r}) does not follow the "
                "vocabulary of tokenizer.json"
            )
    special = {named[key] for key in _NAMED_TOKENS if key in named} | _extra_tokens(config)
    hidden = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in sorted(special - hidden)
            if backend.token_to_id(text) is not None
        ]
    )


def _extra_tokens(config: dict[str, Any]) -> set[str]:
    lists = (config.get("additional_special_tokens"), config.get("extra_special_tokens"))
    entries = [entry for each in lists if isinstance(each, list) for entry in each]
    return {entry["content"] if isinstance(entry, dict) else entry for entry in entries}


def _set_bos_eos(
    backend: tokenizers.Tokenizer, named: dict[str, str], add_bos: bool, add_eos: bool
) -> None:
    """Make encode() frame a text with the tokens that are wanted and exist."""
    bos = named.get("bos_token") if add_bos else None
    eos = named.get("eos_token") if add_eos else None
    frame = [token for token in (bos, eos) if token is not None]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(frame)],
    )


def _eos_token_ids(
    backend: tokenizers.Tokenizer, named: dict[str, str], folder: Path
) -> tuple[int, ...]:
    """The tokenizer's end token and those of generation_config.json, else of config.json."""
    found = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    for name in (_GENERATION_FILE, "config.json"):
        ids = _read_json(folder / name).get("eos_token_id")
        if ids is not None:
            found += ids if isinstance(ids, list) else [ids]
            break
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _sampling_defaults(file: Path) -> dict[str, float]:
    config = _read_json(file)
    given = {name: config[name] for name in _MODEL_DEFAULTS if config.get(name) is not None}
    if isinstance(top_k := given.get("top_k"), float) and top_k.is_integer():
        given["top_k"] = int(top_k)
    for name, value in given.items():
        if type(value) is not int and (type(value) is not float or name == "top_k"):
            raise ModelLoadError(f"{file}: {name}: expected a number, got {value!r}")
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{file}: {error}") from None
    return given


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template sources by name; files win over tokenizer_config.json."""
    entry = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(entry, str):
        entry = [{"name": "default", "template": entry}]
    sources = {item["name"]: item["template"] for item in entry or []}
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return sources


def _text_decoder(backend: tokenizers.Tokenizer) -> TextDecoder:
    if backend.decoder is None:
        return TextDecoder("other")
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return TextDecoder("byte_level")
    num_stripped = 0
    if steps and steps[-1]["type"] == "Strip":
        strip = steps.pop()
        num_stripped = strip["start"] if (strip["content"], strip["stop"]) == (" ", 0) else -1
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    if num_stripped >= 0 and steps == [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return TextDecoder("byte_fallback", num_stripped)
    return TextDecoder("other")


def _piece(token: str, kind: str) -> Piece:
    if kind == "byte_level":
        try:
            data = bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token outside the byte alphabet is plain text
            return token
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data
    if kind == "byte_fallback" and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ")
