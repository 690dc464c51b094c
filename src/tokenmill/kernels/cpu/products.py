"""Tiles of matrix products over packed weights: fp32, and int8 weights with int16 activations."""

from __future__ import annotations

from typing import Any

from tokenmill.kernels.cpu.compiler import compiled
from tokenmill.kernels.cpu.threads import get_num_threads, task_kernel
from tokenmill.kernels.cpu.tiles import f32_rows, make_f32_tile, make_int_tile

COLUMNS = 16  # of a full tile; what is left is a last, narrower tile
_TASK_MACS = 500_000  # at least, where there is enough work to go round
_ROW_BLOCK = 128  # rows of A that stay in L2 while a tile of weights passes over them

_i6x2, _i4x2, _i3x2 = make_int_tile(6, 2), make_int_tile(4, 2), make_int_tile(3, 2)
_i2x2, _i1x2 = make_int_tile(2, 2), make_int_tile(1, 2)
_i4x1, _i1x1 = make_int_tile(4, 1), make_int_tile(1, 1)
_f4x1, _f1x1 = make_f32_tile(4, 1), make_f32_tile(1, 1)


@compiled
def _f32_tail(a: Any, lda: Any, w: Any, k: Any, m: Any, c: Any, ldc: Any, keep: Any) -> None:
    while m >= 4:
        _f4x1(a, lda, w, 32, k, c, ldc, keep)
        a, c, m = a + 4 * lda, c + 4 * ldc, m - 4
    while m >= 1:
        _f1x1(a, lda, w, 32, k, c, ldc, keep)
        a, c, m = a + lda, c + ldc, m - 1


@compiled
def _f32_tile(args: Any, tile: int) -> None:
    a, w, c, m, k, n = args[0], args[1], args[2], args[3], args[4], args[5]
    lda, ldc, keep = args[6], args[7], args[8]
    columns = (n + 15) // 16
    row, column = (tile // columns) * 128, (tile % columns) * 16
    rows = min(m - row, 128)
    a, c, w = a + row * lda, c + row * ldc + column * 4, w + column * k * 4
    for start in range(0, k, 256):
        depth = min(256, k - start)
        if n - column >= 16:
            f32_rows(a, lda, w + 64 * start, 64, depth, rows, c, ldc, keep)
        else:
            _f32_tail(a, lda, w + 32 * start, depth, rows, c, ldc, keep)
        a, keep = a + 4 * depth, 1  # partial sums of 256 keep fp32 rounding down


def _f32_body(args: Any, task: int) -> None:
    for tile in range(task * args[9], min(args[10], task * args[9] + args[9])):
        _f32_tile(args, tile)


@compiled
def _int_rows(
    a: Any, lda: Any, w: Any, k: Any, m: Any, s: Any, ws: Any, b: Any, c: Any, ldc: Any, keep: Any
) -> None:
    while m >= 6:
        _i6x2(a, lda, w, k, s, ws, b, c, ldc, keep)
        a, c, s, m = a + 6 * lda, c + 6 * ldc, s + 24, m - 6
    if m == 4:
        _i4x2(a, lda, w, k, s, ws, b, c, ldc, keep)
        m = 0
    if m >= 3:
        _i3x2(a, lda, w, k, s, ws, b, c, ldc, keep)
        a, c, s, m = a + 3 * lda, c + 3 * ldc, s + 12, m - 3
    if m == 2:
        _i2x2(a, lda, w, k, s, ws, b, c, ldc, keep)
    if m == 1:
        _i1x2(a, lda, w, k, s, ws, b, c, ldc, keep)


@compiled
def _int_tail(
    a: Any, lda: Any, w: Any, k: Any, m: Any, s: Any, ws: Any, b: Any, c: Any, ldc: Any, keep: Any
) -> None:
    while m >= 4:
        _i4x1(a, lda, w, k, s, ws, b, c, ldc, keep)
        a, c, s, m = a + 4 * lda, c + 4 * ldc, s + 16, m - 4
    while m >= 1:
        _i1x1(a, lda, w, k, s, ws, b, c, ldc, keep)
        a, c, s, m = a + lda, c + ldc, s + 4, m - 1


@compiled
def _int_tile(args: Any, tile: int) -> None:
    a, w, c, m, k, n = args[0], args[1], args[2], args[3], args[4], args[5]
    a_scale, w_scale, bias, ldc, keep = args[6], args[7], args[8], args[9], args[10]
    lda = 2 * k
    columns = (n + 15) // 16
    row, column = (tile // columns) * 128, (tile % columns) * 16
    rows = min(m - row, 128)
    a, c, w = a + row * lda, c + row * ldc + column * 4, w + column * k
    a_scale, w_scale = a_scale + row * 4, w_scale + column * 4
    if bias != 0:
        bias += column * 4
    if n - column >= 16:
        _int_rows(a, lda, w, k, rows, a_scale, w_scale, bias, c, ldc, keep)
    else:
        _int_tail(a, lda, w, k, rows, a_scale, w_scale, bias, c, ldc, keep)


def _int_body(args: Any, task: int) -> None:
    for tile in range(task * args[11], min(args[12], task * args[11] + args[11])):
        _int_tile(args, tile)


F32_KERNEL = task_kernel(_f32_body)
INT_KERNEL = task_kernel(_int_body)


def split(m: int, n: int, k: int, columns: int = COLUMNS) -> tuple[int, int, int]:
    """(tasks, tiles a task, tiles): a task outweighs the atomic that hands it out."""
    tiles = -(-m // _ROW_BLOCK) * -(-n // columns)
    enough = _TASK_MACS // (min(m, _ROW_BLOCK) * columns * k) + 1
    span = min(enough, -(-tiles // (4 * get_num_threads())))
    return -(-tiles // span), span, tiles
