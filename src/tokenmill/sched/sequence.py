"""The state of one request, and the batch that a step computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from tokenmill.core.cost import Cost
from tokenmill.core.images import ImageInput
from tokenmill.core.requests import Request
from tokenmill.core.types import TokenLogprobs
from tokenmill.sched.cache.blocks import chain_seed
from tokenmill.sched.trackers import LoopFinder, NgramIndex, Thinking

PENDING = -1  # a token that is sampled but not known yet: its step still runs
Key = tuple[int, int, int]  # (priority, arrival_ns, order of add): the best runs first
Item = tuple["Sequence", int]  # and its num_new_tokens


class Status(Enum):
    """Where a sequence is; Queues.move() alone changes it."""

    WAITING = auto()  # it holds no blocks
    RECEIVING = auto()  # another engine fills its blocks
    LOADING = auto()  # tiers fill its blocks
    RUNNING = auto()
    ENDED = auto()  # its terminal output exists


@dataclass(slots=True, eq=False)
class Sequence:
    """The mutable state of one request: num_computed_tokens catches up with num_tokens."""

    request: Request
    key: Key
    max_len: int  # num_tokens at which it ends whatever it says
    stop_ids: frozenset[int]
    status: Status = Status.WAITING
    started: bool = False  # was admitted once
    scheduled_ns: int = 0  # when that was

    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)
    image_end: int = field(init=False)  # of the last image
    # Prompt, then output: what was generated elsewhere is known like after a preemption.
    token_ids: list[int] = field(init=False)
    draft_ids: list[int] = field(default_factory=list)  # guesses of what comes after token_ids
    ngrams: NgramIndex | None = None  # where drafts come from its own tokens
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, at the first admission
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    sampler_state: object | None = None  # the engine's own, dropped at the end
    cost: Cost = field(default_factory=Cost)
    decoding: tuple[int, float, float] | None = None  # the meter's own

    # It goes on after `limit` tokens only when all of them are known; request_limits.py looks at
    # each from `look_at` known tokens on.
    limit: int = field(init=False)
    look_at: int = field(init=False)
    thinking: Thinking | None = None  # its reasoning, where that has a budget
    loops: LoopFinder | None = None  # where a repetition ends it

    slot: int = -1  # its row in tables that a runner keeps; its own while it holds blocks
    block_ids: list[int] = field(default_factory=list)
    capacity: int = 0  # tokens that block_ids can hold
    # Where layers slide: their blocks from block `window_first` on, one of each group in turn.
    window_ids: list[int] = field(default_factory=list)
    window_first: int = 0
    # Blocks behind which others may start: the prompt's last full one, guesses before it, and
    # `branch`, the last one that full layers had cached where sliding layers knew less.
    starts: list[int] = field(default_factory=list)
    branch: int = 0
    num_found: int = 0  # blocks of its prefix that full layers have cached
    # chain[0] is the salt's seed, chain[j + 1] the hash of block j.
    chain: list[int] = field(init=False)
    digests: list[bytes] = field(default_factory=list)  # of blocks, where there are tiers
    # block_ids[:num_inserted_blocks] are cached under `parent`, the identity of the last one.
    num_inserted_blocks: int = 0
    parent: int | str = field(init=False)
    ahead: bool = False  # while it waited, tiers have brought its prefix nearer, or had nothing
    near: bool = False  # nothing of it has to come from disk, or all does already

    def __post_init__(self) -> None:
        request = self.request
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.task.prompt_token_ids)
        self.image_end = request.task.images[-1].end if request.task.images else 0
        self.token_ids = [*request.task.prompt_token_ids, *request.task.output_token_ids]
        if request.task.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self.limit = self.look_at = self.max_len
        self.chain = [chain_seed(request.task.cache_salt)]
        self.parent = request.task.cache_salt

    @property
    def finished(self) -> bool:
        return self.status is Status.ENDED

    @property
    def remote(self) -> bool:
        """Whether another engine is to compute its prompt."""
        return self.request.task.kv_from is not None and not self.started

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

    budget: int  # tokens that are left
    hold_context: bool  # decode only
    singles: list[Item] = field(default_factory=list)
    chunks: list[Item] = field(default_factory=list)  # of more than one new token

    def add(self, seq: Sequence, num_new: int) -> None:
        (self.singles if num_new == 1 else self.chunks).append((seq, num_new))
        self.budget -= num_new


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
    unsampled: list[int] = field(default_factory=list)  # items that sample nothing after all
    masks_follow: bool = False  # those of its constrained items are set after its launch
    num_to_draft: int = 0  # tokens that the runner is to guess for each item that samples
    dropped_images: list[bytes] = field(default_factory=list)  # whose features are to be forgotten
    begun_images: list[BegunImage] = field(default_factory=list)  # encoded over several steps

    def part(self, items: list[Item]) -> Batch:
        num_tokens = sum(num_new for _, num_new in items)
        return replace(self, items=items, num_tokens=num_tokens, unsampled=[])

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
