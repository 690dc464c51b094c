"""The row cache's kernels, compiled for a Hopper GPU without one."""

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenmill.kernels.gpu import embedding

TYPES = {
    **dict.fromkeys(("cached", "out", "table", "rows"), "*fp16"),
    **dict.fromkeys(("tags", "ids", "totals"), "*i64"),
    **dict.fromkeys(("counters", "sketch", "estimates"), "*fp32"),
    **dict.fromkeys(("count", "num_sets", "sketch_mask", "dim"), "i32"),
}
KERNELS = {
    "lookup": (embedding._lookup_kernel, {"KEYS": 16, "BLOCK": 512}),
    "fetch": (embedding._fetch_kernel, {"PROGRAMS": 2048, "BLOCK": 512}),
    "copy": (embedding._copy_kernel, {"PROGRAMS": 2048, "BLOCK": 512}),
    "admit": (embedding._admit_kernel, {"PROGRAMS": 2048, "BLOCK": 512}),
    "write": (embedding._write_kernel, {"KEYS": 16, "BLOCK": 512}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_and_move_16_bytes_at_once(name: str) -> None:
    kernel, constants = KERNELS[name]
    one_row = "PROGRAMS" in constants
    num_warps = embedding.row_warps(torch.empty(1, 512, dtype=torch.float16)) if one_row else 4
    compiled = compiled_for_hopper(kernel, constants, num_warps)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and "local" not in ptx.split(".entry")[1].split("ret;")[0]
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def compiled_for_hopper(kernel: Any, constants: dict[str, int], num_warps: int) -> Any:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name == "dim"
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": num_warps})
