"""The cache of images: each is made once, and there are never more bytes than allowed."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tokenmill.core.images import ImageInput, VisionConfig
from tokenmill.core.types import ImageError
from tokenmill.vision.image_maker import ImageMaker
from tokenmill.vision.loader import ImageLoader
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from vision.pictures import data_url, file_of, photo

LIMITS = PixelLimits(1024, 65_536)
PROCESSOR = ImageProcessor(LIMITS, 16, 2, 2, 1 / 255, (0.5,) * 3, (0.5,) * 3, token_id=7)
SIZE = 64 * 64 * 3  # bytes of a 64 x 64 image that is ready


def url(seed: int = 0) -> str:
    return data_url(file_of(photo(64, 64, seed), "PNG"))


async def load(loader: ImageLoader, *urls: str) -> list[ImageInput]:
    return list(await asyncio.gather(*(loader.load(u, LIMITS, 4096) for u in urls)))


def test_an_image_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    make = ImageMaker.make

    def counted(self: ImageMaker, data: bytes, *rest: Any) -> ImageInput:
        made.append(data)
        return make(self, data, *rest)

    monkeypatch.setattr(ImageMaker, "make", counted)

    async def run() -> None:
        loader = ImageLoader(PROCESSOR, VisionConfig())
        first = await load(loader, *[url()] * 5, url(1))
        again = await load(loader, url())
        assert {id(image) for image in first[:5]} == {id(again[0])}
        assert len(made) == 2
        assert (loader.stats.num_images, loader.stats.num_hits) == (7, 5)
        other = await loader.load(url(), PixelLimits(1024, 1024), 4096)
        assert other.num_tokens(2) == 1 and len(made) == 3
        loader.close()

    asyncio.run(run())


def test_the_cache_is_bounded_and_keeps_the_last_used() -> None:
    async def run() -> None:
        loader = ImageLoader(PROCESSOR, VisionConfig(cache_bytes=2 * SIZE))
        for seed in (0, 1, 0, 2):  # 1 is the least recently used when 2 comes
            await load(loader, url(seed))
        assert loader.stats.cached_bytes == 2 * SIZE
        hits = loader.stats.num_hits
        await load(loader, url(0))
        assert loader.stats.num_hits == hits + 1
        await load(loader, url(1))
        assert loader.stats.num_hits == hits + 1
        small = ImageLoader(PROCESSOR, VisionConfig(cache_bytes=SIZE - 1))
        await load(small, url())
        assert small.stats.cached_bytes == 0
        loader.close()
        small.close()

    asyncio.run(run())


def test_a_call_that_is_given_up_does_not_end_the_work_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go = Event()
    make = ImageMaker.make

    def slow(self: ImageMaker, *rest: Any) -> ImageInput:
        go.wait()
        return make(self, *rest)

    monkeypatch.setattr(ImageMaker, "make", slow)

    async def run() -> None:
        loader = ImageLoader(PROCESSOR, VisionConfig())
        calls = [asyncio.create_task(loader.load(url(), LIMITS, 4096)) for _ in range(2)]
        while loader.stats.num_hits == 0:  # the second waits for the first's work
            await asyncio.sleep(0.001)
        calls[0].cancel()
        go.set()
        assert (await calls[1]).num_tokens(2) == 4
        loader.close()

    asyncio.run(run())


def test_errors_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "late.png"

    async def run() -> None:
        loader = ImageLoader(PROCESSOR, VisionConfig(folder=str(tmp_path)))
        with pytest.raises(ImageError, match="cannot be read"):
            await load(loader, path.as_uri())
        path.write_bytes(file_of(photo(64, 64), "PNG"))
        assert (await load(loader, path.as_uri()))[0].grid == (1, 4, 4)
        assert sum(loader.stats.refused.values()) == 1
        loader.close()

    asyncio.run(run())


def test_decoding_leaves_the_event_loop_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work of an image runs in the loader's own threads."""
    used: list[str] = []
    submit = ThreadPoolExecutor.submit

    def noted(self: ThreadPoolExecutor, work: Any, *rest: Any, **named: Any) -> Any:
        used.append(self._thread_name_prefix)
        return submit(self, work, *rest, **named)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)

    async def run() -> None:
        loader = ImageLoader(PROCESSOR, VisionConfig())
        await load(loader, url())
        loader.close()

    asyncio.run(run())
    assert used.count("image") == 2  # reading, then decoding
