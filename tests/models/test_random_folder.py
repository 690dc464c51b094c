"""A folder of random weights is a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny_configs import write_config
from tokenmill.models.checkpoints import weights
from tokenmill.models.checkpoints.random_folder import write_random_folder


@pytest.mark.parametrize("shard_bytes", [1, 3000, 10**9])
def test_a_random_folder_is_the_model_of_its_config(tmp_path: Path, shard_bytes: int) -> None:
    config = tmp_path / "config.json"
    write_config(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    num_bytes = write_random_folder(config, folder, shard_bytes=shard_bytes)
    drawn = dict(weights.open_checkpoint(config, random_weights=True).tensors())
    checkpoint = weights.open_checkpoint(folder)
    found = dict(checkpoint.tensors())
    assert found.keys() == drawn.keys()
    assert all(torch.equal(tensor, drawn[name].bfloat16()) for name, tensor in found.items())
    files = list(folder.glob("*.safetensors"))
    assert num_bytes == sum(file.stat().st_size for file in files) > checkpoint.num_bytes
    assert len(files) == {1: len(drawn), 10**9: 1}.get(shard_bytes, len(files))
