"""Which part of a checkpoint a rank holds: names to slices, as data; what cannot be divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from tokenmill.core.config import ParallelConfig
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.layers.experts import first_placement, own_slots
from tokenmill.models.names import canonical, expert_of
from tokenmill.parallel import Layout, Ranks

# Module -> what its rows (or columns) are divided by; the parts of "out" modules are added up.
_ROWS = {
    "self_attn.q_proj": "heads",
    "self_attn.q_b_proj": "heads",
    "self_attn.kv_b_proj": "heads",
    "self_attn.k_proj": "kv_heads",
    "self_attn.v_proj": "kv_heads",
    "self_attn.sinks": "heads",  # a tensor, not a module
    "mlp.gate_proj": "inner",
    "mlp.up_proj": "inner",
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
}
_COLUMNS = {"self_attn.o_proj": "heads", "mlp.down_proj": "inner"}


def plan_layout(spec: ModelSpec, config: ParallelConfig, ranks: Ranks) -> Layout:
    """How this model is divided, or a refusal that names the flag."""
    _check_numbers(config)
    size = config.num_ranks
    assert ranks.size == size
    if config.ep > 1 and spec.moe is None:
        raise ModelLoadError(f"--ep {config.ep}: {spec.architecture} has no experts, use --tp")
    if config.tp > 1 and config.ep > 1 and config.tp != config.ep:
        raise ModelLoadError(f"--tp {config.tp} must be 1 or as many as --ep {config.ep}")
    if config.attention_dp and (config.tp > 1 or config.ep == 1):
        raise ModelLoadError("--attention-dp needs --ep of 2 or more, and no --tp")
    _check_effect(spec, config)
    if config.tp > 1:
        _check_heads(spec, size)
    slots = 0
    if spec.moe is not None:
        experts = spec.moe.num_experts
        if size > experts:
            flag = "ep" if config.ep > 1 else "tp"
            raise ModelLoadError(f"--{flag} {size}: the model has {experts} experts in a layer")
        slots = -(-(experts + config.redundant_experts) // size) * size
        if slots > size * experts:
            raise ModelLoadError(
                f"--redundant-experts {config.redundant_experts}: with {experts} on each of "
                f"{size} ranks every rank has all, at most {(size - 1) * experts}"
            )
    return Layout(ranks, config.tp > 1, config.attention_dp, slots)


def _check_numbers(config: ParallelConfig) -> None:
    """What is 1 or more by default cannot be less; nothing is negative."""
    for name, default in asdict(ParallelConfig()).items():
        value, least = getattr(config, name), min(1, default)
        if value < least:
            raise ModelLoadError(f"{name} must be {least} or more, got {value}")


def _check_effect(spec: ModelSpec, config: ParallelConfig) -> None:
    shared, default = spec.moe is not None and config.num_ranks > 1, ParallelConfig()
    experts = "a model with experts and --ep or --tp of 2 or more"
    for flag, is_set, has_effect, needed in (
        ("--redundant-experts", config.redundant_experts, shared, experts),
        ("--rebalance-steps", config.rebalance_steps, shared, experts),
        (
            "rebalance_layers",
            config.rebalance_layers != default.rebalance_layers,
            config.rebalance_steps,
            "--rebalance-steps",
        ),
        ("nodes", config.nodes > 1, config.rebalance_steps, "--rebalance-steps"),
        ("--adp-timeout-iters", config.timeout_iters, config.attention_dp, "--attention-dp"),
        (
            "batching_wait_iters",
            config.batching_wait_iters,
            config.timeout_iters,
            "--adp-timeout-iters of 1 or more",
        ),
    ):
        if is_set and not has_effect:
            raise ModelLoadError(f"{flag} needs {needed}")
    if config.num_ranks % config.nodes:
        raise ModelLoadError(f"nodes {config.nodes} does not divide {config.num_ranks} ranks")


def _check_heads(spec: ModelSpec, size: int) -> None:
    kv_heads = spec.num_kv_heads
    if spec.num_heads % size:
        raise ModelLoadError(f"--tp {size} does not divide the {spec.num_heads} attention heads")
    if spec.mla is None and kv_heads % size and size % kv_heads:
        raise ModelLoadError(f"--tp {size} neither divides {kv_heads} KV heads nor is a multiple")
    dense = spec.moe is None or not all(spec.moe.layers)
    if dense and spec.intermediate_size % size:
        inner = spec.intermediate_size
        raise ModelLoadError(f"--tp {size} does not divide the intermediate_size {inner}")


def local_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    size = layout.tensor_ranks.size
    if size == 1:
        return spec
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
    )


def wanted(spec: ModelSpec, layout: Layout) -> Callable[[str], bool]:
    """Whether this rank needs the tensor of a name in the checkpoint."""
    experts: set[int] = set()
    if spec.moe is not None:
        experts = set(own_slots(first_placement(spec.moe.num_experts, layout), layout))

    def needs(name: str) -> bool:
        if name == "lm_head.weight":
            return layout.samples or layout.split_heads
        short = name.removeprefix("model.layers.").partition(".")[2]
        found = expert_of(canonical(spec, short))
        return found is None or found[0] in experts

    return needs


def shard(name: str, tensor: torch.Tensor, spec: ModelSpec, ranks: Ranks) -> torch.Tensor:
    """This rank's part of a tensor; a sum's bias counts on the first rank alone."""
    if ranks.size == 1:
        return tensor
    module, _, kind = (name, "", "") if name in _ROWS else name.rpartition(".")
    if module in _ROWS:
        return tensor[_part(_ROWS[module], tensor.shape[0], spec, ranks)]
    if module in _COLUMNS and kind == "weight":
        return tensor[:, _part(_COLUMNS[module], tensor.shape[1], spec, ranks)]
    if module in _COLUMNS and ranks.rank:
        return torch.zeros_like(tensor)
    return tensor


def _part(unit: str, length: int, spec: ModelSpec, ranks: Ranks) -> slice:
    """Where a rank's heads or channels lie; a KV head of many ranks is copied to each."""
    if unit == "vocabulary":
        return ranks.own(length)
    if unit == "inner" and length % ranks.size:  # the model's own divides: an MTP module's may not
        raise ModelLoadError(f"--tp {ranks.size} does not divide an MLP of {length} channels")
    count = {"heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "inner": length}[unit]
    width, each = length // count, max(1, count // ranks.size)
    first = ranks.rank * count // ranks.size
    return slice(first * width, (first + each) * width)
