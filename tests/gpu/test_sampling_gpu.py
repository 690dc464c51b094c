"""Sampling on a GPU: kernels against the references, tokens against numpy, and no waiting."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import triton_sampling_parity

from sampling_rows import constrained_rows, logits_of, on_host, random_rows
from tokenmill.engine.sampling.device_sampler import DeviceSampler


@pytest.mark.parametrize("check", triton_sampling_parity.CHECKS)
def test_kernels(check: str) -> None:
    torch.manual_seed(0)
    triton_sampling_parity.CHECKS[check]("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_launches_do_not_wait_and_give_the_tokens_of_the_host(dtype: torch.dtype) -> None:
    sampler, agreed, total = DeviceSampler(), 0, 0
    for seed in range(12):
        rows = (random_rows, constrained_rows)[seed % 2](40, random.Random(seed))
        logits = logits_of(40, seed, dtype)
        on_gpu, last_ids = logits.cuda(), torch.zeros(40, dtype=torch.int32, device="cuda")
        if seed == 0:
            sampler.warm_up(on_gpu)  # loading a kernel may wait
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampled = sampler.launch(on_gpu, [*rows], last_ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        tokens = sampled.token_ids.tolist()
        expected, _ = on_host(logits, rows)
        agreed += sum(a == b for a, b in zip(tokens, expected, strict=True))
        total += len(rows)
        assert len(sampled.finish(tokens)) == len(rows)
    assert agreed >= total - 1  # exp of a GPU rounds otherwise: an edge of a CDF may move
