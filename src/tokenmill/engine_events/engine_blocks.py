"""What one cache of another engine holds, in the hashes of this package's index.

Engines hash blocks in ways of their own, and seed the hashes per process. So a block is known by
its tokens: those of the event, behind the block that its parent's hash stands for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import error as struct_error
from typing import Any

import numpy as np

from tokenmill.core.kv import DEVICE, DISK, HOST
from tokenmill.core.kv_events import Cleared, Event, Hash, Removed, Stored
from tokenmill.engine_events.wire import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    WireError,
)
from tokenmill.sched.cache.blocks import U64, chain_seed, hash_chain, hash_input

TIERS = {
    None: DEVICE,
    "GPU": DEVICE,
    "CPU": HOST,
    "CPU_PINNED": HOST,
    "DISK": DISK,
    "STORAGE": DISK,
}
# Groups of layers whose blocks say how long a cached prefix is; those with a window do not.
WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention")
REMOTE = "REMOTE"  # all backends reach such a block, so it favours none of them
MAX_GONE = 1 << 16  # blocks that are no longer held, whose children may still be stored


def salt_of(adapter: str, cache_salt: str) -> str:
    """What stands before the first block: prompts of different adapters or salts share nothing."""
    return f"{adapter}\0{cache_salt}"


@dataclass(slots=True)
class _Block:
    chain: Hash
    depth: int  # blocks up to this one
    size: int  # in tokens
    counts: dict[str, int] = field(default_factory=dict)  # of copies, by tier


class EngineBlocks:
    """Turns the events of one cache into those of an index, in order."""

    def __init__(self) -> None:
        self._held: dict[BlockHash, _Block] = {}
        self._gone: OrderedDict[BlockHash, _Block] = OrderedDict()
        self._left_out: set[int] = set()  # groups of layers that do not count
        self.block_size = 0  # as the last stored block had it
        self.num_orphans = 0  # stored blocks whose parents were never told of

    def take(self, event: EngineEvent) -> list[Event]:
        """What an event changes in the index; raises WireError where it contradicts itself."""
        match event:
            case BlockStored():
                return self._store(event)
            case BlockRemoved():
                return self._remove(event)
            case AllBlocksCleared():
                self.forget()
                return [Cleared()]

    def forget(self) -> None:
        """Nothing is held any more, as far as is known; the blocks keep their meaning."""
        for block_hash, block in self._held.items():
            self._retire(block_hash, block)
        self._held.clear()

    def _retire(self, block_hash: BlockHash, block: _Block) -> None:
        block.counts = {}
        self._gone[block_hash] = block
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(False)

    def _store(self, event: BlockStored) -> list[Event]:
        tier = self._tier_of(event)
        if tier is None or not event.block_hashes:
            return []
        if event.token_ids or event.block_size:
            blocks = self._placed(event)
        else:  # vLLM's offloading may name blocks alone
            known = (self._find(block_hash) for block_hash in event.block_hashes)
            blocks = [block for block in known if block is not None]
        if len(blocks) < len(event.block_hashes):
            self.num_orphans += len(event.block_hashes)
            return []
        new = []
        for block_hash, block in zip(event.block_hashes, blocks, strict=True):
            self._gone.pop(block_hash, None)
            kept = self._held.setdefault(block_hash, block)
            if not kept.counts.get(tier):
                new.append(kept.chain)
            kept.counts[tier] = kept.counts.get(tier, 0) + 1
        return [Stored(None, new, tier)] if new else []

    def _placed(self, event: BlockStored) -> list[_Block]:
        """The blocks of an event, by their tokens; none where the parent is unknown."""
        size, count = event.block_size, len(event.block_hashes)
        if size < 1 or len(event.token_ids) != count * size:
            raise WireError(
                f"BlockStored has {len(event.token_ids)} token_ids; expected block_size x "
                f"block_hashes, which is {size} x {count}"
            )
        if event.extra_keys is not None and len(event.extra_keys) != count:
            raise WireError(
                f"BlockStored has {len(event.extra_keys)} extra_keys; expected one for each of "
                f"its {count} block_hashes, or none"
            )
        if event.parent_block_hash is None:
            start = chain_seed(_salt(event)), 0
        else:
            above = self._find(event.parent_block_hash)
            if above is None or above.size != size:
                return []
            start = above.chain, above.depth
        self.block_size = size
        try:
            chain = hash_chain(_words(event), size, start)
        except struct_error:
            raise WireError("BlockStored has token_ids beyond 63 bits") from None
        return [_Block(each, start[1] + i + 1, size) for i, each in enumerate(chain.tolist())]

    def _find(self, block_hash: BlockHash) -> _Block | None:
        return self._held.get(block_hash) or self._gone.get(block_hash)

    def _remove(self, event: BlockRemoved) -> list[Event]:
        tier = TIERS.get(event.medium)
        if tier is None or event.group_idx in self._left_out or event.locality == REMOTE:
            return []
        gone = []
        for block_hash in event.block_hashes:
            block = self._held.get(block_hash)
            copies = 0 if block is None else block.counts.get(tier, 0)
            if block is None or not copies:
                continue
            if copies > 1:
                block.counts[tier] = copies - 1
                continue
            gone.append(block.chain)
            del block.counts[tier]
            if not block.counts:
                self._retire(block_hash, self._held.pop(block_hash))
        return [Removed(gone, tier)] if gone else []

    def _tier_of(self, event: BlockStored) -> str | None:
        """Where the blocks are; None: they do not count here."""
        group = event.group_idx
        if event.kv_cache_spec_kind not in WHOLE_PREFIX:
            if group is not None:
                self._left_out.add(group)
            return None
        if event.kv_cache_spec_kind is None and group:  # of several groups the first counts
            self._left_out.add(group)
            return None
        return None if event.locality == REMOTE else TIERS.get(event.medium)


def _adapter(event: BlockStored) -> str:
    """The adapter's name, or what stands for one that only a number is known of."""
    if isinstance(event.lora_name, str):
        return event.lora_name
    return "" if event.lora_id is None else f"\0{event.lora_id}"


def _salt(event: BlockStored) -> str:
    """The salt of a first block: SGLang's metadata, or the strings of vLLM's extra keys."""
    if isinstance(event.lora_name, dict):
        return salt_of(_adapter(event), str(event.lora_name.get("cache_salt", "")))
    names = [key for key in _own_keys(event, 0) if isinstance(key, str)]
    return salt_of(_adapter(event), "\0".join(names))


def _own_keys(event: BlockStored, index: int) -> list[Any]:
    """The extra keys of a block, without the adapter's name, which is that of all blocks."""
    keys = event.extra_keys[index] if event.extra_keys else None
    keys = keys or []
    return keys[1:] if keys and keys[0] == event.lora_name else keys


def _images(event: BlockStored, index: int) -> list[Any]:
    """What beside its tokens is in a block: images, for example."""
    keys = _own_keys(event, index)
    is_first = index == 0 and event.parent_block_hash is None
    return [key for key in keys if not isinstance(key, str)] if is_first else keys


def _words(event: BlockStored) -> Sequence[int] | U64:
    """The tokens as they are hashed: blocks with images are told apart by these."""
    if not event.extra_keys or not any(event.extra_keys):
        return event.token_ids
    words, size = np.array(hash_input(event.token_ids)), event.block_size
    for index in range(len(event.block_hashes)):
        if images := _images(event, index):
            digest = blake2b(repr(images).encode(), digest_size=8).digest()
            words[index * size : (index + 1) * size] ^= np.uint64(int.from_bytes(digest, "little"))
    return words
