"""With drafts, tokens are drawn from the model's own distribution: a chi-square test shows it."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from draft_heads import forgetful, save_head
from driver import build, complete
from tiny_models import make_model, save, tame
from tokenmill.core.types import SamplingParams
from tokenmill.engine.launched import LaunchedStep
from tokenmill.engine.sampling.sampler import filtered_probs

VOCAB, LENGTH, NUM_SAMPLES = 5, 3, 1500
PROMPT = [1, 3, 0, 4, 2]
PARAMS = {
    "plain": SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True),
    "filtered": SamplingParams(
        temperature=1.4, top_p=0.9, top_k=4, min_p=0.02, max_tokens=LENGTH, ignore_eos=True
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    model = forgetful(tame(make_model("llama", vocab_size=VOCAB, head_dim=16), 0.25), 0.3)
    return model, save(model, folder / "model"), save_head(model, folder / "head.safetensors")


def exact(model: PreTrainedModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every answer, token by token from the model's logits."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for answer, probability in probs.items():
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + list(answer)])).logits[0, -1].float()
            ids, shares = filtered_probs(logits.numpy(), params)
            for token, share in zip(ids.tolist(), shares.tolist(), strict=True):
                longer[(*answer, token)] = probability * share
        probs = longer
    return probs


def drawn(folder: Path, head: Path, params: SamplingParams) -> tuple[Counter[tuple[int, ...]], int]:
    """Answers of unseeded requests, and how many drafts were accepted."""
    random.seed(7)  # the source of the seeds that requests without one get
    built = build(
        folder, "fp32", chunked=False, prefix_cache=True, num_blocks=300, mtp=2, draft=head
    )
    answers = itertools.chain.from_iterable(
        complete(built.engine, [PROMPT] * 250, params) for _ in range(NUM_SAMPLES // 250)
    )
    counts = Counter(tuple(answer.token_ids) for answer in answers)
    return counts, sum(built.engine.stats().num_accepted)


def deviation(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> float:
    """Chi-square in standard deviations of its normal approximation (Wilson and Hilferty)."""
    total = counts.total()
    assert counts.keys() <= probs.keys()
    common = [answer for answer, p in probs.items() if p * total >= 5]
    pairs = [(counts[answer], probs[answer] * total) for answer in common]
    rest = total - sum(count for count, _ in pairs), total - sum(mean for _, mean in pairs)
    pairs += [rest] if rest[1] >= 5 else []
    square = sum((count - mean) ** 2 / mean for count, mean in pairs)
    freedom = len(pairs) - 1
    spread = 2 / (9 * freedom)
    return ((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


@pytest.mark.parametrize("kind", PARAMS)
def test_answers_follow_the_exact_distribution(
    tiny: tuple[PreTrainedModel, Path, Path], kind: str
) -> None:
    model, folder, head = tiny
    counts, num_accepted = drawn(folder, head, PARAMS[kind])
    assert num_accepted > NUM_SAMPLES // 8
    found = deviation(counts, exact(model, PARAMS[kind]))
    assert abs(found) < 4


def test_a_wrong_rule_of_acceptance_is_noticed(
    tiny: tuple[PreTrainedModel, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder, head = tiny
    fill = LaunchedStep._fill

    def lenient(self: LaunchedStep, tokens: list[int], logprobs: None) -> None:
        """Take one of four first drafts that were not drawn."""
        first = 0
        for index, drafts in enumerate(self.drafts):
            if drafts and index % 4 == 0:
                tokens[first] = drafts[0]
            first += len(drafts) + 1
        fill(self, tokens, logprobs)

    monkeypatch.setattr(LaunchedStep, "_fill", lenient)
    counts, _ = drawn(folder, head, PARAMS["plain"])
    found = deviation(counts, exact(model, PARAMS["plain"]))
    assert found > 4
