"""The GPUs of this machine, found without torch."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from tokenmill.core.types import TokenmillError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs that processes started here see, as CUDA_VISIBLE_DEVICES names them."""
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    named = os.environ.get(VISIBLE)
    if named is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in named.split(",")]
    return list(takewhile(lambda name: name and name != "-1", names))[:count]


def check_device(device: str) -> None:
    """Refuse a GPU that was asked for and is not there, before anything is downloaded for it."""
    if device == "cuda" and not visible_gpus():
        raise TokenmillError(
            f"--device cuda: this machine shows no NVIDIA GPU (/dev/nvidia*, {VISIBLE}); "
            "leave the flag out to compute on the CPU"
        )


def seen_first(own: list[str], gpus: list[str]) -> str:
    """A value of CUDA_VISIBLE_DEVICES: a process runs on its own GPUs and reads from all others."""
    return ",".join([*own, *(gpu for gpu in gpus if gpu not in own)])
