"""Prompts with images in the scheduler."""

from __future__ import annotations

from scheduler_cases import make, request, step
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.types import Request

PAD = 9


def image(seed: int, num_tokens: int) -> ImageInput:
    return ImageInput.of(bytes([seed]) * 64, (1, 2, 2 * num_tokens))


def pictured(name: str, seed: int, tail: int = 1) -> Request:
    """Six tokens, an image of ten, and a tail."""
    tokens = [1, 2, 3, 4, 5, 6, *[PAD] * 10, *[7] * tail]
    return request(name, tokens, images=(ImageSpan(6, 10, image(seed, 10)),))


def test_cached_prefixes_are_those_of_the_same_image() -> None:
    scheduler = make(max_num_batched_tokens=64)
    scheduler.add(pictured("first", 1))
    assert step(scheduler) == {"first": 17}
    for name, seed, cached in (("same", 1, 16), ("other", 2, 4)):
        scheduler.add(pictured(name, seed, 4))
        assert step(scheduler)[name] == 20 - cached
