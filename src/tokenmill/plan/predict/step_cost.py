"""The time of one step of a replica: rooflines of its parts, times efficiencies that are fitted.

One part follows the other. A product with weights takes the time of its arithmetic and of reading
its weights, less what is hidden; attention takes the longer of its arithmetic and reading its KV.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.hardware import Accelerator
from tokenmill.plan.predict.catalog import Precision

FP8_BYTES, BF16_BYTES = 1, 2
MEMORY_SHARE = 0.9  # for weights and KV; activations and buffers take the rest
MICRO = 1e-6
EXPERT_TILE = 128  # rows
# Four-bit weights on a GPU without such arithmetic become bf16 beside each product. On an H200 that
# takes 3,646 us for experts of 8,192 tokens whose tiles alone take 2,580 (docs/log.md).
UNPACKING = 1.41


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of the hardware software reaches; all that is fitted."""

    products: float  # share of the peak that matrix products in bf16 and fp8 reach
    fp4_products: float  # and those in fp4
    experts: float  # of that, what grouped products of routed experts reach
    attention: float  # share of bf16's peak that attention's products reach
    memory: float  # share of the memory's rate that weights, KV and activations reach
    overlap: float  # share of a product's reading that is hidden by arithmetic, or the other way
    layer_us: float  # of a layer in which nothing else happens: launches, small kernels
    exchange_us: float  # latency of a layer's exchange between GPUs
    balance: float  # mean over fullest rank of attention data parallelism
    load: float  # share of the rate that holds the limits on paper, which runs reached

    def scaled(self, **factors: float) -> Efficiency:
        values = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return replace(self, **values)


EFFICIENCIES = tuple(field.name for field in fields(Efficiency))


@dataclass(frozen=True, slots=True)
class Replica:
    """How one copy of the model lies on GPUs."""

    precision: Precision
    tensor_parallel: int = 1
    attention_dp: int = 1  # ranks with attention of their own; experts lie over all GPUs
    mtp_depth: int = 0

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.attention_dp

    @property
    def expert_parallel(self) -> int:
        return self.gpus if self.attention_dp > 1 else 1


@dataclass(frozen=True, slots=True)
class Work:
    """What a replica computes in a step, over all its GPUs."""

    sequences: float  # that decode
    rows: float  # tokens that they compute: one each, and their drafts
    decode_seen: float  # positions over all layers that one row of each sequence attends to, summed
    prefill_tokens: float = 0.0
    prefill_seen: float = 0.0
    sampled: float = 0.0


