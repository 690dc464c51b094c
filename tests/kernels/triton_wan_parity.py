"""Checks of the diffusion transformer's Triton kernels against their references, and of the whole.

fp32 where the interpreter runs them, since its bf16 products are wrong.
"""

from dataclasses import replace

import gluon_emulator
import torch
import triton_parity  # noqa: F401  the interpreter then rounds to fp8 as torch does

import tokenmill.kernels
from tokenmill.core.specs.wan import TINY
from tokenmill.kernels import MODE, bidirectional, modulation
from tokenmill.kernels.gpu import bidirectional as gpu_bidirectional
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu import modulation as gpu_modulation
from tokenmill.kernels.gpu.hopper import bidirectional as bidirectional_hopper
from tokenmill.kernels.gpu.hopper.two_groups import ProgramShape
from tokenmill.kernels.rows import FP8, QuantizedRows
from tokenmill.layers.linear import ComputeType
from tokenmill.models.wan.wan_transformer import WanTransformer, rotation_of, transformer_tensors

SHAPES = ((1, 16), (5, 100), (3, 640))


def assert_same_codes(
    found: QuantizedRows, expected: QuantizedRows, atol: float = 1e-4, alike: float = 0.98
) -> None:
    """Scales alike, and codes that differ by one step at most, where a value lies between two."""
    torch.testing.assert_close(found.scales, expected.scales, atol=atol / 448, rtol=1e-3)
    values = [rows.values.float() * rows.scales[:, None] for rows in (found, expected)]
    torch.testing.assert_close(*values, atol=atol, rtol=0.13)
    assert (found.values.float() == expected.values.float()).float().mean() > alike


def check_norm_modulate(device: str) -> None:
    for m, k in SHAPES:
        x = 3 + torch.randn(m, k, device=device)
        factor, shift = torch.randn(2, k, device=device)
        expected = modulation.norm_modulate.reference(x, factor, shift, 1e-6)
        found = gpu_modulation.norm_modulate(x, factor, shift, 1e-6)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        rounded = modulation.norm_modulate.reference(x, factor, shift, 1e-6, FP8)
        assert isinstance(rounded, QuantizedRows)
        codes = gpu_modulation.norm_modulate(x, factor, shift, 1e-6, FP8)
        assert isinstance(codes, QuantizedRows)
        assert_same_codes(codes, rounded)


def check_add_and_norm(device: str) -> None:
    for m, k in SHAPES:
        x, delta = torch.randn(2, m, k, device=device)
        factor, shift, gate = torch.randn(3, k, device=device)
        for share in (gate, None):
            added, own, expected = modulation.Added(delta, share), x.clone(), x.clone()
            normed = modulation.norm_modulate.reference(
                expected, factor, shift, 1e-6, None, added
            )  # fmt: skip
            found = gpu_modulation.norm_modulate(own, factor, shift, 1e-6, None, added)
            torch.testing.assert_close(own, expected)
            torch.testing.assert_close(found, normed, atol=1e-4, rtol=1e-4)


def check_round_rows(device: str) -> None:
    """A GPU's tanh is within 2^-11, which is most in small results of values below zero."""
    bounds = (1e-4, 0.98) if device == "cpu" else (2e-3, 0.9)
    for m, k in SHAPES:
        x = 2 * torch.randn(m, k, device=device)
        for name in ("gelu_rows", "round_rows"):
            expected = getattr(modulation, name)(x.cpu(), FP8)
            assert isinstance(expected, QuantizedRows)
            found = getattr(gpu_modulation, name)(x, FP8)
            assert_same_codes(
                QuantizedRows(*(part.cpu() for part in found)), expected, *bounds
            )  # fmt: skip


def check_norm_rotate(device: str) -> None:
    for heads, dim, grid in ((2, 12, (2, 3, 2)), (3, 8, (1, 5, 1)), (1, 128, (3, 1, 2))):
        spec = replace(TINY.transformer, num_heads=heads, head_dim=dim)
        tokens, k = spec.num_tokens((grid[0], 2 * grid[1], 2 * grid[2])), spec.hidden_size
        wide = torch.randn(2, tokens, 3 * k, device=device)
        weight = torch.randn(k, device=device)
        rotation = rotation_of(spec, grid, device)
        for turns in (rotation, None):
            arguments = (wide.chunk(3, dim=-1)[1], weight, 1e-6, heads, turns)
            expected = bidirectional.norm_rotate.reference(*arguments)
            found = gpu_bidirectional.norm_rotate(*arguments)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def check_norm_silu(device: str) -> None:
    """Dense frames, and those of an upsampler, where a frame's channels lie together."""
    for channels, frames, seen, height, width in (
        (5, 1, 2, 3, 7),
        (48, 4, 2, 5, 40),
        (96, 2, 0, 2, 8),
    ):
        x = torch.randn(1, channels, frames, height, width, device=device)
        x[..., 0] = 0.0  # a position without a length
        gamma = torch.randn(channels, 1, 1, 1, device=device)
        before = torch.randn(1, channels, seen, height, width, device=device)
        by_frame = x.transpose(1, 2).contiguous().transpose(1, 2)
        expected = modulation.norm_silu.reference(x, gamma, before)
        for own in (x, by_frame):
            found = gpu_modulation.norm_silu(own, gamma, before)
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


