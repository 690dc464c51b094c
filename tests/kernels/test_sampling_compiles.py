"""The mask kernel compiled for Hopper and Blackwell GPUs without one."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hopper_compiler import stack_bytes
from tokenmill.kernels.gpu import sampling


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_masks_move_logits_by_16_bytes_and_spill_nothing(capability: int, dtype: str) -> None:
    kernel = sampling._mask_kernel
    types = {"logits": f"*{dtype}", "out": f"*{dtype}"}
    types |= dict.fromkeys(("stride", "size", "num_words"), "i32")
    constants = {"CHUNK": sampling.CHUNK}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("stride", "size")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": 4})
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"] and stack_bytes(compiled) == 0
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx
    assert "st.global.b16" not in ptx
