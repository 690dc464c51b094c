"""Images of calls, ready for the engine: each made once, and kept while there is room.

The loader is the one owner of its cache. An image is known by the bytes of its file and the limits
of its size; calls that want it while it is being made wait for the same work.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from hashlib import blake2b

from tokenmill.core.images import ImageInput, LoaderStats, VisionConfig
from tokenmill.vision.fetching import Boundless, FetchRoom
from tokenmill.vision.image_maker import ImageMaker
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from tokenmill.vision.sources import ImageSources

Key = tuple[bytes, PixelLimits]
MakeRoom = Callable[[], AbstractContextManager[FetchRoom]]


def boundless() -> AbstractContextManager[FetchRoom]:
    return nullcontext(Boundless())


class ImageLoader:
    def __init__(self, processor: ImageProcessor, config: VisionConfig) -> None:
        self.processor = processor.with_limits(config.min_pixels, config.max_pixels)
        self.config = config
        self.stats = LoaderStats()
        self._sources = ImageSources(config)
        self._maker = ImageMaker(self.processor, config.max_area)
        # Each waits for one process of the maker, or reads a file.
        self._threads = ThreadPoolExecutor(config.processes, thread_name_prefix="image")
        self._cache: OrderedDict[Key, ImageInput] = OrderedDict()  # the last used at the end
        self._under_way: dict[Key, asyncio.Task[ImageInput]] = {}

    async def load(
        self, url: str, limits: PixelLimits, max_tokens: int, make_room: MakeRoom = boundless
    ) -> ImageInput:
        """The image behind a URL, whose file has room until it is decoded.

        ImageError says why there is none.
        """
        stats, stage = self.stats, "fetch" if self._sources.is_remote(url) else "read"
        stats.num_images += 1
        try:
            with make_room() as room:
                data, digest = await self._read(url, room)
                stage = "decode"
                image = await self._process((digest, limits), data, max_tokens)
        except Exception:
            stats.refused[stage] += 1
            raise
        stats.num_tokens += image.num_tokens(self.processor.merge)
        return image

    def close(self) -> None:
        self._maker.close()
        self._threads.shutdown()

    async def _read(self, url: str, room: FetchRoom) -> tuple[bytes, bytes]:
        loop = asyncio.get_running_loop()
        if self._sources.is_remote(url):
            data = await self._sources.fetch(url, room)
            self.stats.num_fetched += 1
            return data, await loop.run_in_executor(self._threads, _digest, data)
        if self._sources.is_file(url):
            await room.grow(await loop.run_in_executor(self._threads, self._sources.file_size, url))
        return await loop.run_in_executor(self._threads, self._read_here, url)

    def _read_here(self, url: str) -> tuple[bytes, bytes]:
        data = self._sources.read(url)
        return data, _digest(data)

    async def _process(self, key: Key, data: bytes, max_tokens: int) -> ImageInput:
        image = self._cache.get(key)
        if image is not None:
            self.stats.num_hits += 1
            self._cache.move_to_end(key)
            return image
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._make(key, data, max_tokens))
            self._under_way[key] = task
            task.add_done_callback(partial(self._finish, key))
        else:
            self.stats.num_hits += 1
        return await asyncio.shield(task)  # a call that is given up does not end it for others

    async def _make(self, key: Key, data: bytes, max_tokens: int) -> ImageInput:
        loop = asyncio.get_running_loop()
        work = self._maker.make
        image = await loop.run_in_executor(self._threads, work, data, key[1], max_tokens)
        self.stats.num_decoded += 1
        return image

    def _finish(self, key: Key, task: asyncio.Task[ImageInput]) -> None:
        del self._under_way[key]
        if task.cancelled() or task.exception() is not None:
            return
        image = task.result()
        if len(image.data) > self.config.cache_bytes:
            return
        self._cache[key] = image
        self.stats.cached_bytes += len(image.data)
        while self.stats.cached_bytes > self.config.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self.stats.cached_bytes -= len(dropped.data)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()
