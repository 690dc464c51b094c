"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tokenmill.api.protocol.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)
from tokenmill.core.types import TokenLogprobs
from tokenmill.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no -inf


def chat_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], as_ids: bool = False
) -> ChatLogprobs:
    """Chat: every token with its bytes and the best alternatives; `as_ids`: by its id."""
    content = []
    for position in positions:
        entries = [
            TopLogprob(
                token=_by_id(token_id) if as_ids else data.decode(errors="replace"),
                logprob=_finite(p),
                bytes=list(data),
            )
            for token_id, p in zip(position.token_ids, position.logprobs, strict=True)
            for data in (tokenizer.token_to_bytes(token_id),)
        ]
        taken, *best = entries
        content.append(
            ChatLogprob(
                token=taken.token, logprob=taken.logprob, bytes=taken.bytes, top_logprobs=best
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs | None],
    offset: int,
    as_ids: bool = False,
) -> tuple[CompletionLogprobs, int]:
    """Text completions: parallel lists from text `offset` on, and the offset they end at.

    A position without logprobs (the first of a prompt) has null. `as_ids`: tokens by their ids.
    """
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        text = _by_id(token_id) if as_ids else token_text(tokenizer, token_id)
        result.tokens.append(text)
        result.text_offset.append(offset)
        offset += len(tokenizer.token_to_bytes(token_id).decode(errors="replace"))
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(position.logprobs[0]))
        pairs = zip(position.token_ids, position.logprobs, strict=True)
        names = _by_id if as_ids else partial(token_text, tokenizer)
        result.top_logprobs.append({names(t): _finite(p) for t, p in pairs})
    return result, offset


def prompt_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs | None], num_best: int
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's form: by token id, the prompt's own token first; the first position has none."""
    return [
        None if position is None else _by_token_id(tokenizer, position, num_best)
        for position in positions
    ]


def _by_token_id(
    tokenizer: Tokenizer, position: TokenLogprobs, num_best: int
) -> dict[str, PromptLogprob]:
    entries: dict[str, PromptLogprob] = {}
    pairs = list(zip(position.token_ids, position.logprobs, strict=True))[: num_best + 1]
    for index, (token_id, logprob) in enumerate(pairs):
        entry = PromptLogprob(
            logprob=_finite(logprob),
            rank=index or position.rank,
            decoded_token=tokenizer.token_to_bytes(token_id).decode(errors="replace"),
        )
        entries.setdefault(str(token_id), entry)
    return entries


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; one that is no whole character is spelled bytes:\\x.. as OpenAI does."""
    data = tokenizer.token_to_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
