"""Block hashes and the block pool: stable hashes, LRU, prefixes that can never be wrong."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from scheduler_integrity import check_pool
from tokenmill.core.kv_groups import Sliding
from tokenmill.sched.cache.blocks import BlockPool, block_hashes, chain_seed, next_block_hashes

MASK = 2**64 - 1


def reference_hashes(token_ids: list[int], block_size: int, salt: str = "") -> list[int]:
    """The same polynomial in plain integers."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93 & MASK
        return x ^ (x >> 29)

    golden = 0x9E3779B97F4A7C15
    multipliers = [mix((i + 1) * golden & MASK) | 1 for i in range(block_size)]
    chain, out = chain_seed(salt), []
    for index in range(len(token_ids) // block_size):
        block = token_ids[index * block_size : (index + 1) * block_size]
        dot = sum(t * m for t, m in zip(block, multipliers, strict=True)) + golden & MASK
        chain = chain + mix(dot) * pow(0xBF58476D1CE4E5B9, index, 2**64) & MASK
        out.append(chain)
    return out


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=200), st.integers(1, 17), st.text(max_size=4))
def test_hashes_equal_plain_integer_arithmetic(tokens: list[int], size: int, salt: str) -> None:
    assert block_hashes(tokens, size, salt=salt) == reference_hashes(tokens, size, salt)


def test_chain_continues_without_rehashing() -> None:
    tokens = random.Random(1).choices(range(50_000), k=40 * 16 + 5)
    whole = block_hashes(tokens, 16, salt="s")
    assert len(whole) == 40
    for k in (1, 7, 39):
        assert block_hashes(tokens[k * 16 :], 16, (whole[k - 1], k)) == whole[k:]
    blocks = [tokens[i * 16 : (i + 1) * 16] for i in range(40)]
    starts = [(chain_seed("s"), 0)] + [(whole[i], i + 1) for i in range(39)]
    assert next_block_hashes(blocks, 16, starts) == whole


def test_hash_depends_on_prefix_position_order_and_salt() -> None:
    a, b = list(range(16)), list(range(100, 116))
    hashes = {
        block_hashes(a, 16)[-1],
        block_hashes(a + a, 16)[-1],
        block_hashes(a + b, 16)[-1],
        block_hashes(b + a, 16)[-1],
        block_hashes(a[::-1], 16)[-1],
        block_hashes(a, 16, salt="x")[-1],
        *block_hashes([0] * 64, 16),
    }
    assert len(hashes) == 10
    assert block_hashes(a[:15], 16) == []


def test_no_collisions_among_similar_blocks() -> None:
    rng = random.Random(2)
    prompts = [rng.choices(range(4), k=64) for _ in range(2000)]
    prefixes = {tuple(p[: 4 * (i + 1)]) for p in prompts for i in range(16)}
    hashes = {h for p in prompts for h in block_hashes(p, 4)}
    assert len(hashes) == len(prefixes)


