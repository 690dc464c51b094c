"""The time of a step over ranks of attention data and expert parallelism: a roofline, predicted.

A rank computes attention, shared experts, dense layers and the output head for its own tokens, so
the fullest rank decides; routed experts lie on all ranks and their work is taken to be even. One
kind of operation follows the other, each at the rate of arithmetic or of memory, whichever is
slower. Launches, norms, sampling and uneven experts cost nothing here: it is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.sched.scheduler import Batch

FP8_BYTES, BF16_BYTES = 1, 2
NVFP4_BYTES = 0.5 + 1 / 16  # an fp8 scale for every 16 values
MEMORY_SHARE = 0.9  # for weights and KV; activations and buffers take the rest
DISPATCH_BYTES, COMBINE_BYTES = FP8_BYTES, BF16_BYTES  # of a hidden value on its way to experts
# TensorRT-LLM's one-sided NVLink kernels with one token: 18 us to dispatch, 31 us to combine.
EXCHANGE_LATENCY_S = (18 + 31) * 1e-6


@dataclass(frozen=True, slots=True)
class GPU:
    """What one GPU reaches."""

    name: str
    read_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float
    expert_flops: float  # in the type of the routed experts
    expert_bytes: float  # of a parameter of theirs
    link_bytes_per_s: float  # to the other ranks, one direction
    memory_bytes: float


def _from_datasheet(name: str, fp4_flops: float, memory_bytes: float) -> GPU:
    """Blackwell's peaks, less what H200 falls short of its own: 4.8 TB/s, 989 and 1,979 TFLOP/s."""
    h200 = GPUS["h200"]
    fp8_share = h200.fp8_flops / 1979e12
    return GPU(
        name,
        read_bytes_per_s=8e12 * h200.read_bytes_per_s / 4.8e12,
        bf16_flops=2.5e15 * h200.bf16_flops / 989e12,
        fp8_flops=5e15 * fp8_share,
        expert_flops=fp4_flops * fp8_share,
        expert_bytes=NVFP4_BYTES,
        link_bytes_per_s=900e9,
        memory_bytes=memory_bytes,
    )


# H200: measured rates of memory and GEMM; the link is half of the datasheet's 900 GB/s.
GPUS = {"h200": GPU("h200", 4.3e12, 790e12, 1.5e15, 1.5e15, FP8_BYTES, 450e9, 141e9)}
GPUS["gb200"] = _from_datasheet("gb200", fp4_flops=10e15, memory_bytes=186e9)
GPUS["gb300"] = _from_datasheet("gb300", fp4_flops=15e15, memory_bytes=288e9)


@dataclass(slots=True)
class RankWork:
    """What a rank computes in a step."""

    num_tokens: int = 0
    num_context_tokens: int = 0  # of these, tokens of prompts
    num_sampled: int = 0
    context_seen: int = 0  # positions that prompt tokens attend to, in a layer
    decode_seen: int = 0  # and decoded ones
    kv_read: int = 0  # tokens whose KV is read: by each decoded token, and once by a chunk

    @classmethod
    def of(cls, batch: Batch) -> RankWork:
        work = cls(num_tokens=batch.num_tokens)
        decoded = 0
        for seq, num_new in batch.items:
            computed = seq.num_computed_tokens
            if num_new == 1:
                decoded += computed + 1
                work.num_sampled += 1
            else:
                work.num_context_tokens += num_new
                work.context_seen += num_new * computed + num_new * (num_new + 1) // 2
                work.kv_read += computed
                work.num_sampled += computed + num_new == len(seq.token_ids)
        work.decode_seen = decoded
        work.kv_read += decoded
        return work


def mean_work(ranks: Sequence[RankWork]) -> RankWork:
    """What each rank would compute if all had the same."""
    counts = zip(*(astuple(work) for work in ranks), strict=True)
    return RankWork(*(sum(column) // len(ranks) for column in counts))


def exchange_bytes(spec: ModelSpec, num_ranks: int) -> float:
    """Bytes that a rank sends for one of its tokens: to experts elsewhere, and back from them."""
    if spec.moe is None:
        return 0.0
    hit = (num_ranks - 1) * (1 - (1 - 1 / num_ranks) ** spec.moe.top_k)  # ranks, by even choice
    return sum(spec.moe.layers) * hit * spec.hidden_size * (DISPATCH_BYTES + COMBINE_BYTES)


class RankCost:
    """Prices the steps of one model on ranks of one kind of GPU."""

    def __init__(self, spec: ModelSpec, gpu: GPU, num_ranks: int) -> None:
        if spec.moe is None:
            raise ValueError("attention data parallelism is priced for models with experts")
        self._spec, self._gpu, self._num_ranks = spec, gpu, num_ranks
        self._moe, self._num_sparse = spec.moe, sum(spec.moe.layers)
        self._own_params = sum(spec.step_params(0))
        self._head_params = spec.vocab_size * spec.hidden_size
        self._kv_bytes = spec.kv_bytes_per_token(FP8_BYTES)
        self._sent_bytes = exchange_bytes(spec, num_ranks)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits beside a rank's weights."""
        experts = self._expert_params(self._moe.num_experts) * self._gpu.expert_bytes
        embeddings = 2 * self._head_params * BF16_BYTES
        weights = self._own_params * FP8_BYTES + embeddings + experts / self._num_ranks
        return int((self._gpu.memory_bytes * MEMORY_SHARE - weights) / self._kv_bytes)

    def step_s(self, ranks: Sequence[RankWork]) -> float:
        """The slowest rank's own work, then the experts of all."""
        num_tokens = sum(work.num_tokens for work in ranks)
        return max(self.own_s(work) for work in ranks) + self.experts_s(num_tokens)

    def own_s(self, work: RankWork) -> float:
        """Everything that a rank does for its own tokens alone."""
        gpu, spec = self._gpu, self._spec
        linear_s = self._linear_s(work.num_tokens, self._own_params, gpu.fp8_flops, FP8_BYTES)
        head_s = self._linear_s(work.num_sampled, self._head_params, gpu.bf16_flops, BF16_BYTES)
        flops = spec.num_layers * work.decode_seen * spec.seen_flops(decode=True)
        decode_s = max(work.kv_read * self._kv_bytes / gpu.read_bytes_per_s, flops / gpu.bf16_flops)
        flops = spec.num_layers * work.context_seen * spec.seen_flops(decode=False)
        context_s = flops / gpu.bf16_flops
        sent_s = work.num_tokens * self._sent_bytes / gpu.link_bytes_per_s
        return linear_s + head_s + decode_s + context_s + sent_s

    def experts_s(self, num_tokens: int) -> float:
        """A rank's part of the routed experts, and the way there and back at its shortest."""
        gpu = self._gpu
        flops = 2 * num_tokens * self._expert_params(self._moe.top_k)
        read = self._expert_params(self._moe.distinct_experts(num_tokens)) * gpu.expert_bytes
        compute_s = max(flops / gpu.expert_flops, read / gpu.read_bytes_per_s) / self._num_ranks
        return compute_s + self._num_sparse * EXCHANGE_LATENCY_S * (self._num_ranks > 1)

    def _expert_params(self, num_experts: float) -> float:
        return self._num_sparse * num_experts * self._moe.expert_params(self._spec.hidden_size)

    def _linear_s(self, num_rows: int, params: float, flops_per_s: float, width: int) -> float:
        """One product with weights of `params` values for so many rows; none costs nothing."""
        read_s = params * width / self._gpu.read_bytes_per_s
        return max(2 * num_rows * params / flops_per_s, read_s) if num_rows else 0.0
