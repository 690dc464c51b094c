"""Random images and prompts around them, for the tiny Qwen3-VL models."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from tiny_models import IMAGE_TOKENS, VISION
from tokenmill.core.images import ImageInput, ImageSpan

MERGE = 2
PATCH_DIM = 3 * 2 * VISION["patch_size"] ** 2
Grid = tuple[int, int, int]


class Prompt(NamedTuple):
    """Token ids with expanded placeholders, and the images that they stand for."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()


def image(seed: int, grid: Grid) -> ImageInput:
    pixels = np.random.default_rng(seed).uniform(-1, 1, (grid[0] * grid[1] * grid[2], PATCH_DIM))
    return ImageInput.of(pixels.astype("<f4").tobytes(), grid)


def prompt(seed: int, *parts: int | ImageInput) -> Prompt:
    """So many random tokens, or an image between its start and its end, one after the other."""
    source, ids, spans = random.Random(seed), [], []
    for part in parts:
        if isinstance(part, int):
            ids += [source.randrange(60) for _ in range(part)]
            continue
        count = part.num_tokens(MERGE)
        ids.append(IMAGE_TOKENS["vision_start_token_id"])
        spans.append(ImageSpan(len(ids), count, part))
        ids += [IMAGE_TOKENS["image_token_id"]] * count + [IMAGE_TOKENS["vision_end_token_id"]]
    return Prompt(ids, tuple(spans))


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, asked: Prompt) -> torch.Tensor:
    """What transformers says after every token, [tokens, vocab]."""
    ids = torch.tensor([asked.token_ids])
    if not asked.images:
        return model(ids).logits[0]
    found = [span.image for span in asked.images]
    pixels = [np.frombuffer(each.data, "<f4").reshape(-1, PATCH_DIM) for each in found]
    result = model(
        ids,
        pixel_values=torch.tensor(np.concatenate(pixels)),
        image_grid_thw=torch.tensor([each.grid for each in found]),
        mm_token_type_ids=(ids == IMAGE_TOKENS["image_token_id"]).int(),
    )
    return result.logits[0]
