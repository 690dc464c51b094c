"""Writes a folder of random weights in bf16, as large as a published model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenmill.models.checkpoints.weights import (
    CONFIG_FILE,
    INDEX_SUFFIX,
    RandomTensor,
    open_checkpoint,
)

SHARD_BYTES = 2**30
NUM_WRITERS = 4  # each has a shard in host memory


def write_random_folder(
    config: Path, folder: Path, device: str = "cpu", shard_bytes: int = SHARD_BYTES
) -> int:
    """Fill `folder` with the model of a config.json, drawn on `device`; returns its bytes."""
    checkpoint = open_checkpoint(config, random_weights=True)
    tensors = {
        name: replace(tensor, device=device)
        for name, tensor in checkpoint.readable.items()
        if isinstance(tensor, RandomTensor)
    }
    shards = list(_shards(tensors, shard_bytes))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(NUM_WRITERS) as writers:
        list(writers.map(_write, shards, [folder / name for name in names]))
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    (folder / f"model{INDEX_SUFFIX}").write_text(json.dumps({"weight_map": index}))
    source = config / CONFIG_FILE if config.is_dir() else config
    (folder / CONFIG_FILE).write_bytes(source.read_bytes())
    return sum((folder / name).stat().st_size for name in names)


def _shards(
    tensors: Mapping[str, RandomTensor], shard_bytes: int
) -> Iterator[dict[str, RandomTensor]]:
    """Tensors in order, as many in each shard as fit, or one."""
    shard: dict[str, RandomTensor] = {}
    for name, tensor in tensors.items():
        shard[name] = tensor
        if sum(each.num_bytes for each in shard.values()) >= shard_bytes:
            yield shard
            shard = {}
    if shard:
        yield shard


def _write(shard: Mapping[str, RandomTensor], file: Path) -> None:
    drawn = {name: tensor.read().cpu() for name, tensor in shard.items()}
    halves = {n: t.bfloat16() if t.dtype == torch.float32 else t for n, t in drawn.items()}
    save_file(halves, file, {"format": "pt"})
