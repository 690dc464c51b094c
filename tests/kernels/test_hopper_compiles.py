"""Kernels for Hopper, compiled for it without one: Gluon has no interpreter, and the layout of
weights must suit the tensor cores.
"""

import re

import pytest
from triton.compiler import ASTSource

from hopper_compiler import compiled_for_hopper, product_loops, stack_bytes
from tokenmill.kernels.gpu import mxfp4
from tokenmill.kernels.gpu.hopper import gated, prefill
from tokenmill.kernels.gpu.hopper import mla as mla_hopper
from tokenmill.kernels.gpu.hopper import moe as moe_hopper


def tiles(*shape: int) -> str:
    """The type of a tensor whose tiles are copied whole."""
    layout = f"swizzle_byte_width=128, element_bitwidth=16, rank={len(shape)}, transposed=False, "
    layout += "fp4_padded=False, cga_layout=[]"
    return f"tensordesc<bf16{list(shape)},NVMMASharedLayout({layout})>"


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


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_gated_products_compile_and_fit(rows: int) -> None:
    """All sums stay in registers."""
    step = gated.STEP.value
    types = {"x": tiles(rows, step), "weight": tiles(gated.CHANNELS.value, step), "out": "*bf16"}
    types |= dict.fromkeys(("num_rows", "n", "k"), "i32")
    constants = {"ROWS": rows, "STAGES": gated.num_stages(rows), "EARLY": True}
    compiled = compiled_for_hopper(gated.gated_kernel, types, constants, ("n", "k"))
    assert stack_bytes(compiled) <= 16
    assert constants["STAGES"] >= 3, "one to multiply, two on their way"


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(
    ("rows", "few_or_many"), [(16, 1), (16, 9999), (32, 9999), (64, 1), (128, 1)]
)
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
    loops = product_loops(compiled)
    assert len(loops) == 1 + shape.levels
    assert not any(word in loop for loop in loops for word in ("local_store", "local_alloc"))


@pytest.mark.parametrize(
    ("dim", "group", "share", "block_size", "sliding", "sinks"),
    [
        (128, 4, 1, 64, False, False),
        (128, 1, 5, 64, False, False),
        (128, 1, 1, 16, False, False),
        (128, 2, 1, 256, True, False),
        (64, 8, 1, 64, True, True),
    ],
)
def test_attention_of_prompts_compiles_and_fits(
    dim: int, group: int, share: int, block_size: int, sliding: bool, sinks: bool
) -> None:
    """Weights stay in registers, and nothing is spilled."""
    page = min(block_size, prefill.KEYS.value)
    types = {"q": tiles(128 // group, group, dim), "out": "*bf16", "sinks": "*fp32"}
    types |= dict.fromkeys(("k_cache", "v_cache"), tiles(page, dim))
    types |= dict.fromkeys(("table_stride", "out_stride", "last", "window"), "i32")
    constants = {
        "DIM": dim, "KV_HEADS": 8, "SHARE": share, "GROUP": group, "BLOCK": block_size,
        "SLIDING": sliding, "SINKS": sinks, "STAGES": prefill.STAGES, "EARLY": True,
    }  # fmt: skip
    compiled = compiled_for_hopper(prefill.prefill_kernel, types, constants, ("out_stride",))
    ptx = compiled.asm["ptx"]
    products = re.findall(r"wgmma\.mma_async[^;]*;", ptx)
    loops = 1 if sliding else 2  # a window's tiles are all masked
    # Of each group the last product and that of each loop have their left operand in registers.
    assert sum(product.count("{") == 2 for product in products) == 2 * (loops + 1) * 8
    copies = len(re.findall(r"cp\.async\.bulk\.tensor\.2d", ptx))
    assert copies and copies % ((128 // page) * (dim // 64)) == 0
    assert stack_bytes(compiled) == 0 and "st.shared.v4" not in ptx
