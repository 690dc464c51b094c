"""Attention data parallelism: every rank owns its requests' attention and KV, all share the MoE.

Ranks step together, so a step takes as long as its slowest rank. Two rules keep them even: which
rank a request goes to, and in which steps prompts are computed at all. Both depend on gathered
numbers alone, so every rank finds the same answer without another exchange:

    ranks = assign(loads, prompt_lens, cached)    # for new requests; loads: each Scheduler.load()
    held = policy.hold(outlooks)                  # once a step; outlooks: each Scheduler.outlook()
    batch = scheduler.schedule(now_ns, held)      # on each rank; where it is empty the rank idles
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from tokenmill.core.kv import DEVICE
from tokenmill.core.kv_events import Event, EventJournal, Hash, Removed, Stored
from tokenmill.routing.kv_index import by_depth
from tokenmill.sched.cache.blocks import hash_chain

RankLoad = tuple[int, int]  # a rank's (requests that are not finished, tokens of their KV)
Outlook = tuple[int, int]  # a rank's (context requests, decoding requests) before a step
HELD_SHARE = 4  # a rank that holds one in so many tokens of a prompt may exceed its even share
HOLDERS_SLACK = 4  # by one request in so many, and by one at least


def assign(
    loads: Sequence[RankLoad],
    prompt_lens: Sequence[int],
    cached: Sequence[Mapping[int, int]] | None = None,
    max_num_seqs: int | None = None,
) -> list[int]:
    """The rank of each new request: TensorRT-LLM's rules, without cached prompts and with them.

    The longest prompt goes first, to the rank with the lowest cost: the tokens it has to compute,
    and as many more as its share of all ranks' tokens makes of the prompt. `cached` may say how
    many tokens of each prompt a rank holds already. No rank gets more requests than an even share,
    or than the fullest rank has; one that holds much of a prompt may get some more, but by that
    never more than it has places for.
    """
    num_requests = [requests for requests, _ in loads]
    num_tokens = [tokens for _, tokens in loads]
    share = -(-(sum(num_requests) + len(prompt_lens)) // len(loads))
    limit = max(share, *num_requests)
    places = limit if max_num_seqs is None else max_num_seqs
    limit_of_holders = max(limit, min(share + max(1, share // HOLDERS_SLACK), places))
    chosen = [-1] * len(prompt_lens)
    for index in sorted(range(len(prompt_lens)), key=lambda index: -prompt_lens[index]):
        length, held = prompt_lens[index], cached[index] if cached is not None else {}
        total = max(sum(num_tokens), length)
        _, _, rank = min(
            ((length - held.get(rank, 0)) * total + length * tokens, num_requests[rank], rank)
            for rank, tokens in enumerate(num_tokens)
            if num_requests[rank] < limit
            or (num_requests[rank] < limit_of_holders and held.get(rank, 0) * HELD_SHARE >= length)
        )
        chosen[index] = rank
        num_requests[rank] += 1
        num_tokens[rank] += length - held.get(rank, 0)
    return chosen


class RankCaches:
    """Which rank holds which cached block, and what all of them together cache and forget."""

    def __init__(self, num_ranks: int, block_size: int) -> None:
        self._block_size, self._all = block_size, (1 << num_ranks) - 1
        # Ranks as bits: those that hold a block in a tier, and in any.
        self._tiers: defaultdict[str, dict[Hash, int]] = defaultdict(dict)
        self._holders: dict[Hash, int] = {}
        self._journal: EventJournal | None = None

    def record_events(self) -> EventJournal:
        """The journal of blocks that a first rank caches and the last one forgets, from now on."""
        if self._journal is None:
            self._journal = EventJournal()
        return self._journal

    def cached_hashes(self) -> list[Hash]:
        return list(self._tiers[DEVICE])

    def tier_hashes(self) -> dict[str, list[Hash]]:
        """Hashes of blocks in host memory and on disk, by rank."""
        return {tier: list(held) for tier, held in self._tiers.items() if tier != DEVICE}

    def apply(self, rank: int, events: Iterable[Event]) -> None:
        """Take what a rank has cached and forgotten, in order."""
        bit = 1 << rank
        for event in events:
            if isinstance(event, Stored):
                parents = [event.parent, *event.hashes[:-1]]
                for parent, block_hash in zip(parents, event.hashes, strict=True):
                    self._store(bit, parent, block_hash, event.tier)
            elif isinstance(event, Removed):
                self._remove(bit, event.hashes, event.tier)
            else:
                held = [h for h, ranks in self._tiers[DEVICE].items() if ranks & bit]
                self._remove(bit, held, DEVICE)

    def _store(self, bit: int, parent: Hash | None, block_hash: Hash, tier: str) -> None:
        held = self._tiers[tier]
        ranks = held.get(block_hash, 0)
        held[block_hash] = ranks | bit
        self._holders[block_hash] = self._holders.get(block_hash, 0) | bit
        if not ranks and self._journal is not None:
            self._journal.stored(parent if tier == DEVICE else None, block_hash, tier)

    def _remove(self, bit: int, hashes: Iterable[Hash], tier: str) -> None:
        held = self._tiers[tier]
        for block_hash in hashes:
            ranks = held.pop(block_hash, 0)
            if ranks & ~bit:
                held[block_hash] = ranks & ~bit
            elif ranks and self._journal is not None:
                self._journal.removed(block_hash, tier)
            holders = 0
            for each in self._tiers.values():
                holders |= each.get(block_hash, 0)
            self._holders[block_hash] = holders
            if not holders:
                del self._holders[block_hash]

    def cached_tokens(self, token_ids: Sequence[int], salt: str = "") -> dict[int, int]:
        """How many leading tokens of a prompt each rank need not compute; none: not in the dict."""
        if not self._holders:
            return {}
        size = self._block_size
        most = (len(token_ids) - 1) // size * size  # one is always computed
        chain = hash_chain(token_ids, size, salt=salt)
        found: dict[int, int] = {}
        for depth, ranks in by_depth(self._holders, chain, self._all):
            for rank in range(ranks.bit_length()):
                if ranks >> rank & 1:
                    found[rank] = min(depth * size, most)
        return found


class ContextPolicy(Protocol):
    """Says whether prompts wait in the next step; asked once a step, on every rank alike."""

    def hold(self, ranks: Sequence[Outlook]) -> bool: ...


class NeverHold:
    """Each rank computes its prompts as soon as it can."""

    def hold(self, ranks: Sequence[Outlook]) -> bool:
        return False


class ContextBalancer:
    """Prompts wait until every rank has one: TensorRT-LLM's rule.

    While a rank has no prompt, or no place for one, they wait for up to `timeout_iters` steps. Once
    every rank has one they wait `batching_wait_iters` steps more, so that ranks gather similar
    amounts. A rank that has nothing to decode ends the wait.
    """

    def __init__(
        self, max_num_seqs: int, timeout_iters: int = 50, batching_wait_iters: int = 10
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._timeout_iters = timeout_iters
        self._batching_wait_iters = batching_wait_iters
        self._num_waited = 0  # steps since every rank had a prompt, or since the last timeout
        self._num_gathered = 0  # held steps in which every rank had one

    def hold(self, ranks: Sequence[Outlook]) -> bool:
        decode = all(decoding > 0 for _, decoding in ranks)
        if all(context > 0 and decoding < self._max_num_seqs for context, decoding in ranks):
            self._num_waited = 0
            if decode and self._num_gathered < self._batching_wait_iters:
                self._num_gathered += 1
                return True
            if decode:
                self._num_gathered = 0
            return False
        self._num_waited += 1
        if self._num_waited >= self._timeout_iters or not decode:
            self._num_waited = 0
            return False
        return True
