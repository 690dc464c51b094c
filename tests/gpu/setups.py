"""Every engine that the tests of this folder build.

tests/engine/test_gpu_setups.py builds them on CPU: what the engine refuses fails there too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save_file

from draft_heads import (
    OUTPUTS,
    eagle3_tensors,
    forgetful,
    look_at_newest,
    make_head,
    save_eagle3,
    save_head,
)
from tokenmill.core.config import (
    NGRAM,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.models.checkpoints import store
from tokenmill.models.checkpoints.weights import open_checkpoint

Device = Literal["cpu", "cuda"]
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
}
GEMMA3 = CONFIG | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,  # as all published sizes have
    "sliding_window": 32,
    "sliding_window_pattern": 3,
}
GPT_OSS = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 160,  # no multiple of a tile of the kernels for MXFP4
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 32,
    "quantization_config": {"quant_method": "mxfp4"},
}
IMAGE_TOKEN, VISION_START, VISION_END = 509, 510, 511
QWEN3_VL: dict[str, object] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "text_config": CONFIG
    | {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [12, 10, 10]}},
    "vision_config": {
        "depth": 3,
        "hidden_size": 144,  # heads of 72 channels, as all published encoders have
        "intermediate_size": 208,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": CONFIG["hidden_size"],
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
QWEN3_MOE = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"]} | _EXPERTS
QWEN3_VL_MOE = QWEN3_VL | {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {**QWEN3_VL["text_config"], **_EXPERTS},  # type: ignore[dict-item]
}
LLAMA = {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 512}
DEFAULT = ExecutionConfig()
ALONE = ParallelConfig()
PLAIN = ExecutionConfig(cuda_graphs=False, overlap=False)
INVARIANT = ExecutionConfig(batch_invariant=True)
LIMITS = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256)
CONTEXT = 2048  # of the default model's real weights
HEAD = "head.safetensors"


def make_random(folder: Path, config: dict[str, object] = CONFIG) -> None:
    """Random weights in a file: made anew they would differ by device."""
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(open_checkpoint(folder, random_weights=True).tensors())
    if config is GEMMA3:  # whose norms multiply with 1 + w
        weights = {n: torch.zeros_like(t) if "norm" in n else t for n, t in weights.items()}
    save_file(weights, folder / "model.safetensors")


def make_drafted_qwen3(folder: Path) -> None:
    """A model whose newest token decides most, and a head that knows it."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(folder, random_weights=True)
    weights = {
        name: tensor * (0.02 if name.endswith(OUTPUTS) else 1.0)
        for name, tensor in checkpoint.tensors()
    }
    save_file(weights, folder / "model.safetensors")
    spec = checkpoint.spec
    (folder / "draft").mkdir()
    save_file(make_head(spec, torch.ones(spec.hidden_size), 0.003), folder / "draft" / HEAD)


def make_drafted_llama(folder: Path) -> None:
    from tiny_models import make_model, save, tame  # transformers, which the others do without

    model = forgetful(tame(make_model("llama", **LLAMA), 0.3))
    save(model, folder)
    (folder / "draft").mkdir()
    save_head(model, folder / "draft" / HEAD)
    tensors = eagle3_tensors(model, bias=True)
    look_at_newest(tensors, model)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    save_eagle3(model, folder / "draft" / "eagle3", tensors, **layers)


MAKERS: dict[str, Callable[[Path], None]] = {
    "qwen3": make_random,
    "gemma3": partial(make_random, config=GEMMA3),
    "gpt-oss": partial(make_random, config=GPT_OSS),
    "gpt-oss-bf16": partial(make_random, config=GPT_OSS | {"quantization_config": None}),
    "qwen3-moe": partial(make_random, config=QWEN3_MOE),
    "qwen3-vl": partial(make_random, config=QWEN3_VL),
    "qwen3-vl-moe": partial(make_random, config=QWEN3_VL_MOE),
    "drafted-qwen3": make_drafted_qwen3,
    "drafted-llama": make_drafted_llama,
}


