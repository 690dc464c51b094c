"""The least time that a cell can take, computed from the measured rates of the machine.

Linear layers run at the GEMM rate of their type or read their weights once a step; attention runs
at the rate of the KV cache's type or reads the cache. Norms, sampling and Python are free here.

Of E experts, k for each token, a step of B tokens reads E * (1 - (1 - k / E) ** B): as many as are
hit when tokens choose evenly. Skewed routing reads less.

Accepted drafts save steps. Making drafts and verifying rejected ones costs nothing here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from tokenmill.bench.workload import Cell
from tokenmill.core.specs.quantization import MXFP4_BYTES
from tokenmill.core.specs.spec import ModelSpec

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
ATTENTION_DTYPE = {"fp16": "int16"}  # what a cache of this type is multiplied in, if not its own
GPU_DTYPES = ("bf16", "fp8")
HEAD_DTYPE = {"fp8": "bf16"}  # the output head keeps this type; others are as the layers


@dataclass(frozen=True, slots=True)
class PeakRates:
    """What this machine does at best, measured in the same run."""

    gemm_flops: dict[str, float]  # FLOP/s by compute type
    read_bytes_per_s: float
    num_threads: int
    name: str = ""  # of the processor that computes
    software: dict[str, str] = field(default_factory=dict)  # version by name

    def flops_per_s(self, dtype: str) -> float:
        """The rate of a type; the best of all for one that was not measured."""
        return self.gemm_flops.get(dtype) or max(self.gemm_flops.values())

    def times(self, count: int) -> PeakRates:
        rates = {dtype: count * flops for dtype, flops in self.gemm_flops.items()}
        return replace(self, gemm_flops=rates, read_bytes_per_s=count * self.read_bytes_per_s)


@dataclass(frozen=True, slots=True)
class CellSetup:
    """The types an engine computes in, and how much it can run at once."""

    dtype: str
    kv_dtype: str
    max_num_seqs: int
    kv_tokens: int  # whose KV in all layers is as large as the cache
    tokens_per_step: float = 1.0  # that a sequence gains; drafts that came true make it more


@dataclass(frozen=True, slots=True)
class Roofline:
    flops: float
    bytes_read: float  # weights once per decode step, and the KV cache
    num_steps: float  # decode steps
    serial_s: float  # one kind of operation after the other: prefill, linear layers, attention
    overlap_s: float  # all arithmetic beside all reading


def roofline(cell: Cell, spec: ModelSpec, setup: CellSetup, machine: PeakRates) -> Roofline:
    """Both bounds of a cell with its own lengths, each request's first token from its prefill."""
    head = 2 * spec.vocab_size * spec.hidden_size
    layers = spec.flops_per_token(0) - head
    layers_s = _layer_seconds(spec, setup.dtype, machine)
    head_rate = machine.flops_per_s(HEAD_DTYPE.get(setup.dtype, setup.dtype))
    attention_rate = machine.flops_per_s(ATTENTION_DTYPE.get(setup.kv_dtype, setup.kv_dtype))

    num_decoded = cell.num_output_tokens - cell.num_prompts
    prefill_seen = sum(spec.attended_positions(i) for i, _ in cell.lengths)
    decode_seen = sum(spec.attended_positions(i + o - 1) for i, o in cell.lengths) - prefill_seen
    prefill_flops = prefill_seen * spec.seen_flops(decode=False)
    decode_flops = decode_seen * spec.seen_flops(decode=True)
    seen_bytes = spec.num_kv_heads * sum(spec.cache_dims) * BYTES[setup.kv_dtype]
    steps = min_decode_steps(cell, spec, setup.max_num_seqs, setup.kv_tokens)
    weights_s = min_weight_bytes(cell, spec, setup, steps) / machine.read_bytes_per_s
    steps, weights_s = steps / setup.tokens_per_step, weights_s / setup.tokens_per_step
    cache_s = decode_seen / setup.tokens_per_step * seen_bytes / machine.read_bytes_per_s

    prefill_s = cell.num_input_tokens * layers_s + cell.num_prompts * head / head_rate
    prefill_s += prefill_flops / attention_rate
    linear_s = num_decoded * (layers_s + head / head_rate)
    attention_s = decode_flops / attention_rate
    return Roofline(
        flops=cell.num_input_tokens * layers
        + cell.num_output_tokens * head
        + num_decoded * layers
        + prefill_flops
        + decode_flops,
        bytes_read=(weights_s + cache_s) * machine.read_bytes_per_s,
        num_steps=steps,
        serial_s=prefill_s + max(linear_s, weights_s) + max(attention_s, cache_s),
        overlap_s=max(prefill_s + linear_s + attention_s, weights_s + cache_s),
    )


