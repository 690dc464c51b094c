"""One rank of a group that runs tiny models together; test_ranks.py starts as many as it needs.

python rank_checks.py RANK SIZE FOLDER: checks every model of FOLDER, raises on the first fault.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from harness import BLOCK_SIZE, Harness
from tokenmill import parallel
from tokenmill.core.config import ParallelConfig
from tokenmill.engine.choices import set_num_threads
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.engine.ranks.rebalance import move_experts
from tokenmill.engine.runner import ModelRunner
from tokenmill.kernels import cpu_kernels
from tokenmill.layers import experts as layers
from tokenmill.models import family_of
from tokenmill.models.checkpoints.shards import plan_layout, wanted
from tokenmill.models.checkpoints.weights import open_checkpoint
from tokenmill.parallel import Ranks, connect, disconnect, file_store

PROMPT = [random.Random(5).randrange(64) for _ in range(37)]
STAGED = "mixtral"  # the model that is checked once more with copies
CHUNKS = [3, 20, 1, 1, 12]


class Part(Harness):
    """A rank's part of a checkpoint."""

    def __init__(self, folder: Path, dtype: str, config: ParallelConfig, ranks: Ranks) -> None:
        checkpoint = open_checkpoint(folder)
        layout = plan_layout(checkpoint.spec, config, ranks)
        tensors = checkpoint.tensors(wanted=wanted(checkpoint.spec, layout))
        model = family_of(checkpoint.spec).model
        self.model = model(checkpoint.spec, tensors, dtype, 256, "cpu", layout)
        cache = allocate_kv_cache(self.model.spec, 16, BLOCK_SIZE)
        self.runner = ModelRunner(self.model, cache, BLOCK_SIZE, max_model_len=256)


def check_experts(folder: Path, ranks: Ranks) -> None:
    """Experts on several ranks, some twice, moved about: one rank's logits to the last bit.

    Other ranks have no head.
    """
    for dtype in ("fp32", "int8") if cpu_kernels() else ("fp32",):
        part = Part(folder, dtype, ParallelConfig(ep=ranks.size, redundant_experts=4), ranks)
        if not ranks.rank:
            alone = Harness(folder, dtype)
            expected = alone.logits(PROMPT, CHUNKS)
            experts, all_experts = part.model.experts[0], alone.model.experts[0]
            share = len(experts.own) / experts.num_experts
            assert experts.num_bytes == round(all_experts.num_bytes * share)
        for seed in range(2):
            with mock.patch.object(layers, "MOST_PADDED", seed * layers.MOST_PADDED):
                found = part.logits(PROMPT, CHUNKS)
            assert ranks.rank or torch.equal(found, expected), (folder.name, dtype, seed)
            for layer in part.model.experts:
                placement = list(layer.placement)
                random.Random(seed).shuffle(placement)
                assert move_experts(layer, placement) > 0
                assert layer.placement == placement


def check_heads(folder: Path, ranks: Ranks) -> None:
    """Heads, dense layers, vocabulary divided: sums in another order, so close and no more."""
    part = Part(folder, "fp32", ParallelConfig(tp=ranks.size), ranks)
    found, vocab_size = part.logits(PROMPT, CHUNKS), part.model.spec.vocab_size
    (share,) = {ranks.shares(vocab_size)[ranks.rank], part.model.head.weight.n}
    if ranks.rank:
        assert found.shape == (len(PROMPT), share)
    else:
        alone = Harness(folder, "fp32")
        expected = alone.logits(PROMPT, CHUNKS)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert not torch.equal(found, expected) and torch.equal(found.argmax(1), expected.argmax(1))
        assert part.model.layers[0].num_bytes < alone.model.layers[0].num_bytes
        outer = (part.model.embedding, part.model.head), (alone.model.embedding, alone.model.head)
        own, whole = (sum(table.num_bytes for table in tables) for tables in outer)
        assert own < whole / 2


def check_own_tokens(folder: Path, ranks: Ranks) -> None:
    """Each rank has a prompt of its own, the last one none: it computes for the others."""
    part = Part(folder, "fp32", ParallelConfig(ep=ranks.size, attention_dp=True), ranks)
    if ranks.rank == ranks.size - 1:
        for _ in CHUNKS:
            part.model.assist()
        return
    prompt = PROMPT[ranks.rank :] + PROMPT[: ranks.rank]
    expected = Harness(folder, "fp32").logits(prompt, CHUNKS)
    assert torch.equal(part.logits(prompt, CHUNKS), expected), folder.name


def check_by_way_of_host_memory(folder: Path, ranks: Ranks) -> None:
    """Ranks that share a GPU: what is sent and what arrives are copies."""
    with mock.patch.object(parallel, "to_host", torch.clone):
        staged = replace(ranks, staged=True)
        check_experts(folder, staged)
        check_own_tokens(folder, staged)
        check_heads(folder, staged)
        x = torch.full((2, 3), float(ranks.rank))
        assert staged.gather(x)[:, 0, 0].tolist() == list(range(ranks.size))
        assert not staged.broadcast(x).any()


def main(rank: int, size: int, folder: Path) -> None:
    set_num_threads(1)
    ranks = connect(rank, size, file_store(str(folder / "store"), size), "gloo")
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        if open_checkpoint(model).spec.moe is not None:
            check_experts(model, ranks)
            check_own_tokens(model, ranks)
            if model.name == STAGED:
                check_by_way_of_host_memory(model, ranks)
        check_heads(model, ranks)
    disconnect()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
