"""A decode step by its parts: what each takes on the device, and what it takes at least."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.bench.roofline import BYTES, HEAD_DTYPE, Machine
from tokenmill.core.spec import ModelSpec

PARTS = ("attention", "experts", "linear", "other")
# Where a kernel belongs, by a part of its name; the first that fits.
_KERNELS = {
    "latent_kernel": "attention",
    "_attention_kernel": "attention",
    "_join_kernel": "attention",
    "grouped_kernel": "experts",
    "_skinny_kernel": "linear",
    "_matmul_kernel": "linear",
    "_scale_kernel": "linear",
    "nvjet": "linear",
    "gemm": "linear",
    "gemv": "linear",  # cuBLAS's, for one row
    "cutlass": "linear",
    "splitKreduce": "linear",
}
# Triton kernels that can be left out one by one, and what stands in for them.
FUSIONS = {
    "rms_norm": "norm, residual and rounding in one pass",
    "silu_mul": "gate and rounding in one pass",
    "quantize_rows": "rounding in one pass",
    "route": "the choice of experts in one kernel",
    "latent_cache": "latent norm, rotation and cache write in one kernel",
    "rope_and_cache": "head norms, rotation and cache write in one kernel",
}


def part_of(kernel: str) -> str:
    """The part of the step that a kernel computes."""
    return next((part for name, part in _KERNELS.items() if name in kernel), "other")


def by_part(kernels: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part."""
    parts = dict.fromkeys(PARTS, 0.0)
    for kernel, seconds in kernels.items():
        parts[part_of(kernel)] += seconds
    return parts


def least_seconds(
    spec: ModelSpec, dtype: str, kv_dtype: str, batch: int, context: int, machine: Machine
) -> dict[str, float]:
    """The roofline of each part: arithmetic or reading, whichever takes longer."""
    seen = batch * spec.attended_positions(context + 1) - batch * spec.attended_positions(context)
    entry = spec.num_kv_heads * sum(spec.cache_dims) * BYTES[kv_dtype]
    attention = _longer(
        seen * spec.seen_flops(decode=True) / machine.flops_per_s(kv_dtype),
        seen * entry / machine.read_bytes_per_s,
    )
    head_type, head = HEAD_DTYPE.get(dtype, dtype), spec.vocab_size * spec.hidden_size
    rate, experts, expert_params = machine.flops_per_s(dtype), 0.0, 0.0
    if spec.moe is not None:
        one = sum(spec.moe.layers) * spec.moe.expert_params(spec.hidden_size)
        expert_params = spec.moe.distinct_experts(batch) * one
        experts = _longer(
            2 * batch * spec.moe.top_k * one / rate,
            expert_params * BYTES[dtype] / machine.read_bytes_per_s,
        )
    rounded, plain = spec.step_params(batch)
    rounded -= expert_params
    linear = _longer(
        2 * batch * (rounded / rate + (plain + head) / machine.flops_per_s(head_type)),
        (rounded * BYTES[dtype] + (plain + head) * BYTES[head_type]) / machine.read_bytes_per_s,
    )
    return {"attention": attention, "experts": experts, "linear": linear}


def _longer(arithmetic: float, reading: float) -> float:
    return max(arithmetic, reading)
