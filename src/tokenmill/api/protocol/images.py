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
from tokenmill.core.types import ImageError, InvalidRequestError, LargeImageError
from tokenmill.vision.loader import ImageLoader, MakeRoom
from tokenmill.vision.processor import LOW_DETAIL_PIXELS, ImageProcessor, PixelLimits

Places = Sequence[tuple[str, PixelBounds | None]]  # with their paths, the nearest first


@dataclass(frozen=True, slots=True)
class WantedImage:
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
        message = f"the call has {len(found)} images; {most} are allowed"
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
    places = ((f"{path}.image_url", inner), (path, part), ("mm_processor_kwargs", bounds))
    low_path, low = _given(places, "min_pixels")
    high_path, high = _given(places, "max_pixels")
    detail = part.detail if inner is None or inner.detail is None else inner.detail
    try:
        return WantedImage(path, str(url), pixel_limits(processor, detail, low, high))
    except ImageError as error:
        field = low_path if error.param == "min_pixels" else high_path
        raise InvalidRequestError(f"{field}: {error}", field) from None


def _given(places: Places, name: str) -> tuple[str, int | None]:
    """A limit of an image, from the first place that has it, and where it stands."""
    for path, bounds in places:
        value = None if bounds is None else getattr(bounds, name)
        if value is not None:
            return f"{path}.{name}", value
    return name, None


def pixel_limits(
    processor: ImageProcessor, detail: Detail | None, low: int | None, high: int | None
) -> PixelLimits:
    """The limits of one image: its own, within those of the server."""
    server = processor.limits
    for name, value in (("min_pixels", low), ("max_pixels", high)):
        if value is not None and value > server.high:
            message = f"{value} is over the server's limit; send {server.high} at most"
            raise ImageError(message, name)
    least = processor.factor**2
    if high is not None and high < least:
        message = f"{high} is less than one token has; send {least} at least"
        raise ImageError(message, "max_pixels")
    most = high if high is not None else server.high
    if detail == "low" and high is None:
        most = min(most, max(LOW_DETAIL_PIXELS, least))
    if low is not None and low > most:
        message = f"{low} is more than the image's max_pixels; send {most} at most"
        raise ImageError(message, "min_pixels")
    return PixelLimits(min(low if low is not None else server.low, most), most)


async def load_images(
    wanted: Sequence[WantedImage], loader: ImageLoader, max_tokens: int, make_room: MakeRoom
) -> list[ImageInput]:
    """All images of a call, made side by side; the first that fails is named."""
    tasks = [loader.load(image.url, image.limits, max_tokens, make_room) for image in wanted]
    loaded = await asyncio.gather(*tasks, return_exceptions=True)
    images: list[ImageInput] = []
    for place, image in zip(wanted, loaded, strict=True):
        if isinstance(image, ImageError):
            message = f"{place.path}: the image cannot be used: {_reason(image)}"
            raise ApiError(400, message, place.path, "invalid_image")
        if isinstance(image, BaseException):
            raise image
        images.append(image)
    return images


def _reason(error: ImageError) -> str:
    """Why an image is not taken, in the words of a server's callers."""
    if isinstance(error, LargeImageError):
        return f"{error}; send a smaller one" + (f", or {error.remedy}" if error.remedy else "")
    return str(error)


def mark_images(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [
            {"type": "image"} if part["type"] == "image_url" else part for part in content
        ]
