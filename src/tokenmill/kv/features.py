"""Features of encoded images that move between engines, by the connectors that move KV.

An encoder's engine holds them in blocks until the front releases them. A language engine reads an
image when the scheduler first reaches it, beside the steps: the request waits, others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch

from tokenmill.core.images import FEATURES_LOST, ImageInput
from tokenmill.core.kv import FEATURES, KVAddress, KVGeometry, common_ways
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import ModelLoadError, RequestOutput
from tokenmill.kv.connectors import KVLink
from tokenmill.kv.transfer import OwnConnector, TransferError
from tokenmill.sched.cache.encoder_cache import EncoderCache

BLOCK_TOKENS = 16
_MOST_TOKENS = 2**14  # of an image: 4,096 x 4,096 pixels, the most that Qwen3-VL's processor makes
_log = logging.getLogger(__name__)


class FeatureBlockPool:
    """Blocks of features that other engines can read, or that are read into from others."""

    def __init__(
        self,
        connector: str,
        vision: VisionSpec,
        num_blocks: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        link = KVLink.plan(connector, device)
        if link is None:
            raise ModelLoadError("an encoder on a worker of its own needs a feature_connector")
        shape = (num_blocks, vision.num_features, BLOCK_TOKENS, vision.out_size)
        if link.pages is not None:
            size = int(np.prod(shape)) * dtype.itemsize
            pages = link.pages.zeros((size,), np.uint8)
            self._blocks = torch.from_numpy(pages).view(dtype).view(shape)
        else:
            self._blocks = torch.zeros(shape, dtype=dtype, device=device)
        self.num_blocks, self._free = num_blocks, list(range(num_blocks))[::-1]
        by_block = self._blocks.view(num_blocks, -1).view(torch.uint8)
        geometry = _geometry(vision, str(dtype), by_block.shape[1])
        self.connectors, self.address = link.offer([by_block], geometry, num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_tokens: int) -> list[int] | None:
        """Blocks for so many tokens; None: there are not enough."""
        count = num_feature_blocks(num_tokens)
        if count > len(self._free):
            return None
        taken, self._free = self._free[-count:], self._free[:-count]
        return taken

    def free(self, block_ids: list[int]) -> None:
        self._free += block_ids

    def put(self, block_ids: list[int], features: torch.Tensor) -> None:
        """Write features [1 + layers, tokens, hidden]; a peer may read them when this returns."""
        rest = -features.shape[1] % BLOCK_TOKENS
        padded = torch.nn.functional.pad(features, (0, 0, 0, rest))
        self._blocks[block_ids] = padded.unflatten(1, (-1, BLOCK_TOKENS)).transpose(0, 1)
        _finish(self._blocks.device)

    def get(self, block_ids: list[int], num_tokens: int) -> torch.Tensor:
        """A copy of what blocks hold; they may be given to others when this returns."""
        features = self._blocks[block_ids].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        _finish(self._blocks.device)
        return features


def num_feature_blocks(num_tokens: int) -> int:
    """Blocks that the features of an image take."""
    return -(-num_tokens // BLOCK_TOKENS)


def _finish(device: torch.device) -> None:
    """Connectors know nothing of a GPU's queue: what they move must be there, or have been used."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _geometry(vision: VisionSpec, dtype: str, block_bytes: int) -> KVGeometry:
    return KVGeometry(
        model=blake2b(repr(vision).encode(), digest_size=8).hexdigest(),
        dtype=dtype,
        layout=FEATURES,
        num_layers=vision.num_features,
        num_kv_heads=1,
        head_dim=vision.out_size,
        block_size=BLOCK_TOKENS,
        block_bytes=(block_bytes,),
    )


class FeatureStore(Protocol):
    """Who owns the features that steps use."""

    vision: VisionSpec

    def put(self, content: bytes, features: torch.Tensor) -> None: ...


@dataclass(slots=True, eq=False)
class _Reading:
    image: ImageInput
    block_ids: list[int]
    read: Future[None]


