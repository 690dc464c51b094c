"""The images of a chat: found in its messages, loaded, and put in place of their placeholders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.requests import (
    Detail,
    ImagePart,
    ImageUrl,
    LocatedImage,
    Message,
    PixelBounds,
    ToolMessage,
    UserMessage,
)
from tokenmill.core.images import ImageInput
from tokenmill.core.types import ImageError, InvalidRequestError
from tokenmill.vision.loader import ImageLoader
from tokenmill.vision.processor import LOW_DETAIL_PIXELS, ImageProcessor, PixelLimits


@dataclass(frozen=True, slots=True)
class WantedImage:
    """An image of a call, and where it stands."""

    path: str
    url: str
    limits: PixelLimits


def wanted_images(
    messages: Sequence[Message], bounds: PixelBounds | None, loader: ImageLoader | None
) -> list[WantedImage]:
    """The images of a call in the order of its prompt; ApiError where they cannot be taken."""
    found = list(_image_parts(messages))
    if loader is None:
        _refuse(found, bounds)
        return []
    if len(found) > loader.config.max_images:
        most = loader.config.max_images
        message = f"the call has {len(found)} images; {most} are allowed (--max-images)"
        raise InvalidRequestError(f"messages: {message}", "messages")
    return [_wanted(part, path, bounds, loader.processor) for part, path in found]


def wanted_parts(
    messages: Sequence[Message], bounds: PixelBounds | None, processor: ImageProcessor
) -> list[WantedImage]:
    """The images of a call, however many, for a front that loads none."""
    return [_wanted(part, path, bounds, processor) for part, path in _image_parts(messages)]


def _image_parts(messages: Sequence[Message]) -> Iterator[tuple[ImagePart, str]]:
    for turn, message in enumerate(messages):
        if not isinstance(message, UserMessage | ToolMessage) or isinstance(message.content, str):
            continue
        for index, part in enumerate(message.content or ()):
            if isinstance(part, ImagePart):
                path = f"messages[{turn}].content[{index}]"
                yield part, part.path if isinstance(part, LocatedImage) else path


def _refuse(found: list[tuple[ImagePart, str]], bounds: PixelBounds | None) -> None:
    way_out = "is not supported: this model takes text only"
    if found:
        path = f"{found[0][1]}.type"
        message = f"{path}: 'image_url' {way_out}; send parts of type 'text'"
        raise ApiError(400, message, path, "unsupported_value")
    if bounds is not None and (bounds.min_pixels or bounds.max_pixels):
        name = "mm_processor_kwargs"
        raise ApiError(400, f"{name} {way_out}; leave it out", name, "unsupported_value")


def _wanted(
    part: ImagePart, path: str, bounds: PixelBounds | None, processor: ImageProcessor
) -> WantedImage:
    inner = part.image_url if isinstance(part.image_url, ImageUrl) else None
    url = part.image_url if inner is None else inner.url
    places = [place for place in (inner, part, bounds) if place is not None]
    low = next((p.min_pixels for p in places if p.min_pixels is not None), None)
    high = next((p.max_pixels for p in places if p.max_pixels is not None), None)
    detail = part.detail if inner is None or inner.detail is None else inner.detail
    try:
        return WantedImage(path, str(url), pixel_limits(processor, detail, low, high))
    except ImageError as error:
        raise InvalidRequestError(f"{path}: {error}", path) from None


def pixel_limits(
    processor: ImageProcessor, detail: Detail | None, low: int | None, high: int | None
) -> PixelLimits:
    """The limits of one image: its own, within those of the server."""
    server = processor.limits
    for name, value in (("min_pixels", low), ("max_pixels", high)):
        if value is not None and value > server.high:
            raise ImageError(f"{name} {value} is over the server's limit of {server.high}")
    if high is not None and high < processor.factor**2:
        raise ImageError(f"max_pixels {high} is less than the {processor.factor**2} of one token")
    most = high if high is not None else server.high
    if detail == "low" and high is None:
        most = min(most, max(LOW_DETAIL_PIXELS, processor.factor**2))
    if low is not None and low > most:
        raise ImageError(f"min_pixels {low} is more than max_pixels {most}")
    return PixelLimits(min(low if low is not None else server.low, most), most)


async def load_images(
    wanted: Sequence[WantedImage], loader: ImageLoader, max_tokens: int
) -> list[ImageInput]:
    """All images of a call, made side by side; the first that fails is named."""
    tasks = [loader.load(image.url, image.limits, max_tokens) for image in wanted]
    loaded = await asyncio.gather(*tasks, return_exceptions=True)
    images: list[ImageInput] = []
    for place, image in zip(wanted, loaded, strict=True):
        if isinstance(image, ImageError):
            message = f"{place.path}: the image cannot be used: {image}"
            raise ApiError(400, message, place.path, "invalid_image")
        if isinstance(image, BaseException):
            raise image
        images.append(image)
    return images


def mark_images(message: dict[str, Any]) -> None:
    """Image parts as chat templates know them."""
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [
            {"type": "image"} if part["type"] == "image_url" else part for part in content
        ]
