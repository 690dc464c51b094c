"""tokenmill embeddings create | load | check: the tables of a recommender."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from tokenmill import console
from tokenmill.core.flags import count, setting
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.help_page import HelpGroup
from tokenmill.settings.options import command
from tokenmill.settings.shared import JsonOption


@dataclass(frozen=True, slots=True)
class TableType:
    table_dtype: Literal["float16", "bfloat16", "float32"] | None = setting(
        None, "Type of the table's values (float16, or that of the file)."
    )


@dataclass(frozen=True, slots=True)
class TableShape:
    table_rows: int | None = setting(None, "Rows of the table.", count(16))
    table_columns: int = setting(512, "Columns of the table.", count(1))


@dataclass(frozen=True, slots=True)
class TensorOption:
    tensor: str | None = setting(None, "Tensor of the safetensors file that is the table.")


GROUP_HELP = "Create, load and check embedding tables."

Folder = Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of the table.")]
File = Annotated[str, typer.Argument(metavar="FILE", help="A .safetensors or .npy file.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=HelpGroup, no_args_is_help=True, rich_markup_mode="rich")
    command(group, "create", {"Table": (TableShape, TableType)})(create)
    command(group, "load", {"Table": (TensorOption, TableType)})(load)
    command(group, "check", {"Output": JsonOption})(check)
    app.add_typer(group, name="embeddings", help=GROUP_HELP)


def create(settings: Settings, folder: Folder) -> None:
    """Make a table of zeros.

    tokenmill embeddings create items --table-rows 1000000
    """
    from tokenmill.ranking.stores.opening import create_table
    from tokenmill.ranking.stores.store import TableSpec
    from tokenmill.ranking.stores.table_folder import KINDS

    num_rows = settings.get("table-rows")
    if num_rows is None:
        raise SettingsError("a new table needs --table-rows, such as --table-rows 1000000")
    dtype = KINDS[settings.get("table-dtype") or "float16"]
    spec = TableSpec(num_rows, settings.get("table-columns"), dtype)
    create_table(folder, spec)
    console.out.print(f"{folder}: {spec}, {spec.num_bytes / 1e6:,.1f} MB of rows", markup=False)


def load(settings: Settings, file: File, folder: Folder) -> None:
    """Make a table of a file's rows, which are read a piece at a time.

    tokenmill embeddings load items.npy items
    tokenmill embeddings load model.safetensors items --tensor item_embedding.weight
    """
    from tokenmill.ranking.stores.opening import load_table
    from tokenmill.ranking.stores.table_files import open_rows
    from tokenmill.ranking.stores.table_folder import KINDS

    wanted = settings.get("table-dtype")
    rows = open_rows(file, settings.get("tensor"))
    spec = load_table(folder, rows, KINDS[wanted] if wanted else None)
    console.out.print(f"{folder}: {spec}, from {file}", markup=False)


def check(settings: Settings, folder: Folder) -> None:
    """Read every row of a table and all updates in its log, and say what is there.

    tokenmill embeddings check items
    """
    from tokenmill.ranking.stores.opening import check_table
    from tokenmill.ranking.stores.store import type_name

    report = check_table(folder)
    if settings.get("json"):
        fields = {"kind": report.kind, "rows": report.spec.num_rows, "columns": report.spec.dim}
        counts = {"disk_bytes": report.disk_bytes, "rows_not_finite": report.num_not_finite}
        console.print_json(
            {**fields, "dtype": type_name(report.spec.dtype), **counts}, settings.get("json")
        )
        return
    console.out.print(
        f"{folder}: {report.kind}, {report.spec}, {report.disk_bytes / 1e6:,.1f} MB on disk; "
        f"{report.num_not_finite} rows are not finite",
        markup=False,
    )
