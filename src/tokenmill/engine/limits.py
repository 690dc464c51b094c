"""How many requests run at once and how many tokens a step has, by memory and model; pure."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.config import DEFAULT_BUDGET
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.engine.graphs.graph_sizes import graph_sizes

MAX_GPU_NUM_SEQS = 1024  # larger batches gain little and lengthen every step
MIN_GPU_NUM_SEQS = 64  # requests may be short
EXPECTED_TOKENS = 1200  # of a request in the cache; choose_num_seqs says what hangs on it
STEP_S = 0.2  # of a step full of prompt tokens: so long the requests that decode may wait
IMAGE_SHARE = 0.5  # of the time of such a step, for the encoder: it lasts 1.5 times as long at most
IMAGE_PATCHES = 4096  # of an image of 1,024 x 1,024, by which the time of a patch is counted
SHARED_S = 0.025  # of a step that prompts share with decoding: beside it launches hardly count
SHARED_READS = 6  # times as long as its weights are read: what prompts add to that hardly counts
FEW_REQUESTS = 16  # that decode together where gaps between tokens count
IMAGE_PART = 0.9  # of the time in which these read their weights, for images beside them
LEAST_TOKENS = 512  # of a prompt that has to run in parts
ENCODER_RATE = 0.65  # FLOP/s of the encoder by those of prompts
LARGE_GPU_BYTES_S, GPU_BYTES_S = 4e12, 6e11  # read by the same GPUs
MIN_GPU_BUDGET, MAX_GPU_BUDGET = 2048, 8192
# 33 tiles of 128 rows: Hopper's 132 multiprocessors then have no round of tiles that is not full,
# whatever number of columns that divides by 1,024 a product has. 4,096 rows take 3 % longer each.
ROUND_TOKENS, LARGE_GPU_TOKENS = 4096, 4224
LARGE_GPU_BYTES = 70 * 2**30  # H100, H200, B200 and their like
LARGE_GPU_FLOPS, GPU_FLOPS = 7e14, 1.5e14  # reached with bf16 by those and by smaller ones


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """The memory that a model has on a GPU, in bytes."""

    memory_bytes: int  # that weights and KV may take
    weight_bytes: int
    kv_bytes_per_token: int  # of a request of the expected length

    @property
    def num_kv_tokens(self) -> int:
        return max(0, self.memory_bytes - self.weight_bytes) // max(1, self.kv_bytes_per_token)


def choose_num_seqs(room: MemoryRoom, max_model_len: int) -> int:
    """As many requests as the KV cache holds at their expected length, the size of a graph.

    The expected length is a short one: longer requests are bounded by the KV cache itself, since
    the scheduler admits what fits, and a limit that is too high for them costs a few preemptions;
    shorter ones are bounded by this limit, and a low one would cost them much of the throughput.
    """
    fitting = room.num_kv_tokens // min(EXPECTED_TOKENS, max_model_len)
    sizes = [size for size in graph_sizes(MAX_GPU_NUM_SEQS) if size <= fitting]
    return max(MIN_GPU_NUM_SEQS, *sizes, 0)


def choose_budget(spec: ModelSpec, gpu_bytes: int | None) -> int:
    """Tokens of a step: about a power of two that a GPU of this memory computes in about STEP_S."""
    if gpu_bytes is None:
        return DEFAULT_BUDGET
    flops, _ = gpu_rates(gpu_bytes)
    tokens = int(STEP_S * flops / spec.flops_per_token(0))
    budget = min(MAX_GPU_BUDGET, max(MIN_GPU_BUDGET, 1 << max(0, tokens.bit_length() - 1)))
    if gpu_bytes < LARGE_GPU_BYTES or budget < ROUND_TOKENS:
        return budget
    return budget // ROUND_TOKENS * LARGE_GPU_TOKENS


def choose_least_shared(spec: ModelSpec, gpu_bytes: int | None, width: int) -> int | None:
    """Tokens that a step has at least when prompts share it with decoding: a power of two.

    `width` is the bytes of a parameter. Models whose experts are hardly all read while they decode
    need many tokens for a prompt's step to be worth it. On CPU, where None is chosen, a budget is
    small anyhow.
    """
    if gpu_bytes is None:
        return None
    flops, rate = gpu_rates(gpu_bytes)
    reads = SHARED_READS * width * sum(spec.step_params(MAX_GPU_BUDGET)) / rate
    tokens = int(max(SHARED_S, reads) * flops / spec.flops_per_token(0))
    return 1 << max(0, tokens.bit_length() - 1)


def gpu_rates(gpu_bytes: int) -> tuple[float, float]:
    """FLOP/s and bytes/s that a GPU of this memory reaches."""
    large = gpu_bytes >= LARGE_GPU_BYTES
    return (LARGE_GPU_FLOPS, LARGE_GPU_BYTES_S) if large else (GPU_FLOPS, GPU_BYTES_S)


def choose_encoder_patches(spec: ModelSpec, budget: int) -> int:
    """Patches of a step: as many as take IMAGE_SHARE of the time of its tokens, by FLOPs.

    Requests that decode wait for a step that is full of prompts at most so much longer with images
    in it. An image is not divided: one that has more patches is encoded without others. More than
    the patches of so many tokens a step does not reach.
    """
    vision = spec.vision
    assert vision is not None
    patch_flops = vision.encode_flops(IMAGE_PATCHES) / IMAGE_PATCHES
    patches = int(IMAGE_SHARE * budget * spec.flops_per_token(0) / patch_flops)
    return min(max(patches, IMAGE_PATCHES), budget * vision.merge_size**2)


def choose_image_parts(
    spec: ModelSpec, gpu_bytes: int | None, width: int
) -> tuple[int | None, int | None]:
    """Patches, or prompt tokens as long, that a step has for images while others decode.

    So a step that decodes for few requests takes about twice as long; it has at least the time of
    LEAST_TOKENS, for which others wait beside texts, too. `width` is the bytes of a parameter. On
    CPU, where None is chosen, prompts with images do not run in parts.
    """
    if gpu_bytes is None or spec.vision is None:
        return None, None
    flops, rate = gpu_rates(gpu_bytes)
    read_s = width * sum(spec.step_params(FEW_REQUESTS)) / rate
    tokens = max(LEAST_TOKENS, int(IMAGE_PART * read_s * flops / spec.flops_per_token(0)))
    patch_flops = spec.vision.encode_flops(IMAGE_PATCHES) / IMAGE_PATCHES
    return int(ENCODER_RATE * tokens * spec.flops_per_token(0) / patch_flops), tokens
