"""Prompts with images in the scheduler."""

from __future__ import annotations

import random

import pytest

from scheduler_cases import distinct, make, request, sampled, step
from scheduler_integrity import check_scheduler
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.requests import Request
from tokenmill.core.types import SamplingParams
from tokenmill.sched.scheduler import Scheduler

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


def while_others_decode(**config: int) -> Scheduler:
    """Eight requests decode; a step in parts has sixteen patches, or as many tokens."""
    scheduler = make(max_num_batched_tokens=64, encoder_patches=50, encoder_share=16, **config)
    for index in range(8):
        scheduler.add(request(f"t{index}", [index, 9], SamplingParams(max_tokens=20)))
    step(scheduler)
    return scheduler


def prompts_of(scheduler: Scheduler) -> tuple[dict[str, int], list[float]]:
    """Run a step: the tokens of requests but for those eight, and the shares of begun images."""
    batch = scheduler.schedule(0)
    found = {seq.request_id: num_new for seq, num_new in batch.items}
    scheduler.update(batch, sampled(batch))
    check_scheduler(scheduler)
    assert all(found.pop(f"t{index}") == 1 for index in range(8))
    return found, [each.share for each in batch.begun_images]


def test_a_prompt_with_an_image_runs_in_even_parts_while_others_decode() -> None:
    """Forty patches and eighteen tokens: three parts, then two. Its text waits for the image."""
    scheduler = while_others_decode()
    scheduler.add(pictured("a", 1, 2))
    parts = [prompts_of(scheduler) for _ in range(6)]
    assert parts == [
        ({"a": 1}, [0.35]),
        ({}, [0.675]),
        ({}, [1.0]),
        *[({"a": n}, []) for n in (9, 8, 1)],
    ]


def test_fewer_patches_and_tokens_run_beside_prompts_of_text() -> None:
    """A text that comes later runs at once and whole; at least half is left for images."""
    scheduler = while_others_decode()
    scheduler.add(pictured("a", 1, 2))
    for count, share in ((4, 10 / 40), (30, 18 / 40)):
        scheduler.add(distinct(f"text {count}", count))
        found, shares = prompts_of(scheduler)
        assert (found[f"text {count}"], shares) == (count, [share])


def test_a_small_image_and_its_tokens_run_in_one_step() -> None:
    scheduler = while_others_decode()
    spans = (ImageSpan(1, 2, image(3, 2)),)
    scheduler.add(request("a", [1, PAD, PAD, 2], images=spans))
    assert prompts_of(scheduler) == ({"a": 4}, [])


def test_no_prompt_runs_in_parts_while_more_than_four_have_images() -> None:
    """They count among the running ones, too, as long as their prompts are not done."""
    scheduler = make(max_num_batched_tokens=64, encoder_patches=50, encoder_share=16)
    scheduler.add(request("t", [8, 9], SamplingParams(max_tokens=20)))
    step(scheduler)
    for seed, name in enumerate("abcdef"):
        scheduler.add(pictured(name, seed, 2))
    encoded, divided = [], []
    for _ in range(4):
        batch = scheduler.schedule(0)
        encoded.append(scheduler.images.num_encoded)
        divided.append(bool(batch.begun_images))
        scheduler.update(batch, sampled(batch))
    assert (encoded, divided) == ([1, 2, 2, 2], [False, False, True, True])


def test_an_image_that_nobody_waits_for_any_more_is_begun_anew() -> None:
    scheduler = while_others_decode()
    for name in ("a", "b"):
        scheduler.add(pictured(name, 1, 2))
        batch = scheduler.schedule(0)
        assert [each.share for each in batch.begun_images] == [0.35]
        scheduler.update(batch, sampled(batch))
        scheduler.abort(name)
        batch = scheduler.schedule(0)
        assert batch.begun_images == []
        scheduler.update(batch, sampled(batch))


def test_a_begun_image_is_kept_while_steps_go_to_other_prompts() -> None:
    """`b` has two of its forty patches; then five others come, and `a` takes most of the budget."""
    scheduler = while_others_decode()
    for seed, name in enumerate("ab"):
        scheduler.add(pictured(name, seed, 2))
    assert prompts_of(scheduler)[1] == [14 / 40, 2 / 40]
    batch = scheduler.schedule(0, hold_context=True)
    assert [each.share for each in batch.begun_images] == [14 / 40, 2 / 40]
    scheduler.update(batch, sampled(batch))
    for seed, name in enumerate("cdefg", 2):
        scheduler.add(pictured(name, seed, 2))
    assert prompts_of(scheduler)[1] == [2 / 40]
    assert prompts_of(scheduler)[1] == [] and scheduler.images.num_encoded == 2


def test_an_image_beyond_the_budget_is_encoded_alone() -> None:
    scheduler = make(max_num_batched_tokens=64, encoder_patches=8)
    scheduler.add(pictured("a", 1))
    scheduler.add(pictured("b", 2))
    assert step(scheduler)["a"] == 17
    assert step(scheduler)["b"] == 11 and scheduler.images.num_encoded == 2


@pytest.mark.parametrize("parts", [{}, {"encoder_share": 7, "image_tokens": 5}])
def test_whatever_waits_for_room_gets_it(parts: dict[str, int]) -> None:
    """Random images under a budget that few of them fit: all requests end, and few are held."""
    source, held = random.Random(4), 0
    scheduler = make(num_blocks=60, max_num_batched_tokens=13, encoder_patches=24, **parts)
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
            for span in seq.request.task.images:
                if span.offset < first + num_new and span.end > first:
                    contents.add(span.image.content_hash)
        held = max(held, len(contents))
        scheduler.update(batch, sampled(batch))
        if not scheduler.has_work():
            break
    assert not scheduler.has_work() and scheduler.stats().num_finished == {"length": 30}
    assert held < 16  # of some 40 that there are
