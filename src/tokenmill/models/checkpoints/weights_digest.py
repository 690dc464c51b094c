"""What tells the weights of a model from others: names, shapes, types and samples of the data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from tokenmill.models.checkpoints.gguf import GGUFTensor
from tokenmill.models.checkpoints.weights import (
    FP8Tensor,
    ReadableTensor,
    SafetensorsTensor,
    open_checkpoint,
)

_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 512  # of a file: 2 MiB

StoredTensor = SafetensorsTensor | GGUFTensor


def weights_digest(*parts: Mapping[str, ReadableTensor]) -> str:
    """Equal for copies of the same files, and for random weights that are drawn alike.

    The middle of each tensor is read; in a file of more than 512 tensors, of that many.
    """
    digest = blake2b(digest_size=16)
    files: dict[Path, list[StoredTensor]] = {}
    for number, part in enumerate(parts):
        for name in sorted(part):
            tensor = part[name]
            if not isinstance(tensor, StoredTensor | FP8Tensor):
                digest.update(f"{number} {tensor!r}\n".encode())  # how it is drawn
                continue
            for stored in tensor.stored if isinstance(tensor, FP8Tensor) else (tensor,):
                facts = number, name, stored.shape, stored.type_name
                digest.update(f"{facts}\n".encode())
                files.setdefault(stored.file, []).append(stored)
    for file, tensors in files.items():
        for sample in _samples(file, tensors):
            digest.update(sample)
    return digest.hexdigest()


def model_identity(path: Path, *, random_weights: bool, seed: int) -> dict[str, str]:
    """What is equal for copies of a model alone; the revision is that of a hub's download."""
    checkpoint = open_checkpoint(path, random_weights=random_weights, seed=seed)
    spec = checkpoint.spec
    digest = blake2b(repr(spec).encode(), digest_size=4).hexdigest()
    snapshots = (folder for folder in (path, *path.parents) if folder.parent.name == "snapshots")
    return {
        "model": f"{spec.architecture} of {spec.num_layers} layers, "
        f"{spec.num_params() / 1e6:,.1f}M parameters (config {digest})",
        "weights": weights_digest(checkpoint.readable),
        "revision": next(snapshots, Path()).name,
    }


def _samples(file: Path, tensors: list[StoredTensor]) -> list[bytes]:
    step = -(-len(tensors) // _MOST_SAMPLES)
    with file.open("rb", buffering=0) as opened:
        return [_middle(opened.fileno(), tensor) for tensor in tensors[::step]]


def _middle(fd: int, tensor: StoredTensor) -> bytes:
    size = min(tensor.num_bytes, _SAMPLE_BYTES)
    return os.pread(fd, size, tensor.begin + (tensor.num_bytes - size) // 2)