class Checkpoints:
    """The models by name, each made on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Path:
        if name == "smollm2":
            return store.resolve(name)
        path = self.folder / name
        if not path.exists():
            path.mkdir()
            MAKERS[name](path)
        return path


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is built from, but for the device; on CPU all compute in fp32."""

    checkpoint: str
    execution: ExecutionConfig = DEFAULT
    dtype: Literal["bf16", "fp8"] = "bf16"
    kv_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    num_blocks: int = 200
    limits: SchedulerConfig = LIMITS
    max_model_len: int | None = None
    draft: str = HEAD
    block_size: int | None = None
    offloading: str | None = None  # {folder} is the checkpoint's
    connector: Literal["none", "auto"] = "none"
    parallel: ParallelConfig = ALONE

    def configs(self, checkpoints: Checkpoints, device: Device) -> Setup:
        folder = checkpoints[self.checkpoint]
        on_gpu = device == "cuda"
        return Setup(
            ModelConfig(
                str(folder),
                self.dtype if on_gpu else "fp32",
                device,
                share_gpus=True,
                max_model_len=self.max_model_len,
                draft=self._draft(folder) if self.execution.mtp else None,
            ),
            CacheConfig(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                dtype=self.kv_dtype if on_gpu else "auto",
                offloading=self.offloading and self.offloading.format(folder=folder),
                connector=self.connector,
            ),
            self.limits,
            self.execution,
            self.parallel,
        )

    def _draft(self, folder: Path) -> str:
        return NGRAM if self.draft == NGRAM else str(folder / "draft" / self.draft)

    def build(self, checkpoints: Checkpoints, device: Device) -> BuiltEngine:
        return build_engine(resolve_setup(self.configs(checkpoints, device)))


QWEN3 = {
    "default": EngineSetup("qwen3"),
    "plain": EngineSetup("qwen3", PLAIN),
    "overlap": EngineSetup("qwen3", replace(PLAIN, overlap=True)),
    "graphs": EngineSetup("qwen3", replace(PLAIN, cuda_graphs=True)),
    "graphs-overlap": EngineSetup("qwen3", replace(PLAIN, cuda_graphs=True, overlap=True)),
    "unfused": EngineSetup("qwen3", replace(PLAIN, fused_kernels=False)),
    "preempted": EngineSetup("qwen3", PLAIN, num_blocks=8),
    "preempted-overlap": EngineSetup("qwen3", replace(PLAIN, overlap=True), num_blocks=8),
    "fp8": EngineSetup("qwen3", dtype="fp8", kv_dtype="bf16"),
    "kv-fp8": EngineSetup("qwen3", kv_dtype="fp8"),
    "fp8-kv-fp8": EngineSetup("qwen3", dtype="fp8", kv_dtype="fp8"),
    "invariant": EngineSetup("qwen3", INVARIANT),
    "invariant-plain": EngineSetup("qwen3", replace(PLAIN, batch_invariant=True)),
    "invariant-fp8": EngineSetup("qwen3", INVARIANT, dtype="fp8"),
}


GEMMA3_SETUPS = {
    "gemma3": EngineSetup("gemma3"),
    "gemma3-fp8": EngineSetup("gemma3", dtype="fp8", kv_dtype="fp8"),
}


GPT_OSS_SETUPS = {
    "gpt-oss": EngineSetup("gpt-oss"),
    "gpt-oss-plain": EngineSetup("gpt-oss", PLAIN),
    "gpt-oss-invariant": EngineSetup("gpt-oss", INVARIANT),
    "gpt-oss-kv-fp8": EngineSetup("gpt-oss", kv_dtype="fp8"),
    "gpt-oss-bf16": EngineSetup("gpt-oss-bf16"),
}


