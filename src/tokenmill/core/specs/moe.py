"""Mixture of experts: which layers have one, and how tokens choose their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.core.specs.fields import Settings, positive_int
from tokenmill.core.types import ModelLoadError

Scoring = Literal["softmax", "sigmoid"]


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
    bias: bool = False  # of the router and of the experts' matrices

    def expert_params(self, hidden: int) -> int:
        return 3 * hidden * self.intermediate_size

    def bias_params(self, hidden: int) -> int:
        of_expert = (1 + 2 * self.intermediate_size + hidden) * self.bias + self.correction_bias
        return self.num_experts * of_expert

    def other_params(self, hidden: int) -> int:
        """Matrix parameters of a sparse layer that every token uses: router, shared expert."""
        return hidden * self.num_experts + 3 * hidden * self.shared_size

    def distinct_experts(self, num_tokens: float) -> float:
        """How many experts of a layer a batch is expected to hit when tokens choose evenly.

        E * (1 - (1 - k / E) ** tokens). Skewed routing hits fewer.
        """
        missed: float = (1 - self.top_k / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


def read_choice(settings: Settings, names: tuple[str, ...]) -> tuple[int, int]:
    """top_k and the number of experts, which goes by several names; the first one counts."""
    name = next(name for name in names if name in settings)
    num_experts, top_k = positive_int(settings, name), positive_int(settings, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelLoadError(f"num_experts_per_tok: {top_k} of {num_experts} experts")
    return top_k, num_experts
