"""fp8 on real weights, computed by the references: what it costs in perplexity."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenmill.core.requests import Generate, Request
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.engine.runner import ModelRunner
from tokenmill.kernels import matmul
from tokenmill.layers import attention, linear
from tokenmill.layers.linear import ComputeType, Linear
from tokenmill.models import decoder, family_of
from tokenmill.models.checkpoints.weights import open_checkpoint
from tokenmill.sched.sequence import Batch, Sequence
from tokenmill.text.tokenizer import load_tokenizer

NUM_TOKENS = 1000
PRODUCT = matmul.matmul.reference


def product(
    x: Any, weight: Any, bias: torch.Tensor | None = None, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """A CPU multiplies bf16 eight times more slowly than fp32; the sums are fp32 either way."""
    if weight.data.dtype != torch.bfloat16 or bias is not None:
        return PRODUCT(x, weight, bias, add_to)
    out = x.float() @ weight.data.float().T
    return out.bfloat16() if add_to is None else add_to.copy_(add_to + out)


class CastingLinear(Linear):
    """A CPU attends in fp32 alone; a bf16 product takes bf16."""

    def __call__(self, x: Any, add_to: torch.Tensor | None = None) -> torch.Tensor:
        return super().__call__(x.bfloat16() if isinstance(x, torch.Tensor) else x, add_to)


@torch.inference_mode()
def perplexity(path: Path, dtype: ComputeType, token_ids: list[int]) -> float:
    checkpoint = open_checkpoint(path)
    model = family_of(checkpoint.spec).model(checkpoint.spec, checkpoint.tensors(), dtype, 1024)
    runner = ModelRunner(model, allocate_kv_cache(checkpoint.spec, 80, 16), 16, 4, 1024)
    seq = Sequence(Request("r", Generate(token_ids)), (0, 0, 0), 1024, frozenset())
    seq.slot, seq.block_ids = 0, list(range(1 + len(token_ids) // 16))
    runner.builder.tables.update([(seq, 0)], runner.builder.staging)
    inputs = runner.builder.build(Batch([(seq, len(token_ids))], len(token_ids)))
    hidden = runner.model.forward(inputs.token_ids, runner.kv_cache, inputs.attention)
    scores = runner.model.logits(hidden[:-1]).float().log_softmax(-1)
    return math.exp(-scores[torch.arange(len(token_ids) - 1), token_ids[1:]].mean())


def test_fp8_perplexity_stays_close(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow model loses 3 % over many tokens; a thousand tell to half of one."""
    rope = attention.rope_and_cache
    monkeypatch.setattr(attention, "rope_and_cache", lambda qkv, *rest: rope(qkv.float(), *rest))
    for module in (matmul, linear):
        monkeypatch.setattr(module, "matmul", product)
    monkeypatch.setattr(decoder, "Linear", CastingLinear)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = load_tokenizer(str(smollm2_path)).encode(text)[:NUM_TOKENS]
    expected = perplexity(smollm2_path, "bf16", token_ids)
    cost = perplexity(smollm2_path, "fp8", token_ids) / expected - 1
    print(f"fp8 costs {cost:.2%}")
    assert abs(cost) < 0.04
