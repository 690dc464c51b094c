"""Tables by their path: made, loaded from a file, checked, and opened as the store that fits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tokenmill.kernels.embedding import WAYS
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable, available_bytes
from tokenmill.ranking.stores.store import EmbeddingError, EmbeddingStore, TableSpec, type_name
from tokenmill.ranking.stores.table import DeviceTable
from tokenmill.ranking.stores.table_files import PIECE_BYTES, SUFFIXES, RowFile, open_rows
from tokenmill.ranking.stores.table_folder import DESCRIPTION, KINDS, TableFolder

CACHED_SHARE = 10  # a cache has a tenth of the table's rows where none is asked for


@dataclass(frozen=True, slots=True)
class TableReport:
    kind: str  # file or folder
    spec: TableSpec
    disk_bytes: int
    num_not_finite: int  # rows with a NaN or an infinity


def create_table(path: Path | str, spec: TableSpec) -> None:
    TableFolder.create(path, torch.zeros(1, dtype=spec.dtype).expand(*_shape(spec))).close()


def load_table(path: Path | str, rows: RowFile, dtype: torch.dtype | None = None) -> TableSpec:
    """A new table with the rows of a file, converted where another type is asked for."""
    spec = replace(rows.spec, dtype=dtype or rows.spec.dtype)
    if spec.dtype not in KINDS.values():
        raise EmbeddingError(
            f"{rows.path} holds {type_name(spec.dtype)}, which tables do not: convert it by "
            "--table-dtype float32"
        )
    table = HostTable.create(spec)
    try:
        _fill(table.table, rows)
        TableFolder.create(path, table.table).close()
    finally:
        table.close()
    return spec


def check_table(path: Path | str) -> TableReport:
    """Read every row, and what updates there are in logs."""
    path = Path(path)
    kind = kind_of(path)
    store = open_table(path, "cpu")
    spec = store.spec
    step, wrong = max(1, PIECE_BYTES // spec.row_bytes), 0
    for start in range(0, spec.num_rows, step):
        ids = torch.arange(start, min(start + step, spec.num_rows))
        wrong += int((~torch.isfinite(store.lookup(ids))).any(dim=1).sum())
    store.close()
    files = [path] if path.is_file() else list(path.iterdir())
    return TableReport(kind, spec, sum(file.stat().st_size for file in files), wrong)


def open_table(
    path: Path | str,
    device: torch.device | str,
    cache_rows: int = 0,
    spec: TableSpec | None = None,
) -> EmbeddingStore:
    """The table at a path, whose rows come to `device`; `spec` is what it must be.

    A file is a whole table on the device, or in the host's memory behind a cache of cache_rows.
    A folder is in the host's memory, once for all processes that open it. On a GPU it has a
    cache, of a tenth of its rows unless cache_rows says how many.
    """
    path, device = Path(path), torch.device(device)
    kind = kind_of(path)
    if kind == "file":
        rows = open_rows(path)
        rows.check(spec or rows.spec)
        if not cache_rows:
            what = f"the table {path} ({rows.spec})"
            instead = "load it by tokenmill embeddings load into the host's memory"
            check_memory(rows.spec.num_bytes, device, what, instead)
            table = torch.empty(_shape(rows.spec), dtype=rows.spec.dtype, device=device)
            _fill(table, rows)
            return DeviceTable(table)
        host = HostTable.create(rows.spec)
        _fill(host.table, rows)
        return _cached(host, cache_rows, device)
    backing = HostTable.open_or_attach(path, spec)
    if device.type == "cpu" and not cache_rows:
        return backing
    return _cached(backing, cache_rows, device)


def check_memory(need: int, device: torch.device | str, what: str, instead: str) -> None:
    """An error before the start where a device has fewer bytes than `what` will take."""
    device = torch.device(device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    if need > free:
        raise EmbeddingError(
            f"memory for {what}: {need / 2**30:.1f} GiB are needed on {device.type} and "
            f"{free / 2**30:.1f} GiB are free; {instead}"
        )


def kind_of(path: Path) -> str:
    """What lies at a path: a file of rows, or a folder with a log."""
    if path.suffix in SUFFIXES:
        return "file"
    if (path / DESCRIPTION).is_file():
        return "folder"
    raise EmbeddingError(
        f"{path} is not a table: give a .safetensors or .npy file, or a folder that `tokenmill "
        "embeddings create` or `load` has made"
    )


def _cached(backing: HostTable, cache_rows: int, device: torch.device) -> CachedTable:
    if device.type == "cuda":
        backing.pin()
    return CachedTable(backing, _slots(backing.spec, cache_rows), device)


def _slots(spec: TableSpec, cache_rows: int) -> int:
    rows = cache_rows or spec.num_rows // CACHED_SHARE
    return max(1, -(-rows // WAYS)) * WAYS


def _fill(table: torch.Tensor, rows: RowFile) -> None:
    for start, piece in rows.pieces():
        table[start : start + len(piece)] = piece.to(table.dtype)


def _shape(spec: TableSpec) -> tuple[int, int]:
    return spec.num_rows, spec.dim
