"""What the scheduler knows of KV blocks that left the device: their names, and who holds them.

A block is named by a digest of all that its KV depends on: the model and its cache, the salt, and
the tokens up to its last one. Unlike the chained hash, which routers know, it can be trusted alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

DIGEST_BYTES, HASH_BYTES = 16, 8
WINDOW = b"w"  # ends the name of what sliding layers keep of a block


class Page(NamedTuple):
    """What tiers hold under one name, and the blocks of the device where it lies or will lie."""

    name: bytes
    block_ids: tuple[int, ...]


class Tiers(Protocol):
    """What holds blocks that were evicted from the device."""

    root: bytes  # a digest of the model and the layout of its cache

    def holds(self, name: bytes) -> bool: ...
    def num_loadable(self, sizes: Sequence[tuple[bytes, int]]) -> int:
        """How many of these (name, blocks), which are held, fit into one load, in order."""


def root_digest(identity: bytes, salt: str) -> bytes:
    """What stands before the first block of a prompt."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=identity).digest()


def next_digest(above: bytes, contents: bytes) -> bytes:
    return blake2b(above + contents, digest_size=DIGEST_BYTES).digest()


def block_name(digest: bytes, block_hash: int) -> bytes:
    """The name of a block: its digest, and the hash by which routers know it."""
    return digest + block_hash.to_bytes(HASH_BYTES, "little")


def hash_of(name: bytes) -> int:
    return int.from_bytes(name[DIGEST_BYTES : DIGEST_BYTES + HASH_BYTES], "little")


def is_full(name: bytes) -> bool:
    """Whether a name is that of full layers' part of a block."""
    return len(name) == DIGEST_BYTES + HASH_BYTES
