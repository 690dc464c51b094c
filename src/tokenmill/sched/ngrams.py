"""Drafts without a model: what came after the newest tokens when they were there before."""

from __future__ import annotations

MOST_COMPARED = 16  # tokens before a place, the pair among them
MOST_PLACES = 8  # the latest ones of a pair


class NgramIndex:
    """Where each pair of neighbouring tokens of one sequence was, as far as it has been read."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}  # of the token after the pair
        self._num_read = 2

    def drafts(self, token_ids: list[int], count: int) -> list[int]:
        """The `count` tokens after the place that has most in common with the end, or none.

        Where fewer follow, what is drafted goes on from its own beginning: the text repeats itself.
        """
        self._read(token_ids)
        end = len(token_ids)
        places = self._places.get((token_ids[-2], token_ids[-1]), ()) if end > 1 else ()
        if not places:
            return []
        # Of equals the latest.
        place = max(reversed(places[-MOST_PLACES:]), key=lambda at: _num_common(token_ids, at))
        drafts: list[int] = []
        for at in range(place, place + count):
            drafts.append(token_ids[at] if at < end else drafts[at - end])
        return drafts

    def _read(self, token_ids: list[int]) -> None:
        for place in range(self._num_read, len(token_ids)):
            pair = token_ids[place - 2], token_ids[place - 1]
            self._places.setdefault(pair, []).append(place)
        self._num_read = max(self._num_read, len(token_ids))


def _num_common(token_ids: list[int], place: int) -> int:
    """How many tokens before a place are those at the end."""
    end, count = len(token_ids), 2
    most = min(MOST_COMPARED, place)
    while count < most and token_ids[place - 1 - count] == token_ids[end - 1 - count]:
        count += 1
    return count
