"""Grouped int8 products against their reference, and the same bits on AVX2 and AVX-512."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenmill.kernels import cpu_kernels
from tokenmill.kernels import matmul as mm
from tokenmill.kernels.rows import QuantizedRows, by_groups, quantize_rows

needs_kernels = pytest.mark.skipif(not cpu_kernels(), reason="no compiled kernels here")

KERNELS = """
import hashlib, sys
import torch
sys.path.insert(0, sys.argv[1])
from attention_batches import NUM_BLOCKS, make_batch
from tokenmill.kernels import attention, matmul as mm, rows
torch.manual_seed(5)
found = []
for m, n, k in ((1, 40, 80), (2, 16, 48), (13, 96, 576), (131, 48, 64)):
    x, weight, bias = 3 * torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    packed, half = (mm.pack(w, "int8", grouped=True) for w in (weight, weight[:, : k // 2]))
    normed = rows.rms_norm(x, torch.rand(k), 1e-5, rows.by_groups(k))
    gated = rows.act_and_mul(x, rows.by_groups(k // 2))
    found += [mm.matmul(normed, packed, bias), mm.matmul(gated, half)]
    found += [mm.matmul(x, mm.pack(weight, "fp32")), rows.act_and_mul(x)]
    found.append(packed.rows(torch.arange(n)))
for dim, block_size, window in ((64, 16, 0), (48, 32, 70)):
    batch = make_batch([1, 70, 200], [37, 100, 0], block_size, 3)
    for kind in (torch.float32, torch.float16):
        k_cache = torch.randn(NUM_BLOCKS, 2, dim, block_size).to(kind)
        v_cache = torch.randn(NUM_BLOCKS, 2, block_size, dim).to(kind)
        qkv, table = torch.randn(271, 10 * dim), torch.randn(512, dim)
        q = attention.rope_and_cache(qkv, k_cache, v_cache, table, batch, 6, dim**-0.5)
        found.append(attention.paged_attention(q, k_cache, v_cache, batch, 6, window))
digests = [hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in found]
from tokenmill.kernels.cpu.compiler import VNNI
print(VNNI, *digests, sep="\\n")
"""


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(m * 1000 + n)
    return torch.randn(m, k) * torch.logspace(-2, 1, k), torch.randn(n, k), torch.randn(n)


@pytest.mark.parametrize("k", [16, 80, 576])
@pytest.mark.parametrize("n", [8, 16, 24, 40, 96])
def test_product_is_the_sum_over_groups(n: int, k: int) -> None:
    for m in (1, 2, 3, 6, 8, 13, 131):
        x, weight, bias = _operands(m, n, k)
        packed = mm.pack(weight, "int8", grouped=True)
        rows = quantize_rows(x, by_groups(x.shape[1]))
        expected = mm.matmul.reference(rows, packed, bias)
        found = mm.matmul(rows, packed, bias)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
        start = torch.randn(m, n)
        total = mm.matmul(rows, packed, bias, add_to=start.clone())
        torch.testing.assert_close(total, start + expected, atol=1e-4, rtol=1e-5)


def _plain(rows: QuantizedRows, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded rows as int16 and a scale, whichever way this machine keeps them."""
    if not cpu_kernels():
        return rows
    from tokenmill.kernels.cpu import groups

    return groups.shifted_rows(*rows, k)


def test_rows_are_rounded_as_the_reference_does() -> None:
    x = torch.randn(9, 80) * torch.logspace(-12, 12, 9)[:, None]
    x[3], x[4, :32], x[5, 1:64:4] = 0.0, 0.0, 1e-4 * x[5, 1:64:4]
    rounding = by_groups(80)
    values, scales = _plain(quantize_rows(x, rounding), 80)
    expected = quantize_rows.reference(x, rounding)
    torch.testing.assert_close(scales, expected.scales, atol=0, rtol=1e-6)
    apart = (values.int() - expected.values.int()).abs()
    assert (apart > 0).float().mean() < 0.01  # a tie after another rounding
    steps = torch.tensor([[(v & -v if v else 1) for v in row] for row in values.tolist()])
    assert (apart <= steps).all()
    assert expected.values.abs().max() == rounding.limit == 127 << 8
    errors = (values[5] * scales[5] - x[5]).abs()
    assert (errors[1:64:4] <= 0.51 * scales[5]).all()  # a small group keeps the finest steps


@pytest.mark.parametrize("k", [64, 576, 1536, 14336])
def test_the_largest_sums_fit(k: int) -> None:
    x, weight = torch.full((2, k), 3.0), torch.ones(16, k)
    x[1], weight[1:] = -3.0, -1.0
    packed = mm.pack(weight, "int8", grouped=True)
    found = mm.matmul(quantize_rows(x, by_groups(k)), packed)
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-5, atol=0)


def test_a_row_is_bitwise_the_same_in_any_batch() -> None:
    x, weight, _ = _operands(50, 96, 576)
    packed = mm.pack(weight, "int8", grouped=True)

    def product(rows: torch.Tensor) -> torch.Tensor:
        return mm.matmul(quantize_rows(rows, by_groups(x.shape[1])), packed)

    together = product(x)
    for size in (1, 3, 7, 20):
        for start in range(0, 50, size):
            alone = product(x[start : start + size].contiguous())
            assert torch.equal(alone, together[start : start + size])


def test_weights_come_back() -> None:
    weight = torch.randn(40, 80)
    packed = mm.pack(weight, "int8", grouped=True)
    ids = torch.tensor([0, 39, 17, 0])
    torch.testing.assert_close(packed.rows(ids), weight[ids], atol=0.03, rtol=0)


def _digests(isa: str) -> list[str]:
    env = os.environ | {"TOKENMILL_CPU_ISA": isa}
    command = [sys.executable, "-c", KERNELS, str(Path(__file__).parents[1])]
    return subprocess.run(
        command, env=env, capture_output=True, check=True, text=True
    ).stdout.split()


@needs_kernels
def test_avx2_and_avx512_give_the_same_bits() -> None:
    from tokenmill.kernels.cpu import compiler

    if not compiler.VNNI:
        pytest.skip("the CPU has no AVX-512 with VNNI, or is held to AVX2")
    wide, held = _digests(""), _digests("avx2")
    assert (wide[0], held[0]) == ("True", "False")
    assert len(wide) > 20 and wide[1:] == held[1:]


@needs_kernels
def test_the_avx512_tile_compiles_to_its_instruction_anywhere() -> None:
    import llvmlite.binding as llvm
    from llvmlite import ir

    from tokenmill.kernels.cpu import groups

    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 12), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    groups.emit_tile(6, 2, builder, function.args)
    builder.ret_void()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(module.triple).create_target_machine(cpu="icelake-server")
    assembly = target.emit_assembly(llvm.parse_assembly(str(module)))
    assert assembly.count("vpdpbusd") == 4 * 6 * 2 and "zmm" in assembly


@needs_kernels
def test_an_unknown_instruction_set_is_refused() -> None:
    env = os.environ | {"TOKENMILL_CPU_ISA": "avx9"}
    command = [sys.executable, "-c", "import tokenmill.kernels.cpu.compiler"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode and "TOKENMILL_CPU_ISA is 'avx9': use avx2" in done.stderr
