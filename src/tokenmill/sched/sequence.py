"""The state of one request, and the batch that a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.cost import Cost
from tokenmill.core.images import ImageInput
from tokenmill.core.types import Request, TokenLogprobs
from tokenmill.sched.cache.blocks import chain_seed
from tokenmill.sched.ngrams import NgramIndex

PENDING = -1  # a token that is sampled but not known yet: its step still runs
Key = tuple[int, int, int]  # (priority, arrival_ns, order of add): the best runs first
Item = tuple["Sequence", int]  # and its num_new_tokens


class Sequence:
    """The mutable state of one request: num_computed_tokens catches up with num_tokens."""

    __slots__ = (
        "ahead",
        "block_ids",
        "capacity",
        "chain",
        "cost",
        "decoding",
        "digests",
        "draft_ids",
        "finished",
        "image_end",
        "key",
        "max_len",
        "near",
        "ngrams",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_inserted_blocks",
        "num_prompt_tokens",
        "parent",
        "prompt_logprobs",
        "remote",
        "request",
        "request_id",
        "scheduled_ns",
        "slot",
        "started",
        "state",
        "stop_ids",
        "token_ids",
        "window_first",
        "window_ids",
    )

    def __init__(self, request: Request, key: Key, max_len: int, stop_ids: frozenset[int]) -> None:
        self.request = request
        self.request_id = request.request_id
        # Prompt, then output: what was generated elsewhere is known like after a preemption.
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.image_end = request.images[-1].end if request.images else 0  # of the last image
        self.draft_ids: list[int] = []  # guesses of what comes after token_ids
        self.ngrams: NgramIndex | None = None  # where drafts come from its own tokens
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, at the first admission
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if request.sampling.prompt_logprobs is None else [None]
        )
        self.state: object | None = None  # the engine's own, dropped at the end
        self.cost = Cost()
        self.decoding: tuple[int, float, float] | None = None  # the meter's own
        self.key = key
        self.max_len = max_len  # num_tokens at which it ends whatever it says
        self.stop_ids = stop_ids
        self.started = False  # was admitted once
        self.scheduled_ns = 0  # when that was
        self.finished = False  # its terminal output exists
        self.remote = request.kv_from is not None  # until its KV is here
        self.slot = -1  # its row in tables that a runner keeps; its own while it holds blocks
        self.block_ids: list[int] = []
        self.capacity = 0  # tokens that block_ids can hold
        # Where layers slide: their blocks from block `window_first` on, one of each group in turn.
        self.window_ids: list[int] = []
        self.window_first = 0
        # chain[0] is the salt's seed, chain[j + 1] the hash of block j.
        self.chain = [chain_seed(request.cache_salt)]
        self.digests: list[bytes] = []  # of blocks, where tiers hold what leaves the device
        self.ahead = False  # tiers have brought its prefix nearer while it waited, or had nothing
        self.near = False  # nothing of it has to come from disk, or all does already
        # block_ids[:num_inserted_blocks] are cached under `parent`, the identity of the last one.
        self.num_inserted_blocks = 0
        self.parent: int | str = request.cache_salt

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def extend_prompt_logprobs(self, entries: list[TokenLogprobs]) -> None:
        """Add the positions not known yet; `entries` begin after the step's first token."""
        known = self.prompt_logprobs
        if known is not None:
            first = self.num_computed_tokens + 1
            known += entries[len(known) - first : self.num_prompt_tokens - first]


@dataclass(slots=True)
class Step:
    """The batch that schedule() is choosing."""

    now_ns: int
    budget: int  # tokens that are left
    hold_context: bool  # decode only
    singles: list[Item] = field(default_factory=list)
    chunks: list[Item] = field(default_factory=list)  # of more than one new token


@dataclass(frozen=True, slots=True)
class BegunImage:
    """An image that steps encode in parts, so that requests that decode wait less."""

    image: ImageInput
    share: float  # of its layers, after the step


@dataclass(slots=True)
class Batch:
    """What one step computes: (sequence, num_new_tokens), those with one new token first.

    An item samples iff its num_computed_tokens + num_new_tokens >= num_tokens; what goes beyond are
    its drafts, which the step verifies.
    """

    items: list[Item] = field(default_factory=list)
    num_tokens: int = 0
    grown: list[Item] = field(default_factory=list)  # (sequence, index of its first new block)
    samples: list[bool] | None = None  # by item, once Scheduler.advance() has counted the step
    num_to_draft: int = 0  # tokens that the runner is to guess for each item that samples
    dropped_images: list[bytes] = field(default_factory=list)  # whose features are to be forgotten
    begun_images: list[BegunImage] = field(default_factory=list)  # encoded over several steps

    def num_singles(self) -> int:
        """Return how many items have one new token: those that decode."""
        count = len(self.items)
        while count and self.items[count - 1][1] > 1:
            count -= 1
        return count


def num_drafts(item: Item) -> int:
    """Return how many of an item's new tokens are drafts; negative inside a prompt."""
    seq, num_new = item
    return seq.num_computed_tokens + num_new - len(seq.token_ids)