# Queries, keys, heads and branches: ragged ends, one of each, more keys than queries and fewer.
ATTENTION = ((1, 1, 1, 1), (130, 300, 2, 2), (128, 256, 1, 1), (3, 129, 1, 2), (260, 5, 1, 1))
ROUNDINGS = [own for own in bidirectional.ROUNDINGS.values() if own is not None]


def qkv(case: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Queries, keys that share a large part, and values amid wider rows."""
    n, m, heads, branches = case
    q = torch.randn(branches, n, heads, 128, device=device)
    k = torch.randn(branches, m, heads, 128, device=device) + 2 * torch.randn(128, device=device)
    v = torch.randn(branches, m, 3 * heads * 128, device=device).chunk(3, dim=-1)[2]
    return [part.to(dtype) for part in (q, k, v.unflatten(-1, (heads, 128)))]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm())


def hopper_attention(
    packed: gpu_bidirectional.Packed, out: torch.Tensor, num_keys: int, stages: int, turns: bool
) -> None:
    """The Hopper kernel: on a Hopper GPU, or emulated on CPU."""
    if out.is_cuda:
        shape = ProgramShape(stages, turns)
        bidirectional_hopper.launch(packed, out, num_keys, shape)
    else:
        emulated(packed, out, num_keys, stages, turns)


def emulated(
    packed: gpu_bidirectional.Packed, out: torch.Tensor, num_keys: int, stages: int, turns: bool
) -> None:
    branches, num_queries, heads, dim = out.shape
    codes, fp8 = packed.q_scales is not None, packed.v_scales is not None
    parts = ((packed.q, codes), (packed.k, codes), (packed.v, fp8))
    matrices = [
        gluon_emulator.Descriptor(packed.rows(part, rounded), (128, 128)) for part, rounded in parts
    ]
    scales = [
        None if part is None else gluon_emulator.Pointer(part)
        for part in (packed.q_scales, packed.k_scales, packed.v_scales)
    ]
    gluon_emulator.run(
        bidirectional_hopper, "attend_kernel", (-(-num_queries // 128), heads, branches),
        *matrices, gluon_emulator.Pointer(out), *scales, num_queries, num_keys, heads, dim**-0.5,
        STAGES=stages, TURNS=turns, EARLY=False,
    )  # fmt: skip


def check_hopper_attention(device: str) -> None:
    """Every row is written, and right, in all types."""
    if device == "cuda" and not hopper.is_here():
        return
    for number, case in enumerate((*ATTENTION, (129, 700, 1, 1))):
        q, k, v = qkv(case, torch.bfloat16, device)
        exact = bidirectional.attend.reference(q.float(), k.float(), v.float())
        shape = 2 + number % 2, number % 3 > 0
        plain = gpu_bidirectional.Packed(q, None, k, None, v, None)
        out = torch.full_like(q, torch.nan)
        hopper_attention(plain, out, case[1], *shape)
        assert difference(out, exact) < 0.005, case
        for rounding in ROUNDINGS:
            expected = bidirectional.attend_rounded.reference(q, k, v, rounding)
            packed = gpu_bidirectional.pack(q, k, v, rounding)
            out = torch.full_like(q, torch.nan)
            hopper_attention(packed, out, case[1], *shape)
            assert difference(out, exact) < 1.2 * difference(expected, exact) + 0.005, case


def check_transformer(device: str) -> None:
    """Two branches through the whole transformer; the kernels, and torch's operations."""
    if device == "cpu":
        tokenmill.kernels.on_gpu = lambda x: x.dim() > 1  # but what is packed in tiles for a CPU
    spec = TINY.transformer
    weights = {
        name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        for name, shape in transformer_tensors(spec).items()
    }
    dtype: ComputeType = "fp32" if device == "cpu" else "bf16"
    model = WanTransformer(spec, weights, dtype, device)
    latents, text = torch.randn(16, 2, 4, 2), torch.randn(2, 8, spec.text_dim)
    found = model(latents, 899, model.text_kv(text))
    MODE.fused = False
    expected = model(latents, 899, model.text_kv(text))
    MODE.fused = True
    assert found.shape == (2, 16, 2, 4, 2)
    assert (found - expected).norm() / expected.norm() < (1e-5 if device == "cpu" else 0.02)


CHECKS = {
    "norm_modulate": check_norm_modulate,
    "add_and_norm": check_add_and_norm,
    "round_rows": check_round_rows,
    "norm_rotate": check_norm_rotate,
    "norm_silu": check_norm_silu,
    "hopper_attention": check_hopper_attention,
    "transformer": check_transformer,  # last: it changes how the modules dispatch
}
