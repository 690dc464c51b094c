"""Images of `tokenmill chat`: as parts of a message, and as a prompt of a model in this process."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.core.images import ImageInput, ImageSpan, VisionConfig
from tokenmill.core.types import ImageError, LargeImageError, TokenmillError

if TYPE_CHECKING:
    from tokenmill.text.tokenizer import Tokenizer
    from tokenmill.vision.image_maker import ImageMaker
    from tokenmill.vision.processor import ImageProcessor

Messages = list[dict[str, Any]]


def image_parts(files: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": _url(file)}} for file in files]


def _url(file: str) -> str:
    if file.startswith(("http://", "https://", "data:")):
        return file
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise TokenmillError(f"--image {file}: {error.strerror}") from None
    kind = mimetypes.guess_type(file)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class ImagePrompts:
    """Prompts with images for a model in this process; each image is made once."""

    def __init__(self, processor: ImageProcessor | None, max_tokens: int) -> None:
        self._processor = processor
        self._max_tokens = max_tokens
        self._made: dict[str, ImageInput] = {}
        self._maker: ImageMaker | None = None

    def check(self, files: Sequence[str]) -> None:
        """Make these images; TokenmillError names the one that the model cannot take."""
        if not files:
            return
        if self._processor is None:
            raise TokenmillError("--image: this model takes text only; leave --image out")
        from tokenmill.vision.processor import check_pillow

        check_pillow()
        for file in files:
            if file.startswith(("http://", "https://")):
                raise TokenmillError(f"--image {file}: a URL needs a server (--url); give a file")
            try:
                self._image(_url(file))
            except ImageError as error:
                advice = "; give a smaller one" if isinstance(error, LargeImageError) else ""
                raise TokenmillError(
                    f"--image {file}: it cannot be used: {error}{advice}"
                ) from None

    def encode(
        self, tokenizer: Tokenizer, messages: Messages
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        urls: list[str] = []
        marked = [message | {"content": _marked(message["content"], urls)} for message in messages]
        token_ids = tokenizer.encode_chat(marked)
        if self._processor is None:
            return token_ids, ()
        from tokenmill.vision.placing import place_images

        return place_images(token_ids, [self._image(url) for url in urls], self._processor)

    def _image(self, url: str) -> ImageInput:
        from tokenmill.vision.image_maker import ImageMaker
        from tokenmill.vision.sources import ImageSources

        assert self._processor is not None
        config = VisionConfig()
        if url not in self._made:
            data = ImageSources(config).read(url)
            self._maker = self._maker or ImageMaker(self._processor, config.max_area)
            self._made[url] = self._maker.make(data, self._processor.limits, self._max_tokens)
        return self._made[url]


def _marked(content: Any, urls: list[str]) -> Any:
    """The content with its images as templates know them; their URLs are noted."""
    if isinstance(content, str):
        return content
    images = [part for part in content if part["type"] == "image_url"]
    urls += [part["image_url"]["url"] for part in images]
    return [{"type": "image"} if part in images else part for part in content]
