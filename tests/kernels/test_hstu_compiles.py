"""HSTU's kernels, compiled for Hopper without one: they use its tensor cores and copy engine."""

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hopper_compiler import compiled_for_hopper, stack_bytes
from tokenmill.kernels.gpu import hstu
from tokenmill.kernels.hstu import HEAD_DIMS


@pytest.mark.parametrize(("dim", "ahead"), [(HEAD_DIMS[0], False), (128, False), (128, True)])
def test_silu_attention_compiles_and_fits(dim: int, ahead: bool) -> None:
    """Its tiles come by the copy engine, and a weight is one tanh."""
    shape = hstu.ATTENTION
    types = dict.fromkeys(("q", "own_k", "own_v", "out"), "*bf16")
    types |= dict.fromkeys(("k", "v"), f"tensordesc<bf16[{shape.keys}, {dim}]>")
    strides = tuple(name for name in hstu.attention_kernel.arg_names if name.endswith("stride"))
    types |= dict.fromkeys((*strides, "first_target"), "i32")
    types |= dict.fromkeys(("scale", "inverse"), "fp32")
    constants = {
        "DIM": dim, "VDIM": dim, "ROWS": hstu.TILE_ROWS, "KEYS": shape.keys,
        "STAGES": shape.stages, "AHEAD": ahead, "FAST": True, "TMA": True,
    }  # fmt: skip
    compiled = compiled_for_hopper(
        hstu.attention_kernel, types, constants, strides, ASTSource, shape.warps
    )
    assert "tanh.approx.f32" in compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("kernel", [hstu.uvqk_kernel, hstu.output_kernel])
def test_products_around_it_compile_and_fit(kernel: Any) -> None:
    shape = hstu.UVQK if kernel is hstu.uvqk_kernel else hstu.OUTPUT
    left = f"tensordesc<bf16[{shape.rows}, {shape.step}]>"
    tiled = ("x",) if kernel is hstu.uvqk_kernel else ("u", "o")
    types = dict.fromkeys(("x", "norm_weight", "norm_bias", "out"), "*bf16")
    types |= dict.fromkeys(tiled, left) | dict.fromkeys(("stats", "sums", "bias"), "*fp32")
    types["weight"] = f"tensordesc<bf16[{shape.step}, {shape.columns}]>"
    sizes = ("k", "n", "gated", "width")
    strides = tuple(name for name in kernel.arg_names if name.endswith("stride"))
    types |= dict.fromkeys((*strides, *sizes, "num_rows"), "i32")
    constants = {
        "ROWS": shape.rows, "COLUMNS": shape.columns, "STEP": shape.step, "STAGES": shape.stages,
        "FAST": True, "TMA": True,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    compiled = compiled_for_hopper(
        kernel, types, constants, (*strides, *sizes), ASTSource, shape.warps
    )
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("kernel", [hstu.input_rows_kernel, hstu.swish_norm_kernel])
def test_whole_rows_are_made_in_registers(kernel: Any) -> None:
    """By 16 bytes a thread; a row's sums are one warp's, and nothing is spilled."""
    names, (rows, width) = kernel.arg_names, hstu.whole_rows(512)
    types = dict.fromkeys(("num_rows", "num_users", "num_items", "last_action", "width"), "i32")
    types |= dict.fromkeys(("scale", "eps"), "fp32")
    types |= {name: "*i64" for name in names if name == "order" or name.endswith("_ids")}
    constants = {"ROWS": rows, "WIDTH": width}
    signature = {n: "constexpr" if n in constants else types.get(n, "*bf16") for n in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned for i, n in enumerate(names) if n == "width" or signature[n][0] == "*"
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 1})
    ptx = compiled.asm["ptx"]
    assert "st.global.v4.b32" in ptx and "st.global.b16" not in ptx
    assert "bar.sync" not in ptx and stack_bytes(compiled) == 0


def test_rows_of_the_gate_are_rounded_in_registers() -> None:
    names = hstu.gate_rows_kernel.arg_names
    types = dict.fromkeys(("u", "o", "norm_weight", "norm_bias"), "*bf16")
    types |= {"out": "*fp8e4nv", "scales": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("u_stride", "o_stride", "width"), "i32")
    constants = {"BLOCK": 512, "FAST": True}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, n in enumerate(names) if n not in (*constants, "eps")}
    source = ASTSource(hstu.gate_rows_kernel, signature, constants, attributes)
    ptx = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 1}).asm["ptx"]
    assert "tanh.approx.f32" in ptx and "cvt.rn.satfinite.e4m3x2" in ptx and "st.local" not in ptx
