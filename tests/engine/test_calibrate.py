"""fp8 on real weights, computed by the references: what it costs in perplexity."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import make_model, save, tame
from tokenmill.core.types import Request
from tokenmill.engine import calibrate
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.engine.runner import ModelRunner
from tokenmill.kernels import matmul
from tokenmill.layers import attention
from tokenmill.layers.linear import Linear
from tokenmill.models import decoder, family_of
from tokenmill.models.checkpoints.weights import open_checkpoint
from tokenmill.sched.sequence import Batch, Sequence
from tokenmill.text.tokenizer import load_tokenizer

NUM_TOKENS = 1000


@pytest.fixture(autouse=True)
def attention_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU attends in fp32 alone."""
    rope = attention.rope_and_cache
    monkeypatch.setattr(attention, "rope_and_cache", lambda qkv, *rest: rope(qkv.float(), *rest))


@pytest.fixture(autouse=True)
def products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU multiplies bf16 eight times more slowly; the sums are fp32 either way."""
    reference = matmul.matmul_reference

    def product(
        x: Any, weight: Any, bias: torch.Tensor | None = None, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight.data.dtype != torch.bfloat16 or bias is not None:
            return reference(x, weight, bias, add_to)
        out = x.float() @ weight.data.float().T
        return out.bfloat16() if add_to is None else add_to.copy_(add_to + out)

    monkeypatch.setattr(matmul, "matmul_reference", product)


class CastingLinear(Linear):
    """Attention comes in fp32 here; a bf16 product takes bf16."""

    def __call__(self, x: Any, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return super().__call__(x.bfloat16() if isinstance(x, torch.Tensor) else x, add_to)


def load(path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(decoder, "Linear", CastingLinear)
    checkpoint = open_checkpoint(path)
    model = family_of(checkpoint.spec).model(checkpoint.spec, checkpoint.tensors(), dtype, 1024)
    return ModelRunner(model, allocate_kv_cache(checkpoint.spec, 80, 16), 16, 4, 1024)


@torch.inference_mode()
def perplexity(runner: ModelRunner, token_ids: list[int]) -> float:
    seq = Sequence(Request("r", token_ids), (0, 0, 0), 1024, frozenset())
    seq.slot, seq.block_ids = 0, list(range(1 + len(token_ids) // 16))
    runner.builder.tables.update([(seq, 0)], runner.builder.staging)
    inputs = runner.builder.build(Batch([(seq, len(token_ids))], len(token_ids)))
    hidden = runner.model.forward(inputs.token_ids, runner.kv_cache, inputs.attention)
    scores = runner.model.logits(hidden[:-1]).float().log_softmax(-1)
    return math.exp(-scores[torch.arange(len(token_ids) - 1), token_ids[1:]].mean())


def test_fp8_perplexity_stays_close(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 % over many tokens (tests/gpu/test_accuracy.py); a thousand tell to half of one."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = load_tokenizer(str(smollm2_path)).encode(text)[:NUM_TOKENS]
    runner = load(smollm2_path, "bf16", monkeypatch)
    expected = perplexity(runner, token_ids)
    calibrate.quantize(runner)
    weight = runner.model.linears[0].weight
    assert weight.data.dtype == torch.float8_e4m3fn and weight.k == 576 + 2 * calibrate.NUM_CHANNELS
    cost = perplexity(runner, token_ids) / expected - 1
    print(f"fp8 costs {cost:.2%}")
    assert abs(cost) < 0.015


def test_products_between_two_norms_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(save(tame(make_model("gemma3")), tmp_path), "bf16", monkeypatch)
    token_ids = [i * 7 % 64 for i in range(100)]
    expected = perplexity(runner, token_ids)
    calibrate.quantize(runner)
    assert all(linear.weight.channels is not None for linear in runner.model.linears)
    assert perplexity(runner, token_ids) == pytest.approx(expected, rel=0.05)
