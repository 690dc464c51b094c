"""The sampler against transformers' logits processors, and against its own promises."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from random_model import sequence
from tokenmill.core.types import SamplingParams
from tokenmill.engine.sampling.sampler import (
    Sampler,
    TokenCounts,
    adjusted,
    allowed_ids,
    draw,
    filtered_probs,
    splitmix64,
    state_of,
    uniform,
)

sample = Sampler()


def logits_of(seed: int, vocab: int = 1000, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, generator=generator) * spread


def transformers_probs(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution that transformers' own warpers make, in vLLM's order."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    scores = logits[None].clone()
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    return scores.softmax(-1)[0].numpy()


def dense(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    ids, probs = filtered_probs(logits.numpy(), params)
    assert (np.diff(ids) > 0).all()
    out = np.zeros(logits.numel(), np.float32)
    out[ids] = probs
    return out


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 999},
    {"top_k": 5000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    {"temperature": 10.0, "top_p": 0.4533},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_filters_give_the_distribution_of_transformers(
    options: dict[str, Any], spread: float
) -> None:
    params = SamplingParams(**options)
    for seed in range(3):
        logits = logits_of(seed, spread=spread)
        expected, found = transformers_probs(logits, params), dense(logits, params)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-9)
        assert ((found > 0) == (expected > 0)).all()


def test_tokens_with_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 0.0])
    assert filtered_probs(logits.numpy(), SamplingParams(top_k=1))[0].tolist() == [1, 3]
    assert filtered_probs(logits.numpy(), SamplingParams(top_k=3))[0].tolist() == [1, 2, 3, 4]
    assert filtered_probs(logits.numpy(), SamplingParams(top_p=0.1))[0].tolist() == [1, 3]
    assert filtered_probs(logits.numpy(), SamplingParams(min_p=1.0))[0].tolist() == [1, 3]
    assert sample(logits[None], [sequence(temperature=0)], [None])[0] == [1]


def test_masked_logits_have_no_probability() -> None:
    logits = torch.full((64,), -math.inf)
    logits[[7, 9]] = torch.tensor([1.0, 0.5])
    for options in FILTERS:
        ids, probs = filtered_probs(logits.numpy(), SamplingParams(**options))
        assert set(ids[probs > 0].tolist()) <= {7, 9}


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, output = logits_of(1), [3, 3, 17, 999], [17, 42, 42, 42]
    seq = sequence(prompt, output, repetition_penalty=penalty)
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    expected = reference(torch.tensor([prompt + output]), logits[None].clone())[0]
    np.testing.assert_allclose(adjusted(logits.numpy(), seq), expected.numpy(), rtol=1e-6)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits, prompt, output = logits_of(2), [1, 2, 3, 3], [3, 8, 8, 500]
    seq = sequence(prompt, output, presence_penalty=0.7, frequency_penalty=-0.4)
    expected = logits.clone()
    for token, count in Counter(output).items():  # the formula of OpenAI's reference
        expected[token] -= 0.7 + count * -0.4
    np.testing.assert_allclose(adjusted(logits.numpy(), seq), expected.numpy(), rtol=1e-6)


def test_penalties_follow_the_sequence_as_it_grows() -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 400).tolist()
    seq = sequence(tokens[:100], repetition_penalty=1.2, frequency_penalty=0.3)
    logits = logits_of(3).numpy()
    for token in tokens[100:]:
        seq.token_ids.append(token)
        grown = adjusted(logits, seq)
    rebuilt = sequence(tokens[:100], tokens[100:], repetition_penalty=1.2, frequency_penalty=0.3)
    np.testing.assert_array_equal(grown, adjusted(logits, rebuilt))
    ids, num_outputs = TokenCounts().update(seq)
    assert dict(zip(ids.tolist(), num_outputs.tolist(), strict=True)) == (
        dict.fromkeys(tokens[:100], 0) | Counter(tokens[100:])
    )


def test_logit_bias_is_that_of_transformers() -> None:
    logits, bias = logits_of(4), {5: -100.0, 17: 3.5, 999: 100.0}
    reference = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected = reference(torch.tensor([[1, 2]]), logits[None].clone())[0]
    found = adjusted(logits.numpy(), sequence(logit_bias=bias))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("num_output", [0, 2, 3])
def test_min_tokens_is_that_of_transformers(num_output: int) -> None:
    logits, prompt, output = logits_of(5), [4, 5], [6] * num_output
    seq = sequence(prompt, output, frozenset({7, 900}), min_tokens=3)
    reference = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [7, 900])
    expected = reference(torch.tensor([prompt + output]), logits[None].clone())[0]
    np.testing.assert_array_equal(adjusted(logits.numpy(), seq), expected.numpy())


def test_bias_comes_after_penalties() -> None:
    logits = torch.zeros(10)
    logits[4] = 2.0
    seq = sequence([4], repetition_penalty=2.0, logit_bias={4: 3.0})
    assert adjusted(logits.numpy(), seq)[4] == pytest.approx(2.0 / 2.0 + 3.0)


def test_greedy_rows_take_the_largest_logit_and_leave_the_logits_alone() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(8)])
    before = logits.clone()
    rows = [sequence([1, 2], [3], temperature=0) for _ in range(8)]
    assert sample(logits, rows, [None] * 8)[0] == before.argmax(-1).tolist()
    best = int(before[0].argmax())
    rows[0] = sequence(temperature=0, logit_bias={best: -100.0})
    rows[1] = sequence([best], temperature=1e-6, presence_penalty=1.0, repetition_penalty=9.0)
    tokens, _ = sample(logits, rows, [None] * 8)
    assert tokens[0] != best and tokens[2:] == before[2:].argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_a_mask_decides_and_ids_beyond_it_are_never_taken() -> None:
    mask = np.zeros(3, np.int32)  # covers 96 of 100 tokens
    mask[0], mask[2] = 1 << 5, np.int32(-(2**31))
    assert allowed_ids(mask, 100).tolist() == [5, 95]
    assert allowed_ids(mask, 50).tolist() == [5]
    logits = torch.zeros(100)
    logits[96:] = 50.0
    for options in ({"temperature": 0}, {"seed": 1}, {"seed": 2, "top_k": 5, "top_p": 0.9}):
        assert sample(logits[None], [sequence(**options)], [mask])[0][0] in (5, 95)


def test_a_row_that_is_not_finite_has_no_token_and_others_have_theirs() -> None:
    for value in (math.nan, math.inf):
        logits = torch.zeros(2, 8)
        logits[0, 3], logits[1, 5] = value, 40.0
        for options in (
            {"temperature": 0},
            {},
            {"top_k": 2},
            {"temperature": 0, "logit_bias": {1: 1.0}},
        ):
            rows = [sequence(logprobs=1, **options), sequence(logprobs=1, **options)]
            tokens, logprobs = sample(logits, rows, [None, None])
            assert tokens == [-1, 5] and logprobs[0] is None and logprobs[1] is not None
    with pytest.raises(TypeError, match="fp32"):
        sample(torch.zeros(1, 8, dtype=torch.float64), [sequence()], [None])


# Randomness.


def test_uniform_is_splitmix64() -> None:
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the published first output for seed 0
    numbers = [uniform(seed, position) for seed in range(40) for position in range(50)]
    assert all(0 <= number < 1 for number in numbers) and len(set(numbers)) == 2000
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert chi_square(counts, np.full(20, 100.0)) < critical(19)


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def critical(degrees: int, z: float = 3.09) -> float:
    """Wilson and Hilferty's chi-square quantile; z = 3.09 is the 99.9% one."""
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + z * math.sqrt(part)) ** 3)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 12}, {"top_p": 0.8, "temperature": 1.3}], ids=str
)
def test_sampled_frequencies_follow_the_distribution(options: dict[str, Any]) -> None:
    logits = logits_of(6, vocab=40, spread=1.5)
    probs = transformers_probs(logits, SamplingParams(**options))
    num = 6_000
    rows = [sequence(seed=seed, **options) for seed in range(num)]
    tokens, _ = sample(logits.expand(num, -1), rows, [None] * num)
    counts = np.bincount(tokens, minlength=40)
    assert (counts[probs == 0] == 0).all()
    likely = probs * num >= 5
    pooled = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probs[likely], probs[~likely].sum()) * num
    pooled, expected = pooled[expected > 0], expected[expected > 0]
    assert chi_square(pooled, expected) < critical(len(pooled) - 1)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 2000),
    st.floats(0, 1, exclude_max=True, width=32),
    st.integers(0, 2**32 - 1),
    st.floats(0, 0.95),
)
def test_draw_inverts_the_cumulative_distribution(
    size: int, number: float, seed: int, zeros: float
) -> None:
    generator = np.random.default_rng(seed)
    weights = generator.exponential(size=size) * (generator.random(size) >= zeros)
    weights[generator.integers(size)] = 1.0
    probs = (weights / weights.sum()).astype(np.float32)
    sums = np.cumsum(probs, dtype=np.float64)
    index = draw(probs, number)
    assert probs[index] > 0
    assert sums[index] - probs[index] - 1e-9 <= number * sums[-1] <= sums[index] + 1e-9


