"""Qwen3-VL, dense (2B to 32B) and with experts (30B-A3B, 235B-A22B): text and images in.

The text model is Qwen3's with positions in time, height and width: each pair of channels of a head
turns by one of the three, in turns. Text has the same in all three; the tokens of an image have its
first position in time, and their row and column. Text goes on after the image's longer side. The
first layers add features that the vision encoder's inner layers made (DeepStack).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tokenmill.core.specs.fields import Settings
from tokenmill.core.specs.rope import rope_fields
from tokenmill.core.specs.spec import ModelSpec, read_common
from tokenmill.core.specs.vision import read_vision
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.layers.images import StepRows
from tokenmill.layers.linear import Tensors
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import KVCache, Layer
from tokenmill.models.family import Architecture, Family, Shape
from tokenmill.models.llama import Llama
from tokenmill.models.names import attention_tensors, feed_forward_tensors, norm_tensors
from tokenmill.models.qwen import read_experts
from tokenmill.models.qwen3_vl_vision import VisionEncoder, vision_tensors

_DEFAULTS: Settings = {
    "vocab_size": 151_936,
    "max_position_embeddings": 128_000,
    "rope_theta": 500_000.0,
    "image_token_id": 151_655,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
_DENSE: Settings = {
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
}
_SPARSE: Settings = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_local_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_VISION: Settings = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}
_FIXED: Settings = {"mlp_bias": False}
_VISUAL = "visual."  # before the names of the encoder's tensors
ARCHITECTURES = {
    "Qwen3VLForConditionalGeneration": Architecture(
        model_type="qwen3_vl",
        defaults=_DEFAULTS | _DENSE,
        fixed=_FIXED,
        text_field="text_config",
        prefixes=_PREFIXES,
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        model_type="qwen3_vl_moe",
        defaults=_DEFAULTS | _SPARSE,
        fixed=_FIXED | {"norm_topk_prob": True},
        text_field="text_config",
        prefixes=_PREFIXES,
    ),
}


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    settings = _without_sections(settings)
    spec = read_common(architecture, "qwen3_vl", settings)
    vision = settings.get("vision_config")
    if isinstance(vision, dict):
        settings = settings | {"vision_config": _VISION | vision}
    seen = read_vision(settings, spec.hidden_size, spec.head_dim)
    if len(seen.deepstack_layers) > spec.num_layers:
        problem = f"the text model has {spec.num_layers} layers to add them to"
        raise ModelLoadError(f"vision_config.deepstack_visual_indexes: {problem}")
    sparse = architecture == "Qwen3VLMoeForConditionalGeneration"
    moe = read_experts(settings, spec.num_layers) if sparse else None
    return replace(spec, qk_norm=True, moe=moe, vision=seen)


def _without_sections(settings: Settings) -> Settings:
    """Take what is M-RoPE's out of the rotation's fields, which then are those of others."""
    field, rope = rope_fields(settings)
    if rope.get("mrope_interleaved", True) is not True:
        problem = f"only true is supported, got {rope['mrope_interleaved']!r}"
        raise ModelLoadError(f"{field}.mrope_interleaved: {problem}")
    own = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return settings | {field: own, "mrope_section": rope.get("mrope_section", [24, 20, 20])}


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    """All experts of a layer lie in one tensor, transposed; compressed-tensors takes them apart."""
    norms = norm_tensors(spec, "input_layernorm", "post_attention_layernorm")
    tensors = norms | attention_tensors(spec)
    apart = spec.quantization is not None and spec.quantization.method == "compressed-tensors"
    if spec.moe is None or not spec.moe.layers[index] or apart:
        return tensors | feed_forward_tensors(spec, index)
    experts, hidden, inner = spec.moe.num_experts, spec.hidden_size, spec.moe.intermediate_size
    return tensors | {
        "mlp.gate.weight": (experts, hidden),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
        "mlp.experts.down_proj": (experts, inner, hidden),
    }


def outer_tensors(spec: ModelSpec) -> dict[str, Shape]:
    assert spec.vision is not None
    return {f"{_VISUAL}{name}": shape for name, shape in vision_tensors(spec.vision).items()}


class Qwen3VL(Llama):
    """Qwen3 with a vision encoder before it."""

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[Layer], Tensors]:
        layers, outer = super()._load(tensors)
        names = [name for name in outer if name.startswith(_VISUAL)]
        own = {name.removeprefix(_VISUAL): outer.pop(name) for name in names}
        assert self.full.vision is not None
        if own:
            self.visual = VisionEncoder(self.full.vision, own, self.dtype, self.device)
        self.axes = _axes(self.full.vision.rope_sections).to(self.device)
        return layers, outer

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVCache,
        batch: AttentionBatch,
        images: StepRows | None = None,
    ) -> torch.Tensor:
        """As Decoder.forward(), where rows of images have their features and positions."""
        if images is None:
            return super().forward(token_ids, kv_cache, batch)
        stream = Residual(images.embed(self.embedding(token_ids)), self.spec.rms_eps)
        table, own = self._rotations(batch, images)
        for index, (layer, cache) in enumerate(zip(self.layers, kv_cache, strict=True)):
            layer(stream, cache, table, own)
            if index + 1 < images.features.shape[0]:
                images.add(stream.complete(), index + 1)
        return stream.complete()

    def _rotations(
        self, batch: AttentionBatch, images: StepRows
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """A table with a row for each of the step's tokens, and the batch that reads it so."""
        places = images.place(batch.positions)
        halves = self.cos_sin[0][places].unflatten(-1, (2, -1))  # [3, n, cosines and sines, pairs]
        axes = self.axes.expand(1, *halves.shape[1:])
        rows = halves.gather(0, axes)[0].flatten(1)
        positions = torch.arange(len(rows), dtype=batch.positions.dtype, device=rows.device)
        return rows, replace(batch, positions=positions)

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + (0 if self.visual is None else self.visual.num_bytes)


def _axes(sections: tuple[int, int, int]) -> torch.Tensor:
    """Which position each pair of channels turns by: int64 [head_dim / 2]."""
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


FAMILY = Family(
    ARCHITECTURES,
    read_spec,
    layer_tensors,
    Qwen3VL,
    outer_tensors,
)
