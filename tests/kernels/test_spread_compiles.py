"""RoPE with the KV write into an fp8 cache, compiled for a Hopper GPU without one."""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hopper_compiler import stack_bytes
from tokenmill.kernels.gpu import spread

NUMBERS = ("stride", "heads", "kv_heads", "q_parts", "kv_parts")


@pytest.mark.parametrize(("dim", "normed"), [(128, False), (64, True)])
def test_a_program_is_one_warp_whose_values_stay_in_their_threads(dim: int, normed: bool) -> None:
    """Only the table, gains and signs go through shared memory, before the loop over heads."""
    types = {"qkv": "*bf16", "cos_sin": "*fp32", "q_norm": "*bf16", "k_norm": "*bf16"}
    types |= dict.fromkeys(("k_cache", "v_cache"), "*fp8e4nv")
    types |= dict.fromkeys(NUMBERS, "i32") | {"scale": "fp32", "eps": "fp32"}
    constants = {
        "HAS_NORM": normed, "DIM": dim, "BLOCK": 64, "HEADS": spread.CHANNELS // dim,
        "WIDTH": 32, "EARLY": True,
    }  # fmt: skip
    names = spread._spread_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name == "stride"
    }
    source = ASTSource(spread._spread_kernel, signature, constants, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 1})
    ptx = compiled.asm["ptx"]
    assert stack_bytes(compiled) == 0 and compiled.metadata.shared < 4096
    # Of queries, keys and values: two loads of each half, and of the first two also those ahead.
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 4 * 5
    # Queries are stored as they are loaded; eight numbers of fp8 are 8 bytes.
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 4
    assert len(re.findall(r"st\.global\.v2\.b32", ptx)) == 8
    assert len(re.findall(r"mma\.sync", ptx)) == 2 * 16
    for loop in compiled.asm["ttgir"].split("scf.for")[1:]:
        assert not re.search(r"local_(alloc|store|load)", loop.split("scf.yield")[0])
    # Squares are added up by shuffles. A barrier stands between two tables on their way through
    # shared memory: cosines and sines, of both halves where each has a gain.
    assert ("shfl" in ptx) == normed
    assert len(re.findall(r"\bbar\.sync", ptx)) == (6 if normed else 2)