def test_hash_is_the_same_in_another_process() -> None:
    code = (
        "from tokenmill.sched.cache.blocks import block_hashes;"
        "print(block_hashes(list(range(48)), 16, salt='tenant'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(block_hashes(list(range(48)), 16, salt="tenant"))
    # Routers and workers of different machines agree on the values.
    assert block_hashes(list(range(16)), 16) == [5982054559458919514]


def fill(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Allocate and cache the full blocks of a prompt."""
    size = pool.block_size
    hashes = block_hashes(tokens, size, salt=salt)
    table = pool.allocate(len(hashes))
    parent: int | str = salt
    for index, (block, block_hash) in enumerate(zip(table, hashes, strict=True)):
        content = tuple(tokens[index * size : (index + 1) * size])
        parent = pool.insert(block, block_hash, parent, content)
    return table


def match(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    return pool.match(tokens, block_hashes(tokens, pool.block_size, salt=salt), salt)


def test_match_returns_the_longest_cached_prefix() -> None:
    pool = BlockPool(8, 2)
    table = fill(pool, [1, 2, 3, 4, 5, 6])
    assert match(pool, [1, 2, 3, 4, 5, 6, 7]) == table
    assert match(pool, [1, 2, 3, 4, 9, 9]) == table[:2]
    assert match(pool, [3, 4]) == []  # the same tokens under another parent
    assert match(pool, [1, 2], salt="x") == []
    check_pool(pool, [table])


def test_tail_is_evicted_before_the_prefix_and_old_before_new() -> None:
    pool = BlockPool(4, 2)
    old = fill(pool, [1, 2, 3, 4])
    new = fill(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    taken = pool.allocate(3)
    assert taken == [old[1], old[0], new[1]]
    assert match(pool, [1, 2, 3, 4]) == []
    assert match(pool, [5, 6, 7, 8]) == new[:1]
    check_pool(pool, [taken])


def test_hit_revives_a_free_block_and_renews_its_age() -> None:
    pool = BlockPool(2, 1)
    a, b = fill(pool, [1]), fill(pool, [2])
    pool.release(a)
    pool.release(b)
    hit = match(pool, [1])
    assert pool.num_revived(hit) == 1
    pool.acquire(hit)
    assert pool.num_free == 1 and pool.num_used == 1 and pool.num_revived(hit) == 0
    pool.release(hit)
    assert pool.allocate(1) == b  # a was used later
    assert match(pool, [1]) == a


def test_plain_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3, 1)
    cached = fill(pool, [1])
    plain = pool.allocate(1)
    pool.release(cached)
    pool.release(plain)
    assert cached[0] not in pool.allocate(2)
    assert match(pool, [1]) == cached


def test_first_of_two_equal_blocks_stays_cached() -> None:
    pool = BlockPool(6, 2)
    first = fill(pool, [1, 2, 3, 4])
    second = fill(pool, [1, 2, 3, 4])
    assert match(pool, [1, 2, 3, 4]) == first
    pool.release(second)
    assert set(pool.allocate(4)) >= set(second)  # duplicates were plain
    assert match(pool, [1, 2, 3, 4]) == first


def test_child_of_an_evicted_parent_is_not_found_and_is_replaced() -> None:
    pool = BlockPool(3, 1)
    parent, child = fill(pool, [1, 2])
    pool.release([parent])
    pool.forget([parent])
    assert match(pool, [1, 2]) == []
    again = pool.allocate(1)
    hashes = block_hashes([1, 2], 1)
    identity = pool.insert(again[0], hashes[0], "", (1,))
    assert match(pool, [1, 2]) == again  # the old child hangs on the old parent
    fresh = pool.allocate(1)
    pool.insert(fresh[0], hashes[1], identity, (2,))
    assert match(pool, [1, 2]) == again + fresh
    check_pool(pool, [[child], again, fresh])


def test_forget_makes_free_and_used_blocks_unfindable() -> None:
    pool = BlockPool(3, 1)
    used, free = fill(pool, [1]), fill(pool, [2])
    pool.release(free)
    pool.forget([*used, *free, 2])
    assert match(pool, [1]) == match(pool, [2]) == []
    check_pool(pool, [used])


def test_collisions_never_give_a_wrong_block() -> None:
    """All blocks of one depth share a hash: what is found is still exactly what was asked for."""
    rng = random.Random(3)
    pool = BlockPool(16, 2)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    hits = 0
    for _ in range(2000):
        salt = rng.choice(["", "s"])
        tokens = [rng.randrange(3) for _ in range(6)]
        found = pool.match(tokens, [0, 1, 2], salt)
        for index, block in enumerate(found):
            hits += 1
            assert content[block] == (salt, tuple(tokens[: 2 * index + 2]))
        pool.acquire(found)
        table = found + pool.allocate(3 - len(found))
        parent: int | str = pool.identity(found[-1]) if found else salt
        for index in range(len(found), 3):
            content[table[index]] = (salt, tuple(tokens[: 2 * index + 2]))
            block = tuple(tokens[2 * index : 2 * index + 2])
            parent = pool.insert(table[index], index, parent, block)
        check_pool(pool, [table])
        pool.release(table)
    assert hits > 0


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(2)
    with pytest.raises(ValueError, match="asked for 1 blocks, 0 are free"):
        pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(table)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0, 16)


def test_check_pool_sees_each_kind_of_damage() -> None:
    def damaged(name: str) -> BlockPool:
        pool = BlockPool(4, 1)
        pool.release(fill(pool, [1]))
        table = fill(pool, [2])
        check_pool(pool, [table])
        if name == "leak":
            pool._plain.pop()
        elif name == "twice":
            pool._plain.append(pool._plain[0])
        elif name == "free and used":
            pool._refs[pool._plain[0]] = 1
        elif name == "hash":
            pool._hashes[table[0]] += 1
        elif name == "tokens":
            pool._tokens[table[0]] = None
        elif name == "lost hash":
            pool._by_hash.popitem()
        return pool

    for name in ("leak", "twice", "free and used", "hash", "tokens", "lost hash"):
        with pytest.raises(AssertionError):
            check_pool(damaged(name))
    pool = BlockPool(2, 1)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="references"):
        check_pool(pool, [])


class PoolMachine(RuleBasedStateMachine):
    """Tables come and go; a model remembers what each cached block stands for."""

    @initialize(
        num_blocks=st.integers(1, 12),
        size=st.integers(1, 3),
        collide=st.booleans(),
        groups=st.sampled_from([0, 0, 1, 2]),
    )
    def start(self, num_blocks: int, size: int, collide: bool, groups: int) -> None:
        self.pool = BlockPool(num_blocks, size, sliding=Sliding(2, groups))
        self.collide = collide
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the prefix it was written with

    def hashes(self, tokens: list[int]) -> list[int]:
        hashes = block_hashes(tokens, self.pool.block_size)
        return [h % 2 for h in hashes] if self.collide else hashes

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), cached=st.booleans())
    def admit(self, tokens: list[int], cached: bool) -> None:
        pool, size, groups = self.pool, self.pool.block_size, self.pool.sliding.num_groups
        hashes = self.hashes(tokens)
        found = pool.match(tokens, hashes)
        for index, block in enumerate(found):
            for each in (block, *pool.beside(block)):
                assert self.content[each] == tuple(tokens[: (index + 1) * size])
        beside = [each for block in found for each in pool.beside(block)]
        fresh = len(hashes) - len(found)
        revived = pool.num_revived([*found, *beside])
        if fresh * (1 + groups) + revived > pool.num_free:
            return
        pool.acquire([*found, *beside])
        table, sliding = found + pool.allocate(fresh), pool.allocate(fresh * groups)
        parent: int | str = pool.identity(found[-1]) if found else ""
        for index in range(len(found), len(table) if cached else 0):
            own = sliding[(index - len(found)) * groups :][:groups]
            for each in (table[index], *own):
                self.content[each] = tuple(tokens[: (index + 1) * size])
            block = tuple(tokens[index * size : (index + 1) * size])
            parent = pool.insert(table[index], hashes[index], parent, block)
            if groups:
                pool.put_beside(parent, own)
        self.tables.append(table + beside + sliding)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.pool.forget([data.draw(st.integers(0, self.pool.num_blocks - 1))])

    @invariant()
    def integrity(self) -> None:
        check_pool(self.pool, self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.num_free == self.pool.num_blocks
        check_pool(self.pool, [])


PoolMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
TestPool = PoolMachine.TestCase


def cached(pool: BlockPool, tokens: list[int], salt: str) -> int:
    """How many blocks of a prompt are still cached."""
    return len(pool.match(tokens, block_hashes(tokens, pool.block_size, salt=salt), salt))


def test_no_owner_pushes_out_the_prefixes_of_others() -> None:
    pool, prompt = BlockPool(256, 4), list(range(160))
    for name in "abc":
        pool.release(fill(pool, prompt, f"{name}\0s"))
    for i in range(100):  # one after another, and each of its prompts with a salt of its own
        pool.release(fill(pool, [1000 * (i + 1) + j for j in range(120)], f"noisy\0{i}"))
        check_pool(pool, [])
    assert [cached(pool, prompt, f"{name}\0s") for name in "abc"] == [40] * 3
    assert len(pool.cached_hashes()) == 256, "what others leave is the noisy one's"
    for i in range(100):  # now of another one, which takes no more than its share
        pool.release(fill(pool, [10**6 * (i + 1) + j for j in range(40)], "a\0s"))
    assert [cached(pool, prompt, f"{name}\0s") for name in "bc"] == [40] * 2


def test_salts_without_an_owner_share_one_order() -> None:
    pool, prompt = BlockPool(16, 4), list(range(32))
    for salt in "xyz":
        pool.release(fill(pool, prompt, salt))
    assert [cached(pool, prompt, salt) for salt in "xyz"] == [0, 8, 8]