class StepCost:
    """Prices the steps of one model on one kind of replica."""

    def __init__(
        self, spec: ModelSpec, gpu: Accelerator, replica: Replica, efficiency: Efficiency
    ) -> None:
        self.spec, self.gpu, self.replica, self.efficiency = spec, gpu, replica, efficiency
        self._memory = gpu.memory_bytes_per_s * efficiency.memory
        precision = replica.precision
        self._rates = {part: self._rate(precision, part) for part in ("experts", "others")}
        self._attention_rate = gpu.peak("bf16") * efficiency.attention
        self._head_rate = gpu.peak("bf16") * efficiency.products
        self._others = sum(spec.step_params(0)) / replica.tensor_parallel
        self._head = spec.vocab_size * spec.hidden_size / replica.tensor_parallel
        self._activations = self._activation_bytes()
        self._seen_bytes = spec.num_kv_heads * sum(spec.cache_dims) * precision.num_bytes("kv")
        self._seen_bytes /= self._kv_shards()

    def _rate(self, precision: Precision, part: str) -> float:
        flops, efficiency = self.gpu.flops, self.efficiency
        compute = precision.compute(part, "fp8" in flops, "fp4" in flops)
        share = efficiency.fp4_products if compute == "fp4" else efficiency.products
        if part == "experts" and self.spec.moe:
            share *= efficiency.experts
        if "fp4" not in flops and precision.num_bytes(part) < 1:
            share /= UNPACKING
        # Blackwell Ultra's fp4 is three times its fp8, but no published row shows more than two.
        most = 2 * self.gpu.peak("fp8") if compute == "fp4" else math.inf
        return min(self.gpu.peak(compute), most) * share

    def _kv_shards(self) -> int:
        """Over how many GPUs of a replica the KV of one sequence is cut; latents are copied."""
        heads = 1 if self.spec.mla else self.spec.num_kv_heads
        return min(self.replica.tensor_parallel, heads)

    def _activation_bytes(self) -> float:
        """Bytes that norms, rotations, gates and roundings move for a token, over all layers.

        Norms read and write the stream and the residual twice; a gate reads two and writes one.
        """
        spec, tp = self.spec, self.replica.tensor_parallel
        attention = 16 * spec.hidden_size + (7 * spec.q_size + 8 * spec.kv_size) / tp
        dense = 5 * spec.intermediate_size / tp
        if spec.moe is None:
            return spec.num_layers * (attention + dense)
        moe, num_sparse = spec.moe, sum(spec.moe.layers)
        inner = 5 * (moe.top_k * moe.intermediate_size + moe.shared_size) / tp
        sparse = inner + 5 * spec.hidden_size * moe.top_k
        return (
            spec.num_layers * attention
            + num_sparse * sparse
            + (spec.num_layers - num_sparse) * dense
        )

    def step_s(self, work: Work) -> float:
        return sum(self.parts(work).values())

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds of each part on a GPU, all GPUs with the same share."""
        parts = self._trunk_parts(work)
        if self.replica.mtp_depth:
            parts["drafts"] = self._drafts_s(work)
        return parts

    def _drafts_s(self, work: Work) -> float:
        """One layer as the model's own and its output head, one draft after the other."""
        sequences = work.sequences
        alone = self._trunk_parts(Work(sequences, sequences, work.decode_seen, sampled=sequences))
        head = alone.pop("output head")
        return self.replica.mtp_depth * (sum(alone.values()) / self.spec.num_layers + head)

    def _trunk_parts(self, work: Work) -> dict[str, float]:
        spec, replica = self.spec, self.replica
        ranks = replica.attention_dp * (self.efficiency.balance if replica.attention_dp > 1 else 1)
        rows, prefill = work.rows / ranks, work.prefill_tokens / ranks
        tokens = rows + prefill
        return {
            "linear layers": self._linear_s(tokens, self._others, "others"),
            "routed experts": self._experts_s(work.rows + work.prefill_tokens),
            "output head": self._head_s(work.sampled / ranks),
            "decode attention": self._decode_s(work, ranks),
            "prefill attention": work.prefill_seen
            * spec.seen_flops(decode=False)
            / (ranks * replica.tensor_parallel * self._attention_rate),
            "activations": tokens * self._activations / self._memory,
            "exchange": self._exchange_s(tokens),
            "launches": spec.num_layers * self.efficiency.layer_us * MICRO,
        }

    def _linear_s(self, rows: float, params: float, part: str) -> float:
        read_s = params * self.replica.precision.num_bytes(part) / self._memory
        return self._product_s(2 * rows * params / self._rates[part], read_s)

    def _product_s(self, compute_s: float, read_s: float) -> float:
        """Arithmetic and reading of weights, a part of the shorter hidden by the longer."""
        hidden = self.efficiency.overlap * min(compute_s, read_s)
        return compute_s + read_s - hidden

    def _head_s(self, rows: float) -> float:
        if not rows:
            return 0.0
        # TensorRT-LLM divides the head among ranks where it drafts (enable_lm_head_tp_in_adp).
        shards = self.replica.attention_dp if self.replica.mtp_depth else 1
        read_s = self._head * BF16_BYTES / shards / self._memory
        return self._product_s(2 * rows * self._head / self._head_rate, read_s)

    def _experts_s(self, tokens: float) -> float:
        """Routed experts over all GPUs of the replica; distinct ones are read."""
        spec, moe = self.spec, self.spec.moe
        if moe is None:
            return 0.0
        each = sum(moe.layers) * moe.expert_params(spec.hidden_size) / self.replica.gpus
        hit = moe.distinct_experts(tokens)
        read = hit * each * self.replica.precision.num_bytes("experts")
        rows = tokens * moe.top_k
        # Tiles hold the rows of one expert: the last is half empty, and few rows have small tiles.
        padding = min(hit * EXPERT_TILE / 2, rows / 2)
        flops = 2 * (rows + padding) * each
        return self._product_s(flops / self._rates["experts"], read / self._memory)

    def _decode_s(self, work: Work, ranks: float) -> float:
        per_row = work.rows / work.sequences if work.sequences else 1.0
        flops = work.decode_seen * per_row * self.spec.seen_flops(decode=True)
        compute_s = flops / (ranks * self.replica.tensor_parallel * self._attention_rate)
        return max(compute_s, work.decode_seen / ranks * self._seen_bytes / self._memory)

    def _exchange_s(self, tokens: float) -> float:
        """All-reduces of tensor parallelism, or the way to the experts and back."""
        spec, replica = self.spec, self.replica
        if replica.gpus == 1:
            return 0.0
        link = self.gpu.link(replica.gpus)
        latency = self.efficiency.exchange_us * MICRO
        seconds = 0.0
        if replica.tensor_parallel > 1:
            share = (replica.tensor_parallel - 1) / replica.tensor_parallel
            sent = 4 * share * spec.num_layers * spec.hidden_size * BF16_BYTES
            seconds += tokens * sent / link + spec.num_layers * latency
        if replica.attention_dp > 1 and spec.moe:
            sent = expert_exchange_bytes(spec, replica.gpus) / replica.tensor_parallel
            seconds += tokens * sent / link + sum(spec.moe.layers) * latency
        return seconds

    @property
    def weight_bytes(self) -> float:
        spec, precision = self.spec, self.replica.precision
        total = self._others * precision.num_bytes("others") + 2 * self._head * BF16_BYTES
        if spec.moe:
            each = sum(spec.moe.layers) * spec.moe.expert_params(spec.hidden_size)
            experts = spec.moe.num_experts * each * precision.num_bytes("experts")
            total += experts / self.replica.gpus
        return total

    @property
    def kv_bytes(self) -> float:
        """Room for KV on one GPU; negative where the weights do not fit."""
        return self.gpu.memory_bytes * MEMORY_SHARE - self.weight_bytes

    def max_sequences(self, mean_seen: float) -> float:
        """Sequences of a replica whose KV fits, each with so many positions over all layers."""
        room = max(0.0, self.kv_bytes) * self.replica.attention_dp
        return room / (mean_seen * self._seen_bytes)


def expert_exchange_bytes(spec: ModelSpec, num_ranks: int) -> float:
    """Bytes that a rank sends for one of its tokens: to experts elsewhere, and back from them."""
    if spec.moe is None:
        return 0.0
    # Ranks that a token is sent to, where each is chosen as often.
    hit = (num_ranks - 1) * (1 - (1 - 1 / num_ranks) ** spec.moe.top_k)
    return sum(spec.moe.layers) * hit * spec.hidden_size * (FP8_BYTES + BF16_BYTES)
