"""tokenmill receipts: GPU time and dollars of a server's requests, by API key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tokenmill import console
from tokenmill.cli.worker_commands import call_server
from tokenmill.core.cost import Cost, usd_of
from tokenmill.core.flags import count, number, setting
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.options import command
from tokenmill.settings.shared import JsonOption, ServerAddress

if TYPE_CHECKING:
    from tokenmill.plan.recorded import RunRecord


@dataclass(frozen=True, slots=True)
class RecordOption:
    record: str | None = setting(
        None, "Read this record of `serve --record` instead of asking a server."
    )


@dataclass(frozen=True, slots=True)
class ReceiptOptions:
    price_per_gpu_hour: float | None = setting(
        None,
        "Dollars per GPU and hour; by default those that the server was started with.",
        number(0, math.inf, "USD"),
    )
    latest: int = setting(0, "Latest requests to show one by one.", count(0))


PANELS = {
    "Source": (ServerAddress, RecordOption),
    "Receipts": ReceiptOptions,
    "Output": JsonOption,
}
PARTS = ("prefill", "decode", "drafts")
SPLIT = (*PARTS, "saved")
ALONE = ("url", "control-token")  # flags of a server
Json = dict[str, Any]


def register(app: typer.Typer) -> None:
    command(app, "receipts", PANELS)(receipts)


def receipts(settings: Settings) -> None:
    """Show the GPU time and the dollars of requests, by API key; idle time makes up the rest.

    tokenmill receipts
    tokenmill receipts --price-per-gpu-hour 3.76 --latest 20
    tokenmill receipts --url http://10.0.0.1:8000 --control-token secret
    tokenmill receipts --record flight.jsonl
    """
    record = settings.values.get("record")
    if record is not None:
        both = [key for key in ALONE if key in settings]
        if both:
            raise SettingsError(f"--record reads a file: leave out --{both[0]}")
        view = _recorded(Path(record).expanduser())
    else:
        view = call_server(settings, "/workers/receipts")
    price = settings.values.get("price-per-gpu-hour", view["price_per_gpu_hour"])
    _set_price(view, price)
    latest = settings.get("latest")
    view["requests"] = view["requests"][-latest:] if latest else []
    if not settings.get("json"):
        console.print_table(list(_rows(view, price is not None)))
        if view["requests"]:
            console.out.print()
            console.print_table(list(_request_rows(view, price is not None)))
        for line in _notes(view, price):
            console.note(line)
    console.print_json(view, settings.get("json"))


def _set_price(view: Json, price: float | None) -> None:
    """Put dollars beside all GPU time, or nowhere."""
    view["price_per_gpu_hour"] = price
    parts = [each["receipt"] for each in (*view["keys"], *view["requests"])]
    for receipt in (view, *parts):
        receipt.pop("usd", None)
        if price is not None:
            receipt["usd"] = usd_of(receipt["gpu_seconds"], price)


def _rows(view: Json, priced: bool) -> Iterator[list[str]]:
    yield ["key", "requests", *(f"{part} s" for part in PARTS), "GPU s", "share", "saved s"] + (
        ["$"] if priced else []
    )
    total_s = view["gpu_seconds"]
    for key in view["keys"]:
        receipt = key["receipt"]
        yield [key["key"], str(key["num_requests"]), *_cells(receipt, total_s, priced)]
    price = view["price_per_gpu_hour"]
    for name, gpu_s in (
        ("not told yet", view["untold_gpu_seconds"]),
        ("idle", view["idle_gpu_seconds"]),
        ("all", total_s),
    ):
        usd = [_usd(usd_of(gpu_s, price))] if priced else []
        yield [name, "", "", "", "", _seconds(gpu_s), _share(gpu_s, total_s), "", *usd]


def _request_rows(view: Json, priced: bool) -> Iterator[list[str]]:
    heads = [*(f"{part} s" for part in PARTS), "GPU s", "share", "saved s"]
    yield ["request", "key", *heads, *(["$"] if priced else [])]
    for each in view["requests"]:
        cells = _cells(each["receipt"], view["gpu_seconds"], priced)
        yield [each["request_id"], each["key"], *cells]


def _cells(receipt: Json, total_s: float, priced: bool) -> list[str]:
    gpu_s = receipt["gpu_seconds"]
    parts = [_seconds(receipt[f"{part}_gpu_seconds"]) for part in PARTS]
    saved = _seconds(receipt["saved_gpu_seconds"])
    usd = [_usd(receipt["usd"])] if priced else []
    return [*parts, _seconds(gpu_s), _share(gpu_s, total_s), saved, *usd]


def _seconds(value: float) -> str:
    return f"{value:.3f}"


def _usd(value: float) -> str:
    return f"{value:.6f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _notes(view: Json, price: float | None) -> Iterator[str]:
    num_gpus = view["num_gpus"]
    yield f"{num_gpus} GPUs (on CPU: processes that compute) run now; saved time is not charged"
    if price is None:
        yield (
            "there is no price, so these are GPU-seconds only: "
            "give --price-per-gpu-hour here or to serve"
        )


def _recorded(path: Path) -> Json:
    """A record in the shape of a server's answer; it does not know keys."""
    from tokenmill.plan.recorded import RecordError, read_record

    record = read_record(path)
    ended = [request for request in record.requests if request.reason is not None]
    if any(request.cost is None for request in ended):
        raise RecordError(f"{path}: was made by a version that did not record costs")
    costs = [request.cost or Cost() for request in ended]
    total = Cost()
    for cost in costs:
        total.add(cost)
    gpu_s = _recorded_s(record) * record.num_gpus
    return {
        "price_per_gpu_hour": None,
        "num_gpus": record.num_gpus,
        "gpu_seconds": gpu_s,
        "idle_gpu_seconds": gpu_s - total.spent_s,
        "untold_gpu_seconds": 0.0,
        "keys": [{"key": "all", "num_requests": len(ended), "receipt": _receipt(total)}],
        "requests": [
            {"request_id": str(request.number), "key": "-", "receipt": _receipt(cost)}
            for request, cost in zip(ended, costs, strict=True)
        ],
    }


def _recorded_s(record: RunRecord) -> float:
    """From the first step to the end of the last one."""
    began = [event[1] for event in record.events if event[0] == "schedule"]
    ended = [event[3] for event in record.events if event[0] == "update"]
    return (ended[-1] - began[0]) / 1e9 if began and ended else 0.0


def _receipt(cost: Cost) -> Json:
    split = {f"{part}_gpu_seconds": getattr(cost, f"{part}_s") for part in SPLIT}
    return {"gpu_seconds": cost.spent_s, **split}
