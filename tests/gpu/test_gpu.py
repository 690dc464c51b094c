"""The engine on a GPU: kernels against torch, tokens against the CPU, every switch against none."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import triton_encoder_parity
import triton_gated_parity
import triton_moe_parity
import triton_parity
import triton_wan_parity

from driver import Answer, complete
from gpu.setups import MIXED_FAMILIES, SETUPS, Checkpoints, prompts
from scheduler_integrity import check_scheduler
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine
from tokenmill.kernels import product_trials

Build = Callable[[str], BuiltEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
CHECKS = (
    triton_parity.CHECKS
    | triton_moe_parity.CHECKS
    | triton_encoder_parity.CHECKS
    | triton_wan_parity.CHECKS
    | triton_gated_parity.CHECKS
)


@pytest.mark.parametrize("kernel", CHECKS)
def test_kernels(kernel: str) -> None:
    torch.manual_seed(3)
    CHECKS[kernel]("cuda")


def test_a_tried_product_is_the_same_by_both_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_trials, "_second_is_faster", {})
    weight = torch.randn(4096, 14336, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 14336, device="cuda", dtype=torch.bfloat16)
    with product_trials.trials():
        chosen = product_trials.by_lt(x, weight)
    assert product_trials.by_lt(x, weight) == chosen
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = product_trials.matmul_by_lt(x, weight)
    graph.replay()
    expected = x.float() @ weight.float().T
    assert float((product.float() - expected).norm() / expected.norm()) < 5e-3


def _agree(found: list[Answer], expected: list[Answer], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours.token_ids))
        assert same >= 4
        for a, b in list(zip(ours.logprobs, theirs.logprobs, strict=True))[:same]:
            assert abs(a.logprobs[0] - b.logprobs[0]) < tolerance


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_graphs_and_overlap_give_what_the_plain_loop_gives(build: Build) -> None:
    expected = tokens(complete(build("plain").engine, prompts(), GREEDY))
    for name in ("overlap", "graphs", "graphs-overlap"):
        engine = build(name).engine
        assert tokens(complete(engine, prompts(), GREEDY)) == expected
        assert tokens(complete(engine, prompts(), replace(GREEDY, logprobs=None))) == expected


@pytest.mark.parametrize("family", MIXED_FAMILIES)
def test_pieces_of_mixed_steps_give_the_bits_of_plain_ones(build: Build, family: str) -> None:
    """Padded, and with attention between graphs; twice, so that no step reads another's rows."""
    eager, by_graph = build(f"mixed-{family}-eager"), build(f"mixed-{family}")
    graphs = by_graph.runner.plain.graphs
    assert graphs is not None and eager.runner.plain.graphs is None
    expected = complete(eager.engine, prompts(), GREEDY)
    for _ in range(2):
        found = complete(by_graph.engine, prompts(), GREEDY)
        assert tokens(found) == tokens(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert [x.logprobs for x in ours.logprobs] == [x.logprobs for x in theirs.logprobs]
    assert graphs.num_replayed > 4


def test_preemption_and_sampling_do_not_depend_on_overlap(build: Build) -> None:
    sampling = SamplingParams(
        temperature=0.9, top_p=0.9, seed=4, max_tokens=60, ignore_eos=True, frequency_penalty=0.4
    )
    answers = []
    for name in ("preempted", "preempted-overlap"):
        engine = build(name).engine
        assert isinstance(engine, LanguageEngine)
        answers.append(tokens(complete(engine, prompts(), sampling)))
        assert engine.stats().num_preemptions > 0
        check_scheduler(engine._scheduler)
    assert answers[0] == answers[1]


def test_torch_operations_give_nearly_the_same(build: Build) -> None:
    fused = complete(build("plain").engine, prompts(), GREEDY)
    _agree(complete(build("unfused").engine, prompts(), GREEDY), fused, 0.05)


def scores(built: BuiltEngine) -> np.ndarray:
    """Log-probabilities of the tokens of all prompts."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    answers = complete(built.engine, prompts()[1:], sampling)
    entries = [entry for a in answers for entry in a.prompt_logprobs or [] if entry is not None]
    return np.array([entry.logprobs[0] for entry in entries])


@pytest.mark.parametrize("name", ["fp8", "kv-fp8", "fp8-kv-fp8"])
def test_fp8_weights_and_cache_stay_close(build: Build, name: str) -> None:
    expected, found = scores(build("default")), scores(build(name))
    assert len(found) == 614 and 0 < np.abs(found - expected).mean() < 0.05


@pytest.mark.parametrize(("name", "bound"), [("gemma3", 0.03), ("gemma3-fp8", 0.1)])
def test_gemma3_follows_the_cpu(
    build: Build, checkpoints: Checkpoints, name: str, bound: float
) -> None:
    expected = scores(SETUPS["gemma3"].build(checkpoints, "cpu"))
    assert 0 < np.abs(scores(build(name)) - expected).mean() < bound


@pytest.mark.parametrize("name", ["invariant", "invariant-fp8"])
def test_batch_invariance_is_bitwise(build: Build, name: str) -> None:
    together = complete(build(name).engine, prompts(), GREEDY)
    alone = build(name).engine
    for prompt, answer in zip(prompts(), together, strict=True):
        (single,) = complete(alone, [prompt], GREEDY)
        assert single.token_ids == answer.token_ids
        assert [x.logprobs for x in single.logprobs] == [x.logprobs for x in answer.logprobs]


def test_tokens_follow_the_cpu_in_fp32(build: Build, checkpoints: Checkpoints) -> None:
    on_cpu = SETUPS["default"].build(checkpoints, "cpu")
    expected = complete(on_cpu.engine, prompts(), GREEDY)
    _agree(complete(build("default").engine, prompts(), GREEDY), expected, 0.05)
