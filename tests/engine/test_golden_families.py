"""Experts, latent attention, mixed layers: transformers' tokens, and one answer in every mode."""

import random
from pathlib import Path

import pytest
import torch

from driver import assert_same, build, complete
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save, tame
from tokenmill.core.types import SamplingParams
from tokenmill.kernels import cpu_kernels

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
FAMILIES = ("qwen3-moe", "mixtral", "deepseek-v3", "gemma3", "gpt-oss")
FEWER = {"gpt-oss": 13}  # blocks instead of 18: layers with a window leave room
# chunked, prefix_cache, num_blocks, overlap
MODES = (
    (False, False, 400, True),
    (True, False, 400, False),
    (True, True, 400, True),
    (False, False, 18, False),
    (True, True, 18, True),
)


def prompts() -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(40)]
    own = [[source.randrange(64) for _ in range(n)] for n in (1, 17, 33)]
    return own + [shared + tail for tail in own]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_gives_transformers_tokens(family: str, tmp_path: Path) -> None:
    model = tame(make_model(family), 0.3)
    folder, expected = save(model, tmp_path), []
    for prompt in prompts():
        ids = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(ids[0, len(prompt) :].tolist())
    for dtype in ("fp32", "int8") if cpu_kernels() else ("fp32",):
        alone = build(folder, dtype, chunked=False, prefix_cache=False, num_blocks=64)
        golden = [complete(alone.engine, [prompt], GREEDY)[0] for prompt in prompts()]
        if dtype == "fp32":
            assert [answer.token_ids for answer in golden] == expected
        for chunked, prefix_cache, num_blocks, overlap in MODES:
            blocks = FEWER.get(family, 18) if num_blocks == 18 else num_blocks
            built = build(
                folder, dtype, chunked=chunked, prefix_cache=prefix_cache, num_blocks=blocks,
                overlap=overlap, batch_invariant=cpu_kernels() and overlap,
            )  # fmt: skip
            for _ in range(1 + prefix_cache):
                answers = complete(built.engine, prompts(), GREEDY)
                assert_same(answers, golden)
            if prefix_cache and num_blocks == 400:
                cached = [answer.num_cached_tokens for answer in answers]
                assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts()]
            slides = built.runner.sliding.num_groups > 0  # see test_sliding_kv.py
            if num_blocks == 18 and not prefix_cache and (family in FEWER or not slides):
                assert built.engine.stats().num_preemptions > 0
            check_scheduler(built.engine._scheduler)
            assert built.engine.stats().num_kv_blocks_used == 0