def _layer_seconds(spec: ModelSpec, dtype: str, machine: PeakRates) -> float:
    flops, experts = spec.flops_per_token(0) - 2 * spec.vocab_size * spec.hidden_size, 0
    if spec.moe is not None:
        each = spec.moe.top_k * spec.moe.expert_params(spec.hidden_size)
        experts = 2 * sum(spec.moe.layers) * each
    own, theirs = machine.flops_per_s(dtype), machine.flops_per_s(expert_dtype(spec, dtype))
    return (flops - experts) / own + experts / theirs


def min_decode_steps(cell: Cell, spec: ModelSpec, max_num_seqs: int, kv_tokens: int) -> float:
    """Fewest decode steps: by sequences at once, by the longest output and by room in the cache.

    A step holds what the tokens of all its sequences see, in sliding layers no more than their
    window, so the sum over steps is at most steps x room.
    """
    num_decoded = cell.num_output_tokens - cell.num_prompts
    seen = spec.attended_positions
    held = sum(seen(i + o - 1) - seen(i) for i, o in cell.lengths) / spec.num_layers
    return max(num_decoded / max_num_seqs, max(cell.output_lens) - 1, held / kv_tokens)


def min_weight_bytes(cell: Cell, spec: ModelSpec, setup: CellSetup, steps: float) -> float:
    """Bytes of weights that the decode steps read at least.

    More tokens read more experts, but ever fewer for each: uneven steps read least. None are more
    uneven than those of requests that all begin at once; nor than full steps, the others having one
    sequence each. Each bounds what the other leaves out: the limit on sequences, or their lengths.
    """
    read = functools.cache(functools.partial(step_weight_bytes, spec, setup.dtype))
    lens = sorted(cell.output_lens)
    spans = zip([1, *lens], lens, strict=False)
    together = sum((b - a) * read(len(lens) - i) for i, (a, b) in enumerate(spans) if b > a)
    most = min(setup.max_num_seqs, cell.num_prompts)
    if most < 2:
        return max(together, steps * read(1)) if steps else 0.0
    full = (cell.num_output_tokens - cell.num_prompts - steps) / (most - 1)
    return max(together, full * read(most) + (steps - full) * read(1))


def step_weight_bytes(spec: ModelSpec, dtype: str, num_tokens: float) -> float:
    """Bytes of the weights that a step of so many tokens reads: linear layers, output head."""
    rounded, plain, experts = spec.step_params(num_tokens)
    plain += spec.vocab_size * spec.hidden_size
    wide = plain * BYTES[HEAD_DTYPE.get(dtype, dtype)]
    return rounded * BYTES[dtype] + wide + experts * expert_bytes(spec, dtype)


def expert_dtype(spec: ModelSpec, dtype: str) -> str:
    """What experts are multiplied in: a GPU turns MXFP4 into bf16 as it reads it."""
    return "bf16" if spec.mxfp4 and dtype in GPU_DTYPES else dtype


def expert_bytes(spec: ModelSpec, dtype: str) -> float:
    """Bytes of a weight of the experts: a GPU reads MXFP4 as it is stored."""
    return MXFP4_BYTES if spec.mxfp4 and dtype in GPU_DTYPES else BYTES[dtype]
