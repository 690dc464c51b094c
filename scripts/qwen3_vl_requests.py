"""The requests of qwen3_vl_gpu.py and qwen3_vl_peer.py: like those of MLPerf, the same for both."""

from __future__ import annotations

import random

import numpy as np

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.requests import Generate, Request
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import SamplingParams

SIZES = ((1024, 768), (1024, 1024), (1280, 1152), (1536, 1280), (1408, 1408), (1408, 1024))
TEXT, OUT = (400, 1200), 43
WARM_UP, SAMPLES = 24, 256


class Work:
    """Requests like those of MLPerf: the same for the same seed."""

    def __init__(self, vision: VisionSpec, vocab: int, tiny: bool = False) -> None:
        self.vision, self.vocab, self.tiny = vision, vocab, tiny
        self.source, self.count = random.Random(7), 0

    def text(self, length: int, out: int) -> Request:
        """A prompt of random tokens."""
        self.count += 1
        ids = [self.source.randrange(10, self.vocab - 400) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        return Request(str(self.count), Generate(ids, sampling))

    def sample(self, out: int = OUT, as_text: bool = False) -> Request:
        """A prompt with one image between two halves of text, or with text in its place."""
        length = self.source.randint(*(part // (20 if self.tiny else 1) for part in TEXT))
        width, height = self.source.choice(SIZES)
        unit = 32 * 8 if self.tiny else 32
        tokens = (height // unit) * (width // unit)
        request = self.text(length + 2 + tokens, out)
        if as_text:
            return request
        image, offset = self._image(2 * (height // unit), 2 * (width // unit)), length // 2 + 1
        ids, vision = request.task.prompt_token_ids, self.vision
        ids[offset - 1] = vision.vision_start_id
        ids[offset : offset + tokens] = [vision.image_token_id] * tokens
        ids[offset + tokens] = vision.vision_end_id
        return Request(
            request.request_id,
            Generate(ids, request.task.sampling, images=(ImageSpan(offset, tokens, image),)),
        )

    def _image(self, rows: int, columns: int) -> ImageInput:
        size = rows * columns * self.vision.patch_dim // self.vision.temporal_patch_size
        levels = np.tile(np.linspace(-1, 1, 256, dtype="<f4"), self.vision.in_channels).tobytes()
        data = np.random.default_rng(self.count).bytes(size)
        return ImageInput(data, (1, rows, columns), self.source.randbytes(32), levels)
