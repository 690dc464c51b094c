"""Checks of HSTU's Triton kernels against their torch references, by name and for a device.

fp32 throughout, since the interpreter's bf16 products are wrong; on a GPU tf32 is what dots use.
"""

from __future__ import annotations

import numpy as np
import torch
import triton_parity  # noqa: F401  the interpreter then rounds to fp8 as torch does

from tokenmill.kernels import hstu
from tokenmill.kernels.gpu import hstu as gpu

TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}  # tf32 on a GPU
HISTORIES, CANDIDATES = [0, 200, 201, 330], [0, 3, 140, 141]


def batch_on(device: str) -> hstu.Jagged:
    """Three users: more rows than a tile, one row, and a second tile of candidates."""
    targets, before = hstu.query_tiles(HISTORIES, CANDIDATES, hstu.TILE_ROWS)
    tiles = torch.from_numpy(np.concatenate([targets, before])).to(device)
    return hstu.Jagged(HISTORIES, CANDIDATES, tiles, len(targets))


def close(found: torch.Tensor, expected: torch.Tensor, device: str) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE[device], rtol=TOLERANCE[device])


def check_attention(device: str) -> None:
    """All rows, and candidates alone, of q, k, v that are columns of one matrix."""
    rows, heads, dim = batch_on(device), 2, 16
    n = rows.num_history
    found = torch.randn(n + rows.num_candidates, 3 * heads * dim, device=device) * 2
    q, k, v = found.unflatten(1, (3, heads, dim)).unbind(1)
    for ahead in (False, True):
        gpu.ATTENTION = gpu.AttentionShape(ahead=ahead)
        for queries in (q, q[n:]):
            parts = queries, k[:n], v[:n], k[n:], v[n:], rows, 7
            expected = hstu.silu_attention.reference(*parts)
            assert expected.abs().max() > 1
            close(gpu.silu_attention(*parts), expected, device)
    gpu.ATTENTION = gpu.AttentionShape()


def check_history_alone(device: str) -> None:
    """No candidate at all, as the first pass of candidates in chunks has it."""
    targets, before = hstu.query_tiles([0, 130], [0, 0], hstu.TILE_ROWS)
    tiles = torch.from_numpy(np.concatenate([targets, before])).to(device)
    rows = hstu.Jagged([0, 130], [0, 0], tiles, len(targets))
    q, k, v = torch.randn(3, 130, 1, 16, device=device).unbind()
    parts = q, k, v, k[130:], v[130:], rows, 130
    close(gpu.silu_attention(*parts), hstu.silu_attention.reference(*parts), device)


def norm_of(width: int, device: str) -> hstu.AffineNorm:
    return hstu.AffineNorm(
        1 + 0.3 * torch.randn(width, device=device), 0.3 * torch.randn(width, device=device)
    )


def check_norm_uvqk(device: str) -> None:
    """Rows with a mean far from zero, which the folded norm subtracts afterwards."""
    x = torch.randn(35, 64, device=device) * 3 + 5
    weight, bias = torch.randn(64, 64, device=device) / 8, torch.randn(64, device=device)
    product = hstu.NormProduct(norm_of(64, device), weight, bias)
    for gated in (16, 0):
        expected = hstu.norm_uvqk.reference(x, product, gated)
        close(gpu.norm_uvqk(x, product, gated), expected, device)


def check_gate_output(device: str) -> None:
    wide = torch.randn(35, 96, device=device)
    u, o, x = wide[:, :32], torch.randn(35, 32, device=device), torch.randn(35, 48, device=device)
    weight = torch.randn(96, 48, device=device) / 8
    norm = norm_of(32, device)
    expected = hstu.gate_output.reference(x, u, o, norm, weight)
    close(gpu.gate_output(x, u, o, norm, weight), expected, device)


def check_gate_rows(device: str) -> None:
    """Rows of very different sizes, u of a wider matrix; a code is off by one step at most."""
    sizes = 10.0 ** torch.arange(-3, 4, device=device)[:, None]
    u = torch.randn(7, 96, device=device)[:, :48] * sizes
    o, norm = (torch.randn(7, 48, device=device) + 1) * sizes.flip(0), norm_of(48, device)
    found, expected = gpu.gate_rows(u, o, norm), hstu.gate_rows.reference(u, o, norm)
    torch.testing.assert_close(found.scales, expected.scales, rtol=TOLERANCE[device], atol=0.0)
    torch.testing.assert_close(found.values.float(), expected.values.float(), atol=0.02, rtol=0.13)


def check_input_rows(device: str) -> None:
    """Two users of 3 and 5 items and 4 candidates in an order, and rows that end inside a tile."""
    items, d = torch.randn(12, 48, device=device) * 2 + 1, 48
    tables = hstu.RowTables(*(torch.randn(n, d, device=device) for n in (2, 5, 9, 11, 7)))
    order = torch.tensor([0, 2, 3, 4, 1, *range(5, 14)], device=device)

    def some(limit: int, count: int) -> torch.Tensor:
        return torch.randint(limit, (count,), device=device)

    ids = hstu.RowIds(order, some(5, 12), some(8, 8), some(11, 14), some(7, 14))
    parts = items, norm_of(d, device), 1e-5, tables, ids, 3.5
    expected = hstu.input_rows.reference(*parts)
    close(gpu.input_rows(*parts), expected, device)
    lines = tables.positions[ids.positions] + tables.times[ids.times]
    close(expected[[0, 4]], tables.context * 3.5 + lines[[0, 4]], device)


def check_swish_norm(device: str) -> None:
    x, norm = torch.randn(7, 48, device=device) * 2 + 1, norm_of(48, device)
    close(gpu.swish_norm(x, norm, 1e-5), hstu.swish_norm.reference(x, norm, 1e-5), device)


CHECKS = {
    "attention": check_attention,
    "history_alone": check_history_alone,
    "norm_uvqk": check_norm_uvqk,
    "gate_output": check_gate_output,
    "gate_rows": check_gate_rows,
    "input_rows": check_input_rows,
    "swish_norm": check_swish_norm,
}
