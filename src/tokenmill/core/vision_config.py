"""The settings of images in calls: where they may come from, and how large they may be."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.flags import SIZE, count, number, setting


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
    max_bytes: int = setting(20 * 2**20, "Largest file of an image.", SIZE, flag="max-image-size")
    max_area: int = setting(
        64_000_000,
        "Most pixels of an image before it is resized; larger ones are not decoded.",
        count(1),
        flag="max-image-area",
    )
    max_images: int = setting(32, "Most images of one call.", count(1))
    max_pixels: int | None = setting(
        None,
        "Most pixels of an image after it is resized; the default is the model's.",
        count(1),
        flag="image-max-pixels",
    )
    min_pixels: int | None = setting(
        None,
        "Fewest pixels of an image after it is resized; the default is the model's.",
        count(1),
        flag="image-min-pixels",
    )
    timeout_s: float = setting(
        10.0,
        "Time to fetch an image.",
        number(0.01, 3600, "SECONDS"),
        flag="image-timeout",
    )
    cache_bytes: int = setting(
        256 * 2**20, "Memory for images that are ready.", SIZE, flag="image-cache-size"
    )
    processes: int = setting(
        4, "Processes that decode and resize images.", count(1, 256), flag="image-processes"
    )
