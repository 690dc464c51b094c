"""The copy of KV blocks, compiled for a Hopper GPU without one."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenmill.kernels.gpu import blocks


@pytest.mark.parametrize("wide", [True, False])
def test_it_compiles_for_hopper_and_moves_16_bytes_at_once(wide: bool) -> None:
    tile = blocks.TILE_BYTES // (8 if wide else 1)
    constants = {"WIDE": wide, "TILE": tile}
    types = {"regions": "*i64", "pairs": "*i64", "count": "i32"}
    signature = {n: types.get(n, "constexpr") for n in blocks._copy_kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1)}
    source = ASTSource(blocks._copy_kernel, signature, constants, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and "local" not in ptx.split(".entry")[1].split("ret;")[0]
    assert ("ld.global.v2.b64" in ptx or "ld.global.v4.b32" in ptx) == wide
