"""Peak memory stays below weights + KV cache + 1 GiB while the cache is full."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, random, sys
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup

model, dtype, kv_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
cache = CacheConfig(memory_bytes=kv_bytes)
built = build_engine(
    resolve_setup(Setup(ModelConfig(model=model, dtype=dtype), cache, SchedulerConfig()))
)
source, most_used = random.Random(0), 0
for i in range(built.num_blocks // 14):  # 15 blocks each
    prompt = [source.randrange(built.spec.vocab_size) for _ in range(200)]
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    built.engine.submit(Request(str(i), Generate(prompt, sampling)))
while built.engine.has_work():
    built.engine.step()
    most_used = max(most_used, built.engine.stats().num_kv_blocks_used)
status = open("/proc/self/status").read()  # ru_maxrss would count the process that forked this one
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
print(json.dumps({"peak": peak, "weights": built.weight_bytes, "used": most_used,
                  "blocks": built.num_blocks}))
"""


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_peak_memory(smollm2_path: Path, dtype: str) -> None:
    kv_bytes = 32 * 2**20
    command = [sys.executable, "-c", SCRIPT, str(smollm2_path), dtype, str(kv_bytes)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["used"] > 0.9 * facts["blocks"]
    assert facts["peak"] < facts["weights"] + kv_bytes + 2**30, facts
