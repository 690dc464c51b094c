"""Mixture of experts: which layers have one, and how tokens choose their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.core.fields import Settings, count, fixed, flag, number, positive_int
from tokenmill.core.types import ModelLoadError

Scoring = Literal["softmax", "sigmoid"]
MOE_DEFAULTS: dict[str, Settings] = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "DeepseekV3ForCausalLM": {
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
}


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Experts of the sparse layers, and the router's rule."""

    layers: tuple[bool, ...]  # which layers have experts instead of one MLP
    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    shared_size: int = 0  # inner size of the expert that every token takes; 0: there is none
    scoring: Scoring = "softmax"
    renormalise: bool = True  # the chosen experts' weights sum to one, before `scaling`
    scaling: float = 1.0
    num_groups: int = 1  # experts are chosen among those of the best `top_groups` groups
    top_groups: int = 1
    correction_bias: bool = False  # a learned bias per expert that counts in the choice alone

    def expert_params(self, hidden: int) -> int:
        return 3 * hidden * self.intermediate_size

    def other_params(self, hidden: int) -> int:
        """Matrix parameters of a sparse layer that every token uses: router, shared expert."""
        return hidden * self.num_experts + 3 * hidden * self.shared_size

    def distinct_experts(self, num_tokens: float) -> float:
        """How many experts of a layer a batch is expected to hit when tokens choose evenly.

        E * (1 - (1 - k / E) ** tokens). Skewed routing hits fewer.
        """
        missed: float = (1 - self.top_k / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


def read_moe(architecture: str, settings: Settings, num_layers: int) -> MoESpec | None:
    """The experts that config.json describes; None for an architecture without them."""
    if architecture not in MOE_DEFAULTS:
        return None
    if architecture == "DeepseekV3ForCausalLM":
        return _deepseek(settings, num_layers)
    top_k, num_experts = _choice(settings, ("num_experts", "num_local_experts"))
    if architecture == "MixtralForCausalLM":
        inner = positive_int(settings, "intermediate_size")
        return MoESpec((True,) * num_layers, num_experts, top_k, inner)
    return MoESpec(
        layers=_qwen_layers(settings, num_layers),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive_int(settings, "moe_intermediate_size"),
        renormalise=flag(settings, "norm_topk_prob"),
    )


def _qwen_layers(settings: Settings, num_layers: int) -> tuple[bool, ...]:
    step, dense = positive_int(settings, "decoder_sparse_step"), settings["mlp_only_layers"] or []
    if not isinstance(dense, list):
        raise ModelLoadError(f"mlp_only_layers: expected a list of layers, got {dense!r}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _deepseek(settings: Settings, num_layers: int) -> MoESpec:
    fixed(settings, "scoring_func", "sigmoid")
    fixed(settings, "topk_method", "noaux_tc")
    fixed(settings, "moe_layer_freq", 1)
    top_k, num_experts = _choice(settings, ("num_local_experts", "n_routed_experts"))
    num_groups, top_groups = positive_int(settings, "n_group"), positive_int(settings, "topk_group")
    if num_experts % num_groups or num_experts < 2 * num_groups:
        raise ModelLoadError(
            f"n_group: {num_groups} groups of two or more do not divide {num_experts} experts"
        )
    if top_groups > num_groups or top_groups * (num_experts // num_groups) < top_k:
        raise ModelLoadError(
            f"topk_group: {top_groups} of {num_groups} groups do not hold {top_k} experts"
        )
    dense, shared = count(settings, "first_k_dense_replace"), settings["n_shared_experts"]
    inner = positive_int(settings, "moe_intermediate_size")
    return MoESpec(
        layers=tuple(layer >= dense for layer in range(num_layers)),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_size=inner * (count(settings, "n_shared_experts") if shared else 0),
        scoring="sigmoid",
        renormalise=flag(settings, "norm_topk_prob"),
        scaling=number(settings, "routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=top_groups,
        correction_bias=True,
    )


def _choice(settings: Settings, names: tuple[str, ...]) -> tuple[int, int]:
    """top_k and the number of experts, which goes by several names; the first one counts."""
    name = next(name for name in names if name in settings)
    num_experts, top_k = positive_int(settings, name), positive_int(settings, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelLoadError(f"num_experts_per_tok: {top_k} of {num_experts} experts")
    return top_k, num_experts
