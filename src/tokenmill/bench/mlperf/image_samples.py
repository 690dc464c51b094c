"""Samples with an image each: synthetic ones in sizes like the benchmark's, or those of a dataset.

The benchmark publishes no lengths. A sample has about 800 tokens of text and 1,400 of an image, and
43 tokens out of at most 150, by the histogram of the reference and the logs of submissions.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenmill.bench.client.synthetic_images import read_image
from tokenmill.bench.mlperf.accuracy import Row
from tokenmill.bench.mlperf.loadgen import Sample
from tokenmill.bench.mlperf.runs import MIN_OUTPUT, Run
from tokenmill.bench.workload import BenchError
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import SamplingParams, TokenmillError
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.placing import place_images
from tokenmill.vision.processor import ImageProcessor, load_processor

TEXT, TEXT_SPREAD, TEXT_MOST = 800, 0.5, 8000
IMAGE, IMAGE_SPREAD, IMAGE_MOST = 1400, 0.8, 16_384  # of 16.8 million pixels
OUTPUT_LEAST, OUTPUT_MEAN = 22, 43
AROUND = 2  # tokens that begin and end an image


class Shape(NamedTuple):
    """Tokens of a sample; those of its image are rows x columns."""

    text: int
    rows: int
    columns: int
    output: int

    @property
    def num_input(self) -> int:
        return self.text + AROUND + self.rows * self.columns


def draw_shapes(run: Run, max_model_len: int) -> tuple[list[Shape], float]:
    """What every sample has, and the scale that makes it fit a shorter context."""
    rng = random.Random(run.seeds["qsl_rng_seed"])
    shapes = [_draw(rng, run.preset.max_output) for _ in range(run.preset.num_samples)]
    if run.quick_samples:
        shapes = rng.sample(shapes, min(run.quick_samples, len(shapes)))
    longest = max(shape.num_input + shape.output for shape in shapes)
    if longest > max_model_len and not run.quick:
        raise BenchError(
            f"{run.preset.name} needs {longest} tokens of context, but the model has "
            f"{max_model_len}; --quick scales the lengths down"
        )
    room = max_model_len - AROUND - MIN_OUTPUT - 2
    scale = min(run.length_scale, room / longest)
    return ([_scaled(shape, scale) for shape in shapes] if scale < 1 else shapes), scale


def _draw(rng: random.Random, max_output: int) -> Shape:
    text = _lognormal(rng, TEXT, TEXT_SPREAD, TEXT_MOST)
    tokens = _lognormal(rng, IMAGE, IMAGE_SPREAD, IMAGE_MOST)
    rows = max(1, round(math.sqrt(tokens * rng.uniform(0.6, 1.6))))
    output = OUTPUT_LEAST + round(rng.expovariate(1 / (OUTPUT_MEAN - OUTPUT_LEAST)))
    return Shape(text, rows, max(1, round(tokens / rows)), min(output, max_output))


def _lognormal(rng: random.Random, mean: float, spread: float, most: int) -> int:
    drawn = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(round(drawn), most))


def _scaled(shape: Shape, scale: float) -> Shape:
    side = math.sqrt(scale)
    rows, columns = (max(1, int(number * side)) for number in (shape.rows, shape.columns))
    text, output = max(1, int(shape.text * scale)), max(MIN_OUTPUT, int(shape.output * scale))
    return Shape(text, rows, columns, output)


def synthetic_samples(run: Run, shapes: Sequence[Shape], spec: ModelSpec) -> list[Sample]:
    """Random tokens with an image of noise in the middle of each prompt."""
    vision = vision_of(spec, run.preset.name)
    source = np.random.default_rng(run.seeds["sample_index_rng_seed"])
    return [_synthetic(run, shape, spec.vocab_size, vision, source, i)
            for i, shape in enumerate(shapes)]  # fmt: skip


def vision_of(spec: ModelSpec, benchmark: str) -> VisionSpec:
    """The model's encoder; BenchError where it takes no images."""
    if spec.vision is None:
        raise BenchError(
            f"{benchmark} has an image in each sample, but {spec.architecture} takes text alone: "
            "--model must be a Qwen3-VL"
        )
    return spec.vision


def _synthetic(
    run: Run,
    shape: Shape,
    vocab_size: int,
    vision: VisionSpec,
    source: np.random.Generator,
    index: int,
) -> Sample:
    low, high = vocab_size // 32, vocab_size - vocab_size // 8
    ids = source.integers(low, high, shape.num_input, dtype=np.int32)
    count, begin = shape.rows * shape.columns, shape.text // 2 + 1
    ids[begin - 1], ids[begin + count] = vision.vision_start_id, vision.vision_end_id
    ids[begin : begin + count] = vision.image_token_id
    preset = run.preset
    sampling = SamplingParams(
        temperature=preset.temperature, top_p=preset.top_p, top_k=preset.top_k,
        max_tokens=shape.output, ignore_eos=True,
    )  # fmt: skip
    made = partial(_noise, vision, shape, begin, index)
    return Sample(array("i", ids.tolist()), sampling, images=made)


def _noise(vision: VisionSpec, shape: Shape, offset: int, seed: int) -> tuple[ImageSpan, ...]:
    """An image of random bytes between -1 and 1, another one for every sample."""
    grid = (1, vision.merge_size * shape.rows, vision.merge_size * shape.columns)
    source = np.random.default_rng(seed)
    data = source.bytes(grid[1] * grid[2] * vision.patch_dim // vision.temporal_patch_size)
    levels = np.tile(np.linspace(-1, 1, 256, dtype="<f4"), vision.in_channels).tobytes()
    image = ImageInput(data, grid, source.bytes(32), levels)
    return (ImageSpan(offset, shape.rows * shape.columns, image),)


class DatasetImages:
    """Prompts of rows that have an image, by the model's chat template and processor."""

    def __init__(self, model: Path, tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
        processor = load_processor(model)
        if processor is None:
            raise BenchError(f"{model}: its config.json names no vision encoder")
        self._processor: ImageProcessor = processor
        self._tokenizer, self._folder, self._max_tokens = tokenizer, folder, max_tokens

    def prompt(
        self, row: Row, number: int
    ) -> tuple[list[int], Callable[[], tuple[ImageSpan, ...]]]:
        """Token ids with placeholders, and what makes the image again when it is issued."""
        if not row.image:
            raise BenchError(f"sample {number} of the dataset has no image")
        content = [{"type": "image"}, {"type": "text", "text": row.text or ""}]
        ids = self._tokenizer.encode_chat([{"role": "user", "content": content}])
        make = partial(self._placed, ids, row.image, number)
        placed, _ = make()
        return placed, lambda: make()[1]

    def _placed(
        self, ids: list[int], source: str, number: int
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        where = f"sample {number} of the dataset"
        processor, data = self._processor, read_image(source, self._folder, where)
        try:
            image = processor.process(data, processor.limits, 2**28, self._max_tokens)
            return place_images(ids, [image], processor)
        except TokenmillError as error:
            raise BenchError(f"{where}: {error}") from None
