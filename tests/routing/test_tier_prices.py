"""Blocks behind the device: routers hear of them, and price them between cached and computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv.at_once import without_threads
from kv.conversations import converse, engine, hits
from tiny_models import make_model, save, tame
from tokenmill.core.config import RouterConfig
from tokenmill.core.kv import DISK, HOST
from tokenmill.core.kv_events import (
    Dump,
    EventBatch,
    EventJournal,
    Removed,
    Stored,
    pack_events,
    unpack_events,
)
from tokenmill.engine.open_tiers import token_ms
from tokenmill.routing.prices import tier_price
from tokenmill.routing.router import Router
from tokenmill.sched.cache.blocks import block_hashes, hash_chain

PROMPT = list(range(161))
HASHES = block_hashes(PROMPT, 16)  # ten blocks


def router(**held: tuple[int, int, int]) -> Router:
    """Workers with so many blocks on the device, then in host memory, then on disk."""
    made = Router(RouterConfig(block_size=16))
    for name, (device, host, disk) in held.items():
        made.add_worker(name)
        tiers = {HOST: HASHES[device : device + host], DISK: HASHES[device + host :][:disk]}
        assert made.load(name, Dump(0, HASHES[:device], tiers))
    return made


def cached(made: Router) -> dict[str, int]:
    """What events have told; a decision predicts what it will cache, for a few seconds."""
    return made._cached(len(PROMPT), hash_chain(PROMPT, 16), 0.0)


def test_a_nearer_tier_is_worth_more() -> None:
    found = cached(router(a=(10, 0, 0), b=(0, 10, 0), c=(0, 0, 10), d=(2, 4, 4), e=(0, 0, 0)))
    assert found == {"a": 160, "b": 144, "c": 112, "d": 32 + round(64 * 0.9) + round(64 * 0.7)}
    for better, worse in (("a", "b"), ("b", "c"), ("c", "e")):
        amounts = {"a": (10, 0, 0), "b": (0, 10, 0), "c": (0, 0, 10), "e": (0, 0, 0)}
        made = router(**{name: amounts[name] for name in (worse, better)})
        assert made.route("x", PROMPT, 0.0).worker == better


def test_prices_are_what_workers_have_measured() -> None:
    assert tier_price(HOST, {HOST: 0.02, DISK: 0.2}, 0.1) == pytest.approx(0.2)
    assert tier_price(DISK, {HOST: 0.02, DISK: 0.2}, 0.1) == 1.0, "no more than computing it"
    assert tier_price(DISK, {HOST: 0.02}, 0.1) == tier_price(DISK, {}, 0.1) == 0.3
    assert tier_price(HOST, {HOST: 0.02}, 0.0) == 1.0
    # 2,048 bytes at 8 GB/s are 0.256 us, and at 2 GB/s before that 1.024 us more.
    assert token_ms({HOST: 8e9}, 2048) == {HOST: pytest.approx(0.000256)}
    assert token_ms({HOST: 8e9, DISK: 2e9}, 2048)[DISK] == pytest.approx(0.00128)


def test_a_router_knows_each_workers_tiers() -> None:
    """A worker whose copies are slow is worth less; its successor begins anew."""
    made = router(slow=(0, 10, 0), quick=(0, 10, 0))
    computed_ms = made.rates.prefill
    for name, share in (("slow", 0.5), ("quick", 0.05)):
        token = {HOST: share * computed_ms}
        assert made.load(name, Dump(0, [], {HOST: HASHES}, token))
    assert cached(made) == {"slow": 80, "quick": 152}
    assert made.route("x", PROMPT, 0.0).worker == "quick"
    made.add_worker("slow")
    assert made.load("slow", Dump(0, [], {HOST: HASHES}))
    assert cached(made)["slow"] == 144


def test_blocks_move_from_tier_to_tier() -> None:
    made = router(a=(3, 0, 0))
    assert made.apply("a", EventBatch(1, [Stored(None, HASHES[3:6], HOST)]))
    assert cached(made) == {"a": 48 + round(48 * 0.9)}
    moved = [Removed(HASHES[4:6], HOST), Stored(None, HASHES[4:6], DISK)]
    assert made.apply("a", EventBatch(2, moved))
    assert cached(made) == {"a": 48 + round(16 * 0.9) + round(32 * 0.7)}
    assert made.apply("a", EventBatch(3, [Removed(HASHES[4:6], DISK), Removed(HASHES[3:4], HOST)]))
    assert cached(made) == {"a": 48} and made.index.num_blocks("a") == 3
    made.remove_worker("a")
    made.add_worker("a")
    assert cached(made) == {}


def test_events_carry_their_tier() -> None:
    journal = EventJournal()
    journal.stored(1, 2)
    journal.stored(2, 3)
    journal.stored(None, 4, HOST)
    journal.stored(None, 9, HOST)
    journal.removed(4, HOST)
    journal.removed(5)
    events = journal.take()
    assert events == [
        Stored(1, [2, 3]),
        Stored(None, [4, 9], HOST),
        Removed([4], HOST),
        Removed([5]),
    ]
    assert unpack_events(pack_events(events)) == events


def test_a_router_follows_an_engine(tmp_path: Path) -> None:
    model = save(tame(make_model("llama"), 0.3), tmp_path / "model")
    built = engine(model, f"host={12 * 4096},disk={tmp_path / 'kv'}:64MiB")
    without_threads(built.engine.tiers)
    made, publisher = router(a=(0, 0, 0)), built.engine.kv_events()
    converse(built)
    assert hits(built) > 0
    built.engine.tiers.poll()
    while (batch := publisher.take()) is not None:
        assert made.apply("a", batch)
    measured = built.engine.kv_dump().token_ms
    assert 0 < measured[HOST] < measured[DISK]
    fresh = Router(RouterConfig(block_size=16))
    fresh.add_worker("a")
    assert fresh.load("a", built.engine.kv_dump())
    assert made.index._tiers == fresh.index._tiers and made.index._tiers[HOST]
    assert made.index._holders.keys() == fresh.index._holders.keys()
