"""Gluon kernels have no interpreter: here they are at least compiled for the GPU they are for."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tokenmill.kernels.gpu.mla_hopper import HALF, KEYS, ROPE, latent_kernel

SHARED_BYTES = 232_448  # that a program may have on an H100 or H200
LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)


@pytest.mark.parametrize("splits", [1, 4])
def test_latent_attention_compiles_and_fits(splits: int) -> None:
    halves = dict.fromkeys(("q_latent", "q", "out"), "*bf16")
    sums = dict.fromkeys(("partial", "stats"), "*fp32" if splits > 1 else "*bf16")
    numbers = ("table_stride", "q_stride", "heads", "head_dim", "num_tokens", "tile_tokens")
    types = halves | sums | dict.fromkeys(numbers, "i32") | {"scale": "fp32"}
    types["ropes"] = f"tensordesc<bf16[{KEYS.value}, {ROPE.value}],{LAYOUT}>"
    types["latents"] = f"tensordesc<bf16[{KEYS.value}, {HALF.value}],{LAYOUT}>"
    constants = {"BLOCK": 64, "SPLITS": splits, "EARLY": True}
    names = latent_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}
    aligned = ("q_stride", "heads", "head_dim")
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in aligned
    }
    source = GluonASTSource(latent_kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4})
    assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES
    assert "wgmma.mma_async" in compiled.asm["ptx"]
