"""Without the compiled kernels torch does the same arithmetic: same greedy tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import make_model, save, tame

SCRIPT = """
import json, sys
sys.path.append(sys.argv[3])
from driver import complete
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.kernels import cpu_kernels

built = build_engine(
    ModelConfig(model=sys.argv[1], dtype=sys.argv[2]),
    CacheConfig(num_blocks=64),
    SchedulerConfig(max_num_batched_tokens=24),
    ExecutionConfig(fused_kernels=sys.argv[4] == "True"),
)
prompts = [[i * 7 % 64 for i in range(n)] for n in (1, 16, 50)]
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
answers = complete(built.engine, prompts, greedy)
print(json.dumps({"compiled": cpu_kernels(), "tokens": [a.token_ids for a in answers]}))
"""


def run(folder: Path, dtype: str, compiled: bool) -> dict:
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", SCRIPT, str(folder), dtype, tests, str(compiled)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_same_tokens_with_and_without_compiled_kernels(tmp_path: Path, dtype: str) -> None:
    model = tame(make_model("qwen3-tied", hidden_size=64), 0.3)
    folder = save(model, tmp_path)
    plain, fast = run(folder, dtype, compiled=False), run(folder, dtype, compiled=True)
    assert not plain["compiled"]
    assert plain["tokens"] == fast["tokens"]
