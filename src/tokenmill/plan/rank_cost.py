"""The time of a step over ranks of attention data and expert parallelism: a roofline, predicted.

A rank computes attention, shared experts, dense layers and the output head for its own tokens, so
the fullest rank decides; routed experts lie on all ranks and their work is taken to be even. One
kind of operation follows the other, each at the rate of arithmetic or of memory, whichever is
slower. Launches, norms, sampling and uneven experts cost nothing here: it is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from tokenmill.core.specs.spec import ModelSpec, Windows, attended
from tokenmill.plan.hardware import Accelerator
from tokenmill.sched.scheduler import Batch

FP8_BYTES, BF16_BYTES = 1, 2
NVFP4_BYTES = 0.5 + 1 / 16  # an fp8 scale for every 16 values
MEMORY_SHARE = 0.9  # for weights and KV; activations and buffers take the rest
DISPATCH_BYTES, COMBINE_BYTES = FP8_BYTES, BF16_BYTES  # of a hidden value on its way to experts
# TensorRT-LLM's one-sided NVLink kernels with one token: 18 us to dispatch, 31 us to combine.
EXCHANGE_LATENCY_S = (18 + 31) * 1e-6

Layers = Iterable[tuple[int | None, int]]  # windows, and how many layers have each


@dataclass(slots=True)
class RankWork:
    """What a rank computes in a step; positions are summed over all layers."""

    num_tokens: int = 0
    num_context_tokens: int = 0  # of these, tokens of prompts
    num_sampled: int = 0
    context_seen: int = 0  # positions that prompt tokens attend to
    decode_seen: int = 0  # and decoded ones
    kv_read: int = 0  # positions whose KV is read: by each decoded token, and once by a chunk

    @classmethod
    def of(cls, batch: Batch, windows: Windows = (None,)) -> RankWork:
        """Of a batch in layers with these windows; without any it is the work of one layer."""
        layers = Counter(windows).items()
        work = cls(num_tokens=batch.num_tokens)
        for seq, num_new in batch.items:
            computed = seq.num_computed_tokens
            if num_new == 1:
                work.num_sampled += 1
                work.decode_seen += _kept(layers, computed + 1)
            else:
                work.num_context_tokens += num_new
                work.context_seen += _seen(layers, computed + num_new) - _seen(layers, computed)
                work.kv_read += _kept(layers, computed)
                work.num_sampled += computed + num_new == len(seq.token_ids)
        work.kv_read += work.decode_seen
        return work


def _kept(layers: Layers, num_tokens: int) -> int:
    """Positions that a token after so many sees, or one that is the last of them."""
    return sum(count * min(num_tokens, window or num_tokens) for window, count in layers)


def _seen(layers: Layers, num_tokens: int) -> int:
    """Positions that the first tokens of a sequence attend to: ModelSpec.attended_positions."""
    return sum(count * attended(window, num_tokens) for window, count in layers)


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

    def __init__(self, spec: ModelSpec, gpu: Accelerator, num_ranks: int) -> None:
        if spec.moe is None:
            raise ValueError("attention data parallelism is priced for models with experts")
        self._spec, self._gpu, self._num_ranks = spec, gpu.as_reached(), num_ranks
        self._expert_type = "fp4" if "fp4" in gpu.flops else "fp8"
        self._expert_bytes = NVFP4_BYTES if self._expert_type == "fp4" else FP8_BYTES
        self._moe, self._num_sparse = spec.moe, sum(spec.moe.layers)
        self._own_params = sum(spec.step_params(0))
        self._head_params = spec.vocab_size * spec.hidden_size
        self._seen_bytes = spec.kv_bytes_per_token(FP8_BYTES) // spec.num_layers
        self._sent_bytes = exchange_bytes(spec, num_ranks)

    def kv_tokens(self, num_seqs: int) -> int:
        """Tokens whose KV fits beside a rank's weights; layers with a window keep no more of each
        of so many sequences."""
        windows = self._spec.layer_windows
        experts = self._expert_params(self._moe.num_experts) * self._expert_bytes
        embeddings = 2 * self._head_params * BF16_BYTES
        weights = self._own_params * FP8_BYTES + embeddings + experts / self._num_ranks
        kept = num_seqs * sum(window or 0 for window in windows) * self._seen_bytes
        room = self._gpu.memory_bytes * MEMORY_SHARE - weights - kept
        return int(room / (max(1, windows.count(None)) * self._seen_bytes))

    def step_s(self, ranks: Sequence[RankWork]) -> float:
        """The slowest rank's own work, then the experts of all."""
        num_tokens = sum(work.num_tokens for work in ranks)
        return max(self.own_s(work) for work in ranks) + self.experts_s(num_tokens)

    def own_s(self, work: RankWork) -> float:
        """Everything that a rank does for its own tokens alone."""
        gpu, spec = self._gpu, self._spec
        bf16, memory = gpu.peak("bf16"), gpu.memory_bytes_per_s
        linear_s = self._linear_s(work.num_tokens, self._own_params, gpu.peak("fp8"), FP8_BYTES)
        head_s = self._linear_s(work.num_sampled, self._head_params, bf16, BF16_BYTES)
        flops = work.decode_seen * spec.seen_flops(decode=True)
        decode_s = max(work.kv_read * self._seen_bytes / memory, flops / bf16)
        context_s = work.context_seen * spec.seen_flops(decode=False) / bf16
        sent_s = work.num_tokens * self._sent_bytes / gpu.link(self._num_ranks)
        return linear_s + head_s + decode_s + context_s + sent_s

    def experts_s(self, num_tokens: int) -> float:
        """A rank's part of the routed experts, and the way there and back at its shortest."""
        gpu = self._gpu
        flops = 2 * num_tokens * self._expert_params(self._moe.top_k)
        read = self._expert_params(self._moe.distinct_experts(num_tokens)) * self._expert_bytes
        longest = max(flops / gpu.peak(self._expert_type), read / gpu.memory_bytes_per_s)
        exchange_s = self._num_sparse * EXCHANGE_LATENCY_S * (self._num_ranks > 1)
        return longest / self._num_ranks + exchange_s

    def _expert_params(self, num_experts: float) -> float:
        return self._num_sparse * num_experts * self._moe.expert_params(self._spec.hidden_size)

    def _linear_s(self, num_rows: int, params: float, flops_per_s: float, width: int) -> float:
        """One product with weights of `params` values for so many rows; none costs nothing."""
        read_s = params * width / self._gpu.memory_bytes_per_s
        return max(2 * num_rows * params / flops_per_s, read_s) if num_rows else 0.0
