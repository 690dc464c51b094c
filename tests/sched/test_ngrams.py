"""Drafts that are looked up in a sequence's own tokens."""

from __future__ import annotations

import random

import pytest

from tokenmill.sched.trackers import MOST_COMPARED, MOST_PLACES, NgramIndex


def expected(ids: list[int], count: int) -> list[int]:
    """The same by looking at every place."""
    places = [p for p in range(2, len(ids)) if ids[p - 2 : p] == ids[-2:]][-MOST_PLACES:]
    best, longest = 0, 0
    for place in places:
        common = 0
        while common < min(MOST_COMPARED, place) and ids[place - 1 - common] == ids[-1 - common]:
            common += 1
        if common >= longest:
            best, longest = place, common
    ids = list(ids)
    for at in range(best, best + count if longest else best):
        ids.append(ids[at])
    return ids[len(ids) - count :] if longest else []


@pytest.mark.parametrize("vocab", [2, 4, 12])
def test_as_found_by_looking_everywhere(vocab: int) -> None:
    source, index, ids = random.Random(vocab), NgramIndex(), list[int]()
    for _ in range(200):
        ids += [source.randrange(vocab) for _ in range(source.randint(1, 4))]
        count = source.randint(1, 8)
        assert index.drafts(ids, count) == expected(ids, count)


def test_a_copy_goes_on_and_a_loop_repeats() -> None:
    text = [11, 12, 13, 14, 15, 16]
    assert NgramIndex().drafts([*text, 90, 12, 13], 3) == [14, 15, 16]
    assert NgramIndex().drafts([5, 6, 7, 5, 6], 5) == [7, 5, 6, 7, 5]
    assert NgramIndex().drafts([1, 2, 3, 4], 3) == NgramIndex().drafts([1], 3) == []
    # The longer match, though another is later.
    assert NgramIndex().drafts([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1) == [4]


class Counted(list[int]):
    """Counts how often a token is looked at."""

    looks = 0

    def __getitem__(self, at: object) -> int:  # type: ignore[override]
        self.looks += 1
        return super().__getitem__(at)  # type: ignore[index, return-value]


@pytest.mark.parametrize("vocab", [1, 3, 50])
def test_a_token_costs_the_same_however_many_there_are(vocab: int) -> None:
    """Also where the same few tokens come again and again, and every place is a match."""
    source, index, ids = random.Random(vocab), NgramIndex(), Counted()
    most = 2 * MOST_PLACES * MOST_COMPARED + 4 + 4
    for _ in range(600):
        ids.append(source.randrange(vocab))
        ids.looks = 0
        index.drafts(ids, 4)
        assert ids.looks <= most
