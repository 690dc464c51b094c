"""Which images are encoded in a step, and which encoded ones are kept."""

from __future__ import annotations

from collections import OrderedDict

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.sched.sequence import BegunImage, Sequence

STEPS = 2  # the cache holds as many patches as so many steps encode


class EncoderCache:
    """Decides what a runner encodes and keeps, by content; the runner holds the features.

    A step encodes as many patches as its budget has, or one image that has more. What no running
    sequence is in the middle of may be dropped, the least recently used first, once there is no
    room: whoever waits for room waits for sequences that have what they need to go on.

    Where requests decode and few images are ahead, prompts with images run in parts: what a step
    does for them, patches and tokens, has the time of `share` patches or of `tokens` tokens. An
    image that has more is encoded over several steps, a share of its layers in each. Text before it
    waits for it but for one token, since any part of a prompt reads all the experts.
    """

    def __init__(
        self, budget: int | None, share: int | None = None, tokens: int | None = None
    ) -> None:
        """Without a budget every image is encoded as soon as a step reaches it.

        `share` is the budget of a step in parts, and as many `tokens` take as long.
        """
        self._budget, self._left = budget, budget
        self._share = min(share or 0, budget or 0)
        self._tokens = tokens or self._share
        self._whole = self._most_tokens = 0  # patches and tokens of a step in parts
        self._parts = False  # prompts with images run over several steps
        self._begun: dict[bytes, int] = {}  # content: patches' worth of work that is done
        # By content and request, who has reached a begun image and is not past it.
        self._waiting: dict[tuple[bytes, str], tuple[Sequence, ImageSpan]] = {}
        self._held: OrderedDict[bytes, int] = OrderedDict()  # content: patches, the oldest first
        self._num_held = 0
        self._users: list[tuple[Sequence, ImageSpan]] = []
        self._dropped: list[bytes] = []
        self._unused: set[bytes] = set()  # content that is here and that no sequence has used
        self.num_encoded = 0  # images so far
        self.num_patches = 0  # of these
        self.num_hits = 0  # images that were here when a sequence reached them

    @property
    def divides(self) -> bool:
        """Whether there is a smaller budget for steps that encode in parts."""
        return self._budget is not None and self._share > 0

    def begin(self, text_tokens: int | None = None) -> None:
        """A step is being chosen: its budget is whole, and ended or passed images are free.

        It runs in parts where `text_tokens` are given: so many of other prompts are ahead.
        """
        self._left, self._parts = self._budget, text_tokens is not None and self.divides
        if self._parts and text_tokens is not None:
            least = -(-self._share // 2)  # images go on beside many texts
            self._left = self._whole = max(least, self._share - self._cost(text_tokens))
            self._most_tokens = max(1, self._whole * self._tokens // self._share)
        self._users = [
            (seq, span)
            for seq, span in self._users
            if seq.block_ids and not seq.finished and seq.num_computed_tokens < span.end
        ]
        self._forget_begun()

    def _forget_begun(self) -> None:
        """Drop begun images that nobody waits for; who waits may have no turn for many steps."""
        self._waiting = {
            key: (seq, span)
            for key, (seq, span) in self._waiting.items()
            if key[0] in self._begun and not seq.finished and seq.num_computed_tokens < span.end
        }
        wanted = {content for content, _ in self._waiting}
        self._begun = {key: done for key, done in self._begun.items() if key in wanted}

    def reach(self, seq: Sequence, first: int, num_new: int) -> int:
        """How many of the new tokens from `first` on can run: up to an image that has to wait."""
        if self._parts:
            num_new = min(num_new, _even_part(seq.num_tokens - first, self._most_tokens))
        end, waits = first + num_new, False
        reached = [
            span for span in seq.request.task.images if first < span.end and span.offset < end
        ]
        for span in reached:
            if not self._take(span.image, self._cost(num_new)):
                content = span.image.content_hash
                if content in self._begun:
                    self._waiting[content, seq.request_id] = seq, span
                # Without a budget a prompt is not split.
                num_new = 0 if self._budget is None else max(0, span.offset - first)
                waits = span is reached[0]
                break
            self._users.append((seq, span))
        if self._parts:
            num_new = self._run_in_parts(seq, num_new, waits)
        self._count_hits(seq, first, num_new)
        return num_new

    def _run_in_parts(self, seq: Sequence, num_new: int, waits: bool) -> int:
        """How many tokens run of those that could; one, where they wait, lets others pass."""
        cost = self._cost(num_new)
        assert self._left is not None
        if waits or cost > self._left:
            return min(num_new, int(not seq.block_ids))
        self._left -= cost
        return num_new

    def _cost(self, num_tokens: int) -> int:
        """The patches that take as long as so many tokens; 0 where only patches count."""
        return -(-num_tokens * self._share // self._tokens) if self._parts else 0

    def begun_images(self) -> list[BegunImage]:
        """The begun images, also those of earlier steps; the runner forgets all others."""
        images = {content: span.image for (content, _), (_, span) in self._waiting.items()}
        return [
            BegunImage(images[content], done / images[content].num_patches)
            for content, done in self._begun.items()
        ]

    def take_dropped(self) -> list[bytes]:
        """The content of images that the runner is to forget, each once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _take(self, image: ImageInput, cost: int) -> bool:
        if image.content_hash in self._held:
            self._held.move_to_end(image.content_hash)
            return True
        patches = image.num_patches
        if self._left is not None and self._budget is not None:
            if not self._can_encode(image, cost):
                return False
            if not self._make_room(patches, STEPS * self._budget):
                return False
            work = patches - self._begun.pop(image.content_hash, 0)
            self._left = max(0, self._left - work)
        else:
            self._make_room(patches, 0)
        self._held[image.content_hash] = patches
        self._num_held += patches
        self._unused.add(image.content_hash)
        self.num_encoded += 1
        self.num_patches += patches
        return True

    def _can_encode(self, image: ImageInput, cost: int) -> bool:
        """Whether the step encodes all that is left of an image; else it may encode a part.

        In parts it does where the image's tokens, which cost as many patches, run in the same step.
        """
        assert self._left is not None and self._budget is not None
        content, done = image.content_hash, self._begun.get(image.content_hash, 0)
        work = image.num_patches - done
        if not self._parts:
            return work <= self._left or self._left == self._budget
        if work + cost <= self._left:
            return True
        part = min(self._left, _even_part(work, self._whole))
        if done or part:
            self._begun[content], self._left = done + part, self._left - part
        return False

    def _count_hits(self, seq: Sequence, first: int, num_new: int) -> None:
        """Count the images that begin among these tokens and that another sequence has used."""
        for span in seq.request.task.images:
            if first <= span.offset < first + num_new:
                self.num_hits += span.image.content_hash not in self._unused
                self._unused.discard(span.image.content_hash)

    def _make_room(self, patches: int, capacity: int) -> bool:
        """Drop what nobody needs as far as necessary; one image alone always has room."""
        if self._num_held + patches > capacity:
            needed = {span.image.content_hash for _, span in self._users}
            for content in [content for content in self._held if content not in needed]:
                self._num_held -= self._held.pop(content)
                self._dropped.append(content)
                self._unused.discard(content)
                if self._num_held + patches <= capacity:
                    break
        return not self._held or self._num_held + patches <= capacity


def _even_part(work: int, most: int) -> int:
    """The first of equal parts, as few as there are of at most so much each."""
    num_parts = -(-work // most)
    return -(-work // num_parts) if work else 0