FEW_PATCHES = replace(LIMITS, encoder_patches=100)  # a step encodes an image, or a larger one
QWEN3_VL_SETUPS = {
    "qwen3-vl": EngineSetup("qwen3-vl"),
    "qwen3-vl-plain": EngineSetup("qwen3-vl", PLAIN),
    "qwen3-vl-unfused": EngineSetup("qwen3-vl", replace(PLAIN, fused_kernels=False)),
    "qwen3-vl-few-patches": EngineSetup("qwen3-vl", limits=FEW_PATCHES),
    "qwen3-vl-invariant": EngineSetup("qwen3-vl", INVARIANT),
    "qwen3-vl-fp8": EngineSetup("qwen3-vl", dtype="fp8", kv_dtype="fp8"),
    "qwen3-vl-ngram": EngineSetup(
        "qwen3-vl", ExecutionConfig(mtp=3, mtp_adaptive=False), draft=NGRAM
    ),
    "qwen3-vl-parts": EngineSetup(
        "qwen3-vl", limits=replace(LIMITS, encoder_share=220, image_tokens=100)
    ),
    "qwen3-vl-moe": EngineSetup("qwen3-vl-moe"),
    "qwen3-vl-moe-plain": EngineSetup("qwen3-vl-moe", PLAIN),
    "qwen3-vl-moe-fp8": EngineSetup("qwen3-vl-moe", dtype="fp8", kv_dtype="fp8"),
}


def _tiers(offloading: str | None, checkpoint: str = "qwen3", num_blocks: int = 22) -> EngineSetup:
    setup = EngineSetup(checkpoint, INVARIANT, num_blocks=num_blocks, offloading=offloading)
    return replace(setup, block_size=16, limits=replace(LIMITS, max_num_batched_tokens=48))


# The disk's host memory has fewer slots than the tests have blocks.
TIERS_SETUPS = {
    "tiers-room": _tiers(None, num_blocks=400),
    "tiers-off": _tiers(None),
    "tiers-host": _tiers("host=64MiB"),
    "tiers-host-fast": replace(_tiers("host=64MiB"), execution=DEFAULT),
    "tiers-disk": _tiers("host=1536KiB,disk={folder}/kv:64MiB"),
    "tiers-windows-off": _tiers(None, "gemma3"),
    "tiers-windows": _tiers("host=64MiB", "gemma3"),
}


TWO = 2  # ranks, or engines, on one GPU
EAGER = replace(INVARIANT, cuda_graphs=False)
RANKS_SETUPS = {
    "moves": EngineSetup("qwen3", INVARIANT, connector="auto"),
    "moves-windows": EngineSetup("gemma3", INVARIANT, connector="auto"),
    "moves-fp8": EngineSetup("qwen3", INVARIANT, kv_dtype="fp8", connector="auto"),
    "eager": EngineSetup("drafted-qwen3", EAGER),
    "tp": EngineSetup("drafted-qwen3", INVARIANT, parallel=ParallelConfig(tp=TWO)),
    "tp-eager": EngineSetup("drafted-qwen3", EAGER, parallel=ParallelConfig(tp=TWO)),
    "moe": EngineSetup("qwen3-moe", EAGER),
    "moe-ep": EngineSetup("qwen3-moe", INVARIANT, parallel=ParallelConfig(ep=TWO)),
    "moe-dp": EngineSetup(
        "qwen3-moe", INVARIANT, parallel=ParallelConfig(ep=TWO, attention_dp=True)
    ),
    "gpt-oss-eager": EngineSetup("gpt-oss", EAGER),
    "gpt-oss-ep": EngineSetup("gpt-oss", INVARIANT, parallel=ParallelConfig(ep=TWO)),
    "large-steps": EngineSetup(
        "qwen3", INVARIANT, num_blocks=400, limits=replace(LIMITS, max_num_batched_tokens=16384)
    ),
}


# Steps of many sizes, each with prompts beside requests that decode.
_MIXED = replace(LIMITS, max_num_batched_tokens=120)
MIXED_FAMILIES = ("qwen3", "gemma3", "gpt-oss", "qwen3-moe")
MIXED_SETUPS = {
    f"mixed-{family}{suffix}": EngineSetup(family, execution, limits=_MIXED)
    for family in MIXED_FAMILIES
    for suffix, execution in (("", INVARIANT), ("-eager", EAGER))
}
# Beside requests that decode, an image of 624 patches is encoded over several steps.
_IMAGE_PARTS = replace(_MIXED, encoder_share=220, image_tokens=100)
MIXED_IMAGES = ("qwen3-vl", "qwen3-vl-moe")
MIXED_SETUPS |= {
    f"mixed-{family}{suffix}": EngineSetup(family, execution, limits=_IMAGE_PARTS)
    for family in MIXED_IMAGES
    for suffix, execution in (("", INVARIANT), ("-eager", EAGER))
}


