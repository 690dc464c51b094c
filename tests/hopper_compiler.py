"""Compiles a kernel for Hopper, without one, and checks that a program of it fits there."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

SHARED_BYTES = 232_448  # that a program may have on an H100 or H200


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
    for loop in product_loops(compiled):
        products = re.findall(r"ttng.warp_group_dot [^\n]*", loop)
        # Triton 3.6 lets the registers of a loop's only product be overwritten while it runs.
        assert len(products) > 1 or "dot_op<{opIdx = 0" not in products[0]
    return compiled


def product_loops(compiled: Any) -> list[str]:
    """The bodies of its loops that multiply."""
    loops = [part.split("scf.yield")[0] for part in compiled.asm["ttgir"].split("scf.for")[1:]]
    return [loop for loop in loops if "ttng.warp_group_dot " in loop]


def stack_bytes(compiled: Any) -> int:
    """What a thread spills, and whatever else it keeps in local memory.

    From the binary: Triton's disassembly ends after 4,096 instructions.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (found,) = re.findall(r"STACK:(\d+)", shown)
    return int(found)
