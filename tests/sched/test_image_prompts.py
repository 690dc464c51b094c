"""Prompts with images in the scheduler."""

from __future__ import annotations

import random

from scheduler_cases import make, request, sampled, step
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.types import Request, SamplingParams

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


def test_a_chunk_ends_before_an_image_that_has_to_wait() -> None:
    """Ten tokens have forty patches; a step encodes fifty, or one image that has more."""
    scheduler = make(max_num_batched_tokens=64, encoder_patches=50)
    for seed, name in enumerate(("a", "b", "c")):
        scheduler.add(pictured(name, seed, 2))
    # Of the text before the image four tokens are cached, and two can run.
    assert step(scheduler) == {"a": 18, "b": 2, "c": 2}
    assert step(scheduler) == {"a": 1, "b": 12}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 12}
    assert scheduler.images.num_encoded == 3


def test_an_image_is_encoded_over_several_steps_while_others_decode() -> None:
    """Forty patches, sixteen in a step; its tokens come after the last part."""
    scheduler = make(max_num_batched_tokens=64, encoder_patches=50, encoder_share=16)
    for index in range(8):
        scheduler.add(request(f"t{index}", [index, 9], SamplingParams(max_tokens=20)))
    step(scheduler)
    decoding = {f"t{index}": 1 for index in range(8)}
    scheduler.add(pictured("a", 1, 2))
    shares = []
    for expected in ({"a": 6}, {}, {}, {"a": 12}):
        batch = scheduler.schedule(0)
        found = {seq.request_id: num_new for seq, num_new in batch.items}
        assert found == decoding | expected
        shares.append([each.share for each in batch.begun_images])
        scheduler.update(batch, sampled(batch))
    assert shares == [[0.4], [0.8], [1.0], []]


def test_no_image_is_divided_while_more_than_two_wait() -> None:
    """They wait among the running ones, too, once the text before their image has run."""
    scheduler = make(max_num_batched_tokens=64, encoder_patches=50, encoder_share=16)
    scheduler.add(request("t", [8, 9], SamplingParams(max_tokens=20)))
    step(scheduler)
    for seed, name in enumerate("abcde"):
        scheduler.add(pictured(name, seed, 2))
    encoded, divided = [], []
    for _ in range(4):
        batch = scheduler.schedule(0)
        encoded.append(scheduler.images.num_encoded)
        divided.append(bool(batch.begun_images))
        scheduler.update(batch, sampled(batch))
    assert (encoded, divided) == ([1, 2, 3, 3], [False, False, False, True])


def test_an_image_that_nobody_waits_for_any_more_is_begun_anew() -> None:
    scheduler = make(max_num_batched_tokens=64, encoder_patches=50, encoder_share=16)
    for index in range(8):
        scheduler.add(request(f"t{index}", [index, 9], SamplingParams(max_tokens=20)))
    step(scheduler)
    for name in ("a", "b"):
        scheduler.add(pictured(name, 1, 2))
        batch = scheduler.schedule(0)
        assert [each.share for each in batch.begun_images] == [0.4]
        scheduler.update(batch, sampled(batch))
        scheduler.abort(name)
        batch = scheduler.schedule(0)
        assert batch.begun_images == []
        scheduler.update(batch, sampled(batch))


def test_an_image_beyond_the_budget_is_encoded_alone() -> None:
    scheduler = make(max_num_batched_tokens=64, encoder_patches=8)
    scheduler.add(pictured("a", 1))
    scheduler.add(pictured("b", 2))
    assert step(scheduler)["a"] == 17
    assert step(scheduler)["b"] == 11 and scheduler.images.num_encoded == 2


def test_whatever_waits_for_room_gets_it() -> None:
    """Random images under a budget that few of them fit: all requests end, and few are held."""
    source, held = random.Random(4), 0
    scheduler = make(num_blocks=60, max_num_batched_tokens=13, encoder_patches=24)
    for index in range(30):
        tokens, spans = [1], []
        for _ in range(source.randrange(4)):
            count = source.randrange(1, 12)
            spans.append(ImageSpan(len(tokens), count, image(source.randrange(6), count)))
            tokens += [PAD] * count + [2] * source.randrange(1, 5)
        ending = SamplingParams(max_tokens=3)
        scheduler.add(request(str(index), [*tokens, 3], ending, images=tuple(spans)))
    contents: set[bytes] = set()
    for _ in range(2000):
        batch = scheduler.schedule(0)
        contents -= set(batch.dropped_images)
        for seq, num_new in batch.items:
            first = seq.num_computed_tokens
            for span in seq.request.images:
                if span.offset < first + num_new and span.end > first:
                    contents.add(span.image.content_hash)
        held = max(held, len(contents))
        scheduler.update(batch, sampled(batch))
        if not scheduler.has_work():
            break
    assert not scheduler.has_work() and scheduler.stats().num_finished == {"length": 30}
    assert held < 16  # of some 40 that there are
