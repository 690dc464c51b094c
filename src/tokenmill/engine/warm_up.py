"""The steps that compile and load every kernel before the first request waits for them.

Triton builds a kernel for each shape of its tiles: those of attention follow the number of queries
of a sequence and how many sequences there are, those of experts and products the number of rows.
What was built lies in Triton's cache on disk, and the next start only loads it.
"""

from __future__ import annotations

import numpy as np

from tokenmill.core.images import Grid, ImageInput, ImageSpan
from tokenmill.core.requests import Generate, Request
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import SamplingParams
from tokenmill.kernels.attention import SHORT
from tokenmill.sched.sequence import Batch, BegunImage, Item, Sequence

Step = list[int]  # new tokens of each sequence; those with one come first, as in the scheduler
FEW: list[Step] = [[2], [1]]  # where kernels are compiled for all shapes at once
BESIDE = 100  # tokens of a prompt beside sequences that decode


def warm_up_steps(budget: int, num_seqs: int, num_tokens: int) -> list[Step]:
    """Prompts of every length by halves, many short ones, short ends, and prompts beside decoding.

    `num_tokens` fit in a sequence and in the cache.
    """
    longest = max(1, min(budget, num_tokens))
    prompts = [longest >> shift for shift in range(longest.bit_length() - 1)]
    ends = range(min(SHORT, longest), 1, -1)
    beside = min(BESIDE, longest, max(1, budget - num_seqs))
    most = min(num_seqs, max(1, budget - beside))
    counts = [most >> shift for shift in range(most.bit_length())]
    steps = [[n] for n in dict.fromkeys([*prompts, *ends])]
    if longest > SHORT:
        steps.append([SHORT + 1] * min(num_seqs, budget // (SHORT + 1)))
    mixed = [[1] * count + [beside] for count in counts if count + beside <= budget]
    return [*steps, *mixed, [1]]


def warm_up_batch(step: Step, block_size: int, num_to_draft: int = 0) -> Batch:
    """Prompts in the first blocks of the cache, which belong to nobody yet."""
    items = [_item(slot, count, block_size) for slot, count in enumerate(step)]
    grown = [(seq, 0) for seq, _ in items]
    return Batch(items, sum(step), grown, num_to_draft=num_to_draft)


def _item(slot: int, count: int, block_size: int, images: tuple[ImageSpan, ...] = ()) -> Item:
    sampling = SamplingParams(temperature=0.0)
    request: Request = Request(f"warm-up {slot}", Generate([0] * count, sampling, images=images))
    num_blocks = -(-count // block_size)
    seq = Sequence(request, (0, 0, slot), (num_blocks + 1) * block_size, frozenset())
    seq.block_ids, seq.slot = list(range(num_blocks)), slot
    return seq, count


def blank_image(grid: Grid, vision: VisionSpec) -> ImageInput:
    values = grid[0] * grid[1] * grid[2] * vision.in_channels * vision.patch_size**2
    levels = np.zeros(256 * vision.in_channels, "<f4").tobytes()
    return ImageInput(bytes(values), grid, b"warm-up".ljust(32), levels)


def image_batches(image: ImageInput, block_size: int, merge: int) -> list[Batch]:
    """A token beside which an image is encoded in part, and the prompt of the image."""
    beside = warm_up_batch([1], block_size)
    beside.begun_images = [BegunImage(image, 0.5)]
    num_tokens = image.num_tokens(merge)
    item = _item(0, num_tokens + 1, block_size, (ImageSpan(0, num_tokens, image),))
    return [beside, Batch([item], num_tokens + 1, [(item[0], 0)])]
