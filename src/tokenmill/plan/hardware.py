"""The GPUs that a plan can be made for: hardware.toml, and a file of the user's own."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.core.types import TokenmillError

TABLE = Path(__file__).parent / "hardware.toml"
GIGA, TERA, GIB = 1e9, 1e12, 2**30
_NEEDED = ("memory-gb", "memory-tb-s", "bf16-tflops", "node-gpus")
_NUMBERS = (
    *_NEEDED,
    *(
        "int8-tflops",
        "fp8-tflops",
        "fp4-tflops",
        "link-gb-s",
        "network-gb-s",
        "domain-gpus",
        "power-w",
    ),
    *("price-per-gpu-hour", "measured-memory-tb-s", "measured-bf16-tflops", "measured-fp8-tflops"),
)
_TEXTS = ("name", "price-date", "price-source")
_COUNTS = ("node-gpus", "domain-gpus")


class PlanError(TokenmillError):
    """A plan cannot be made: what is wrong, by how much, and what would work."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU at its peak, and how it is connected."""

    key: str
    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: dict[str, float]  # FLOP/s by type of the operands
    link_bytes_per_s: float  # to the GPUs of the same domain, one direction
    network_bytes_per_s: float  # to other domains
    node_gpus: int
    domain_gpus: int
    power_w: float
    price_per_hour: float | None
    price_note: str
    measured: dict[str, float]  # by what `bench` saw: memory_bytes_per_s, bf16, fp8

    def peak(self, dtype: str) -> float:
        """FLOP/s of a type; a GPU without it computes in the next wider one."""
        wider = {
            "fp4": ("fp4", "fp8", "bf16"),
            "fp8": ("fp8", "bf16"),
            "int8": ("int8", "bf16"),
            "bf16": ("bf16",),
        }
        return next(self.flops[name] for name in wider[dtype] if name in self.flops)

    def as_measured(self) -> Accelerator:
        """With the rates that `bench` measured in place of the datasheet's, where there are any."""
        own = {name: rate for name, rate in self.measured.items() if name in self.flops}
        memory = self.measured.get("memory_bytes_per_s", self.memory_bytes_per_s)
        return replace(self, flops=self.flops | own, memory_bytes_per_s=memory)

    def link(self, num_gpus: int) -> float:
        """Bytes per second between the GPUs of a group of this size, one direction."""
        inside = num_gpus <= self.domain_gpus
        return self.link_bytes_per_s if inside else self.network_bytes_per_s


def load_hardware(own: Path | None = None) -> dict[str, Accelerator]:
    """All known GPUs by their key; those of the user's file win."""
    known = dict(_shipped())
    if own is not None:
        known |= _read(own)
    return known


def find_gpu(name: str, own: Path | None = None) -> Accelerator:
    """The GPU of that name; an unknown one is an error that says how to add it."""
    known = load_hardware(own)
    if name.lower() not in known:
        raise PlanError(
            f"--gpu {name}: not known; known are {', '.join(known)}. Another GPU is a table "
            f"[{name.lower()}] with {', '.join(_NEEDED)} in a TOML file given by --hardware"
        )
    return known[name.lower()]


@cache
def _shipped() -> dict[str, Accelerator]:
    return _read(TABLE)


def _read(path: Path) -> dict[str, Accelerator]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"--hardware {path}: cannot be read: {error}") from None
    found = {}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise PlanError(f"{path}: {key}: expected a table such as [{key}], got {table!r}")
        _check(table, f"{path}: {key}")
        found[key.lower()] = _accelerator(key.lower(), table)
    return found


def _check(table: dict[str, Any], where: str) -> None:
    for key, value in table.items():
        if key in _TEXTS:
            if not isinstance(value, str):
                raise PlanError(f"{where}.{key}: expected a text, got {value!r}")
        elif key not in _NUMBERS:
            known = ", ".join((*_NUMBERS, *_TEXTS))
            raise PlanError(f"{where}.{key}: no such key; known are {known}")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise PlanError(f"{where}.{key}: expected a positive number, got {value!r}")
        elif key in _COUNTS and not isinstance(value, int):
            raise PlanError(f"{where}.{key}: expected a whole number of GPUs, got {value!r}")
    for key in _NEEDED:
        if key not in table:
            raise PlanError(f"{where}.{key}: is needed, a positive number")


def _accelerator(key: str, table: dict[str, Any]) -> Accelerator:
    flops = {
        dtype: table[f"{dtype}-tflops"] * TERA
        for dtype in ("bf16", "int8", "fp8", "fp4")
        if f"{dtype}-tflops" in table
    }
    scales = {
        "memory_bytes_per_s": ("measured-memory-tb-s", TERA),
        "bf16": ("measured-bf16-tflops", TERA),
        "fp8": ("measured-fp8-tflops", TERA),
    }
    link = table.get("link-gb-s", 64) * GIGA  # PCIe 5 x16 where nothing is said
    return Accelerator(
        key=key,
        name=table.get("name", key),
        memory_bytes=float(table["memory-gb"] * GIB),
        memory_bytes_per_s=table["memory-tb-s"] * TERA,
        flops=flops,
        link_bytes_per_s=link,
        network_bytes_per_s=table.get("network-gb-s", 50) * GIGA,
        node_gpus=table["node-gpus"],
        domain_gpus=table.get("domain-gpus", table["node-gpus"]),
        power_w=float(table.get("power-w", 0)),
        price_per_hour=table.get("price-per-gpu-hour"),
        price_note=", ".join(
            table[name] for name in ("price-date", "price-source") if name in table
        ),
        measured={
            name: table[field] * scale for name, (field, scale) in scales.items() if field in table
        },
    )
