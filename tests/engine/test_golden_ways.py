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
# torch's own way, in which all other tests run, gives the answers to compare with.
WAYS: dict[str, tuple[dict[str, str], list[str]]] = {
    "default": ({}, ["answers-only"]),
    "without-numba": ({}, ["without-numba"]),
}
if cpu_kernels():
    WAYS |= {"no-vectors": (NO_VECTORS, []), "old": (OLD_LIBRARIES, [])}
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


@pytest.fixture(scope="module")
def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """What each way found; its tests must pass."""
    script = Path(__file__).with_name("golden_way.py")
    environment = {k: v for k, v in os.environ.items() if k not in NO_VECTORS | OLD_LIBRARIES}
    result = subprocess.run(
        [sys.executable, str(script), str(folder)], input=json.dumps(WAYS), env=environment,
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    codes = json.loads(result.stdout.splitlines()[-1])
    return {name: facts(folder.with_suffix(f".{name}").read_text(), codes[name]) for name in WAYS}


def facts(output: str, code: int) -> dict[str, Any]:
    lines = output.splitlines()
    found: dict[str, Any] = {"failure": output[-6000:] if code else ""}
    found |= json.loads(next((line for line in lines if line.startswith('{"compiled"')), "{}"))
    found["passed"] = [name for line in lines for name in re.findall(r"^PASSED .*::(\S+)", line)]
    return found


def digest(answers: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


@pytest.mark.skipif(not cpu_kernels(), reason="the CPU kernels need numba and AVX2")
@pytest.mark.parametrize("way", ["no-vectors", "old"])
def test_compiled_kernels_give_the_same_bits(
    ways: dict[str, dict[str, Any]], way: str, record_property: Any
) -> None:
    default, found = ways["default"], ways[way]
    assert not default["failure"] and not found["failure"]
    assert found["compiled"] and set(FAILED_ONCE) <= set(found["passed"])
    if way == "no-vectors":
        assert found["capability"] == "DEFAULT"
    if way == "no-vectors" or torch.backends.mkl.is_available():
        assert found["library_bits"] != default["library_bits"], "the settings change nothing"
    assert found["answers"] == default["answers"]
    record_property("figures", {"digest": digest(found["answers"]), "settings": WAYS[way][0]})


def test_without_numba_answers_stay_within_the_bound(
    ways: dict[str, dict[str, Any]], record_property: Any
) -> None:
    default, found = ways["default"], ways["without-numba"]
    assert not default["failure"] and not found["failure"]
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
