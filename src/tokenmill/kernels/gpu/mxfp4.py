"""Experts whose weights stay in MXFP4 on a GPU: 4.25 bits in memory, bfloat16 in registers.

W is the left operand of the product, for a tensor core of Hopper takes that one from registers:
weights never go back to shared memory, and few rows of tokens waste nothing. `pack_experts` lays W
out once: tiles of 64 rows by 64 channels, each thread's four words side by side, as the tensor core
wants them. So a thread's load is 16 bytes, and nothing moves between threads.

A word holds 8 values of one scale, in bits that a shift and a mask turn into two bfloat16 at a time
which are 2^126 too small; the multiplication by their scale makes up for it, but for 2^64 that the
sums get at the end.

Neighbouring rows of W lie 8 apart, so that a thread holds both: of the first product they are gate
and up, and it stores their activation alone, in the order of tiles, as the second one reads it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.kernels import MODE
from tokenmill.kernels.gpu.dependent import enabled, launch_options, wait
from tokenmill.kernels.gpu.expert_tiles import ExpertTiles, single_tiles, sort_by_expert
from tokenmill.kernels.gpu.launch import cdiv, quick
from tokenmill.kernels.gpu.rows import clamped_swiglu
from tokenmill.kernels.moe import PackedExperts
from tokenmill.kernels.rows import Activation, ClampedSwiGLU

SIDE = tl.constexpr(64)  # rows and channels of a tile of W
WORDS = tl.constexpr(512)  # of its values
SCALES = tl.constexpr(32)  # words of its scales, four each
GROUP = 8  # tiles of rows that share their columns of W in L2
MOST_ROWS = 128  # of tokens per tile
ROWS_BY_MEAN = {16: 4, 32: 24, 64: 64}  # rows of a tile, up to which mean rows of an expert
SINGLE_ROWS = 16  # up to here each choice has a tile of its own: 4 tokens of GPT-OSS
FEW_TILES = 1024  # up to here programs take one block of 64 rows
SPLIT_TILES = 720  # and up to here the second product's share its channels: 4 tokens of GPT-OSS
VALUE_EXPONENT = 126  # values of a word are 2^126 too small
SUM_EXPONENT = 64  # and so are sums, until the end: so scales from 2^-61 to 2^65 fit a bfloat16
MOST_EXPONENT = 254  # of a bfloat16
SUM_FACTOR = tl.constexpr(2.0**64)


@triton.jit
def _unpack_pairs(word, scale):
    """8 bfloat16 of a word, in the order of channels that a tensor core reads them."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 scale, a, b, c, d, e;
            mul.lo.u32 scale, $9, 0x00800080;
            and.b32 a, $8, 0x81C081C0;
            mul.bf16x2 a, a, scale;
            mov.b32 {$0, $1}, a;
            shl.b32 b, $8, 3;
            and.b32 b, b, 0x81C081C0;
            mul.bf16x2 b, b, scale;
            mov.b32 {$2, $3}, b;
            shl.b32 c, $8, 6;
            and.b32 c, c, 0x81C081C0;
            mul.bf16x2 c, c, scale;
            mov.b32 {$4, $5}, c;
            shl.b32 d, $8, 1;
            and.b32 d, d, 0x80008000;
            shr.u32 e, $8, 5;
            lop3.b32 d, e, 0x01000100, d, 0xEA;
            shr.u32 e, $8, 4;
            lop3.b32 d, e, 0x00C000C0, d, 0xEA;
            mul.bf16x2 d, d, scale;
            mov.b32 {$6, $7}, d;
        }
        """,
        constraints="=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        args=[word, scale],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _halves(pair, scale):
    """The two values of a pair in fp32, whose upper half a bfloat16 is."""
    low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000)
    return low * scale, high.to(tl.float32, bitcast=True) * scale


@triton.jit
def _unpack_plainly(word, scale):
    """The same values in fp32, without the instructions of a GPU."""
    word = word.to(tl.uint32, bitcast=True)
    scale = (scale << 23).to(tl.float32, bitcast=True)
    a0, a1 = _halves(word & 0x81C081C0, scale)
    b0, b1 = _halves((word << 3) & 0x81C081C0, scale)
    c0, c1 = _halves((word << 6) & 0x81C081C0, scale)
    d = ((word << 1) & 0x80008000) | ((word >> 5) & 0x01000100) | ((word >> 4) & 0x00C000C0)
    d0, d1 = _halves(d, scale)
    return a0, a1, b0, b1, c0, c1, d0, d1


@triton.jit
def _dequantise(words, scales, BLOCKS: tl.constexpr, PAIRS: tl.constexpr):
    """Tiles words[BLOCKS, WORDS] as rows [BLOCKS * SIDE, SIDE].

    A word's place is (warp, row of 8, channel pair of 4, half of 16 rows, scale); a value's in it
    (place in its pair, half of 16 channels, 16 channels).
    """
    shifts = 16 * tl.arange(0, 2)[:, None] + 8 * tl.arange(0, 2)[None, :]
    scales = tl.reshape(scales, [BLOCKS, 4, 8, 1, 1, 1]) >> shifts[None, None, None, None]
    scales = tl.broadcast_to(scales & 0xFF, [BLOCKS, 4, 8, 4, 2, 2])
    words = tl.reshape(words, [BLOCKS, 4, 8, 4, 2, 2])
    if PAIRS:
        a0, a1, b0, b1, c0, c1, d0, d1 = _unpack_pairs(words, scales)
    else:
        a0, a1, b0, b1, c0, c1, d0, d1 = _unpack_plainly(words, scales)
    first = tl.join(tl.join(a0, a1), tl.join(b0, b1))
    second = tl.join(tl.join(c0, c1), tl.join(d0, d1))
    rows = tl.permute(tl.join(first, second), [0, 1, 4, 2, 5, 8, 7, 3, 6])
    return tl.reshape(rows, [BLOCKS * 64, 64])


@triton.jit
def _tile_product(
    x, word, scale, own, out, sorted_rows, tile, size, column, channel_tiles,
    n, k, num_rows, alpha, limit,
    SHARE: tl.constexpr, UP: tl.constexpr, PLACES: tl.constexpr, BM: tl.constexpr,
    BLOCKS: tl.constexpr, TURN: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    PAIRS: tl.constexpr, SPLITS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """The first `size` of a tile's PLACES, of which BM at most are used, by a column of W."""
    member = tl.arange(0, BM)
    places, valid = tile * PLACES + member, member < size
    if SINGLE:
        choices = tile + tl.zeros([BM], tl.int32)
    else:
        choices = tl.load(sorted_rows + places, mask=valid, other=0)
    sources = choices // SHARE if UP else places
    channels = tl.arange(0, SIDE)
    lines = x + sources.to(tl.int64)[:, None] * k + channels[None, :]
    acc = tl.zeros([BLOCKS * 64, BM], tl.float32)
    part = tl.cdiv(channel_tiles, SPLITS * TURN) * TURN
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, channel_tiles)
    for start in tl.range(begin, end, TURN, num_stages=STAGES):
        for i in tl.static_range(TURN):
            step = start + i
            if EVEN:
                values = tl.load(lines + step * SIDE, mask=valid[:, None], other=0.0)
                packed, exponents = tl.load(word + step * WORDS), tl.load(scale + step * SCALES)
            else:
                there = step < channel_tiles
                inside = valid[:, None] & (channels < k - step * SIDE)[None, :]
                values = tl.load(lines + step * SIDE, mask=inside, other=0.0)
                packed = tl.load(word + step * WORDS, mask=there, other=0)
                exponents = tl.load(scale + step * SCALES, mask=there, other=0)
            weights = _dequantise(packed, exponents, BLOCKS, PAIRS).to(x.dtype.element_ty)
            acc = tl.dot(weights, tl.trans(values), acc)
    pairs = tl.permute(tl.reshape(acc, [BLOCKS * 4, 2, 8, BM]), [0, 2, 1, 3])
    acc = tl.reshape(pairs, [BLOCKS * 64, BM]) * SUM_FACTOR + own.to(tl.float32)[:, None]
    rows, lines = column * (BLOCKS * SIDE) + tl.arange(0, BLOCKS * 64), choices
    if UP:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCKS * 32, 2, BM]), [0, 2, 1]))
        acc = clamped_swiglu(gate, up, alpha, limit)
        rows, lines = column * (BLOCKS * 32) + tl.arange(0, BLOCKS * 32), places
    if SPLITS > 1:
        lines += tl.program_id(1) * num_rows
    target = out + lines.to(tl.int64)[None, :] * n + rows[:, None]
    mask = valid[None, :] & (rows < n)[:, None]
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@quick
@triton.jit
def grouped_kernel(
    x, words, scales, bias, out, sorted_rows, tile_experts, tile_sizes, num_tiles,
    row_tiles, channel_tiles, n, k, num_rows, alpha, limit,
    SHARE: tl.constexpr, UP: tl.constexpr, BM: tl.constexpr, LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr, TURN: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, SPLITS: tl.constexpr, SINGLE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """UP: x's rows by gate and up, activated, as tiles have them; else such rows by W, by choice.

    `n` is the width of a row of the result. Of several SPLITS each program takes a part of the
    channels, and the results are [SPLITS, num_rows, n] to be added up. SINGLE: see single_tiles.
    A tile that is not half full is multiplied as a smaller one, of half or a quarter of its places
    by the LEVELS: experts get very different numbers of rows.
    """
    # A second product that is set up beside a first one of few programs would be spread unevenly.
    wait(EARLY, not (SINGLE and UP))
    program, column_tiles = tl.program_id(0), tl.cdiv(row_tiles, BLOCKS)
    if SINGLE:
        count = tl.num_programs(0) // column_tiles
    else:
        count = tl.load(num_tiles)
        if program >= count * column_tiles:
            return
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(count - first, GROUP)
    inner = program % (GROUP * column_tiles)
    tile, column = first + inner % height, inner // height
    expert = tl.load(tile_experts + tile).to(tl.int64)
    size = 1 if SINGLE else tl.load(tile_sizes + tile)
    blocks = tl.minimum(column * BLOCKS + tl.arange(0, BLOCKS), row_tiles - 1)
    record = (expert * row_tiles + blocks) * channel_tiles
    word = words + record[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    scale = scales + record[:, None] * SCALES + tl.arange(0, SCALES)[None, :]
    rows = column * (BLOCKS * SIDE) + tl.arange(0, BLOCKS * 64)
    width = 2 * n if UP else n
    counts = (rows < width) & (tl.program_id(1) == 0)
    own = tl.load(bias + expert * width + rows, mask=counts, other=0.0)
    for level in tl.static_range(LEVELS):
        if size <= BM >> LEVELS - level:
            _tile_product(
                x, word, scale, own, out, sorted_rows, tile, size, column, channel_tiles,
                n, k, num_rows, alpha, limit,
                SHARE, UP, BM, BM >> LEVELS - level, BLOCKS, TURN, STAGES, EVEN, PAIRS, SPLITS,
                SINGLE,
            )  # fmt: skip
            return
    _tile_product(
        x, word, scale, own, out, sorted_rows, tile, size, column, channel_tiles,
        n, k, num_rows, alpha, limit,
        SHARE, UP, BM, BM, BLOCKS, TURN, STAGES, EVEN, PAIRS, SPLITS, SINGLE,
    )  # fmt: skip


def _half_word(codes: torch.Tensor, value: int) -> torch.Tensor:
    """Codes of four bits, in the bits of a half word that its value 0, 1, 2 or 3 has."""
    if value == 3:
        return (codes & 12) << 11 | (codes & 3) << 10
    return (codes & 8) << 12 - 3 * value | (codes & 7) << 6 - 3 * value


def _pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x[n, k] with zeros behind it, up to multiples of these."""
    n, k = x.shape
    return torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows))


def _pair_rows(x: torch.Tensor) -> torch.Tensor:
    """Of every 16 rows of x[n, k] the even ones, then the odd ones."""
    pairs: torch.Tensor = x.unflatten(0, (-1, 8, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _pack_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [n, k] -> int32 [n / 64, k / 64, WORDS]."""
    tiles = codes.unflatten(1, (-1, 2, 2, 2, 4, 2)).unflatten(0, (-1, 4, 2, 8))
    # row tile, warp, half, row, channel tile, scale, 16 channels, half, pair, place
    tiles = tiles.permute(7, 6, 9, 0, 4, 1, 3, 8, 2, 5).flatten(3)
    shape = codes.shape[0] // SIDE.value, codes.shape[1] // SIDE.value, WORDS.value
    words = torch.zeros(shape, dtype=torch.int32, device=codes.device).flatten()
    for half, sixteen, place in itertools.product(range(2), repeat=3):
        bits = _half_word(tiles[half, sixteen, place].int(), 2 * sixteen + half)
        words |= bits << 16 * place
    return words.view(shape)


def _pack_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Exponents int32 [n, k / 32] -> int32 [n / 64, k / 64, SCALES]."""
    tiles: torch.Tensor = exponents.unflatten(1, (-1, 2)).unflatten(0, (-1, 4, 2, 8))
    tiles = tiles.permute(0, 4, 1, 3, 2, 5).flatten(4)  # row tile, channel tile, warp, row, 4
    first, second, third, fourth = tiles.unbind(-1)
    return (first | second << 8 | third << 16 | fourth << 24).flatten(2)


def pack_expert(blocks: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and scales of W from blocks uint8 [n, k / 32, 16] and scales uint8 [n, k / 32]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    codes, scales = (_pair_rows(_pad(x, SIDE.value, 1)) for x in (codes, scales))
    exponents = _pad(scales, 1, 2).int() + (VALUE_EXPONENT - SUM_EXPONENT)
    if int(exponents.max()) > MOST_EXPONENT:
        most = MOST_EXPONENT - VALUE_EXPONENT + SUM_EXPONENT
        raise ValueError(f"MXFP4 scales: {int(scales.max())} is above {most}, 2^{most - 127}")
    return _pack_words(_pad(codes, 1, SIDE.value)), _pack_scales(exponents)


class TileShape(NamedTuple):
    """What a program takes."""

    blocks: int  # of 64 rows of W
    turn: int  # steps of 64 channels per turn of the loop, whose own work they share
    warps: int
    stages: int
    levels: int = 0  # of smaller tiles, each half of the next one


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows of tokens per tile: more than most experts get, for one more tile reads all of W again.

    Experts get very different numbers, and a tile that is not full costs less: see tile_shape.
    """
    if MODE.batch_invariant:
        return 64
    mean = num_rows / num_experts
    return next((rows for rows, most in ROWS_BY_MEAN.items() if mean <= most), MOST_ROWS)


def tile_shape(rows: int, most_tiles: int) -> TileShape:
    """By the rows of tokens of a tile, and by how many tiles of 64 rows of W there can be.

    Unpacking takes as many instructions as fit beside the reading of W: two blocks in a thread and
    three steps in a turn share what else a turn does. Few tiles leave no choice: all
    multiprocessors must read. Of many rows two programs run side by side: one unpacks, one
    multiplies.

    A turn has more than one product: of a single one whose W is in registers Triton 3.6 lets the
    next turn begin while it still runs, and W is overwritten as it is read.
    """
    blocks = 1 if rows <= 32 and most_tiles < FEW_TILES else 2
    levels = 0 if MODE.batch_invariant else {16: 0, 32: 1}.get(rows, 2)
    return TileShape(blocks, 3, 4, 2 if rows == 128 else 3, levels)


def num_splits(ids: torch.Tensor, tiles: ExpertTiles, down: PackedExperts) -> int:
    """Programs that share the channels of a row, where there are too few to keep a GPU reading.

    What they leave is added up with the choices; rows that go back to another rank have one.
    """
    assert down.data is not None
    few = tiles.most * down.data.shape[1] <= SPLIT_TILES
    return 2 if few and ids.shape[1] > 1 and not MODE.batch_invariant else 1


def _launch(
    x: torch.Tensor, weight: PackedExperts, out: torch.Tensor, tiles: ExpertTiles, up: bool,
    share: int, clamp: tuple[float, float], shape: TileShape | None, splits: int = 1,
) -> None:  # fmt: skip
    words, scales, bias, k = weight.data, weight.scales, weight.bias, weight.k
    assert words is not None and scales is not None and bias is not None
    assert all(y.is_contiguous() for y in (x, words, scales, bias)) and x.shape[1] == k
    _, row_tiles, channel_tiles, _ = words.shape
    shape = shape or tile_shape(tiles.rows, tiles.most * row_tiles)
    grid = (tiles.most * cdiv(row_tiles, shape.blocks), splits)
    grouped_kernel[grid](
        x, words, scales, bias, out, tiles.sorted_rows, tiles.experts, tiles.sizes, tiles.num_used,
        row_tiles, channel_tiles, out.shape[-1], k, out.shape[-2], *clamp,
        SHARE=share, UP=up, BM=tiles.rows, LEVELS=shape.levels, BLOCKS=shape.blocks,
        TURN=shape.turn, GROUP=GROUP, STAGES=shape.stages,
        EVEN=k % (shape.turn * SIDE.value) == 0,
        PAIRS=x.dtype == torch.bfloat16 and enabled(), SPLITS=splits, SINGLE=tiles.single,
        num_warps=shape.warps,
        **launch_options(),
    )  # fmt: skip


def gate_up_product(
    x: torch.Tensor,
    weight: PackedExperts,
    tiles: ExpertTiles,
    share: int,
    activation: ClampedSwiGLU,
    shape: TileShape | None = None,
) -> torch.Tensor:
    """The activation of gate and up of x[r // share], rows r in the order of tiles."""
    gated = x.new_empty(tiles.most * tiles.rows, weight.n // 2)
    _launch(x, weight, gated, tiles, True, share, (activation.alpha, activation.limit), shape)
    return gated


def down_product(
    gated: torch.Tensor,
    weight: PackedExperts,
    tiles: ExpertTiles,
    num_rows: int,
    shape: TileShape | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Rows in the order of tiles times W.T, plus bias -> [num_rows, n] in the order of choices.

    With `splits` parts of them to be added up, fp32 [splits, num_rows, n].
    """
    if splits == 1:
        out = gated.new_empty(num_rows, weight.n)
    else:
        out = torch.empty(splits, num_rows, weight.n, device=gated.device)
    _launch(gated, weight, out, tiles, False, 1, (0.0, 0.0), shape, splits)
    return out


def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation,
) -> torch.Tensor:
    """Of a few tokens parts to be added up: see down_product."""
    if not isinstance(activation, ClampedSwiGLU):
        raise ValueError(f"experts in MXFP4: the activation is {activation!r}, not ClampedSwiGLU")
    count, num_experts = ids.numel(), gate_up.num_experts
    if count <= SINGLE_ROWS and not MODE.batch_invariant:
        tiles = single_tiles(ids)
    else:
        tiles = sort_by_expert(ids, num_experts, tile_rows(count, num_experts))
    gated = gate_up_product(x, gate_up, tiles, ids.shape[1], activation)
    return down_product(gated, down, tiles, count, splits=num_splits(ids, tiles, down))
