"""The samples of language benchmarks: in the published lengths, or those of a dataset.

The benchmark with images publishes no lengths. A sample of it has about 800 tokens of text and
1,400 of an image, and 43 tokens out of at most 150, by the histogram of the reference and the logs
of submissions.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenmill.bench.client.synthetic_images import read_image
from tokenmill.bench.mlperf.accuracy import DatasetRow
from tokenmill.bench.mlperf.presets import TaskName
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.workload import SHIPPED, BenchError, read_lengths
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import SamplingParams, TokenmillError
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.placing import place_images
from tokenmill.vision.processor import ImageProcessor, load_processor

MIN_OUTPUT = 2  # LoadGen counts a sample of one token as an error: it has no TPOT

TEXT, TEXT_SPREAD, TEXT_MOST = 800, 0.5, 8000
IMAGE, IMAGE_SPREAD, IMAGE_MOST = 1400, 0.8, 16_384  # of 16.8 million pixels
OUTPUT_LEAST, OUTPUT_MEAN = 22, 43
AROUND = 2  # tokens that begin and end an image
SYNTHETIC: dict[TaskName, str] = {
    "language": "Prompts are synthetic: random tokens in the published lengths, not the "
    "benchmark's dataset.",
    "images": "Prompts and images are synthetic: random tokens and noise in sizes like the "
    "benchmark's, not its dataset.",
}


def notices_of(run: MlperfRun, synthetic: bool, scale: float) -> list[str]:
    """Sentences that every output of a run carries."""
    own = [SYNTHETIC[run.preset.task]] if synthetic else []
    if scale != 1:
        own.append(f"Lengths are scaled by {scale:.4g}.")
    return run.notices(own)


@dataclass(frozen=True, slots=True)
class LanguageSample:
    """One entry of the query sample library."""

    prompt_token_ids: array[int]  # a library of lists would take ten times the memory
    sampling: SamplingParams
    text: str = ""  # of the prompt, for a server that takes no token ids
    # Makes the images of the prompt when it is issued: all at once would not fit in memory.
    images: Callable[[], tuple[ImageSpan, ...]] | None = None


def synthetic_lengths(run: MlperfRun, max_model_len: int) -> tuple[list[tuple[int, int]], float]:
    """(input, output) of every sample, and the scale that makes them fit a shorter context.

    Only a quick run has fewer samples or scaled lengths.
    """
    preset = run.preset
    rows = read_lengths(SHIPPED / f"{preset.name}.csv", preset.output_len)
    lengths = [(i, min(round(o * preset.output_scale), preset.max_output)) for i, o in rows]
    if run.quick_samples:
        rng = random.Random(run.seeds["qsl_rng_seed"])
        lengths = rng.sample(lengths, min(run.quick_samples, len(lengths)))
    longest = max(i + o for i, o in lengths)
    if longest > max_model_len and not run.quick:
        raise BenchError(
            f"{preset.name} needs {longest} tokens of context, but the model has {max_model_len}; "
            "--quick scales the lengths down"
        )
    # Room for the two tokens that an output has at least.
    scale = min(run.length_scale, (max_model_len - MIN_OUTPUT) / longest)
    if scale == 1:
        return [(i, max(o, MIN_OUTPUT)) for i, o in lengths], scale
    scaled = [(max(int(i * scale), 1), max(int(o * scale), MIN_OUTPUT)) for i, o in lengths]
    return scaled, scale


def synthetic_samples(
    run: MlperfRun, lengths: Sequence[tuple[int, int]], vocab_size: int
) -> list[LanguageSample]:
    """Random tokens, away from the special ones at the ends of the vocabulary."""
    rng = random.Random(run.seeds["sample_index_rng_seed"])
    temperature = run.preset.temperature
    tokens = range(vocab_size // 32, vocab_size - vocab_size // 8)
    return [
        LanguageSample(
            array("i", rng.choices(tokens, k=input_len)),
            SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True),
        )
        for input_len, output_len in lengths
    ]


def choose_samples(
    run: MlperfRun, input_lens: Sequence[int], max_model_len: int, mode: str
) -> list[int]:
    """Indices of the dataset's samples to run; a quick run takes the first that fit."""
    if run.quick_samples:
        fitting = [i for i, n in enumerate(input_lens) if n + MIN_OUTPUT <= max_model_len]
        if not fitting:
            raise BenchError(f"no prompt of the dataset fits a context of {max_model_len} tokens")
        return fitting[: run.quick_samples]
    own = {"accuracy": run.preset.accuracy_samples, "TEST07": run.preset.compliance_samples}
    run.check_count("the dataset", len(input_lens), "samples", own.get(mode))
    return list(range(len(input_lens)))


def dataset_samples(
    run: MlperfRun, prompts: Sequence[list[int]], max_model_len: int, accuracy: bool
) -> list[LanguageSample]:
    """Samples of a dataset's prompts, with the benchmark's sampling and cap."""
    preset = run.preset
    cap = (accuracy and preset.accuracy_output) or preset.max_output
    longest = max(map(len, prompts)) + cap
    if longest > max_model_len and not run.quick:
        raise BenchError(
            f"the dataset needs {longest} tokens of context, but the model has {max_model_len}"
        )
    return [
        LanguageSample(
            array("i", prompt),
            SamplingParams(
                temperature=preset.temperature,
                top_p=preset.top_p,
                top_k=preset.top_k,
                max_tokens=min(cap, max_model_len - len(prompt)),
                min_tokens=1 if accuracy else MIN_OUTPUT,
            ),
        )
        for prompt in prompts
    ]


