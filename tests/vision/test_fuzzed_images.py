"""Thousands of broken files: each is an image or an error that names it, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import threading
from collections import Counter
from pathlib import Path

from tokenmill.core.images import VisionConfig
from tokenmill.core.types import ImageError
from tokenmill.vision.loader import ImageLoader
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from vision.pictures import data_url, mutated, seeds

NUM_FILES = int(os.environ.get("TOKENMILL_FUZZED_IMAGES", "4000"))
PROCESSOR = ImageProcessor(
    PixelLimits(1024, 65_536), 16, 2, 2, 1 / 255, (0.5,) * 3, (0.5,) * 3, token_id=7
)


def test_broken_files_are_images_or_errors() -> None:
    source, files = random.Random(0), seeds()
    config = VisionConfig(cache_bytes=2**20, max_area=4_000_000)
    ends: Counter[str] = Counter()

    async def run() -> None:
        loader = ImageLoader(PROCESSOR, config)
        for start in range(0, NUM_FILES, 16):
            batch = [mutated(source.choice(files), source) for _ in range(16)]
            urls = [data_url(data) for data in batch]
            loads = [loader.load(url, PROCESSOR.limits, 4096) for url in urls]
            for made in await asyncio.gather(*loads, return_exceptions=True):
                kind = ImageError if isinstance(made, ImageError) else type(made)
                ends[kind.__name__] += 1
            if start == 0:
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert loader.stats.cached_bytes <= config.cache_bytes
        assert loader.stats.num_images == ends.total()
        loader.close()

    sizes: list[int] = []
    handles = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(run())
    assert set(ends) == {"ImageInput", ImageError.__name__}, ends
    assert min(ends.values()) > NUM_FILES // 20  # both ends are met
    assert len(list(Path("/proc/self/fd").iterdir())) <= handles
    assert not [t for t in threading.enumerate() if t.name.startswith("image")]
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - sizes[0]
    assert grown_kib < 200 * 1024, f"{grown_kib} KiB for {ends.total()} files"