def drafting(execution: ExecutionConfig, depth: int = 3) -> ExecutionConfig:
    return replace(execution, mtp=depth, mtp_adaptive=False)


DRAFTED_QWEN3 = {
    "no-drafts": EngineSetup("drafted-qwen3", INVARIANT),
    "drafts-graphs": EngineSetup("drafted-qwen3", drafting(INVARIANT)),
    "drafts-eager": EngineSetup("drafted-qwen3", drafting(replace(INVARIANT, cuda_graphs=False))),
    "drafts-preempted": EngineSetup("drafted-qwen3", drafting(INVARIANT), num_blocks=12),
    "drafts-adaptive": EngineSetup("drafted-qwen3", replace(INVARIANT, mtp=3)),
}


def _llama(execution: ExecutionConfig, budget: int | None = 128) -> EngineSetup:
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget)
    return EngineSetup("drafted-llama", execution, num_blocks=64, limits=limits)


DRAFTED_LLAMA = {
    "llama-eager": _llama(replace(INVARIANT, cuda_graphs=False)),
    "llama-eager-drafts": _llama(drafting(replace(INVARIANT, cuda_graphs=False))),
    "llama-graphs": _llama(INVARIANT),
    "llama-graphs-drafts": _llama(drafting(INVARIANT)),
    "llama-fast": _llama(DEFAULT),
    "llama-fast-drafts": _llama(drafting(DEFAULT)),
    "llama-eager-eagle3": replace(
        _llama(drafting(replace(INVARIANT, cuda_graphs=False))), draft="eagle3"
    ),
    "llama-graphs-eagle3": replace(_llama(drafting(INVARIANT)), draft="eagle3"),
    "llama-graphs-ngram": replace(_llama(drafting(INVARIANT)), draft=NGRAM),
} | {f"llama-depth-{n}": _llama(drafting(DEFAULT, n), None) for n in (0, 1, 2, 3)}
SMOLLM2 = {
    f"smollm2-{dtype}-{kv_dtype}": EngineSetup(
        "smollm2",
        ExecutionConfig(cuda_graphs=False),
        dtype,
        kv_dtype,
        num_blocks=1024,
        limits=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=1024),
        max_model_len=CONTEXT,
    )
    for dtype in ("bf16", "fp8")
    for kv_dtype in ("bf16", "fp8")
}
SETUPS: dict[str, EngineSetup] = (
    QWEN3
    | GEMMA3_SETUPS
    | GPT_OSS_SETUPS
    | QWEN3_VL_SETUPS
    | TIERS_SETUPS
    | RANKS_SETUPS
    | MIXED_SETUPS
    | DRAFTED_QWEN3
    | DRAFTED_LLAMA
    | SMOLLM2
)


def random_prompts(lengths: tuple[int, ...], vocab_size: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(n)] for n in lengths]


def prompts() -> list[list[int]]:
    """Prompts for the Qwen3 models."""
    return random_prompts((1, 5, 17, 64, 200, 333), CONFIG["vocab_size"], 0)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids with placeholders, and the images that they stand for."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...]


def image_prompts(seed: int = 0) -> list[ImagePrompt]:
    """For the Qwen3-VL models: no image, one, two; one with an image at its end."""
    shapes = ((40, (), 9), (9, ((6, 4),), 30), (70, ((10, 12), (4, 14)), 5), (60, ((24, 26),), 0))
    return [_image_prompt(seed + i, *shape) for i, shape in enumerate(shapes)]


def _image_prompt(
    seed: int, before: int, grids: tuple[tuple[int, int], ...], after: int
) -> ImagePrompt:
    source = random.Random(seed)
    ids, spans = [source.randrange(500) for _ in range(before)], []
    for height, width in grids:
        pixels = np.random.default_rng(seed).uniform(-1, 1, (height * width, 96))
        image = ImageInput.of(pixels.astype("<f4").tobytes(), (1, height, width))
        spans.append(ImageSpan(len(ids) + 1, image.num_tokens(2), image))
        ids += [VISION_START, *[IMAGE_TOKEN] * image.num_tokens(2)]
    ids += [source.randrange(500) for _ in range(after)]
    return ImagePrompt(ids, tuple(spans))