class SampleSize(NamedTuple):
    """Tokens of a sample; those of its image are rows x columns."""

    text: int
    rows: int
    columns: int
    output: int

    @property
    def num_input(self) -> int:
        return self.text + AROUND + self.rows * self.columns


def draw_sizes(run: MlperfRun, max_model_len: int) -> tuple[list[SampleSize], float]:
    """What every sample has, and the scale that makes it fit a shorter context."""
    rng = random.Random(run.seeds["qsl_rng_seed"])
    sizes = [_draw(rng, run.preset.max_output) for _ in range(run.preset.num_samples)]
    if run.quick_samples:
        sizes = rng.sample(sizes, min(run.quick_samples, len(sizes)))
    longest = max(size.num_input + size.output for size in sizes)
    if longest > max_model_len and not run.quick:
        raise BenchError(
            f"{run.preset.name} needs {longest} tokens of context, but the model has "
            f"{max_model_len}; --quick scales the lengths down"
        )
    room = max_model_len - AROUND - MIN_OUTPUT - 2
    scale = min(run.length_scale, room / longest)
    return ([_scaled(size, scale) for size in sizes] if scale < 1 else sizes), scale


def _draw(rng: random.Random, max_output: int) -> SampleSize:
    text = _lognormal(rng, TEXT, TEXT_SPREAD, TEXT_MOST)
    tokens = _lognormal(rng, IMAGE, IMAGE_SPREAD, IMAGE_MOST)
    rows = max(1, round(math.sqrt(tokens * rng.uniform(0.6, 1.6))))
    output = OUTPUT_LEAST + round(rng.expovariate(1 / (OUTPUT_MEAN - OUTPUT_LEAST)))
    return SampleSize(text, rows, max(1, round(tokens / rows)), min(output, max_output))


def _lognormal(rng: random.Random, mean: float, spread: float, most: int) -> int:
    drawn = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(round(drawn), most))


def _scaled(size: SampleSize, scale: float) -> SampleSize:
    side = math.sqrt(scale)
    rows, columns = (max(1, int(number * side)) for number in (size.rows, size.columns))
    text, output = max(1, int(size.text * scale)), max(MIN_OUTPUT, int(size.output * scale))
    return SampleSize(text, rows, columns, output)


def image_samples(
    run: MlperfRun, sizes: Sequence[SampleSize], spec: ModelSpec
) -> list[LanguageSample]:
    """Random tokens with an image of noise in the middle of each prompt."""
    vision = vision_of(spec, run.preset.name)
    source = np.random.default_rng(run.seeds["sample_index_rng_seed"])
    return [_synthetic(run, size, spec.vocab_size, vision, source, i)
            for i, size in enumerate(sizes)]  # fmt: skip


def vision_of(spec: ModelSpec, benchmark: str) -> VisionSpec:
    """The model's encoder; BenchError where it takes no images."""
    if spec.vision is None:
        raise BenchError(
            f"{benchmark} has an image in each sample, but {spec.architecture} takes text alone: "
            "--model must be a Qwen3-VL"
        )
    return spec.vision


def _synthetic(
    run: MlperfRun,
    size: SampleSize,
    vocab_size: int,
    vision: VisionSpec,
    source: np.random.Generator,
    index: int,
) -> LanguageSample:
    low, high = vocab_size // 32, vocab_size - vocab_size // 8
    ids = source.integers(low, high, size.num_input, dtype=np.int32)
    count, begin = size.rows * size.columns, size.text // 2 + 1
    ids[begin - 1], ids[begin + count] = vision.vision_start_id, vision.vision_end_id
    ids[begin : begin + count] = vision.image_token_id
    preset = run.preset
    sampling = SamplingParams(
        temperature=preset.temperature, top_p=preset.top_p, top_k=preset.top_k,
        max_tokens=size.output, ignore_eos=True,
    )  # fmt: skip
    made = partial(_noise, vision, size, begin, index)
    return LanguageSample(array("i", ids.tolist()), sampling, images=made)


def _noise(vision: VisionSpec, size: SampleSize, offset: int, seed: int) -> tuple[ImageSpan, ...]:
    """An image of random bytes between -1 and 1, another one for every sample."""
    grid = (1, vision.merge_size * size.rows, vision.merge_size * size.columns)
    source = np.random.default_rng(seed)
    data = source.bytes(grid[1] * grid[2] * vision.patch_dim // vision.temporal_patch_size)
    levels = np.tile(np.linspace(-1, 1, 256, dtype="<f4"), vision.in_channels).tobytes()
    image = ImageInput(data, grid, source.bytes(32), levels)
    return (ImageSpan(offset, size.rows * size.columns, image),)


class DatasetImages:
    """Prompts of rows that have an image, by the model's chat template and processor."""

    def __init__(self, model: Path, tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
        processor = load_processor(model)
        if processor is None:
            raise BenchError(f"{model}: its config.json names no vision encoder")
        self._processor: ImageProcessor = processor
        self._tokenizer, self._folder, self._max_tokens = tokenizer, folder, max_tokens

    def prompt(
        self, row: DatasetRow, number: int
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
