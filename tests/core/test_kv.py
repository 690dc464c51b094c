"""Engines whose KV does not fit say why, field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tokenmill.core.kv import KVAddress, KVGeometry, KVWay, mismatch

SHAPE = KVGeometry("llama", "ab", "fp32", "keys", 30, 3, 64, 16, (12288, 12288))
ADDRESS = KVAddress("one", "here", SHAPE, 64, (KVWay("shm", (0,), b""),))
OTHERS: dict[str, tuple[Any, str]] = {
    "model": ("deepseek", "model architecture: the prefill engine has deepseek"),
    "weights": ("cd", "weights: the prefill engine has cd, the decode engine ab"),
    "dtype": ("fp8", "KV dtype: the prefill engine has fp8, the decode engine fp32"),
    "layout": ("values", "KV layout: the prefill engine has values"),
    "num_layers": (31, "number of layers: the prefill engine has 31, the decode engine 30"),
    "num_kv_heads": (1, "number of KV heads: the prefill engine has 1"),  # as with more ranks
    "head_dim": (128, "head_dim: the prefill engine has 128"),
    "block_size": (64, "block size: the prefill engine has 64, the decode engine 16"),
    "block_bytes": ((4096, 4096), "bytes of a block: the prefill engine has 8192 in 2 tensors"),
}


@pytest.mark.parametrize("name", [field.name for field in fields(KVGeometry)])
def test_every_difference_is_named(name: str) -> None:
    value, reason = OTHERS[name]
    other = replace(ADDRESS, geometry=replace(SHAPE, **{name: value}))
    assert (mismatch(other, ADDRESS) or "").startswith(reason)
    assert mismatch(ADDRESS, ADDRESS) is None


def test_ranks_read_from_as_many_ranks() -> None:
    two = replace(ADDRESS, others=(ADDRESS,))
    reason = "ranks of --tp: the prefill engine has 2, the decode engine 1"
    assert mismatch(two, two) is None and mismatch(two, ADDRESS) == reason
    assert (two.block_bytes, ADDRESS.block_bytes) == (49152, 24576)


def test_shared_memory_needs_one_host() -> None:
    assert "shm needs one host" in (mismatch(replace(ADDRESS, host="there"), ADDRESS) or "")
