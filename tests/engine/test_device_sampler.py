"""The device sampler gives what the numpy sampler gives, and never waits for the device."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from torch.utils._python_dispatch import TorchDispatchMode

from random_model import sequence
from sampling_rows import VOCAB, Options, constrained_rows, logits_of, on_host, random_rows
from tokenmill.core.types import FreeText, ReasoningMarks, StructuredOutput
from tokenmill.engine.sampling.device_sampler import DeviceSampler
from tokenmill.engine.sampling.sampler import (
    TokenCounts,
    allowed_ids,
    grammar_masks,
    state_of,
    uniform,
    uniforms,
)
from tokenmill.kernels.sampling import Masks, masked
from tokenmill.sched.sequence import PENDING, Sequence
from tokenmill.sched.trackers import Thinking


def on_device(
    logits: torch.Tensor, rows: list[Sequence], last_ids: list[int] | None = None
) -> tuple[list[int], list[Any]]:
    newest = last_ids or [seq.token_ids[-1] for seq in rows]
    before = logits.clone()
    sampled = DeviceSampler().launch(logits, rows, torch.tensor(newest, dtype=torch.int32))
    assert torch.equal(logits, before) and sampled.token_ids.dtype == torch.int32
    tokens = sampled.token_ids.tolist()
    return tokens, sampled.finish(tokens)


def assert_same(found: tuple[list[int], list[Any]], expected: tuple[list[int], list[Any]]) -> None:
    assert found[0] == expected[0]
    for entry, wanted in zip(found[1], expected[1], strict=True):
        assert (entry is None) == (wanted is None)
        if wanted is not None:
            assert (entry.token_ids, entry.rank) == (wanted.token_ids, wanted.rank)
            assert entry.logprobs == pytest.approx(wanted.logprobs, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_parameters_gives_the_tokens_of_the_host(seed: int, dtype: torch.dtype) -> None:
    rows = random_rows(40, random.Random(seed))
    logits = logits_of(len(rows), seed, dtype)
    assert_same(on_device(logits, rows), on_host(logits, rows))


@pytest.mark.parametrize("seed", range(6))
def test_a_pending_token_counts_as_if_it_were_known(seed: int) -> None:
    source = random.Random(seed)
    known = random_rows(30, source)
    newest = [source.choice([source.choice(s.token_ids), source.randrange(VOCAB)]) for s in known]
    logits = logits_of(len(known), seed)
    pending = []
    for seq in known:
        twin = Sequence(seq.request, (0, 0, 0), 10**6, seq.stop_ids)
        twin.token_ids = [*seq.token_ids, PENDING]
        pending.append(twin)
    for seq, token in zip(known, newest, strict=True):
        seq.token_ids.append(token)
    assert_same(on_device(logits, pending, newest), on_host(logits, known))
    for seq, token in zip(pending, newest, strict=True):
        seq.token_ids[-1] = token
        seq.token_ids.append(PENDING)
    for seq in known:
        seq.token_ids.append(7)
    again = on_device(logits, pending, [7] * len(pending))
    assert_same(again, on_host(logits, known))


def test_a_spent_budget_of_reasoning_forces_its_rows_alone() -> None:
    rows = random_rows(12, random.Random(5))
    free = on_host(logits_of(len(rows), 5), rows)
    marks = ReasoningMarks(((9, 8),), 0, (7, 9))
    for seq in rows[3:6]:
        seq.thinking = Thinking(seq.num_output_tokens, marks, seq.request.task.prompt_token_ids, ())
        seq.thinking.read([*seq.request.task.prompt_token_ids, *[5] * seq.num_output_tokens])
    found = on_host(logits_of(len(rows), 5), rows)
    assert_same(on_device(logits_of(len(rows), 5), rows), found)
    assert found[0] == [*free[0][:3], 9, 9, 9, *free[0][6:]]
    assert found[1][:3] + found[1][6:] == free[1][:3] + free[1][6:]
    assert not DeviceSampler().wants_best(rows[3:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_masks_give_the_tokens_of_the_host(seed: int, dtype: torch.dtype) -> None:
    rows = constrained_rows(40, random.Random(seed))
    logits = logits_of(len(rows), seed, dtype)
    found = on_device(logits, rows)
    assert_same(found, on_host(logits, rows))
    for token, mask in zip(found[0], grammar_masks(rows), strict=True):
        assert mask is None or token in allowed_ids(mask, VOCAB)


def test_masks_allow_what_xgrammar_lets_pass() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (4, -(-VOCAB // 32)), generator=generator)
    words = words.to(torch.int32)
    logits, numbers = logits_of(9, 0), [1, -1, -1, 2, -1, -1, -1, 0, 3]
    expected = logits.clone()
    for row, number in enumerate(numbers):
        if number >= 0:
            xgrammar.apply_token_bitmask_inplace(
                expected[row : row + 1], words[number : number + 1]
            )
    found = masked(logits, Masks(torch.tensor(numbers, dtype=torch.int32), words))
    assert torch.equal(found, expected) and not torch.equal(found, logits)


def test_a_pending_token_changes_the_answer() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [4, 6]] = torch.tensor([2.0, 1.9])
    options: Options = {"temperature": 0, "presence_penalty": 1.0}
    assert on_device(logits, [sequence([1], [2, PENDING], **options)], [9])[0] == [4]
    assert on_device(logits, [sequence([1], [2, PENDING], **options)], [4])[0] == [6]
    assert on_device(logits, [sequence([1], [2, PENDING], **options)], [-1])[0] == [4]
    assert on_device(logits, [sequence([4], [2], **options)], [4])[0] == [4]  # not pending


def test_counts_leave_a_pending_token_for_later() -> None:
    counts, seq = TokenCounts(), sequence([5, 5], [8, PENDING])
    ids, num_outputs = counts.update(seq)
    assert dict(zip(ids.tolist(), num_outputs.tolist(), strict=True)) == {5: 0, 8: 1}
    seq.token_ids[-1:] = [8, PENDING]
    ids, num_outputs = counts.update(seq)
    assert dict(zip(ids.tolist(), num_outputs.tolist(), strict=True)) == {5: 0, 8: 2}


def test_equal_logits_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 0.0])
    for options, kept in (
        ({"top_k": 1}, {1, 3}),
        ({"top_k": 3}, {1, 2, 3, 4}),
        ({"top_p": 0.1}, {1, 3}),
        ({"min_p": 1.0}, {1, 3}),
        ({"min_p": 0.2, "top_k": 3, "top_p": 0.8}, {1, 2, 3, 4}),
    ):
        rows = [sequence(seed=seed, **options) for seed in range(64)]
        many = logits.expand(64, -1).contiguous()
        tokens, _ = on_device(many, rows)
        assert set(tokens) == kept
        assert tokens == on_host(many, rows)[0]
    assert on_device(logits[None], [sequence(temperature=0)])[0] == [1]


def test_rows_do_not_depend_on_each_other() -> None:
    rows = random_rows(24, random.Random(3))
    logits = logits_of(len(rows), 3)
    together, _ = on_device(logits, rows)
    for row in range(0, len(rows), 5):
        assert on_device(logits[row : row + 1], rows[row : row + 1])[0] == [together[row]]
    order = list(reversed(range(len(rows))))
    assert on_device(logits[order], [rows[i] for i in order])[0] == [together[i] for i in order]


def test_one_sampler_follows_rows_that_grow_come_and_go() -> None:
    sampler, source = DeviceSampler(), random.Random(5)
    rows = random_rows(10, source)
    for step in range(12):
        if step % 4 == 3:
            rows.pop(source.randrange(len(rows)))
            rows += random_rows(1, source)
        logits = logits_of(len(rows), 100 + step)
        last_ids = torch.tensor([seq.token_ids[-1] for seq in rows], dtype=torch.int32)
        tokens = sampler.launch(logits, rows, last_ids).token_ids.tolist()
        assert tokens == on_host(logits, rows)[0]
        for seq, token in zip(rows, tokens, strict=True):
            seq.token_ids.append(token)


def test_uniforms_are_the_scalar_ones() -> None:
    seeds, positions = [0, 1, 2**63 + 5, 2**64 - 1], [0, 7, 300, 2**40]
    found = uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    assert found.tolist() == [uniform(s, p) for s, p in zip(seeds, positions, strict=True)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 2}, {"logprobs": 3}])
def test_a_row_that_is_not_finite_has_no_token(value: float, options: Options) -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = value
    rows = [sequence(**options), sequence(**options)]
    sampled = DeviceSampler().launch(logits, rows, torch.zeros(2, dtype=torch.int32))
    tokens = sampled.token_ids.tolist()
    assert tokens[0] >= 0 and tokens[1] == -1
    assert (sampled.finish(tokens)[0] is None) == ("logprobs" not in options)


def test_masked_logits_are_not_among_the_best() -> None:
    logits = torch.full((1, 64), -math.inf)
    logits[0, [7, 9]] = torch.tensor([1.0, 0.5])
    rows = [sequence(temperature=0, logprobs=5)]
    found = on_device(logits, rows)
    assert_same(found, on_host(logits, rows))
    assert found[1][0].token_ids == [7, 7, 9]


class NoReads(TorchDispatchMode):
    """Refuses the operators that need a value, or a size, from the device."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.REFUSED), f"{name} waits for the device"
        if name == "index":  # a boolean mask is nonzero in disguise
            assert all(i is None or i.dtype != torch.bool for i in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_free_text_has_not_is_not_sampled(temperature: float) -> None:
    structured = StructuredOutput("json_object", after=FreeText(end=5, banned=(0, 3, VOCAB + 9)))
    rows = [
        sequence([1], temperature=temperature, seed=seed, structured=structured)
        for seed in range(20)
    ]
    logits = logits_of(len(rows), 1)
    logits[:, [0, 3]] = 40.0
    assert set(on_device(logits, rows)[0]) <= {0, 3}
    for seq in rows[1:]:  # the first one is past its free text
        state_of(seq).banned = (0, 3, VOCAB + 9)
    tokens = on_device(logits, rows)
    assert_same(tokens, on_host(logits, rows))
    assert tokens[0][0] in (0, 3) and not {0, 3} & set(tokens[0][1:])


def test_warm_up_leaves_nothing_behind() -> None:
    sampler, rows = DeviceSampler(), random_rows(8, random.Random(2))
    logits = logits_of(8, 2)
    sampler.warm_up(logits)
    last_ids = torch.zeros(8, dtype=torch.int32)
    assert sampler.launch(logits, rows, last_ids).token_ids.tolist() == on_host(logits, rows)[0]


def test_a_launch_reads_nothing_back() -> None:
    rows = constrained_rows(40, random.Random(1))
    logits, last_ids = logits_of(40, 1), torch.zeros(40, dtype=torch.int32)
    with NoReads():
        DeviceSampler().launch(logits, rows, last_ids)
        greedy = [sequence(temperature=0) for _ in range(40)]
        DeviceSampler().launch(logits, greedy, last_ids)
        with pytest.raises(AssertionError, match="waits"):
            logits.argmax().item()
