"""Images of a request: their hash, and what tells prompts with images apart."""

import random

from tokenmill.core.images import ImageInput, ImageSpan, content_ids
from tokenmill.core.requests import Generate, Request
from tokenmill.workers.messages import Submit, decode_to_worker, encode

PAD = 9
GRID = (1, 4, 6)


def image(seed: int, grid: tuple[int, int, int] = GRID) -> ImageInput:
    return ImageInput.of(random.Random(seed).randbytes(24 * 8 * 4), grid)


def span(offset: int, seed: int) -> ImageSpan:
    return ImageSpan(offset, 6, image(seed))


def test_a_hash_is_that_of_pixels_and_grid() -> None:
    assert image(1) == image(1)
    hashes = {image(1).content_hash, image(2).content_hash, image(1, (1, 6, 4)).content_hash}
    assert len(hashes) == 3
    assert image(1).num_patches == 24 and image(1).num_tokens(2) == 6


def test_prompts_are_the_same_iff_their_tokens_and_images_are() -> None:
    ids = [1, 2, *[PAD] * 6, 3, *[PAD] * 6]
    assert content_ids(ids, ()) is ids
    first, other = content_ids(ids, [span(2, 1), span(9, 2)]), content_ids(ids, [span(2, 1)])
    assert first[:9] == other[:9] and first[9:] != other[9:]
    assert content_ids(ids, [span(2, 2), span(9, 1)])[2:8] != first[2:8]
    assert [i for i, token in enumerate(first) if token < 64] == [0, 1, 8]
    assert all(0 <= token < 2**63 for token in first)


def test_a_part_of_a_prompt_has_the_ids_of_the_whole() -> None:
    ids = [1, 2, *[PAD] * 6, 3, *[PAD] * 6, 4]
    images = [span(2, 1), span(9, 2)]
    whole = content_ids(ids, images)
    for first in range(len(ids)):
        for end in range(first, len(ids) + 1):
            assert content_ids(ids[first:end], images, first) == whole[first:end]


def test_images_reach_a_worker_as_they_were() -> None:
    request = Request("a", Generate([PAD] * 6, images=(span(0, 3),)))
    received = decode_to_worker(encode(Submit([request])))
    assert isinstance(received, Submit) and received.requests == [request]
