"""Which images are encoded in a step, and which encoded ones are kept."""

from __future__ import annotations

from collections import OrderedDict

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.types import Request
from tokenmill.sched.sequence import BegunImage, Sequence

STEPS = 2  # the cache holds as many patches as so many steps encode


class EncoderCache:
    """Decides what a runner encodes and keeps, by content; the runner holds the features.

    A step encodes as many patches as its budget has, or one image that has more. What no running
    sequence is in the middle of may be dropped, the least recently used first, once there is no
    room: whoever waits for room waits for sequences that have what they need to go on.

    Where requests decode and few images wait, a step may have a smaller budget: an image that has
    more is then encoded over several steps, a share of its layers in each, and its sequence waits
    until the last.

    An image that is encoded elsewhere costs no budget; it is wanted as soon as it is reached, and
    its sequence waits until it has arrived.
    """

    def __init__(self, budget: int | None, share: int | None = None) -> None:
        """Without a budget every image is encoded as soon as a step reaches it.

        `share` is the budget of a step that encodes in parts.
        """
        self._budget, self._left, self._share = budget, budget, share
        self._parts = False  # images may be encoded over several steps
        self._begun: dict[bytes, int] = {}  # content: patches' worth of work that is done
        self._reached: dict[bytes, ImageInput] = {}  # of these, in this step
        self._held: OrderedDict[bytes, int] = OrderedDict()  # content: patches, the oldest first
        self._num_held = 0
        self._users: list[tuple[Sequence, ImageSpan]] = []
        self._dropped: list[bytes] = []
        self._unused: set[bytes] = set()  # content that is here and that no sequence has used
        self._arriving: dict[bytes, set[str]] = {}  # content: the requests that wait for it
        self._wanted: list[ImageInput] = []
        self.num_encoded = 0  # images so far
        self.num_patches = 0  # of these
        self.num_received = 0  # images that were encoded elsewhere
        self.num_hits = 0  # images that were here when a sequence reached them

    @property
    def divides(self) -> bool:
        """Whether there is a smaller budget for steps that encode in parts."""
        return self._budget is not None and self._share is not None

    def begin(self, in_parts: bool = False) -> None:
        """A step is being chosen: its budget is whole, and ended or passed images are free."""
        self._left = self._budget
        self._parts = in_parts and self.divides
        if self._parts and self._share is not None and self._budget is not None:
            self._left = min(self._budget, self._share)
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
                if span.image.content_hash in self._arriving:
                    self._arriving[span.image.content_hash].add(seq.request_id)
                # Without a budget a prompt is not split.
                num_new = 0 if self._budget is None else max(0, span.offset - first)
                break
            self._users.append((seq, span))
        self._count_hits(seq, first, num_new)
        return num_new

    def expect(self, request: Request) -> None:
        """Want a new request's images before it is its turn, as far as there is room."""
        for image in (span.image for span in request.images if span.image.features is not None):
            capacity = STEPS * (self._budget or image.num_patches)
            fits = self._num_held + image.num_patches <= capacity
            if image.content_hash not in self._held and fits:
                self._want(image)
            if image.content_hash in self._arriving:
                self._arriving[image.content_hash].add(request.request_id)

    def take_wanted(self) -> list[ImageInput]:
        """The images that have to be read from where they were encoded, each once."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def seekers(self, image: ImageInput) -> set[str]:
        """The requests that wait for an image on its way."""
        return self._arriving.get(image.content_hash, set())

    def arrived(self, image: ImageInput) -> None:
        """The features of a wanted image are here."""
        del self._arriving[image.content_hash]
        self._unused.add(image.content_hash)
        self.num_received += 1

    def lost(self, image: ImageInput) -> set[str]:
        """The features of a wanted image will not come; returns the requests that wait for it."""
        self._num_held -= self._held.pop(image.content_hash)
        return self._arriving.pop(image.content_hash)

    def take_begun(self) -> list[BegunImage]:
        """What the step encodes a part of; the runner forgets what an earlier step had begun."""
        reached, self._reached = self._reached, {}
        self._begun = {content: self._begun[content] for content in reached}
        return [
            BegunImage(image, self._begun[content] / image.num_patches)
            for content, image in reached.items()
        ]

    def take_dropped(self) -> list[bytes]:
        """The content of images that the runner is to forget, each once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _take(self, image: ImageInput) -> bool:
        if image.content_hash in self._held:
            self._held.move_to_end(image.content_hash)
            return image.content_hash not in self._arriving
        patches, elsewhere = image.num_patches, image.features is not None
        if self._left is not None and self._budget is not None:
            if not elsewhere and not self._can_encode(image):
                return False
            if not self._make_room(patches, STEPS * self._budget):
                if image.content_hash in self._begun:
                    self._reached[image.content_hash] = image
                return False
            work = 0 if elsewhere else patches - self._begun.pop(image.content_hash, 0)
            self._reached.pop(image.content_hash, None)
            self._left = max(0, self._left - work)
        else:
            self._make_room(patches, 0)
        if elsewhere:
            self._want(image)
            return False
        self._hold(image)
        self._unused.add(image.content_hash)
        self.num_encoded += 1
        self.num_patches += patches
        return True

    def _can_encode(self, image: ImageInput) -> bool:
        """Whether the step encodes all that is left of an image; else it may encode a part."""
        assert self._left is not None and self._budget is not None
        content, done = image.content_hash, self._begun.get(image.content_hash, 0)
        if not self._parts:
            return image.num_patches - done <= self._left or self._left == self._budget
        # The tokens of an image that took several steps run in a step that encodes nothing of it.
        if done == image.num_patches or (not done and image.num_patches <= self._left):
            return True
        if done or self._left:
            work = min(self._left, image.num_patches - done)
            self._begun[content], self._left = done + work, self._left - work
            self._reached[content] = image
        return False

    def _hold(self, image: ImageInput) -> None:
        self._held[image.content_hash] = image.num_patches
        self._num_held += image.num_patches

    def _want(self, image: ImageInput) -> None:
        if image.content_hash in self._dropped:  # the runner would forget it after it has come
            self._dropped.remove(image.content_hash)
        self._hold(image)
        self._arriving[image.content_hash] = set()
        self._wanted.append(image)

    def _count_hits(self, seq: Sequence, first: int, num_new: int) -> None:
        """Count the images that begin among these tokens and that another sequence has used."""
        for span in seq.request.images:
            if first <= span.offset < first + num_new:
                self.num_hits += span.image.content_hash not in self._unused
                self._unused.discard(span.image.content_hash)

    def _make_room(self, patches: int, capacity: int) -> bool:
        """Drop what nobody needs as far as necessary; one image alone always has room."""
        if self._num_held + patches > capacity:
            needed = {span.image.content_hash for _, span in self._users} | set(self._arriving)
            for content in [content for content in self._held if content not in needed]:
                self._num_held -= self._held.pop(content)
                self._dropped.append(content)
                self._unused.discard(content)
                if self._num_held + patches <= capacity:
                    break
        return not self._held or self._num_held + patches <= capacity
