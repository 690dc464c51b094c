"""One sequence driven through a model by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokenmill.core.images import ImageSpan
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.engine.model import allocate_kv_cache
from tokenmill.engine.runner import ModelRunner
from tokenmill.models import family_of
from tokenmill.models.checkpoints.weights import open_checkpoint
from tokenmill.sched.sequence import Batch, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # which ranks need not import

BLOCK_SIZE = 16


class Harness:
    """A checkpoint, and one sequence of it over scattered blocks."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        checkpoint = open_checkpoint(folder)
        model = family_of(checkpoint.spec).model
        self.model = model(checkpoint.spec, checkpoint.tensors(), dtype, 256)
        cache = allocate_kv_cache(checkpoint.spec, 16, BLOCK_SIZE)
        self.runner = ModelRunner(self.model, cache, BLOCK_SIZE, max_model_len=256)

    @torch.inference_mode()
    def logits(
        self, token_ids: list[int], chunks: list[int], images: tuple[ImageSpan, ...] = ()
    ) -> torch.Tensor:
        """Logits after every token, computed chunk by chunk over scattered blocks."""
        request = Request("r", Generate(token_ids, SamplingParams(), images=images))
        seq = Sequence(request, (0, 0, 0), 256, frozenset())
        seq.block_ids = [11, 3, 7, 0, 15, 8, 2]
        seq.slot = 3
        builder = self.runner.builder
        builder.tables.update([(seq, 0)], builder.staging)
        rows = []
        for size in chunks:
            batch = Batch([(seq, size)], size)
            seen = None if self.runner.images is None else self.runner.images.rows(batch)
            inputs = builder.build(batch)
            cache = self.runner.kv_cache
            hidden = self.model.forward(inputs.token_ids, cache, inputs.attention, seen)
            rows.append(self.model.logits(hidden))
            seq.num_computed_tokens += size
        return torch.cat(rows)


def assert_same_logits(reference: PreTrainedModel, folder: Path) -> None:
    """Logits within 1e-4 of transformers' and the same choice, whatever the chunks."""
    harness = Harness(folder, "fp32")
    torch.manual_seed(1)
    ids = torch.randint(0, reference.config.get_text_config().vocab_size, (100,)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    for chunks in ([100], [1, 30, 16, 53], [90] + [1] * 10):
        found = harness.logits(ids, chunks)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
