"""Where a model runs, and what is refused before anything is loaded."""

import pytest
import torch

from tokenmill.core.config import ModelConfig
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.build import choose_device


@pytest.mark.parametrize(
    ("gpu", "dtype", "device", "expected"),
    [
        (False, "auto", "auto", "cpu"),
        (True, "auto", "auto", "cuda"),
        (True, "bf16", "auto", "cuda"),
        (True, "int8", "auto", "cpu"),  # a CPU type keeps the model on the CPU
        (True, "auto", "cpu", "cpu"),
    ],
)
def test_auto_follows_the_machine_and_the_compute_type(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, dtype: str, device: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    config = ModelConfig(dtype=dtype, device=device)  # type: ignore[arg-type]
    assert choose_device(config) == expected


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="torch sees no GPU"):
        choose_device(ModelConfig(device="cuda"))
