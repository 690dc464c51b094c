"""Rows of a step that stand for images, as an engine hands them to a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The tokens of a step that are parts of images."""

    rows: torch.Tensor  # int64 [n]: of the step, each once
    positions: torch.Tensor  # int64 [3, n]: in time, height and width
    features: torch.Tensor  # [1 + layers, n, hidden]: embeddings, and what first layers add
