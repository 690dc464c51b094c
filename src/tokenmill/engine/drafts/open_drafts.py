"""What drafts in an engine: refused, opened and loaded from what --mtp and --draft ask for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenmill.core.config import ExecutionConfig, ModelConfig
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.drafts.drafting import AdaptiveDrafting, Drafting, FixedDrafting
from tokenmill.engine.drafts.eagle3 import Eagle3Files, Eagle3Head, is_eagle3, open_eagle3
from tokenmill.engine.drafts.proposer import Drafter
from tokenmill.layers.linear import ComputeType
from tokenmill.models.checkpoints.shards import wanted
from tokenmill.models.checkpoints.store import resolve_draft, shipped_mtp
from tokenmill.models.checkpoints.weights import (
    Checkpoint,
    ReadableTensor,
    open_mtp,
    read_all,
    read_spec,
)
from tokenmill.models.decoder import Decoder
from tokenmill.models.mtp import MTPModule
from tokenmill.parallel import ALONE

DraftFiles = Mapping[str, ReadableTensor] | Eagle3Files


def check_drafts(model: ModelConfig, execution: ExecutionConfig) -> None:
    """Refuse flags for drafts that are given without --mtp."""
    if model.draft is not None and not execution.mtp:
        raise ModelLoadError(f"--draft {model.draft} needs --mtp N, the tokens to draft in a step")


def open_draft(checkpoint: Checkpoint, model: ModelConfig) -> DraftFiles:
    """What drafts: what --draft names, the checkpoint's own module, or one that comes with it."""
    random = model.random_weights and model.draft is None
    path, spec = checkpoint.path, checkpoint.spec
    if spec.vision is not None:
        problem = "takes images, and no MTP module knows their positions; use --draft ngram"
        raise ModelLoadError(f"mtp: {spec.architecture} {problem}")
    if model.draft is not None:
        path = resolve_draft(model.draft)
        if is_eagle3(path):
            return open_eagle3(path, spec)
    elif not random and not spec.num_mtp_layers:
        shipped = shipped_mtp(path)
        if shipped is None:
            problem = "has no MTP module; give one with --draft, or draft with --draft ngram"
            raise ModelLoadError(f"mtp: {path.name} {problem}")
        path = shipped
    return open_mtp(path, spec, random_weights=random, seed=model.seed)


def load_draft(files: DraftFiles, network: Decoder, dtype: ComputeType) -> Drafter:
    """Ranks that share every token divide the module like a layer; others have one each."""
    if isinstance(files, Eagle3Files):
        network.read_layers = files.layers
        return Eagle3Head(files, network, dtype)
    layout = ALONE if network.layout.own_tokens else network.layout
    needs = wanted(network.full, layout)
    own = {name: tensor for name, tensor in files.items() if needs(name)}
    return MTPModule(network, read_all(own, network.device), dtype, layout)


def has_mtp(model: ModelConfig, path: Path) -> bool:
    if model.draft is not None or read_spec(path).num_mtp_layers > 0:
        return True
    return not model.random_weights and shipped_mtp(path) is not None


def choose_drafting(execution: ExecutionConfig, looks_up: bool) -> Drafting | None:
    if not execution.mtp:
        return None
    if not execution.mtp_adaptive:
        return FixedDrafting(execution.mtp)
    return AdaptiveDrafting(execution.mtp, looks_up)