def test_a_seed_gives_the_same_tokens_whatever_the_batch() -> None:
    options: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "top_k": 30},
        {"seed": 3, "top_p": 0.9, "repetition_penalty": 1.3},
        {"seed": 4, "min_p": 0.01, "logit_bias": {3: 2.0}},
        {"temperature": 0},
    ]
    logits = torch.stack([logits_of(seed) for seed in range(len(options))])
    output = [9, 11]
    rows = [sequence([1, 2], output, **o) for o in options]
    together, _ = sample(logits, rows, [None] * len(rows))
    for order in ([4, 3, 2, 1, 0], [2], [0, 3]):
        again = [sequence([1, 2], output, **options[i]) for i in order]
        tokens, _ = sample(logits[order], again, [None] * len(order))
        assert tokens == [together[i] for i in order]
    later = [sequence([1, 2], [*output, 4], **o) for o in options[:4]]
    assert sample(logits[:4], later, [None] * 4)[0] != together[:4]


def test_without_a_seed_each_request_has_its_own_for_good() -> None:
    first, second = sequence(), sequence()
    seed = state_of(first).seed
    assert state_of(first).seed == seed and state_of(second).seed != seed
    assert state_of(sequence(seed=-1)).seed == 2**64 - 1


# Log-probabilities.


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.stack([logits_of(seed) for seed in range(3)])
    rows = [
        sequence(temperature=0, logprobs=5, logit_bias={7: 100.0}),
        sequence(seed=3, temperature=1.7, top_k=400, logprobs=0),
        sequence(seed=4),
    ]
    tokens, found = sample(logits, rows, [None] * 3)
    reference = logits.double().log_softmax(-1)
    assert tokens[0] == 7 and found[2] is None
    for row, k in ((0, 5), (1, 0)):
        entry = found[row]
        assert entry is not None
        best = reference[row].topk(k)
        assert entry.token_ids == [tokens[row], *best.indices.tolist()]
        expected = [float(reference[row, tokens[row]]), *best.values.tolist()]
        assert entry.logprobs == pytest.approx(expected, abs=1e-5)
        order = reference[row].argsort(descending=True).tolist()
        assert entry.rank == 1 + order.index(tokens[row])


def test_prompt_logprobs_score_the_given_tokens() -> None:
    logits, targets = torch.stack([logits_of(seed) for seed in range(4)]), [1, 500, 999, 0]
    found = sample.prompt_logprobs(logits, targets, 3)
    reference = logits.double().log_softmax(-1)
    for row, (entry, target) in enumerate(zip(found, targets, strict=True)):
        best = reference[row].topk(3)
        assert entry.token_ids == [target, *best.indices.tolist()]
        expected = [float(reference[row, target]), *best.values.tolist()]
        assert entry.logprobs == pytest.approx(expected, abs=1e-5)
        assert entry.rank == 1 + int((logits[row] > logits[row, target]).sum())


def test_top_logprobs_of_equal_logits_come_in_token_order() -> None:
    entry = sample.prompt_logprobs(torch.zeros(1, 50), [20], 20)[0]
    assert entry.token_ids == [20, *range(20)] and entry.rank == 1
    assert sample.prompt_logprobs(torch.zeros(1, 4), [2], 20)[0].token_ids == [2, 0, 1, 2, 3]
