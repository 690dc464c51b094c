"""Where a model runs, and what is refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tiny_models import make_model, save
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.types import ModelLoadError
from tokenmill.engine import build, choices
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import choose_device, resolve_setup
from tokenmill.engine.graphs.capture import CaptureReport
from tokenmill.models.checkpoints.weights import open_checkpoint


@pytest.mark.parametrize(
    ("capability", "dtype", "device", "expected"),
    [
        (None, "auto", "auto", "cpu"),
        ((9, 0), "auto", "auto", "cuda"),
        ((9, 0), "bf16", "auto", "cuda"),
        ((9, 0), "fp8", "auto", "cuda"),
        ((8, 0), "fp8", "auto", "cpu"),  # a GPU that lacks the type is left alone
        ((7, 5), "auto", "auto", "cpu"),
        ((9, 0), "int8", "auto", "cpu"),  # a CPU type keeps the model on the CPU
        ((9, 0), "auto", "cpu", "cpu"),
    ],
)
def test_auto_follows_the_machine_and_the_compute_type(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None,
    dtype: str,
    device: str,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = ModelConfig(dtype=dtype, device=device)  # type: ignore[arg-type]
    assert choose_device(config) == expected


@pytest.mark.parametrize(
    ("device", "compiled", "expected"),
    [("cuda", True, "bf16"), ("cpu", True, "int8"), ("cpu", False, "fp32")],
)
def test_all_workers_choose_one_type(
    monkeypatch: pytest.MonkeyPatch, device: str, compiled: bool, expected: str
) -> None:
    """By a rule: timed trials had two answers on a busy machine, one for each worker."""
    monkeypatch.setattr(choices, "cpu_kernels", lambda: compiled)
    assert choices.choose_dtype(device) == expected


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="torch sees no GPU"):
        choose_device(ModelConfig(device="cuda"))


def _fake_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], free: int = 2**40
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Example GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, free))


@pytest.mark.parametrize(
    ("dtype", "capability", "free", "message"),
    [
        ("fp8", (8, 0), 2**40, "dtype fp8 needs a GPU of compute capability 8.9 or more, "
         "but Example GPU has 8.0"),
        ("bf16", (7, 5), 2**40, "dtype bf16 needs a GPU of compute capability 8.0"),
        ("int8", (9, 0), 2**40, "dtype int8 does not run on cuda"),
        ("bf16", (9, 0), 1000, "the weights take .* in bf16, but Example GPU has 0.0 GiB free"),
    ],
)  # fmt: skip
def test_what_a_gpu_lacks_is_said_before_loading(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: str,
    capability: tuple[int, int],
    free: int,
    message: str,
) -> None:
    _fake_gpu(monkeypatch, capability, free)
    folder = save(make_model("llama"), tmp_path)
    config = ModelConfig(str(folder), dtype=dtype, device="cuda")  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match=message):
        build_engine(resolve_setup(Setup(config, CacheConfig(), SchedulerConfig())))


def test_blocks_that_a_gpu_does_not_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _fake_gpu(monkeypatch, (9, 0), 1000)
    config = ModelConfig(str(save(make_model("llama"), tmp_path)), dtype="bf16", device="cuda")
    for size, message in ((48, "block_size is 48: cuda takes divisors"), (192, "the weights take")):
        with pytest.raises(ModelLoadError, match=message):
            build_engine(
                resolve_setup(Setup(config, CacheConfig(block_size=size), SchedulerConfig()))
            )


def test_graphs_that_were_not_captured_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = CaptureReport(planned=9, captured=1, cut_by="the limit of 2 GiB", max_size=64)
    folder = save(make_model("llama"), tmp_path)
    told: list[str] = []
    prepare = build.prepare_runner

    def prepare_runner(setup: Setup, part: Any, runner: Any, *arguments: Any) -> None:
        prepare(setup, part, runner, *arguments)
        runner.decode.graphs = SimpleNamespace(report=report)

    monkeypatch.setattr(build, "prepare_runner", prepare_runner)
    build_engine(
        resolve_setup(
            Setup(ModelConfig(str(folder)), CacheConfig(num_blocks=4), SchedulerConfig())
        ),
        on_warning=told.append,
    )
    (warning,) = told
    assert "captured 1 of 9 CUDA graphs" in warning and "the limit of 2 GiB ended it" in warning


@pytest.mark.parametrize(
    ("dtype", "width", "told"), [("fp8", 64, True), ("bf16", 64, False), ("fp8", 2048, False)]
)
def test_narrow_models_in_fp8_say_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, width: int, told: bool
) -> None:
    folder = save(make_model("llama"), tmp_path)
    setup = resolve_setup(Setup(ModelConfig(str(folder)), CacheConfig(), SchedulerConfig()))
    spec = replace(open_checkpoint(folder).spec, hidden_size=width)
    part = SimpleNamespace(
        checkpoint=SimpleNamespace(spec=spec, path=folder, describe=str),
        network=SimpleNamespace(num_bytes=0),
        max_model_len=setup.scheduler.max_model_len,
        **dict.fromkeys(("mtp", "num_blocks", "kv_tokens", "groups")),
    )
    graphs = SimpleNamespace(decode=SimpleNamespace(graphs=None))
    monkeypatch.setattr(build, "load_part", lambda *_: part)
    monkeypatch.setattr(build, "make_runner", lambda *_: graphs)
    for name in ("make_rebalancer", "prepare_runner", "make_engine"):
        monkeypatch.setattr(build, name, lambda *_: None)
    warnings: list[str] = []
    as_asked = replace(setup, model=replace(setup.model, dtype=dtype))  # type: ignore[arg-type]
    build_engine(as_asked, on_warning=warnings.append)
    assert [f"this one is {width} wide" in warning for warning in warnings] == [True] * told


def test_a_cache_type_that_the_device_lacks_is_named(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    with pytest.raises(ModelLoadError, match="kv_cache_dtype fp8 does not run on cpu: use fp32"):
        build_engine(
            resolve_setup(
                Setup(ModelConfig(str(folder)), CacheConfig(dtype="fp8"), SchedulerConfig())
            )
        )


def test_the_cache_of_int8_is_fp16(tmp_path: Path) -> None:
    folder = str(save(make_model("llama"), tmp_path / "llama"))
    cache, found = CacheConfig(num_blocks=8), {}
    for dtype, asked in (("int8", cache), ("fp32", cache), ("int8", replace(cache, dtype="fp32"))):
        setup = Setup(ModelConfig(folder, dtype), asked, SchedulerConfig())
        built = build_engine(resolve_setup(setup))
        found[dtype, asked.dtype] = built.kv_dtype
    assert list(found.values()) == ["fp16", "fp32", "fp32"]
    latent = str(save(make_model("deepseek-v3"), tmp_path / "deepseek"))
    with pytest.raises(ModelLoadError, match="fp16 does not run with latent attention: use fp32"):
        resolve_setup(Setup(ModelConfig(latent), replace(cache, dtype="fp16"), SchedulerConfig()))


def test_invariance_without_fused_kernels_is_refused(tmp_path: Path) -> None:
    execution = ExecutionConfig(fused_kernels=False, batch_invariant=True)
    with pytest.raises(ModelLoadError, match="batch_invariant needs the fused kernels"):
        build_engine(
            resolve_setup(
                Setup(ModelConfig(str(tmp_path)), CacheConfig(), SchedulerConfig(), execution)
            )
        )
