"""tokenmill bench kv-transfer and kv-tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.core.config import ModelConfig
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    SCHEDULER,
    SETTINGS,
    Settings,
    SettingsError,
)

if TYPE_CHECKING:
    from tokenmill.bench.kv_tiers_load import Load

PANELS = {
    "Benchmark": tuple(
        SETTINGS[key]
        for key in ("model", "kv-connector", "block-size", "kv-tokens", "rounds", "json-only")
    )
}


def kv_transfer(settings: Settings) -> None:
    """Speed of KV blocks between two processes, beside a plain copy of the same size.

    The blocks come from a second process: one block, eight times as many and so
    on, up to --kv-tokens. They are first contiguous, as in a fresh cache, then
    scattered. Without --kv-connector every installed connector is measured;
    those of cuda-ipc lie on a GPU, whose own time is given in brackets: the rest
    is the host's, such as the launch and the wait for the end.

    tokenmill bench kv-transfer
    tokenmill bench kv-transfer --kv-connector nixl --kv-tokens 8192
    tokenmill bench kv-transfer --kv-connector cuda-ipc --model llama3.1-8b --block-size 64
    """
    from tokenmill.bench.commands.throughput import model_path
    from tokenmill.bench.kv_transfer_pair import connectors, measure, read_spec

    spec = read_spec(model_path(ModelConfig(settings.get("model"), random_weights=True)))
    block_size = settings.get("block-size") or 16
    num_blocks = -(-settings.get("kv-tokens") // block_size)
    names = connectors(settings.get("kv-connector"))
    rounds = settings.get("rounds") or 5
    report = measure(spec, names, block_size, num_blocks, rounds)
    if not settings.get("json-only"):
        rows = [["connector", "MB", "side by side", "scattered", "plain copy", "of a copy"]]
        for name, result in report["connectors"].items():
            for size in result["by_size"]:
                figures = [_gb_s(size, kind) for kind in ("contiguous", "scattered", "copy")]
                rows.append([name, f"{size['bytes'] / 1e6:.1f}", *figures, f"{size['ratio']:.0%}"])
        console.print_table(rows)
    console.print_json(report)


def _gb_s(size: dict[str, Any], kind: str) -> str:
    """A rate from call to end, and that of the kernel alone where it was measured."""
    kernel = f" ({size[f'{kind}_kernel']:.0f})" if f"{kind}_kernel" in size else ""
    return f"{size[kind]:.2f}{kernel} GB/s"


OWN = ("conversations", "conversation-turns", "turn-tokens", "answer-tokens", "num-users",
       "working-set")  # fmt: skip
TRACE = (
    replace(
        SETTINGS["trace"],
        help="Mooncake trace whose conversations are replayed: its order, lengths and prefixes.",
        owner=None,
        default=None,
    ),
    *(SETTINGS[key] for key in ("trace-scale", "trace-block-tokens")),
)
TIER_PANELS = {
    "Benchmark": (
        *(SETTINGS[key] for key in OWN),
        *TRACE,
        SETTINGS["time-limit"],
        SETTINGS["json-only"],
    ),
    "Model": MODEL,
    "KV cache": CACHE,
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
}
# Turns of a GPU are so long that computing them takes longer than decoding.
BY_DEVICE = {
    "cpu": {"turn-tokens": 112, "answer-tokens": 16, "num-users": 2},
    "cuda": {"turn-tokens": 992, "answer-tokens": 32, "num-users": 4},
}


def kv_tiers(settings: Settings) -> None:
    """TTFT of conversations that the device cannot hold, with KV tiers and without.

    The KV of all conversations is 4 times the device's (--working-set), and each
    comes back after others have spoken: without tiers its prompt is computed
    anew. The same requests run three times: with --kv-offloading; without it
    (off); and so that nothing at all is cached (recompute). Unless it is given,
    host memory has room for all. Figures go to stderr as they come. Copies of
    blocks are measured beside a plain copy of as many bytes.

    With --trace the requests are those of the first --conversations of a
    Mooncake trace that have several turns, in the trace's order, and
    --num-users of them are in flight at a time. --time-limit leaves out the last
    requests where there is no time for them.

    tokenmill bench kv-tiers
    tokenmill bench kv-tiers --kv-offloading host=64MiB,disk=/var/kv:10GiB
    tokenmill bench kv-tiers --trace recipes/conversation-trace.jsonl --trace-scale 0.05
    tokenmill bench kv-tiers --model llama3.1-8b --random-weights --device cuda
    """
    from tokenmill.bench.commands.throughput import model_path
    from tokenmill.bench.kv_tiers_run import host_bytes, measure
    from tokenmill.engine.choices import choose_device, resolve_setup

    asked = settings.setup()
    model = replace(asked.model, model=str(model_path(asked.model)))
    load = _load(settings, BY_DEVICE[choose_device(model)])
    # Graphs are captured for as many requests as there are.
    scheduler = replace(asked.scheduler, max_num_seqs=asked.scheduler.max_num_seqs or load.at_once)
    setup = resolve_setup(replace(asked, model=model, scheduler=scheduler))
    if setup.cache.offloading is None:
        tiers = f"host={host_bytes(setup, load)}"
        setup = resolve_setup(replace(setup, cache=replace(setup.cache, offloading=tiers)))
    limit_s = settings.get("time-limit")
    report = measure(setup, load, settings.get("working-set"), console.note, limit_s)
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


def _load(settings: Settings, defaults: dict[str, int]) -> Load:
    """The requests: of a trace, or synthetic ones."""
    from tokenmill.bench.kv_tiers_load import Conversations, trace_load

    path = settings.get("trace")
    values: dict[str, int] = {key: settings.get(key) or defaults[key] for key in OWN[:-1]}
    if path is None:
        return Conversations(*values.values())
    for key in ("conversation-turns", "turn-tokens"):
        if key in settings:
            raise SettingsError(
                f"--{key}: leave it out, the trace has its own; or leave out --trace"
            )
    return trace_load(
        path,
        settings.get("trace-block-tokens"),
        settings.get("trace-scale"),
        values["conversations"],
        values["answer-tokens"],
        values["num-users"],
    )


def _print(report: dict[str, Any]) -> None:
    rows = [["tiers", "TTFT mean", "p99", "prompt tokens", "computed", "seconds"]]
    for name, run in report["runs"].items():
        ttft = run["ttft_ms"]
        rows.append([name, f"{ttft['mean']:.0f} ms", f"{ttft['p99']:.0f} ms",
                     f"{run['prompt_tokens']:,}", f"{run['computed_tokens']:,}",
                     f"{run['seconds']:.1f}"])  # fmt: skip
    console.print_table(rows)
    console.out.print(
        f"the same answers: {report['same_answers']} of {report['num_requests']}", markup=False
    )


COMMANDS = (
    BenchCommand("kv-transfer", kv_transfer, PANELS),
    BenchCommand("kv-tiers", kv_tiers, TIER_PANELS),
)
