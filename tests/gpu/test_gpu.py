"""The engine on a GPU: kernels against torch, tokens against the CPU, graphs against eager."""

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import triton_parity

from driver import Answer, complete
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine

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


@pytest.mark.parametrize("kernel", triton_parity.CHECKS)
def test_kernels(kernel: str) -> None:
    triton_parity.CHECKS[kernel]("cuda")


def build(folder: Path, device: str, dtype: str) -> BuiltEngine:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = ModelConfig(str(folder), dtype, device, random_weights=True)  # type: ignore[arg-type]
    return build_engine(model, CacheConfig(num_blocks=400), SchedulerConfig(max_num_seqs=16))


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


def test_tokens_follow_the_cpu_in_fp32(tmp_path: Path) -> None:
    expected = complete(build(tmp_path, "cpu", "fp32").engine, prompts(), GREEDY)
    _agree(complete(build(tmp_path, "cuda", "bf16").engine, prompts(), GREEDY), expected, 0.05)


def test_graphs_give_what_eager_gives(tmp_path: Path) -> None:
    built = build(tmp_path, "cuda", "bf16")
    replayed = complete(built.engine, prompts(), GREEDY)
    eager = build(tmp_path, "cuda", "bf16")
    eager.engine._runner.graphs = None  # type: ignore[attr-defined]
    _agree(replayed, complete(eager.engine, prompts(), GREEDY), 0.05)
