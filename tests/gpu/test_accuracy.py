"""The default model's real weights on a GPU: logits against the CPU in fp32, perplexity by type."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from driver import complete
from gpu.setups import CONTEXT, SETUPS, SMOLLM2, Checkpoints
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.sched.sequence import Batch, Sequence
from tokenmill.text.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
Build = Callable[[str], BuiltEngine]


@pytest.fixture(scope="module")
def texts(smollm2_path: Path) -> list[list[int]]:
    """Some 35,000 tokens: fewer do not tell one percent of perplexity from none."""
    tokenizer = load_tokenizer(str(smollm2_path))
    pages = [ROOT / name for name in ("LICENSE", "README.md", "docs/architecture.md")]
    modules = sorted((ROOT / "src/tokenmill").glob("*/*.py"))[::6]
    tokens = [tokenizer.encode(path.read_text())[: CONTEXT - 8] for path in [*pages, *modules]]
    return [ids for ids in tokens if len(ids) > 300]


def perplexity(built: BuiltEngine, texts: list[list[int]]) -> float:
    asks = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    answers = complete(built.engine, texts, asks)
    entries = [entry for a in answers for entry in a.prompt_logprobs or [] if entry is not None]
    assert len(entries) == sum(len(text) - 1 for text in texts)
    return math.exp(-sum(entry.logprobs[0] for entry in entries) / len(entries))


@torch.inference_mode()
def logits(built: BuiltEngine, token_ids: list[int]) -> torch.Tensor:
    """Logits after every token, [tokens, vocab]."""
    runner = built.runner
    seq = Sequence(Request("r", Generate(token_ids)), (0, 0, 0), CONTEXT, frozenset())
    seq.slot, seq.block_ids = 0, list(range(1, 2 + len(token_ids) // built.block_size))
    runner.builder.tables.update([(seq, 0)], runner.builder.staging)
    inputs = runner.builder.build(Batch([(seq, len(token_ids))], len(token_ids)))
    hidden = runner.model.forward(inputs.token_ids, runner.kv_cache, inputs.attention)
    return runner.model.logits(hidden).float().cpu()


def test_logits_follow_the_cpu_in_fp32(
    build: Build, checkpoints: Checkpoints, texts: list[list[int]]
) -> None:
    on_cpu = SETUPS["smollm2-bf16-bf16"].build(checkpoints, "cpu")
    expected = logits(on_cpu, texts[0][:500])
    found = logits(build("smollm2-bf16-bf16"), texts[0][:500])
    error = (found - expected).norm() / expected.norm()
    print(f"relative error of bf16 logits: {error:.5f}")
    assert error < 2e-2


def test_perplexity_of_fp8_stays_close(build: Build, texts: list[list[int]]) -> None:
    found = {name.removeprefix("smollm2-"): perplexity(build(name), texts) for name in SMOLLM2}
    base = found.pop("bf16-bf16")
    loss = {kind: value / base - 1 for kind, value in found.items()}
    print(json.dumps({"bf16": base, "tokens": sum(map(len, texts))} | loss))
    assert abs(loss["fp8-bf16"]) < 0.04
    assert abs(loss["bf16-fp8"]) < 0.01
    assert abs(loss["fp8-fp8"]) < 0.05
