"""Names of models that benchmarks take: of the catalog, or of a shape with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.bench.commands.throughput import SHAPES, model_path
from tokenmill.core.config import ModelConfig
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints import store


def test_a_model_with_a_shape_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "resolve", lambda name, update: Path("found") / name)
    shapes = {file.stem for file in SHAPES.glob("*.json")}
    for name in shapes & store.CATALOG.keys():
        assert model_path(ModelConfig(name)) == Path("found") / name
        assert model_path(ModelConfig(name, random_weights=True)) == SHAPES / f"{name}.json"
    with pytest.raises(ModelLoadError, match="--random-weights"):
        model_path(ModelConfig(min(shapes - store.CATALOG.keys())))
