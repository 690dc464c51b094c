"""tokenmill bench kv-transfer."""

from __future__ import annotations

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.settings import SETTINGS, Settings

PANELS = {
    "Benchmark": tuple(
        SETTINGS[key]
        for key in ("model", "kv-connector", "block-size", "kv-tokens", "rounds", "json-only")
    )
}


def kv_transfer(settings: Settings) -> None:
    """Speed of KV blocks between two processes, beside a plain copy of the same size.

    The blocks come from a second process. They are first contiguous, as in a
    fresh cache, then scattered. Without --kv-connector every installed
    connector is measured.

    tokenmill bench kv-transfer
    tokenmill bench kv-transfer --kv-connector nixl --kv-tokens 8192
    """
    from tokenmill.bench.kv_transfer_pair import connectors, measure, read_spec

    spec = read_spec(settings.get("model"))
    block_size = settings.get("block-size") or 16
    num_blocks = -(-settings.get("kv-tokens") // block_size)
    names = connectors(settings.get("kv-connector"))
    rounds = settings.get("rounds") or 5
    report = measure(spec, names, block_size, num_blocks, rounds)
    if not settings.get("json-only"):
        rows = [["connector", "side by side", "scattered", "plain copy", "of a copy"]]
        for name, result in report["connectors"].items():
            gb_s = result["gb_s"]
            figures = [f"{gb_s[kind]:.2f} GB/s" for kind in ("contiguous", "scattered", "copy")]
            rows.append([name, *figures, f"{result['ratio']:.0%}"])
        console.print_table(rows)
    console.print_json(report)


COMMANDS = (BenchCommand("kv-transfer", kv_transfer, PANELS),)
