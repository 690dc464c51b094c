"""Groups layers so that the KV of full and of sliding ones lies in pages of one size.

A page holds the KV of a block of tokens in as many layers as see everything. Where other layers
slide over a window, they form groups of at most so many layers, each with pages of its own: a free
page serves any group, and those behind the window serve others.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenmill.core.specs.spec import Windows


class Sliding(NamedTuple):
    """What the pool of pages has to know of layers that slide."""

    window: int = 0  # positions that a query sees, itself included
    num_groups: int = 0  # pages that a block of tokens takes in these layers; 0: none slide

    @property
    def pages_per_block(self) -> int:
        """Pages of a block of tokens that every layer sees."""
        return 1 + self.num_groups

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that a query at this position or after it sees."""
        return max(0, position - self.window + 1) // block_size

    def most_blocks(self, num_new: int, block_size: int) -> int:
        """The most blocks that a sequence holds in a step of so many new tokens.

        From the first on that the first token of its last block sees.
        """
        before = (1 - self.window) % block_size
        return (before + self.window + num_new + block_size - 3) // block_size + 1

    def num_blocks(self, num_pages: int, num_new: int, block_size: int) -> int:
        """Blocks of one sequence that fit in so many pages, in steps of so many new tokens."""
        behind = num_pages - self.num_groups * self.most_blocks(num_new, block_size)
        return max(num_pages // self.pages_per_block, behind)

    def num_pages(self, num_blocks: int, num_new: int, block_size: int) -> int:
        """The inverse of num_blocks: pages that one sequence takes at most."""
        seen = min(num_blocks, self.most_blocks(num_new, block_size))
        return num_blocks + self.num_groups * seen


NONE_SLIDE = Sliding()


class KVGroups(NamedTuple):
    page_layers: int  # layers whose KV a page holds
    places: tuple[int, ...]  # of each layer: its place in a page
    sliding: Sliding


def plan_groups(windows: Windows, num_drafting: int = 0) -> KVGroups:
    """Group layers; the last `num_drafting` see the pages of full ones, whatever their window.

    Where all layers slide, or none does, a page holds all of them and nothing is freed early.
    """
    last = len(windows) - num_drafting
    slides = [bool(window) and index < last for index, window in enumerate(windows)]
    num_full = slides.count(False)
    if not any(slides) or num_full == num_drafting:
        return KVGroups(len(windows), tuple(range(len(windows))), NONE_SLIDE)
    num_groups = -(-sum(slides) // num_full)
    sliding = Sliding(max(window or 0 for window in windows[:last]), num_groups)
    return KVGroups(num_full, _places(slides, num_groups), sliding)


def kept_positions(windows: Windows, num_tokens: int) -> int:
    """Positions that all layers together keep of a sequence of so many tokens."""
    if not plan_groups(windows).sliding.num_groups:
        return len(windows) * num_tokens
    return sum(min(num_tokens, window or num_tokens) for window in windows)


def _places(slides: list[bool], num_groups: int) -> tuple[int, ...]:
    """Full layers in order; of sliding ones each group takes its turn."""
    counts = {False: 0, True: 0}
    places = []
    for kind in slides:
        places.append(counts[kind] // num_groups if kind else counts[kind])
        counts[kind] += 1
    return tuple(places)


def layer_groups(windows: Windows, num_groups: int) -> list[int]:
    """The group of each layer: 0 for full ones, then those of sliding ones in turn."""
    groups, num_sliding = [], 0
    for window in windows:
        groups.append(1 + num_sliding % num_groups if window and num_groups else 0)
        num_sliding += bool(window)
    return groups
