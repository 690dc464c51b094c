"""Which images are encoded in a step, and which encoded ones are kept."""

from __future__ import annotations

from collections import OrderedDict

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.sched.sequence import Sequence

STEPS = 2  # the cache holds as many patches as so many steps encode


class EncoderCache:
    """Decides what a runner encodes and keeps, by content; the runner holds the features.

    A step encodes as many patches as its budget has, or one image that has more. What no running
    sequence is in the middle of may be dropped, the least recently used first, once there is no
    room: whoever waits for room waits for sequences that have what they need to go on.
    """

    def __init__(self, budget: int | None) -> None:
        """Without a budget every image is encoded as soon as a step reaches it."""
        self._budget, self._left = budget, budget
        self._held: OrderedDict[bytes, int] = OrderedDict()  # content: patches, the oldest first
        self._num_held = 0
        self._users: list[tuple[Sequence, ImageSpan]] = []
        self._dropped: list[bytes] = []
        self.num_encoded = 0  # images so far

    def begin(self) -> None:
        """A step is being chosen: its budget is whole, and ended or passed images are free."""
        self._left = self._budget
        self._users = [
            (seq, span)
            for seq, span in self._users
            if seq.block_ids and not seq.finished and seq.num_computed_tokens < span.end
        ]

    def reach(self, seq: Sequence, first: int, num_new: int) -> int:
        """How many of the new tokens from `first` on can run: up to an image that has to wait."""
        for span in seq.request.images:
            if span.end <= first:
                continue
            if span.offset >= first + num_new:
                break
            if not self._take(span.image):
                return max(0, span.offset - first)
            self._users.append((seq, span))
        return num_new

    def take_dropped(self) -> list[bytes]:
        """The content of images that the runner is to forget, each once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _take(self, image: ImageInput) -> bool:
        if image.content_hash in self._held:
            self._held.move_to_end(image.content_hash)
            return True
        patches = image.num_patches
        if self._left is not None and self._budget is not None:
            if patches > self._left < self._budget:
                return False
            if not self._make_room(patches, STEPS * self._budget):
                return False
            self._left = max(0, self._left - patches)
        else:
            self._make_room(patches, 0)
        self._held[image.content_hash] = patches
        self._num_held += patches
        self.num_encoded += 1
        return True

    def _make_room(self, patches: int, capacity: int) -> bool:
        """Drop what nobody needs as far as necessary; one image alone always has room."""
        if self._num_held + patches > capacity:
            needed = {span.image.content_hash for _, span in self._users}
            for content in [content for content in self._held if content not in needed]:
                self._num_held -= self._held.pop(content)
                self._dropped.append(content)
                if self._num_held + patches <= capacity:
                    break
        return not self._held or self._num_held + patches <= capacity
