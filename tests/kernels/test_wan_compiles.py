"""The diffusion transformer's row kernels, compiled for a Hopper GPU without one."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenmill.kernels.gpu import bidirectional, modulation

TYPES = {
    **dict.fromkeys(("x", "delta"), "*bf16"),
    **dict.fromkeys(("factor", "shift", "gate", "weight", "cos", "sin", "scales"), "*fp32"),
    **dict.fromkeys(("k", "stride", "tokens"), "i32"),
    "eps": "fp32",
}
WIDE, INNER = 8192, 16_384  # blocks for rows of 5,120 and 13,824 channels
ROTATE = {"HALF": 64, "ROTATE": True, "BLOCK": WIDE, "EARLY": True}
KERNELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "modulate": (modulation.norm_modulate_kernel, {"FP8": False, "BLOCK": WIDE}, "*bf16"),
    "modulate_fp8": (modulation.norm_modulate_kernel, {"FP8": True, "BLOCK": WIDE}, "*fp8e4nv"),
    "gate": (modulation.add_gated_kernel, {"BLOCK": WIDE}, ""),
    "gelu": (modulation.gelu_rows_kernel, {"BLOCK": INNER}, "*fp8e4nv"),
    "rotate": (bidirectional.norm_rotate_kernel, ROTATE, "*bf16"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_and_keep_rows_in_registers(name: str) -> None:
    kernel, constants, out = KERNELS[name]
    constants = {"EARLY": True, **constants}
    types = TYPES | {"out": out}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("k", "stride")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 16})
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and "st.local" not in ptx
    assert "ld.global.v4.b32" in ptx  # 16 bytes at once
