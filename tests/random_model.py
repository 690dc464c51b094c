"""A byte-level vocabulary and a runner whose logits are noise: what constrains it must hold."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import GrammarVocab, SamplingParams, StepResult
from tokenmill.engine.sampling.sampler import Sampler, grammar_masks
from tokenmill.sched.scheduler import Batch, Sequence

EOS = 0
PAD_TO = 333  # the model's logits are wider than the vocabulary, and no multiple of 32


def _byte_chars() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars, shifted = [""] * 256, 0
    for byte in range(256):
        if byte in printable:
            chars[byte] = chr(byte)
        else:
            chars[byte] = chr(256 + shifted)
            shifted += 1
    return chars


_CHARS = _byte_chars()
_WORDS = [
    '":',
    '",',
    '{"',
    "true",
    "false",
    "null",
    "10",
    "abc",
    "</",
    "yes",
    "[{",
    "é",
    "日",
    "}}",
]
# id 0 is EOS and id 1 another special token; ids 2 to 257 are the bytes.
PIECES: list[bytes] = [b"", b"", *(bytes([byte]) for byte in range(256)), *map(str.encode, _WORDS)]
ENDINGS = [PIECES.index(piece) for piece in (b'"', b"}", b"]", b",")] + [EOS]

SURROGATES = PIECES.index(b"\xed")  # xgrammar lets them pass, a UTF-8 decoder does not


def vocab(stop_token_ids: tuple[int, ...] = (EOS,)) -> GrammarVocab:
    tokens = ["".join(_CHARS[byte] for byte in piece) for piece in PIECES]
    return GrammarVocab(tokens, "BYTE_LEVEL", len(tokens), list(stop_token_ids))


def text_of(token_ids: list[int]) -> str:
    return b"".join(PIECES[token] for token in token_ids).decode()


def noise(token_ids: list[int], salt: int = 0, width: int = PAD_TO) -> torch.Tensor:
    """Logits [width] that depend on the whole prefix; those that end things are a bit likelier."""
    seed = zlib.crc32(np.array([*token_ids, salt], np.int64).tobytes())
    logits = np.random.default_rng(seed).normal(0, 3, width).astype(np.float32)
    logits[ENDINGS] += 4
    logits[SURROGATES] -= 100
    return torch.from_numpy(logits)


class RandomRunner:
    """Samples every row with the real sampler."""

    def __init__(self) -> None:
        self.sampler = Sampler()

    def run(self, batch: Batch) -> StepResult:
        result = StepResult([[] for _ in batch.items])
        ready = [
            index
            for index, (seq, num_new) in enumerate(batch.items)
            if seq.num_computed_tokens + num_new == seq.num_tokens
        ]
        if ready:
            rows = [batch.items[index][0] for index in ready]
            logits = torch.stack([noise(seq.token_ids) for seq in rows])
            tokens, _ = self.sampler(logits, rows, grammar_masks(rows))
            for index, token in zip(ready, tokens, strict=True):
                result.token_ids[index] = [token]
        return result


def sequence(
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    stop_ids: frozenset[int] = frozenset({EOS}),
    **sampling: object,
) -> Sequence:
    """A sequence that has generated `output` after `prompt`."""
    request = Request("r", Generate(prompt or [5], SamplingParams(**sampling)))  # type: ignore[arg-type]
    seq = Sequence(request, (0, 0, 0), 10**6, stop_ids)
    seq.token_ids += output or []
    return seq
