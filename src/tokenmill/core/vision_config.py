"""The settings of images in calls: where they may come from, and how large they may be."""

from __future__ import annotations

from dataclasses import dataclass

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
