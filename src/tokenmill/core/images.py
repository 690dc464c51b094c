"""Images of a request: the patches of each, and where its tokens stand in the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import unpack

from tokenmill.core.flags import setting


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What the front accepts as an image, for models that take images."""

    hosts: tuple[str, ...] = setting(
        (),
        "Host from which images are fetched by https: a name, *.example.com, * for every public "
        "host, or an origin such as http://10.0.0.5:9000, which may be private; repeatable.",
        flag="image-host",
        repeated=True,
    )
    folder: str | None = setting(
        None, "Folder from which images are read by file: URLs.", flag="image-folder"
    )
    max_bytes: int = 20 * 2**20  # of a file
    max_area: int = 64_000_000  # pixels, before it is decoded
    max_images: int = 32  # of a call
    max_pixels: int | None = None  # after it is resized; None: as the model says
    min_pixels: int | None = None
    timeout_s: float = 10.0  # to fetch an image
    cache_bytes: int = 256 * 2**20  # of images that are ready
    processes: int = 4  # that decode and resize


Grid = tuple[int, int, int]  # patches in time, height and width
CONTENT_ID = 1 << 62  # no token id has this bit


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image as the model's processor makes it.

    Its numbers are float32, or single bytes whose values stand in `levels`: these are an eighth of
    the size, since the frames of a still image are the same and one of them is enough.
    """

    data: bytes  # [patches, channels, temporal, patch * patch], little-endian
    grid: Grid
    content_hash: bytes  # of the two above, 32 bytes
    levels: bytes = b""  # float32 [channels, 256]: what each byte is after the normalisation

    @classmethod
    def of(cls, data: bytes, grid: Grid) -> ImageInput:
        """An image from its patches, in the order in which transformers' processor puts them."""
        key = b"%d,%d,%d" % grid
        return cls(data, grid, blake2b(data, digest_size=32, key=key).digest())

    @property
    def num_patches(self) -> int:
        frames, height, width = self.grid
        return frames * height * width

    def num_tokens(self, merge: int) -> int:
        return self.num_patches // merge**2


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image, and the placeholder tokens of the prompt that it takes the place of."""

    offset: int
    num_tokens: int
    image: ImageInput

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


@dataclass(slots=True)
class LoaderStats:
    """What became of the images of calls before a request had them; counters since the start."""

    num_images: int = 0
    num_hits: int = 0  # in the cache, or on the way there
    num_fetched: int = 0  # over the network
    num_decoded: int = 0
    num_tokens: int = 0  # of prompts
    refused: dict[str, int] = field(default_factory=Counter)  # by what failed: fetch, read, decode
    cached_bytes: int = 0

    def add(self, other: LoaderStats) -> None:
        for name in ("num_images", "num_hits", "num_fetched", "num_decoded", "num_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cached_bytes += other.cached_bytes
        self.refused = Counter(self.refused) + Counter(other.refused)


def content_ids(token_ids: list[int], images: Sequence[ImageSpan], first: int = 0) -> list[int]:
    """Token ids from position `first` on, with those of images told apart by their content.

    Two prompts are the same to a prefix cache or a router iff these are the same.
    """
    if not images:
        return token_ids
    ids, last = list(token_ids), first + len(token_ids)
    for span in images:
        begin, end = max(span.offset, first), min(span.end, last)
        if begin < end:
            words = unpack("<4Q", span.image.content_hash)
            words = tuple(word & (CONTENT_ID - 1) | CONTENT_ID for word in words)
            ids[begin - first : end - first] = [words[i % 4] for i in range(begin, end)]
    return ids
