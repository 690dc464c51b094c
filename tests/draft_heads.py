"""MTP modules for tiny models that are right often, without training.

The projection passes the embedding of the newest token on, and the layer adds little: the guess is
what the model would say after that token alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.models import spec_of
from tokenmill.models.names import mtp_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUTS = ("o_proj.weight", "down_proj.weight", "down_proj")  # what layers add to the stream


def forgetful(model: PreTrainedModel, share: float = 0.01) -> PreTrainedModel:
    """Let the layers add so little that the newest token decides most of what comes next."""
    for name, parameter in model.named_parameters():
        if name.endswith(OUTPUTS):
            parameter.data.mul_(share)
    return model


def make_head(spec: ModelSpec, norm: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
    """Tensors under their names in a checkpoint; `scale` is the size of all that is random."""
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for name, shape in mtp_tensors(spec).items():
        tensor = torch.randn(shape, generator=generator) * scale
        if name.endswith("eh_proj.weight"):
            tensor += torch.cat([torch.eye(shape[0]), torch.zeros(shape[0], shape[0])], dim=1)
        elif name.endswith("shared_head.norm.weight"):
            tensor = norm.clone()
        elif "norm" in name:
            tensor += 1.0
        tensors[name] = tensor
    return tensors


def head_tensors(model: PreTrainedModel, scale: float = 0.003) -> dict[str, torch.Tensor]:
    """The head of a transformers model."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    return make_head(spec_of(config), model.model.norm.weight.data, scale)


def save_head(model: PreTrainedModel, file: Path, scale: float = 0.003) -> Path:
    save_file(head_tensors(model, scale), file)
    return file
