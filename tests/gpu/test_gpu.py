"""The engine on a GPU: kernels against torch, tokens against the CPU, every switch against none."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import triton_moe_parity
import triton_parity

from driver import Answer, complete
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.models.weights import open_checkpoint

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
PLAIN = ExecutionConfig(cuda_graphs=False, overlap=False)


CHECKS = triton_parity.CHECKS | triton_moe_parity.CHECKS


@pytest.mark.parametrize("kernel", CHECKS)
def test_kernels(kernel: str) -> None:
    CHECKS[kernel]("cuda")


def build(
    folder: Path,
    device: str,
    dtype: str,
    execution: ExecutionConfig | None = None,
    num_blocks: int = 200,
    kv_dtype: str = "auto",
) -> BuiltEngine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = dict(open_checkpoint(folder, random_weights=True).tensors())
    save_file(weights, folder / "model.safetensors")  # random ones would differ by device
    model = ModelConfig(str(folder), dtype, device)  # type: ignore[arg-type]
    limits = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256)
    cache = CacheConfig(num_blocks=num_blocks, dtype=kv_dtype)  # type: ignore[arg-type]
    return build_engine(model, cache, limits, execution)


def prompts() -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(512) for _ in range(n)] for n in (1, 5, 17, 64, 200, 333)]


def _agree(found: list[Answer], expected: list[Answer], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours.token_ids))
        assert same >= 4
        for a, b in list(zip(ours.logprobs, theirs.logprobs, strict=True))[:same]:
            assert abs(a.logprobs[0] - b.logprobs[0]) < tolerance


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def test_graphs_and_overlap_give_what_the_plain_loop_gives(tmp_path: Path) -> None:
    expected = tokens(complete(build(tmp_path, "cuda", "bf16", PLAIN).engine, prompts(), GREEDY))
    for switches in (
        {"overlap": True},
        {"cuda_graphs": True},
        {"overlap": True, "cuda_graphs": True},
    ):
        execution = replace(PLAIN, **switches)
        engine = build(tmp_path, "cuda", "bf16", execution).engine
        assert tokens(complete(engine, prompts(), GREEDY)) == expected
        assert tokens(complete(engine, prompts(), replace(GREEDY, logprobs=None))) == expected


def test_preemption_and_sampling_do_not_depend_on_overlap(tmp_path: Path) -> None:
    sampling = SamplingParams(
        temperature=0.9, top_p=0.9, seed=4, max_tokens=60, ignore_eos=True, frequency_penalty=0.4
    )
    answers = []
    for overlap in (False, True):
        engine = build(tmp_path, "cuda", "bf16", replace(PLAIN, overlap=overlap), 8).engine
        answers.append(tokens(complete(engine, prompts(), sampling)))
        assert engine.stats().num_preemptions > 0
        engine._scheduler.check_integrity()
    assert answers[0] == answers[1]


def test_torch_operations_give_nearly_the_same(tmp_path: Path) -> None:
    fused = complete(build(tmp_path, "cuda", "bf16", PLAIN).engine, prompts(), GREEDY)
    eager = build(tmp_path, "cuda", "bf16", replace(PLAIN, fused_kernels=False)).engine
    _agree(complete(eager, prompts(), GREEDY), fused, 0.05)
    build(tmp_path, "cuda", "bf16", PLAIN)  # switches the kernels on again


def scores(built: BuiltEngine) -> np.ndarray:
    """Log-probabilities of the tokens of all prompts."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    answers = complete(built.engine, prompts()[1:], sampling)
    entries = [entry for a in answers for entry in a.prompt_logprobs or [] if entry is not None]
    return np.array([entry.logprobs[0] for entry in entries])


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")])
def test_fp8_weights_and_cache_stay_close(tmp_path: Path, dtype: str, kv_dtype: str) -> None:
    expected = scores(build(tmp_path, "cuda", "bf16"))
    found = scores(build(tmp_path, "cuda", dtype, kv_dtype=kv_dtype))
    assert len(found) == 614 and 0 < np.abs(found - expected).mean() < 0.05


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_batch_invariance_is_bitwise(tmp_path: Path, dtype: str) -> None:
    execution = ExecutionConfig(batch_invariant=True)
    together = complete(build(tmp_path, "cuda", dtype, execution).engine, prompts(), GREEDY)
    alone = build(tmp_path, "cuda", dtype, execution).engine
    for prompt, answer in zip(prompts(), together, strict=True):
        (single,) = complete(alone, [prompt], GREEDY)
        assert single.token_ids == answer.token_ids
        assert [x.logprobs for x in single.logprobs] == [x.logprobs for x in answer.logprobs]
    build(tmp_path, "cuda", "bf16", PLAIN)  # switches invariance off again


def test_tokens_follow_the_cpu_in_fp32(tmp_path: Path) -> None:
    expected = complete(build(tmp_path, "cpu", "fp32").engine, prompts(), GREEDY)
    _agree(complete(build(tmp_path, "cuda", "bf16").engine, prompts(), GREEDY), expected, 0.05)
