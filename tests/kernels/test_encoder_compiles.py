"""The attention of a vision encoder, compiled for Hopper without one."""

import re

import pytest
from triton.compiler import ASTSource

from hopper_compiler import compiled_for_hopper, stack_bytes
from tokenmill.kernels.gpu import segments
from tokenmill.kernels.gpu.hopper import segments as segments_hopper


def test_attention_of_images_compiles_and_fits() -> None:
    """Heads of 72 channels, as all published encoders have; no register goes to local memory."""
    low, high = segments.split_channels(72)
    keys, warps, stages = segments.TILE
    types = {"qkv": "*bf16", "out": "*bf16"} | dict.fromkeys(
        ("stride", "out_stride", "size"), "i32"
    )
    types |= {"low_rows": f"tensordesc<bf16[{keys}, {low}]>"}
    types |= {"high_rows": f"tensordesc<bf16[{keys}, {high}]>"}
    constants = {
        "DIM": 72, "LOW": low, "HIGH": high, "ROWS": segments.TILE_ROWS, "KEYS": keys, "TMA": True,
        "STAGES": stages, "EARLY": True,
    }  # fmt: skip
    compiled = compiled_for_hopper(
        segments.segment_kernel,
        types,
        constants,
        ("stride", "out_stride", "size"),
        ASTSource,
        warps,
    )
    assert stack_bytes(compiled) == 0


def tile(channels: int) -> str:
    layout = f"swizzle_byte_width={2 * channels}, element_bitwidth=16, rank=2, "
    layout += "transposed=False, fp4_padded=False, cga_layout=[]"
    return f"tensordesc<bf16[128, {channels}],NVMMASharedLayout({layout})>"


@pytest.mark.parametrize(("stages", "turns"), [(3, True), (2, False)])
def test_segments_compile_for_hopper_and_keep_weights_in_registers(
    stages: int, turns: bool
) -> None:
    numbers = ("stride", "out_stride", "size")
    types = {"low": tile(64), "high": tile(16), "qkv": "*bf16", "out": "*bf16"}
    types |= dict.fromkeys(numbers, "i32")
    constants = {"DIM": 72, "STAGES": stages, "TURNS": turns, "EARLY": True}
    kernel = segments_hopper.segment_kernel
    compiled = compiled_for_hopper(kernel, types, constants, numbers)
    products = re.findall(r"wgmma\.mma_async[^;]*;", compiled.asm["ptx"])
    # Of each group, in the loop and outside of it: 8 steps of keys by two parts of the values, and
    # the last channels of the queries.
    assert sum(product.count("{") == 2 for product in products) == 2 * 2 * (2 * 8 + 1)
    assert stack_bytes(compiled) == 0
