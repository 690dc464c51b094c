"""The diffusion transformer's kernels, compiled for a Hopper GPU without one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hopper_compiler import compiled_for_hopper, stack_bytes
from tokenmill.kernels.gpu import bidirectional, modulation
from tokenmill.kernels.gpu.hopper import bidirectional as bidirectional_hopper

TYPES = {
    **dict.fromkeys(("x", "delta"), "*bf16"),
    **dict.fromkeys(("factor", "shift", "gate", "weight", "cos", "sin", "scales"), "*fp32"),
    **dict.fromkeys(("k", "stride", "tokens"), "i32"),
    "eps": "fp32",
}
WIDE, INNER = 5120, 13_824  # channels of rows
PLAIN = {"ADD": False, "GATED": False}
KERNELS: dict[str, tuple[Any, int, dict[str, Any], str]] = {
    "modulate": (modulation.norm_modulate_kernel, WIDE, PLAIN | {"FP8": False}, "*bf16"),
    "add_and_modulate": (
        modulation.norm_modulate_kernel,
        WIDE,
        {"ADD": True, "GATED": True, "FP8": True},
        "*fp8e4nv",
    ),
    "gelu": (modulation.round_rows_kernel, INNER, {"GELU": True, "FAST": True}, "*fp8e4nv"),
    "rotate": (bidirectional.norm_rotate_kernel, WIDE, {"HALF": 64, "ROTATE": True}, "*bf16"),
}
SCHEMES = [("bf16", "bf16"), ("i8", "bf16"), ("i8", "fp8e4nv"), ("fp8e4nv", "fp8e4nv")]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_hopper_and_keep_rows_in_registers(name: str) -> None:
    kernel, k, constants, out = KERNELS[name]
    shape = modulation.row_parts(k)
    num_warps = shape.pop("num_warps")
    constants = constants | shape | {"EARLY": True}
    types = TYPES | {"out": out}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name in ("k", "stride")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": num_warps})
    ptx = compiled.asm["ptx"]
    assert stack_bytes(compiled) == 0
    assert "ld.global.v4.b32" in ptx  # 16 bytes at once
    registers = max(int(number) for number in re.findall(r"\bR(\d+)\b", compiled.asm["sass"]))
    # Programs that share a multiprocessor: one loads while another one reduces.
    assert 65_536 // (registers + 1) // (32 * num_warps) >= 3


def attention_types(tile: Callable[[str], str], codes: str, values: str) -> dict[str, str]:
    types = dict.fromkeys(("q_scales", "k_scales", "v_scales"), "*fp32")
    types |= dict.fromkeys(("num_queries", "num_keys", "heads"), "i32")
    types |= {"q": tile(codes)}
    return types | {"k": tile(codes), "v": tile(values), "out": "*bf16", "scale": "fp32"}


@pytest.mark.parametrize(("codes", "values"), SCHEMES)
def test_hopper_attention_compiles_and_fits(codes: str, values: str) -> None:
    """Weights stay in registers from one product to the next."""

    def tile(own: str) -> str:
        bits = 16 if own == "bf16" else 8
        layout = f"swizzle_byte_width=128, element_bitwidth={bits}, rank=2, transposed=False, "
        layout += "fp4_padded=False, cga_layout=[]"
        return f"tensordesc<{own}[128, 128],NVMMASharedLayout({layout})>"

    types = attention_types(tile, codes, values)
    kernels = bidirectional_hopper
    stages, turns = kernels.PLAIN if codes == "bf16" else kernels.ROUNDED
    constants = {"STAGES": stages, "TURNS": turns, "EARLY": True}
    compiled = compiled_for_hopper(kernels.attend_kernel, types, constants, ())
    ptx = compiled.asm["ptx"]
    products = re.findall(r"wgmma\.mma_async[^;]*;", ptx)
    steps = 8 if values == "bf16" else 4
    # Of each group the last product and that of the loop have their left operand in registers.
    assert sum(product.count("{") == 2 for product in products) == 4 * steps
    assert stack_bytes(compiled) == 0 and "st.shared.v4" not in ptx


@pytest.mark.parametrize("codes", ["i8", "fp8e4nv"])
def test_rounding_for_attention_compiles(codes: str) -> None:
    numbers = ("tokens", "branch_stride", "row_stride", "heads")
    types = dict.fromkeys(numbers, "i32") | dict.fromkeys(("mean", "scales"), "*fp32")
    types |= {"x": "*bf16", "v": "*bf16", "codes": f"*{codes}", "limit": "fp32"}
    constants = {"BLOCKS": True, "ORDERED": True, "CENTRED": True}
    constants |= {"TILE": 128, "DIM": 128, "EARLY": True}
    for kernel in (bidirectional.round_rows_kernel, bidirectional.round_values_kernel):
        own = {name: value for name, value in constants.items() if name in kernel.arg_names}
        names = {n: "constexpr" if n in own else types[n] for n in kernel.arg_names}
        aligned = [n for n in names if names[n].startswith("*") or n.endswith("stride")]
        attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
        source = ASTSource(kernel, names, own, attributes)
        compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 8})
        assert "ld.global.v4.b32" in compiled.asm["ptx"] and stack_bytes(compiled) == 0


@pytest.mark.parametrize("channels", [96, 192, 384])
def test_norm_of_frames_compiles_and_stays_in_registers(channels: int) -> None:
    kernel, block = modulation.norm_silu_kernel, triton.next_power_of_2(channels)
    constants = {"BLOCK": block, "POSITIONS": modulation.frame_positions(block)}
    types = dict.fromkeys(("x", "gamma", "before", "out"), "*bf16") | {"root": "fp32"}
    names = {n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names}
    even = [n for n in names if names[n].startswith("*") or n.endswith(("_frame", "_channel"))]
    places = [kernel.arg_names.index(n) for n in (*even, "size")]
    source = ASTSource(kernel, names, constants, {(i,): [["tt.divisibility", 16]] for i in places})
    compiled = triton.compile(
        source, GPUTarget("cuda", 90, 32), {"num_warps": modulation.FRAME_WARPS}
    )
    assert "ld.global.v4.b32" in compiled.asm["ptx"] and "st.global.v4.b32" in compiled.asm["ptx"]
    assert stack_bytes(compiled) == 0