class FeatureReader:
    """Reads the features of images that a scheduler has reached; the engine's thread calls it."""

    def __init__(
        self, pool: FeatureBlockPool, cache: EncoderCache, store: FeatureStore, merge: int
    ) -> None:
        self._pool, self._cache, self._store, self._merge = pool, cache, store, merge
        self._connectors = {connector.name: connector for connector in pool.connectors}
        self._peers: dict[str, OwnConnector] = {}
        self._wanted: list[ImageInput] = []  # not begun
        self._reading: list[_Reading] = []
        self._held_back: list[RequestOutput] = []  # see pass_on()

    @classmethod
    def open(
        cls,
        connector: str,
        store: FeatureStore,
        cache: EncoderCache,
        max_len: int,
        dtype: torch.dtype,
        device: str,
    ) -> FeatureReader:
        """A reader for images of up to `max_len` tokens."""
        num_tokens, vision = min(max_len, _MOST_TOKENS), store.vision
        num_blocks = num_feature_blocks(num_tokens)
        pool = FeatureBlockPool(connector, vision, num_blocks, dtype, device)
        return cls(pool, cache, store, vision.merge_size)

    def connect(self, peer: KVAddress) -> str | None:
        """Be ready to read from an encoder's engine; returns why not."""
        own = self._pool.address
        if peer.geometry != own.geometry:
            return "its encoder has other features: workers need the same model and dtype"
        problem = "they have no common way to move features: between hosts they need nixl"
        for way in common_ways(peer, own):
            try:
                self._connectors[way.connector].connect(peer, way)
            except TransferError as error:
                problem = str(error)
                continue
            self._peers[peer.engine_id] = self._connectors[way.connector]
            return None
        return problem

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; requests that need features of it end in ERROR."""
        connector = self._peers.pop(engine_id, None)
        if connector is not None:
            connector.disconnect(engine_id)

    @property
    def busy(self) -> bool:
        """True while there is something to wait for."""
        return bool(self._reading or self._wanted or self._held_back)

    def poll(self, lose: Callable[[str, str, str], None]) -> None:
        """Begin reads and take in what has come; `lose` ends requests whose features will not."""
        for reading in [each for each in self._reading if each.read.done()]:
            self._reading.remove(reading)
            self._take_in(reading, lose)
        self._wanted += self._cache.take_wanted()
        while self._wanted and self._begin(self._wanted[0], lose):
            del self._wanted[0]

    def pass_on(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Hold back the end of a request while features are read for it.

        The front lets an encoder reuse blocks once all requests that know of them have ended.
        """
        if not self.busy:
            return outputs
        outputs, self._held_back = self._held_back + outputs, []
        under_way = [each.image for each in self._reading] + self._wanted
        readers = {request_id for image in under_way for request_id in self._cache.seekers(image)}
        passed: list[RequestOutput] = []
        for output in outputs:
            late = output.finish_reason is not None and output.request_id in readers
            (self._held_back if late else passed).append(output)
        return passed

    def _begin(self, image: ImageInput, lose: Callable[[str, str, str], None]) -> bool:
        """Begin to read an image; False while there is no room."""
        assert image.features is not None
        peer, theirs = image.features.engine_id, image.features.block_ids
        connector = self._peers.get(peer)
        if connector is None:
            self._lose(image, f"engine {peer!r} is gone", lose)
            return True
        block_ids = self._pool.take(image.num_tokens(self._merge))
        if block_ids is None:
            return False
        runs = [(there, here, 1) for there, here in zip(theirs, block_ids, strict=True)]
        self._reading.append(_Reading(image, block_ids, connector.read(peer, runs)))
        return True

    def _take_in(self, reading: _Reading, lose: Callable[[str, str, str], None]) -> None:
        error = reading.read.exception()
        if error is None:
            num_tokens = reading.image.num_tokens(self._merge)
            features = self._pool.get(reading.block_ids, num_tokens)
            self._store.put(reading.image.content_hash, features)
            self._cache.arrived(reading.image)
        else:
            self._lose(reading.image, str(error), lose)
        self._pool.free(reading.block_ids)

    def _lose(self, image: ImageInput, why: str, lose: Callable[[str, str, str], None]) -> None:
        _log.warning("features of an image were not read: %s", why)
        for request_id in self._cache.lost(image):
            lose(request_id, FEATURES_LOST, f"the features of an image did not arrive: {why}")
