"""tokenmill plan attention-dp."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.cli.plan.plan_predict import GPU, own_file
from tokenmill.core.bench_config import BenchConfig
from tokenmill.settings import SETTINGS, Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.plan.attention_dp_simulator import RanksConfig
    from tokenmill.plan.rank_cost import RankCost
    from tokenmill.routing.attention_dp import ContextPolicy

POLICY = (
    *("balance", "timeout-iters", "batching-wait-iters", "compare-policies"),
    *("search", "ttft-limit-ms"),
)
PANELS = {
    "Ranks": (
        SETTINGS["ranks"],
        replace(GPU, help="GPU of a rank: measured rates of H200, the others by datasheet."),
        SETTINGS["hardware"],
        replace(SETTINGS["max-num-seqs"], help="Most requests that a rank runs at once."),
        replace(SETTINGS["max-num-batched-tokens"], help="Most tokens of a rank in one step."),
    ),
    "Load": (
        replace(
            SETTINGS["lengths"],
            help="Lengths of the requests: a CSV file of input_length,output_length, a shipped "
            "name, or uniform:100-1024.",
        ),
        replace(SETTINGS["output-len"], help="Tokens of every answer, whatever --lengths say."),
        SETTINGS["max-output-len"],
        replace(
            SETTINGS["concurrency"],
            help="Requests at any time, those that wait included; as many as run, if not given.",
        ),
        replace(SETTINGS["seed"], help="Same seed, same requests."),
    ),
    "Policy": tuple(SETTINGS[key] for key in POLICY),
    "Output": (SETTINGS["num-steps"], SETTINGS["json-only"]),
}
DEFAULTS = {
    "gpu": "gb200",
    "lengths": "deepseek-r1",
    "max-num-seqs": 512,
    "max-num-batched-tokens": 4608,
    "num-steps": 1000,
    "seed": 0,
}
BLOCK_SIZE = 64
PREDICTION = (
    "predicted: a roofline of one rank's attention, shared and routed experts and exchange; "
    "launches, norms, sampling and uneven experts cost nothing"
)
# What --search tries: (timeout, batching wait) in steps, and budgets over the mean prompt load.
WAITS = ((25, 0), (50, 0), (100, 0), (200, 0), (50, 10), (100, 20))
SLACKS = (1.25, 1.5, 2.0, 4.0)
COMPARED_SLACK, COMPARED_INTERVAL, COMPARED_DELAY = 1.5, 20, 30

Run = tuple["RanksConfig", "ContextPolicy"]


def attention_dp(settings: Settings) -> None:
    """Ranks that share DeepSeek-R1's experts, with prompts held or not.

    Every rank has its own requests, and all step together: one that computes
    a prompt makes the others wait. Schedulers and block pools are the real
    ones, the time of a step is a roofline. Whoever has its answer asks again.

    tokenmill plan attention-dp --concurrency 5120
    tokenmill plan attention-dp --ranks 72 --gpu gb300 --max-num-seqs 128
    """
    from tokenmill.plan.attention_dp_simulator import Ranks

    begin = time.process_time()
    lengths = _lengths(settings)
    config, cost = _pool(settings)
    console.note(
        f"{config.num_ranks} ranks of {settings.get('gpu')}, {config.concurrency} requests, "
        f"{config.num_steps} steps"
    )
    runs = {}
    for name, (own, policy) in _candidates(settings, config, lengths).items():
        runs[name] = Ranks(lengths, own, cost, policy).run()
        console.note(f"{name}: {runs[name]['output_tok_s']:,.0f} tokens/s")
    base = runs["none"]["output_tok_s"]
    for run in runs.values():
        run["speedup"] = round(run["output_tok_s"] / base, 4)
    report = {
        "plan": "attention-dp",
        "model": "deepseek-r1",
        "gpu": settings.get("gpu"),
        "lengths": settings.get("lengths"),
        **asdict(config),
        "time": PREDICTION,
        "runs": runs,
    }
    if settings.get("search"):
        report["search"] = _search_result(runs, settings.get("ttft-limit-ms"))
    report["cpu_s"] = round(time.process_time() - begin, 2)
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


def _lengths(settings: Settings) -> list[tuple[int, int]]:
    from tokenmill.bench.workload import make_cells

    config = BenchConfig(lengths=settings.get("lengths"), output_len=settings.get("output-len"))
    longest = settings.get("max-output-len")
    return [(length, min(output, longest)) for length, output in make_cells(config)[0].lengths]


def _pool(settings: Settings) -> tuple[RanksConfig, RankCost]:
    from tokenmill.bench import workload
    from tokenmill.models import spec_of
    from tokenmill.plan.attention_dp_simulator import RanksConfig
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.rank_cost import RankCost

    shape = Path(workload.__file__).parent / "shapes" / "deepseek-r1.json"
    spec = spec_of(json.loads(shape.read_text(encoding="utf-8")))
    num_ranks, gpu = (
        settings.get("ranks"),
        find_gpu(settings.get("gpu"), own_file(settings, "hardware")),
    )
    cost = RankCost(spec, gpu, num_ranks)
    kv_tokens = cost.kv_tokens(settings.get("max-num-seqs"))
    if kv_tokens < BLOCK_SIZE:
        raise SettingsError(f"--ranks {num_ranks}: the weights do not fit into so many {gpu.name}")
    asked = settings.get("concurrency")
    if asked and len(asked) > 1:
        raise SettingsError("--concurrency: expected one number")
    config = RanksConfig(
        num_ranks=num_ranks,
        concurrency=asked[0] if asked else num_ranks * settings.get("max-num-seqs"),
        max_num_seqs=settings.get("max-num-seqs"),
        max_num_batched_tokens=settings.get("max-num-batched-tokens"),
        num_blocks=kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_steps=settings.get("num-steps"),
        seed=settings.get("seed"),
        windows=spec.layer_windows,
    )
    return config, cost


def _candidates(
    settings: Settings, config: RanksConfig, lengths: list[tuple[int, int]]
) -> dict[str, Run]:
    """What to run, by name."""
    from tokenmill.plan.attention_dp_simulator import prompt_budget
    from tokenmill.routing.attention_dp import (
        ContextBalancer,
        DelayPolicy,
        IntervalPolicy,
        NeverHold,
    )

    given = settings.get("timeout-iters"), settings.get("batching-wait-iters")
    waits, slacks = [(given[0], 0), given], []
    if settings.get("compare-policies"):
        slacks = [COMPARED_SLACK]
    if settings.get("search"):
        waits, slacks = [*waits, *WAITS], [*SLACKS]
    runs: dict[str, Run] = {"none": (config, NeverHold())}
    for timeout, wait in waits if settings.get("balance") else ():
        name = f"timeout {timeout}" + (f", batching {wait}" if wait else "")
        runs[name] = config, ContextBalancer(config.max_num_seqs, timeout, wait)
    if settings.get("compare-policies"):
        runs[f"every {COMPARED_INTERVAL}th step"] = config, IntervalPolicy(COMPARED_INTERVAL)
        runs[f"delay {COMPARED_DELAY}"] = config, DelayPolicy(COMPARED_DELAY)
    for slack in slacks:
        budget = prompt_budget(lengths, config.max_num_seqs, slack)
        own = replace(config, max_num_batched_tokens=min(budget, config.max_num_batched_tokens))
        runs[f"none, {own.max_num_batched_tokens} tokens a step"] = own, NeverHold()
    return runs


def _search_result(runs: dict[str, Any], limit_ms: float) -> dict[str, Any]:
    """The fastest of those whose first tokens come in time; `best` is None where none does."""
    within = {
        name: run["output_tok_s"]
        for name, run in runs.items()
        if run["placed_to_first_token_ms"].get("p99", 0) <= limit_ms
    }
    return {"ttft_limit_ms": limit_ms, "best": max(within, key=within.__getitem__, default=None)}


def _print(report: dict[str, Any]) -> None:
    columns = ("tokens/s", "speed-up", "balance", "even", "SOL", "step ms", "first token ms", "p99")
    rows = [["predicted", *columns]]
    for name, run in report["runs"].items():
        first = run["placed_to_first_token_ms"]
        rows.append(
            [
                f"prompts held: {name}",
                f"{run['output_tok_s']:,.0f}",
                f"{run['speedup']:.2f}",
                f"{run['balance']:.1%}",
                f"{run['even_tok_s']:,.0f}",
                f"{run['sol_tok_s']:,.0f}",
                f"{run['step_ms']:.1f}",
                *(f"{first[key]:,.0f}" if first else "-" for key in ("mean", "p99")),
            ]
        )
    console.print_table(rows)
    console.out.print(
        "balance: mean over fullest rank's tokens; even: tokens/s with even ranks; SOL: as if all "
        "time were the fullest rank's tokens; "
        "first token: since the request has a rank"
    )
    if "search" in report:
        found = report["search"]
        best = found["best"] or "none"
        console.out.print(f"fastest within {found['ttft_limit_ms']:g} ms at p99: {best}")
