"""Prompts of video models as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenmill.core.specs.wan import TEXT_TOKENS
from tokenmill.core.video import byte_token_ids, clean_prompt
from tokenmill.text.tokenizer import load_tokenizer


def video_prompt_ids(
    tokenizer: Path | None, vocab_size: int, texts: Sequence[str]
) -> list[list[int]]:
    """Ids of prompts; models with random weights, which have no tokenizer, get their bytes."""
    if tokenizer is None:
        return [byte_token_ids(text, vocab_size) for text in texts]
    encode = load_tokenizer(tokenizer).encode
    return [_cut(encode(clean_prompt(text))) for text in texts]


def _cut(ids: list[int]) -> list[int]:
    """At most as many as the model sees; the end token stays."""
    return ids if len(ids) <= TEXT_TOKENS else [*ids[: TEXT_TOKENS - 1], ids[-1]]
