"""DeepSeek-V3 against transformers: logits whole, chunked and token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Harness
from tiny_models import make_model, save, tame

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, dict[str, Any]] = {
    "yarn": {},
    "plain-queries": {"q_lora_rank": None, "rope_parameters": DEFAULT_ROPE},
    "halves": {"rope_interleave": False},
    "two-shared-experts": {"n_shared_experts": 2, "norm_topk_prob": False},
    "one-group": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    reference = tame(make_model("deepseek-v3", **CASES[case]))
    harness = Harness(save(reference, tmp_path), "fp32")
    torch.manual_seed(1)
    ids = torch.randint(0, reference.config.vocab_size, (100,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    for chunks in ([100], [1, 30, 16, 53], [90] + [1] * 10):
        found = harness.logits(ids, chunks)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
