"""Puts images into a prompt: as many placeholder tokens as each has, and where they stand."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.types import InvalidRequestError
from tokenmill.vision.processor import ImageProcessor


def place_images(
    token_ids: list[int], images: Sequence[ImageInput], processor: ImageProcessor
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """The prompt, in which the chat template has put one placeholder for each image."""
    places = [index for index, token in enumerate(token_ids) if token == processor.token_id]
    if len(places) != len(images):
        raise InvalidRequestError(
            f"messages: the prompt has {len(places)} placeholders for {len(images)} images; leave "
            "the model's image tokens out of the text, and send images as parts of their own",
            "messages",
        )
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    begin = 0
    for place, image in zip(places, images, strict=True):
        expanded += token_ids[begin:place]
        num_tokens = image.num_tokens(processor.merge)
        spans.append(ImageSpan(len(expanded), num_tokens, image))
        expanded += [processor.token_id] * num_tokens
        begin = place + 1
    return expanded + token_ids[begin:], tuple(spans)
