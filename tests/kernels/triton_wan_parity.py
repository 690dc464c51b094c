"""Checks of the diffusion transformer's Triton kernels against their references, and of the whole.

fp32 where the interpreter runs them, since its bf16 products are wrong.
"""

from dataclasses import replace

import torch
import triton_parity  # noqa: F401  the interpreter then rounds to fp8 as torch does

from tokenmill.core.specs.wan import TINY
from tokenmill.kernels import MODE, bidirectional, modulation
from tokenmill.kernels.gpu import bidirectional as gpu_bidirectional
from tokenmill.kernels.gpu import modulation as gpu_modulation
from tokenmill.kernels.matmul import FP8, QuantizedRows
from tokenmill.layers.linear import ComputeType
from tokenmill.models.wan.wan_transformer import WanTransformer, rotation_of, transformer_tensors

SHAPES = ((1, 16), (5, 100), (3, 640))


def assert_same_codes(found: QuantizedRows, expected: QuantizedRows) -> None:
    """Scales alike, and codes that differ by one step at most, where a value lies between two."""
    torch.testing.assert_close(found.scales, expected.scales)
    values = [rows.values.float() * rows.scales[:, None] for rows in (found, expected)]
    torch.testing.assert_close(*values, atol=1e-4, rtol=0.13)
    assert (found.values.float() == expected.values.float()).float().mean() > 0.98


def check_norm_modulate(device: str) -> None:
    for m, k in SHAPES:
        x = 3 + torch.randn(m, k, device=device)
        factor, shift = torch.randn(2, k, device=device)
        expected = modulation.norm_modulate_reference(x, factor, shift, 1e-6)
        found, scales = gpu_modulation.norm_modulate(x, factor, shift, 1e-6, False)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert scales is None
        rounded = modulation.norm_modulate_reference(x, factor, shift, 1e-6, FP8)
        assert isinstance(rounded, QuantizedRows)
        codes = QuantizedRows(*gpu_modulation.norm_modulate(x, factor, shift, 1e-6, True))
        assert_same_codes(codes, rounded)


def check_add_gated(device: str) -> None:
    for m, k in SHAPES:
        x, delta = torch.randn(2, m, k, device=device)
        gate = torch.randn(k, device=device)
        own = x.clone()
        assert gpu_modulation.add_gated(own, delta, gate) is own
        torch.testing.assert_close(own, modulation.add_gated_reference(x, delta, gate))


def check_gelu_rows(device: str) -> None:
    for m, k in SHAPES:
        x = 2 * torch.randn(m, k, device=device)
        expected = modulation.gelu_rows(x.cpu(), FP8)
        assert isinstance(expected, QuantizedRows)
        found = QuantizedRows(*(part.cpu() for part in gpu_modulation.gelu_rows(x)))
        assert_same_codes(found, expected)


def check_norm_rotate(device: str) -> None:
    for heads, dim, grid in ((2, 12, (2, 3, 2)), (3, 8, (1, 5, 1)), (1, 128, (3, 1, 2))):
        spec = replace(TINY.transformer, num_heads=heads, head_dim=dim)
        tokens, k = spec.num_tokens((grid[0], 2 * grid[1], 2 * grid[2])), spec.hidden_size
        wide = torch.randn(2, tokens, 3 * k, device=device)
        weight = torch.randn(k, device=device)
        rotation = rotation_of(spec, grid, device)
        for turns in (rotation, None):
            arguments = (wide.chunk(3, dim=-1)[1], weight, 1e-6, heads, turns)
            expected = bidirectional.norm_rotate_reference(*arguments)
            found = gpu_bidirectional.norm_rotate(*arguments)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def check_transformer(device: str) -> None:
    """Two branches through the whole transformer; the kernels, and torch's operations."""
    if device == "cpu":
        for module in (modulation, bidirectional):
            module.use_triton = lambda *_: MODE.fused  # type: ignore[attr-defined]
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
    "add_gated": check_add_gated,
    "gelu_rows": check_gelu_rows,
    "norm_rotate": check_norm_rotate,
    "transformer": check_transformer,  # last: it changes how the modules dispatch
}
