"""Kernels for Hopper, compiled for it without one: Gluon has no interpreter, and the layout of
weights must suit the tensor cores.
"""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tokenmill.kernels.gpu import mla_hopper, moe_hopper, mxfp4

SHARED_BYTES = 232_448  # that a program may have on an H100 or H200


def tiles(rows: int, columns: int) -> str:
    """The type of a tensor whose tiles are copied whole."""
    layout = "swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    layout += "fp4_padded=False, cga_layout=[]"
    return f"tensordesc<bf16[{rows}, {columns}],NVMMASharedLayout({layout})>"


def compiled_for_hopper(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...],
    source: Any = GluonASTSource,
    num_warps: int = 4,
) -> Any:
    """Parameters without a type are pointers to int32; pointers and `aligned` divide by 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in aligned
    }
    code = source(kernel, signature, constants, attributes)
    compiled = triton.compile(code, GPUTarget("cuda", 90, 32), {"num_warps": num_warps})
    assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    return compiled


@pytest.mark.parametrize("splits", [1, 4])
def test_latent_attention_compiles_and_fits(splits: int) -> None:
    halves = dict.fromkeys(("q_latent", "q", "out"), "*bf16")
    sums = dict.fromkeys(("partial", "stats"), "*fp32" if splits > 1 else "*bf16")
    numbers = ("table_stride", "q_stride", "heads", "head_dim", "num_tokens", "tile_tokens")
    types = halves | sums | dict.fromkeys(numbers, "i32") | {"scale": "fp32"}
    types["ropes"] = tiles(mla_hopper.KEYS.value, mla_hopper.ROPE.value)
    types["latents"] = tiles(mla_hopper.KEYS.value, mla_hopper.HALF.value)
    constants = {"BLOCK": 64, "SPLITS": splits, "EARLY": True}
    aligned = ("q_stride", "heads", "head_dim")
    compiled_for_hopper(mla_hopper.latent_kernel, types, constants, aligned)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("rows", [16, 128])
def test_experts_compile_and_fit(rows: int, up: bool) -> None:
    step = moe_hopper.STEP.value
    types = {
        "x": "*bf16" if up else tiles(rows, step),
        "weight": tiles(moe_hopper.HALF.value, step),
        "out": "*bf16", "n": "i32", "k": "i32",
    }  # fmt: skip
    constants = {
        "SHARE": 8 if up else 1, "UP": up, "ROWS": rows, "STAGES": moe_hopper.num_stages(rows),
        "GROUP": moe_hopper.GROUP, "EARLY": True,
    }  # fmt: skip
    compiled_for_hopper(moe_hopper.grouped_kernel, types, constants, ("n", "k"))


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("rows", "few_or_many"), [(16, 1), (16, 9999), (64, 1), (128, 1)])
def test_weights_in_mxfp4_stay_in_registers(rows: int, few_or_many: int, up: bool) -> None:
    """The left operand of every product is registers, and nothing is written to shared memory."""
    shape = mxfp4.tile_shape(rows, few_or_many)
    types = dict.fromkeys(("x", "bias", "out"), "*bf16") | dict.fromkeys(("alpha", "limit"), "fp32")
    types |= dict.fromkeys(("row_tiles", "channel_tiles", "n", "k", "num_rows"), "i32")
    constants = {
        "SHARE": 4, "UP": up, "BM": rows, "LEVELS": shape.levels, "BLOCKS": shape.blocks,
        "TURN": shape.turn, "GROUP": mxfp4.GROUP, "STAGES": shape.stages, "EVEN": True,
        "PAIRS": True, "EARLY": True, "SPLITS": 1 if up or rows > 16 else 2,
        "SINGLE": rows == 16 and few_or_many == 1,
    }  # fmt: skip
    compiled = compiled_for_hopper(
        mxfp4.grouped_kernel, types, constants, ("n", "k"), ASTSource, shape.warps
    )
    products = re.findall(r"wgmma\.mma_async[^;]*;", compiled.asm["ptx"])
    assert products and all(product.count("{") == 2 for product in products)
    loops = [part.split("scf.yield")[0] for part in compiled.asm["ttgir"].split("scf.for")[1:]]
    loops = [part for part in loops if "warp_group_dot" in part]
    assert len(loops) == 1 + shape.levels
    for loop in loops:
        assert "local_store" not in loop and "local_alloc" not in loop
        # Triton 3.6 lets the registers of a turn's only product be overwritten while it runs.
        assert len(re.findall(r"ttng.warp_group_dot ", loop)) > 1
