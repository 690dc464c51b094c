"""The golden tests where torch's libraries compute in other ways, each in a process of its own.

torch itself may use no vectors, oneDNN and MKL may be held to SSE, or numba may be missing. The
compiled kernels give the same bits in all of them; torch's own arithmetic stays within a bound.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import LOGPROB_BOUND
from tiny_models import make_model, save, tame
from tokenmill.kernels import cpu_kernels

WIDE = {"head_dim": 16, "hidden_size": 64}
MODELS: dict[str, dict[str, int]] = {
    "llama": WIDE, "qwen3-tied": {"hidden_size": 64}, "mixtral": {}, "qwen3-moe": {},
    "deepseek-v3": {},
}  # fmt: skip
NO_VECTORS = {"ATEN_CPU_CAPABILITY": "default"}
# MKL hears MKL_CBWR on every CPU, MKL_ENABLE_INSTRUCTIONS on Intel's alone.
OLD_LIBRARIES = {
    "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
}  # fmt: skip
FAILED_ONCE = (
    "test_every_mode_gives_transformers_tokens[deepseek-v3]",
    "test_every_mode_gives_the_answer_without_drafts[deepseek-v3-fp32-modes2]",
    "test_padding_ends_with_the_context[deepseek-v3]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models drawn once: torch draws other numbers where it has no vectors."""
    models = tmp_path_factory.mktemp("models")
    for name, changes in MODELS.items():
        save(tame(make_model(name, **changes), 0.3), models / name)
    return models


def run(folder: Path, settings: dict[str, str], *flags: str) -> dict[str, Any]:
    """What a process with these settings prints; its tests must pass."""
    script = Path(__file__).with_name("golden_way.py")
    command = [sys.executable, str(script), str(folder), *flags]
    environment = {k: v for k, v in os.environ.items() if k not in NO_VECTORS | OLD_LIBRARIES}
    result = subprocess.run(
        command, env=environment | settings | {"PYTEST_ADDOPTS": "-rA"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    lines = result.stdout.splitlines()
    facts: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    facts["passed"] = [name for line in lines for name in re.findall(r"^PASSED .*::(\S+)", line)]
    return facts


@pytest.fixture(scope="module")
def default(folder: Path) -> dict[str, Any]:
    """The answers in torch's own way, in which all other tests run."""
    return run(folder, {}, "answers-only")


def digest(answers: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


@pytest.mark.skipif(not cpu_kernels(), reason="the CPU kernels need numba and AVX2")
@pytest.mark.parametrize("settings", [NO_VECTORS, OLD_LIBRARIES], ids=["no-vectors", "old"])
def test_compiled_kernels_give_the_same_bits(
    folder: Path, default: dict[str, Any], settings: dict[str, str], record_property: Any
) -> None:
    found = run(folder, settings)
    assert found["compiled"] and set(FAILED_ONCE) <= set(found["passed"])
    if settings is NO_VECTORS:
        assert found["capability"] == "DEFAULT"
    if settings is NO_VECTORS or torch.backends.mkl.is_available():
        assert found["library_bits"] != default["library_bits"], "the settings change nothing"
    assert found["answers"] == default["answers"]
    record_property("figures", {"digest": digest(found["answers"]), "settings": settings})


def test_without_numba_answers_stay_within_the_bound(
    folder: Path, default: dict[str, Any], record_property: Any
) -> None:
    found = run(folder, {}, "without-numba")
    assert not found["compiled"] and set(FAILED_ONCE) <= set(found["passed"])
    worst = {"fp32": 0.0, "int8": 0.0}
    for name, answers in default["answers"].items():
        dtype = name.split()[1]
        for answer, other in zip(answers, found["answers"][name], strict=True):
            same = num_same(answer[0], other[0])
            assert dtype == "int8" or same == len(answer[0]), name
            values = torch.tensor(answer[1][:same]) - torch.tensor(other[1][:same])
            worst[dtype] = max([worst[dtype], *values.abs().flatten().tolist()])
    assert all(worst[dtype] <= bound for dtype, bound in LOGPROB_BOUND.items()), worst
    record_property("figures", {"largest difference of a log-probability": worst})


def num_same(tokens: list[int], others: list[int]) -> int:
    """How many tokens come before the first that differs."""
    pairs = enumerate(zip(tokens, others, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(tokens))
