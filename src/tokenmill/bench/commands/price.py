"""tokenmill bench price."""

from __future__ import annotations

from typing import Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.options import PriceOptions
from tokenmill.core.metrics import usd_per_million_tokens
from tokenmill.settings import Setting, Settings, SettingsError, settings_of
from tokenmill.settings.shared import JsonOption

FIGURES = settings_of(PriceOptions)
PANELS = {"Price": (PriceOptions, JsonOption)}


def price(settings: Settings) -> None:
    """Dollars per million output tokens for a given rate.

    The rate is that of all GPUs together at full load, and all GPUs are paid
    for every hour.

    tokenmill bench price --tok-s 250634 --gpus 72 --price-per-gpu-hour 3.76
    """
    tok_s, gpus, usd = (_given(settings, setting) for setting in FIGURES)
    if tok_s <= 0:
        raise SettingsError(f"--tok-s must be above 0, got {tok_s:g}")
    per_hour = gpus * usd
    report: dict[str, Any] = {
        "benchmark": "price",
        "output_tok_s": tok_s,
        "gpus": gpus,
        "usd_per_gpu_hour": usd,
        "usd_per_hour": round(per_hour, 5),
        "output_tok_s_gpu": round(tok_s / gpus, 5),
        "usd_per_million_output": round(usd_per_million_tokens(per_hour, tok_s), 5),
    }
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


def _given(settings: Settings, setting: Setting) -> Any:
    if setting.key not in settings:
        raise SettingsError(f"--{setting.key} is missing: {setting.help}")
    return settings.get(setting.key)


def _print(report: dict[str, Any]) -> None:
    usd, machines = report["usd_per_million_output"], f"{report['gpus']:,} GPUs"
    machines = "1 GPU" if report["gpus"] == 1 else machines
    shown = f"{usd:,.2f}" if usd >= 0.1 else f"{usd:,.4f}"
    console.out.print(f"${shown} per million output tokens", markup=False)
    console.out.print(
        f"{report['output_tok_s']:,.0f} tok/s of {machines} at ${report['usd_per_gpu_hour']:g} per "
        f"GPU and hour: ${report['usd_per_hour']:,.2f} an hour, "
        f"{report['output_tok_s_gpu']:,.1f} tok/s per GPU",
        markup=False,
    )


COMMANDS = (BenchCommand("price", price, PANELS),)
