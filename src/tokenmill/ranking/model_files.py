"""A ranking model as a folder: config.json, and model.safetensors with dense part and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints.weights import naming
from tokenmill.models.hstu import HstuModel, dense_tensors
from tokenmill.ranking.model import COUNTS, TABLES, RankingModel, check_store
from tokenmill.ranking.spec_file import CONFIG, read_spec
from tokenmill.ranking.stores.opening import check_memory, open_table
from tokenmill.ranking.stores.store import EmbeddingStore, TableSpec
from tokenmill.ranking.stores.table import DeviceTable

WEIGHTS = "model.safetensors"
_TABLE = "tables."  # and the name of one
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}  # of the stream
FP8_CAPABILITY = (8, 9)  # of a GPU with products in fp8


def save_model(model: RankingModel, folder: Path) -> None:
    """Write a model whose tables fit into memory."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(model.dense.tensors)
    for name in TABLES:
        store = model.stores[name]
        tensors[_TABLE + name] = store.lookup(torch.arange(store.spec.num_rows))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    text = json.dumps(model.spec.config(), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def load_model(
    folder: Path,
    dtype: str = "fp32",
    device: str = "cpu",
    elsewhere: Mapping[str, str] | None = None,
    cache_rows: int = 0,
    **levers: Any,
) -> RankingModel:
    """The model of a folder; an error names the file, and the field or tensor that is wrong.

    Tables that lie `elsewhere` are opened at their paths instead of being read from the folder.
    """
    spec, tensors = read_spec(folder), _read_weights(folder)
    tables = {name: tensors.pop(_TABLE + name, None) for name in TABLES}
    stores = _stores_elsewhere(spec, elsewhere or {}, device, cache_rows)
    for name, table in tables.items():
        if table is not None and name not in stores:
            stores[name] = DeviceTable(table.to(device))
    return RankingModel(_dense(folder, spec, tensors, dtype, device, levers), stores)


def table_paths(given: Sequence[str], cache_rows: int) -> dict[str, str]:
    """--table item=PATH as a dictionary; --cache-rows is for such a table."""
    found = dict(text.partition("=")[::2] for text in given)
    for name, path in found.items():
        if name not in TABLES or not path:
            raise ModelLoadError(
                f"--table {name}={path} is not NAME=PATH with a name of {', '.join(TABLES)}: type "
                "such as --table item=items.npy"
            )
    if cache_rows and not found:
        raise ModelLoadError(
            f"--cache-rows {cache_rows} needs a table to cache: add such as --table item=items.npy"
        )
    return found


def _stores_elsewhere(
    spec: HstuSpec, paths: Mapping[str, str], device: str, cache_rows: int
) -> dict[str, EmbeddingStore]:
    stores: dict[str, EmbeddingStore] = {}
    for name, path in paths.items():
        stores[name] = open_table(path, device, cache_rows)
        with naming(Path(path)):
            check_store(name, stores[name], spec)
    return stores


def load_beside(model: RankingModel, folder: Path, dtype: str, **levers: Any) -> RankingModel:
    """The dense part of a folder in another type, over the tables that a model has open."""
    tensors, device = _read_weights(folder), model.dense.device
    for name in TABLES:
        tensors.pop(_TABLE + name, None)
    dense = _dense(folder, model.spec, tensors, dtype, device, levers)
    return RankingModel(dense, model.stores)


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as fault:
        raise ModelLoadError(f"{folder / WEIGHTS}: cannot be read: {fault}") from None


def _dense(
    folder: Path,
    spec: HstuSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: str,
    device: str | torch.device,
    levers: Mapping[str, Any],
) -> HstuModel:
    with naming(folder / WEIGHTS):
        dense = {name: tensor.to(device, DTYPES[dtype]) for name, tensor in tensors.items()}
        return HstuModel(spec, dense, fp8=dtype == "fp8", **levers)


def random_model(
    spec: HstuSpec,
    dtype: str = "fp32",
    device: str = "cpu",
    seed: int = 0,
    elsewhere: Mapping[str, str] | None = None,
    cache_rows: int = 0,
    **levers: Any,
) -> RankingModel:
    """A model of this shape whose scores mean nothing; tables are fp16, as the benchmark's."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...], scale: float, kind: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=kind, device=device)
        return tensor.normal_(0, scale, generator=generator)

    stores = _stores_elsewhere(spec, elsewhere or {}, device, cache_rows)
    counts = {name: getattr(spec, COUNTS[name]) for name in TABLES if name not in stores}
    need = sum(TableSpec(count, spec.embedding_dim).num_bytes for count in counts.values())
    told = ", ".join(f"{COUNTS[name]} {count}" for name, count in counts.items())
    what = f"random tables of {spec.embedding_dim} columns ({told})"
    instead = "lower these numbers in config.json, or give --table item=PATH"
    check_memory(need, device, what, instead)
    dense = {
        name: normal(shape, 0.5 / max(shape) ** 0.5, DTYPES[dtype])
        for name, shape in dense_tensors(spec).items()
    }
    for name, count in counts.items():
        stores[name] = DeviceTable(normal((count, spec.embedding_dim), 1.0, torch.float16))
    return RankingModel(HstuModel(spec, dense, fp8=dtype == "fp8", **levers), stores)


def choose_device(name: str) -> str:
    """The GPU where there is one, if the choice is left open."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ModelLoadError("--device cuda: torch sees no GPU here; use --device cpu")
    if name != "auto":
        return name
    return "cuda" if found else "cpu"


def choose_dtype(name: str, device: str) -> str:
    """bf16 on a GPU, where the kernels take nothing wider, if the choice is left open."""
    if name == "auto":
        return "bf16" if device == "cuda" else "fp32"
    if name not in DTYPES:
        raise ModelLoadError(f"--dtype {name}: ranking models have {', '.join(DTYPES)}")
    if name == "fp8" and device == "cuda":
        found = torch.cuda.get_device_capability()
        if found < FP8_CAPABILITY:
            raise ModelLoadError(
                f"--dtype fp8 needs a GPU of compute capability {_version(FP8_CAPABILITY)} or "
                f"more, this one has {_version(found)}: use --dtype bf16"
            )
    return name


def _version(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
