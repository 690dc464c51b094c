"""Rows with any mix of sampling parameters, and what the numpy sampler draws for them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from random_model import sequence
from tokenmill.core.types import StructuredOutput
from tokenmill.engine.sampling.sampler import Sampler, grammar_masks, state_of
from tokenmill.sched.sequence import Sequence

VOCAB = 700
Options = dict[str, Any]
host = Sampler()

SOME: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-6, 0.3, 1.0, 1.0, 2.5, 40.0],
    "min_p": [0.0, 0.0, 0.03, 1.0],
    "top_k": [-1, 0, 0, 1, 20, 10**6],
    "top_p": [1.0, 1.0, 0.9, 0.2, 0.9999],
    "repetition_penalty": [1.0, 1.0, 1.4, 0.6],
    "frequency_penalty": [0.0, 0.0, 0.5, -0.3],
    "presence_penalty": [0.0, 0.0, 0.8],
    "logit_bias": [None, None, {3: 4.0, 699: -100.0, 50: 2.5}],
    "min_tokens": [0, 0, 4],
    "logprobs": [None, 0, 5, 20],
}


def logits_of(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, VOCAB, generator=generator)).to(dtype)


def random_rows(num: int, source: random.Random) -> list[Sequence]:
    rows = []
    for _ in range(num):
        options: Options = {name: source.choice(values) for name, values in SOME.items()}
        prompt = [source.randrange(VOCAB) for _ in range(source.randint(1, 80))]
        output = [source.randrange(VOCAB) for _ in range(source.randint(0, 8))]
        stop_ids = frozenset({0, 3, VOCAB + 5})
        rows.append(sequence(prompt, output, stop_ids, seed=source.getrandbits(64), **options))
    return rows


def mask_of(allowed: list[int]) -> NDArray[np.int32]:
    """As short as it can be: what lies beyond is not allowed."""
    words = np.zeros(max(allowed) // 32 + 1, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def constrained_rows(count: int, source: random.Random) -> list[Sequence]:
    """Rows of which two in three have a mask, of one token or of many."""
    rows = random_rows(count, source)
    for seq in rows:
        if source.random() < 0.67:
            sampling = replace(
                seq.request.task.sampling, structured=StructuredOutput("json_object")
            )
            seq.request = seq.request.with_task(sampling=sampling)
            most = source.choice((1, 3, 60, VOCAB))
            state_of(seq).mask = mask_of(source.sample(range(VOCAB), source.randint(1, most)))
    return rows


def on_host(logits: torch.Tensor, rows: list[Sequence]) -> tuple[list[int], list[Any]]:
    return host(logits.float(), rows, grammar_masks(rows))
