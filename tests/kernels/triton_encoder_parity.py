"""Checks of the vision encoder's Triton kernels against their torch references, and of the whole.

fp32 where the interpreter runs them, since its bf16 products are wrong.
"""

from dataclasses import replace

import gluon_emulator
import torch

import tokenmill.kernels
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.engine.graphs.encoder_graphs import EncoderGraphs
from tokenmill.kernels import MODE, rows, segments
from tokenmill.kernels.gpu import dependent, hopper
from tokenmill.kernels.gpu import rows as gpu_rows
from tokenmill.kernels.gpu import segments as gpu_segments
from tokenmill.kernels.gpu.hopper import segments as segments_hopper
from tokenmill.kernels.gpu.hopper.two_groups import ProgramShape
from tokenmill.layers.linear import ComputeType
from tokenmill.models.qwen3_vl_vision import VisionEncoder, vision_tensors

LENS = (130, 16, 1, 64, 257)  # rows of segments: parts of a tile, tiles of whole turns, and more


def check_layer_norm(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 1152)):
        x, delta = 3 + torch.randn(2, m, k, device=device)
        weight, bias = torch.randn(2, k, device=device)
        own = x.clone()
        for added in (None, delta):
            expected = rows.layer_norm.reference(x, weight, bias, 1e-6, added)
            found = gpu_rows.layer_norm(own, weight, bias, 1e-6, added)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            assert torch.equal(own, x)


def check_rotate_heads(device: str) -> None:
    for heads, dim in ((2, 8), (3, 20), (4, 72)):
        qkv, turns = torch.randn(5, 3 * heads * dim), torch.randn(5, dim)
        own = qkv.clone().to(device)
        segments.rotate_heads.reference(qkv, turns, heads, dim**-0.5)
        gpu_segments.rotate_heads(own, turns.to(device), heads, dim**-0.5)
        torch.testing.assert_close(own.cpu(), qkv)


def check_segment_attention(device: str) -> None:
    tolerance = 1e-5 if device == "cpu" else 5e-3
    for heads, dim, lens in ((1, 72, LENS), (2, 8, (40,)), (1, 24, (16, 70)), (2, 32, (5, 3))):
        qkv = torch.randn(sum(lens), 3 * heads * dim, device=device)
        qkv[:, : heads * dim] *= dim**-0.5
        plan = segments.plan_segments(lens, qkv.device)
        expected = segments.segment_attention.reference(qkv, plan, heads)
        for tma in (False, True) if device == "cpu" else (False, dependent.enabled()):
            found = gpu_segments.attend(qkv, plan, heads, gpu_segments.SegmentTile(32, 4, 1), tma)
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def check_hopper_segments(device: str) -> None:
    """Every row of every segment is right, and rows behind them are neither read nor written.

    A tile without rows, as a graph has some, ends and writes nothing.
    """
    if device == "cuda" and not hopper.is_here():
        return
    for number, (heads, dim, lens) in enumerate(((2, 72, LENS), (1, 80, (384, 60)), (2, 72, (9,)))):
        plain = torch.randn(sum(lens) + 40, 3 * heads * dim)
        plain[:, : heads * dim] *= dim**-0.5
        qkv = plain.to(device, torch.bfloat16)
        qkv[sum(lens) :] = torch.nan
        plan = segments.plan_segments(lens, qkv.device)
        plan = replace(plan, tiles=torch.nn.functional.pad(plan.tiles, (0, 0, 0, 1)))
        used = qkv[: sum(lens)]
        expected = segments.segment_attention.reference(used.float(), plan, heads)
        shape = ProgramShape(2 + number % 2, number % 2 == 0)
        found = hopper_segments(qkv, plan, heads, shape)[: sum(lens)].float()
        assert (found - expected).norm() / expected.norm() < 0.005, lens


def hopper_segments(
    qkv: torch.Tensor, plan: segments.Segments, heads: int, shape: ProgramShape
) -> torch.Tensor:
    """The Hopper kernel: on a Hopper GPU, or emulated on CPU."""
    if qkv.is_cuda:
        return segments_hopper.attend(qkv, plan, heads, shape)
    size = qkv.shape[1] // 3
    out = torch.full((qkv.shape[0], size), torch.nan, dtype=qkv.dtype)
    low, high = (gluon_emulator.Descriptor(qkv, (128, width)) for width in (64, 16))
    gluon_emulator.run(
        segments_hopper, "segment_kernel", (heads, len(plan.tiles)), low, high,
        *map(gluon_emulator.Pointer, (qkv, out, plan.tiles)), 3 * size, size, size,
        DIM=size // heads, STAGES=shape.stages, TURNS=shape.turns, EARLY=False,
    )  # fmt: skip
    assert out[sum(plan.lens) :].isnan().all()
    return out


def check_segment_bits(device: str) -> None:
    """An image's rows have the same bits whatever images are beside it."""
    qkv = torch.randn(sum(LENS), 3 * 72, device=device)
    together = _attended(qkv, LENS)
    alone = [_attended(part, (n,)) for part, n in zip(qkv.split(LENS), LENS, strict=True)]
    assert torch.equal(together, torch.cat(alone))


def _attended(qkv: torch.Tensor, lens: tuple[int, ...]) -> torch.Tensor:
    qkv = qkv.contiguous()
    plan = segments.plan_segments(lens, qkv.device)
    return gpu_segments.attend(qkv, plan, 1, gpu_segments.SegmentTile(32, 4, 1), False)


def check_encoder(device: str) -> None:
    """Three images of different sizes in one call; the kernels, and torch's operations."""
    if device == "cpu":
        tokenmill.kernels.on_gpu = lambda x: x.dim() > 1  # but what is packed in tiles for a CPU
    spec = VisionSpec(
        depth=2, hidden_size=2 * 72, intermediate_size=80, num_heads=2, in_channels=3,
        patch_size=4, temporal_patch_size=2, merge_size=2, out_size=32, grid_side=6,
        deepstack_layers=(0,), rope_sections=(2, 1, 1), image_token_id=1, vision_start_id=2,
        vision_end_id=3,
    )  # fmt: skip
    shapes = vision_tensors(spec).items()
    weights = {
        name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0)
        for name, shape in shapes
    }
    dtype: ComputeType = "fp32" if device == "cpu" else "bf16"
    encoder = VisionEncoder(spec, weights, dtype, device)
    grids = [(1, 4, 4), (1, 2, 10), (2, 4, 2)]
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), spec.patch_dim, device=device)
    found = encoder(pixels, grids)
    graphs = EncoderGraphs(encoder, spec, sizes=(128,))
    graphs._pixels.fill_(float("nan"))  # what is behind the images reaches none of them
    for ours, theirs in zip(graphs(pixels, grids), found, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - theirs).norm() / theirs.norm() < (1e-5 if device == "cpu" else 0.02)
    MODE.fused = False
    expected = encoder(pixels, grids)
    MODE.fused = True
    for ours, theirs, (t, h, w) in zip(found, expected, grids, strict=True):
        assert ours.shape == theirs.shape == (2, t * h * w // 4, 32)
        assert (ours - theirs).norm() / theirs.norm() < (1e-5 if device == "cpu" else 0.02)


CHECKS = {
    "layer_norm": check_layer_norm,
    "rotate_heads": check_rotate_heads,
    "segment_attention": check_segment_attention,
    "hopper_segments": check_hopper_segments,
    "segment_bits": check_segment_bits,
    "encoder": check_encoder,  # last: it changes how the modules dispatch
}
