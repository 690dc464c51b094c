"""Events of other engines: what their batches mean, and what prompts then find."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.engine_publisher import (
    AllBlocksCleared,
    BlockRemoved,
    SGLangCleared,
    SGLangRemoved,
    SGLangSalted,
    SGLangStored,
    packed,
    stored,
)
from tokenmill.core.config import RouterConfig
from tokenmill.engine_events.engine_blocks import salt_of
from tokenmill.engine_events.engine_caches import EngineCaches
from tokenmill.engine_events.wire import WireError, decode_batch
from tokenmill.routing.router import Router

TOKENS = list(range(100, 180))
HASHES = [b"%032d" % number for number in range(5)]
SALT = salt_of("", "")


def told(*payloads: bytes, basis: Any = "events") -> EngineCaches:
    made = EngineCaches(16, 5.0)
    made.begin("a", 0, basis)
    for payload in payloads:
        made.take("a", 0, decode_batch(payload))
    return made


def found(caches: EngineCaches, tokens: list[int] = [*TOKENS, 1], salt: str = SALT) -> int:  # noqa: B006
    return caches.overlay({}, tokens, salt, 0.0).get("a", 0)


def test_blocks_are_found_by_their_tokens_behind_their_parent() -> None:
    caches = told(packed(stored(HASHES[:2], None, TOKENS[:32])))
    assert found(caches) == 32
    caches.take("a", 0, decode_batch(packed(stored(HASHES[2:], HASHES[1], TOKENS[32:]))))
    assert found(caches) == 80 and caches.num_blocks("a") == 5
    assert found(caches, [*TOKENS[:40], 7]) == 32, "the third block has other tokens"
    caches.take("a", 0, decode_batch(packed(BlockRemoved(HASHES[2:], "GPU"))))
    assert found(caches) == 32
    caches.take("a", 0, decode_batch(packed(AllBlocksCleared())))
    assert found(caches) == 0 and caches.num_blocks("a") == 0
    again = packed(
        stored([HASHES[1]], HASHES[0], TOKENS[16:32]), stored([HASHES[0]], None, TOKENS[:16])
    )
    caches.take("a", 0, decode_batch(again))
    assert found(caches) == 32, "a block that is gone is still known as a parent"


def test_arrays_of_sglang_and_of_older_vllm_are_read() -> None:
    caches = told(packed(SGLangStored([7, -8], None, TOKENS[:32], 16, None, "GPU")))
    assert found(caches) == 32
    caches.take("a", 0, decode_batch(packed(SGLangRemoved([-8]))))
    assert found(caches) == 16
    caches.take("a", 0, decode_batch(packed(SGLangCleared())))
    assert found(caches) == 0
    salted = SGLangSalted([9], None, TOKENS[:16], 16, None, "GPU", metadata={"cache_salt": "s"})
    caches.take("a", 0, decode_batch(packed(salted)))
    assert found(caches) == 0 and found(caches, salt=salt_of("", "s")) == 16
    oldest = msgspec.msgpack.encode([0.5, [["BlockStored", [1], None, TOKENS[:16], 16, None]]])
    with_all = ["BlockStored", [2], 1, TOKENS[16:32], 16, None, "GPU", None, [None], 0]
    both = told(oldest, msgspec.msgpack.encode([0.5, [with_all], 0]))
    assert found(both) == 32


def test_block_sizes_may_differ() -> None:
    caches = told(packed(stored([1, 2], None, TOKENS[:64], 32)))
    caches.begin("b", 0, "events")
    caches.take("b", 0, decode_batch(packed(stored([1, 2], None, TOKENS[:16], 8))))
    assert caches.overlay({}, [*TOKENS, 1], SALT, 0.0) == {"a": 64, "b": 16}


def test_adapters_salts_and_images_are_part_of_the_key() -> None:
    lora = stored([1], None, TOKENS[:16], lora_id=1, lora_name="law", extra_keys=[("law",)])
    salted = stored([2], None, TOKENS[:16], extra_keys=[("s",)])
    both = stored([3], None, TOKENS[:16], lora_id=1, lora_name="law", extra_keys=[("law", "s")])
    for event, salt in ((lora, ("law", "")), (salted, ("", "s")), (both, ("law", "s"))):
        caches = told(packed(event))
        assert found(caches, salt=salt_of(*salt)) == 16
        assert found(caches) == 0
    keys = [None, (("image-1", 3),), (("image-1", -13),), None]
    pictured = told(packed(stored([1, 2, 3, 4], None, TOKENS[:64], extra_keys=keys)))
    assert found(pictured) == 16, "another image may be in the blocks from there on"
    other = [None, (("image-2", 3),), (("image-2", -13),), None]
    pictured.take(
        "a", 0, decode_batch(packed(stored([1, 5, 6, 7], None, TOKENS[:64], extra_keys=other)))
    )
    assert pictured.num_blocks("a") == 7, "the blocks with images and those behind them differ"


def test_ranks_have_caches_of_their_own() -> None:
    caches = told(
        packed(stored([1], None, TOKENS[:16]), rank=0),
        packed(stored([1, 2], None, TOKENS[:32]), rank=1),
    )
    assert found(caches) == 32
    caches.take("a", 0, decode_batch(packed(BlockRemoved([1, 2], "GPU"), rank=1)))
    assert found(caches) == 16, "rank 0 has its block still"


def test_tiers_count_for_less_and_remote_ones_not_at_all() -> None:
    caches = told(packed(stored([1, 2], None, TOKENS[:32], medium="CPU")))
    assert 16 < found(caches) < 32 and caches.num_blocks("a") == 0
    caches.take("a", 0, decode_batch(packed(stored([1], None, TOKENS[:16]))))
    assert found(caches) > 28
    caches.take("a", 0, decode_batch(packed(BlockRemoved([1, 2], "CPU"))))
    assert found(caches) == 16
    bare = stored([2], None, [], 0, medium="CPU")
    caches.take("a", 0, decode_batch(packed(stored([2], 1, TOKENS[16:32]), bare)))
    caches.take("a", 0, decode_batch(packed(BlockRemoved([2], "GPU"))))
    assert 16 < found(caches) < 32, "vLLM's offloading may name blocks without their tokens"
    assert found(told(packed(stored([1], None, TOKENS[:16], medium="EXTERNAL")))) == 0
    assert found(told(packed(stored([1], None, TOKENS[:16], locality="REMOTE")))) == 0


def test_copies_are_counted_and_windows_left_out() -> None:
    twice = packed(stored([1], None, TOKENS[:16]), stored([1], None, TOKENS[:16]))
    caches = told(twice, packed(BlockRemoved([1], "GPU")))
    assert found(caches) == 16, "vLLM may cache the same tokens in two blocks"
    caches.take("a", 0, decode_batch(packed(BlockRemoved([1], "GPU"))))
    assert found(caches) == 0
    full = stored([1], None, TOKENS[:16], group_idx=0, kv_cache_spec_kind="full_attention")
    window = stored([1], None, TOKENS[:16], group_idx=1, kv_cache_spec_kind="sliding_window")
    both = told(packed(full, window), packed(BlockRemoved([1], "GPU", 1)))
    assert found(both) == 16, "blocks of a window go long before the prefix does"
    both.take("a", 0, decode_batch(packed(BlockRemoved([1], "GPU", 0))))
    assert found(both) == 0


def test_a_block_whose_parent_is_unknown_is_left_out() -> None:
    assert found(told(packed(stored([2], 1, TOKENS[:16])))) == 0


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "expected KV cache events of vLLM"),
        (b"hello", "Expected `array`, got `int`"),
        (msgspec.msgpack.encode({"ts": 0.0, "events": []}), "Expected `array`, got `object`"),
        (packed({"type": "BlockMoved"}), "Invalid value 'BlockMoved'"),
        (packed(["BlockMoved"]), "Invalid value 'BlockMoved'"),
        (packed({"type": "BlockRemoved"}), "missing required field `block_hashes`"),
        (packed({"type": "BlockRemoved", "block_hashes": [1.5]}), r"at `\$.block_hashes\[0\]`"),
        (packed(["BlockStored", [1], None, "text", 16]), "Expected `array`, got `str`"),
        (
            packed(stored([1], None, TOKENS[:15])),
            "BlockStored has 15 token_ids; expected block_size",
        ),
        (packed(stored([1], None, [], 16)), "BlockStored has 0 token_ids"),
        (
            packed(stored([1], None, TOKENS[:16], extra_keys=[])),
            "0 extra_keys; expected one for each",
        ),
        (packed(stored([1], None, [2**64 - 1] * 16)), "token_ids beyond 63 bits"),
    ],
)
def test_what_cannot_be_read(payload: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        told(payload)


def test_a_router_says_what_it_knew_of_the_backend_it_chose() -> None:
    target = Router(RouterConfig(events=False))
    target.told = told(packed(stored(HASHES, None, TOKENS)))
    for name in "ab":
        target.add_worker(name)
    prompt = [*TOKENS, 1]
    decision = target.route("1", prompt, 0.0, "model", told_salt=SALT)
    assert (decision.worker, decision.num_cached_tokens, decision.basis) == ("a", 80, "events")
    target.free("1")
    other = target.route("2", [9] * 40, 0.0, "model", without={"a"}, told_salt=SALT)
    assert other.basis == "assumed", "b has no events"
    target.free("2")
    assert target.route("3", [9] * 40, 0.0, "model", told_salt=SALT).num_cached_tokens == 32
    target.free("3")
    unknown = target.route("4", prompt, 0.0, "model")
    assert unknown.basis == "assumed", "events do not tell of such a prompt"
    target.free("4")
    target.told.begin("a", 0, "assumed")
    forgotten = target.route("5", prompt, 0.0, "model", told_salt=SALT)
    assert (forgotten.num_cached_tokens, forgotten.basis) == (80, "assumed"), "it was sent them"


def test_partial_events_add_to_what_is_assumed() -> None:
    target = Router(RouterConfig(events=False))
    target.told = told(packed(stored(HASHES[:1], None, TOKENS[:16])), basis="partial events")
    target.add_worker("a")
    prompt, other = [*TOKENS, 1], [5] * 40
    decision = target.route("1", prompt, 0.0, "m", told_salt=SALT)
    assert (decision.num_cached_tokens, decision.basis) == (16, "partial events")
    assert target.route("2", prompt, 0.0, "m", told_salt=SALT).num_cached_tokens == 80
    target.route("3", other, 0.0, "m")
    assert target.route("4", other, 0.0, "m", told_salt=SALT).num_cached_tokens == 32


def test_events_tell_how_far_prompts_are() -> None:
    target = Router(RouterConfig(events=False))
    caches = target.told = told()
    target.add_worker("a")
    for name in "12":
        target.route(name, [int(name)] * 40, 0.0, "m", told_salt=SALT)
    assert target.loads()[0].queued_tokens == 80
    num_tokens = caches.take("a", 0, decode_batch(packed(stored([1, 2], None, TOKENS[:32]))))
    assert num_tokens == 32
    target.told_step("a", num_tokens, 1.0)
    assert target.loads()[0][:4] == (48, 96, 2, 2), "of the oldest prompt"
    target.told_step("a", 16, 2.0)
    assert target.loads()[0][:4] == (32, 96, 2, 1)
    target.told_step("gone", 16, 3.0)
    again = decode_batch(packed(stored([1], None, TOKENS[:16]), BlockRemoved([1], "GPU")))
    assert caches.take("a", 0, again) == 0, "a second copy"


def test_a_prompt_on_its_way_counts_until_events_tell_of_it() -> None:
    caches = told()
    caches.predict("a", [*TOKENS, 1], SALT, 0.0)
    assert found(caches) > 60
    assert caches.overlay({}, [*TOKENS, 1], SALT, 6.0) == {}
    caches.predict("a", [*TOKENS, 1], SALT, 7.0)
    caches.restart("a", 0)
    assert caches.overlay({}, [*TOKENS, 1], SALT, 7.0) == {}
    caches.begin("a", 0, "events")
    assert caches.overlay({"a": 9}, [*TOKENS, 1], SALT, 7.0) == {}
