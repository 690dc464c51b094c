"""The parts of a video model in memory: text encoder, experts and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from tokenmill.core.config import ModelConfig
from tokenmill.core.specs.wan import TEXT_TOKENS, WanSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.layers.linear import ComputeType, plain_type
from tokenmill.models.checkpoints.diffusers_folder import WanCheckpoint, open_wan, random_wan
from tokenmill.models.checkpoints.store import resolve_pipeline
from tokenmill.models.checkpoints.weights import Progress
from tokenmill.models.wan.umt5_encoder import TextEncoder
from tokenmill.models.wan.wan_split import ColumnSplit, TokenSplit
from tokenmill.models.wan.wan_vae import VideoDecoder
from tokenmill.parallel import ONE, Ranks
from tokenmill.video.experts import Experts

if TYPE_CHECKING:
    from tokenmill.engine.ranks.group import RankGroup

ONE_RANK = VideoParallel()

_BYTES_PER_WIDTH = 24  # of activations at their peak, for each channel of a token in the stream
_BYTES_PER_INNER = 6  # and in the MLP
_OFFLOAD = "--offload keeps the experts in host memory, and the one in use on the GPU"


@dataclass(frozen=True, slots=True)
class Pipeline:
    spec: WanSpec
    encoder: TextEncoder
    experts: Experts
    decoder: VideoDecoder
    device: torch.device
    dtype: ComputeType
    name: str
    tokenizer: Path | None = None  # None: random weights, prompts are their bytes
    memory_bytes: int | None = None  # of the device beside the weights; None: no limit is known
    parallel: VideoParallel = ONE_RANK
    group: RankGroup | None = None  # on rank 0 of several: the others

    @property
    def split(self) -> TokenSplit:
        """The part of a video that this rank computes."""
        return self.experts.split

    def encode(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Embeddings of prompts, [prompts, TEXT_TOKENS, dim]."""
        return torch.stack([self.encoder(prompt, TEXT_TOKENS) for prompt in prompts])

    def batches_guidance(self, num_tokens: int) -> bool:
        """True where both prompts of a job run as one batch: same shape, same answer, always.

        It does not depend on what is free at the moment, since the sums of a product may depend on
        the number of its rows, and the same job must give the same pixels.
        """
        shape = self.spec.transformer
        width = _BYTES_PER_WIDTH * shape.hidden_size + _BYTES_PER_INNER * shape.ffn_dim
        return self.memory_bytes is None or 2 * num_tokens * width < self.memory_bytes


def open_pipeline(config: ModelConfig) -> WanCheckpoint:
    """The checkpoint that `config` names, of which no weights are read yet."""
    choose_dtype(config)
    if config.random_weights:
        return random_wan(config.model, config.seed)
    return open_wan(resolve_pipeline(config.model))


def load_pipeline(
    checkpoint: WanCheckpoint,
    config: ModelConfig,
    offload: bool = False,
    progress: Progress | None = None,
    parallel: VideoParallel = ONE_RANK,
    ranks: Ranks = ONE,
) -> Pipeline:
    """Read, or draw, the weights: all of them on every rank, since ranks divide tokens alone."""
    device, dtype = choose_device(config), choose_dtype(config)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    try:
        return build_pipeline(checkpoint, device, dtype, offload, progress, parallel, ranks)
    except torch.OutOfMemoryError as error:
        hint = "" if offload else f"; {_OFFLOAD}"
        problem = f"the weights do not fit the GPU's memory{hint}"
        raise ModelLoadError(f"{checkpoint.name}: {problem}") from error


def build_pipeline(
    checkpoint: WanCheckpoint,
    device: torch.device,
    dtype: ComputeType,
    offload: bool = False,
    progress: Progress | None = None,
    parallel: VideoParallel = ONE_RANK,
    ranks: Ranks = ONE,
) -> Pipeline:
    """The parts of a checkpoint on a device, read tensor by tensor."""
    spec, readers = checkpoint.spec, checkpoint.readers(device, progress)
    sources = [readers[part] for part in checkpoint.experts]
    with torch.inference_mode():
        split = TokenSplit(ranks, parallel.cfg)
        experts = Experts(spec.transformer, sources, dtype, device, offload, split)
        encoder = TextEncoder(spec.text, readers["text_encoder"], plain_type(dtype), device)
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        decoder = VideoDecoder(spec.vae, readers["vae"], device, kind, ColumnSplit(ranks))
    return Pipeline(
        spec,
        encoder,
        experts,
        decoder,
        device,
        dtype,
        checkpoint.name,
        checkpoint.tokenizer,
        _memory_beside(experts),
        parallel,
    )


def _memory_beside(experts: Experts) -> int | None:
    """Memory of a GPU without the weights that it holds at once."""
    if experts.device.type != "cuda":
        return None
    total = torch.cuda.get_device_properties(experts.device).total_memory
    moved = experts.num_bytes if experts.offload else 0
    return total - torch.cuda.memory_allocated(experts.device) - moved


def choose_device(config: ModelConfig) -> torch.device:
    """The device of the config; "auto" is a GPU where there is one."""
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise ModelLoadError("--device cuda: no GPU was found; use --device cpu")
    return torch.device("cuda" if found and config.device != "cpu" else "cpu")


def choose_dtype(config: ModelConfig) -> ComputeType:
    """The compute type of the experts; "auto" is bf16 on a GPU, else fp32."""
    if config.dtype == "int8":
        raise ModelLoadError("--dtype int8: video models compute in fp32, bf16 or fp8")
    on_gpu = choose_device(config).type == "cuda"
    if config.dtype == "auto":
        return "bf16" if on_gpu else "fp32"
    if on_gpu and config.dtype == "fp32":
        raise ModelLoadError("--dtype fp32: on a GPU use bf16 or fp8, or --device cpu")
    return cast(ComputeType, config.dtype)
