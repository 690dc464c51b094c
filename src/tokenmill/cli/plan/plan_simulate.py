"""tokenmill plan simulate."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.cli.plan.plan_options import (
    ROUTER,
    BenchmarkOptions,
    ComparedRuns,
    ConfigurationOptions,
    DemandOptions,
    FaultOptions,
    SimulatedWorkers,
    SimulateOptions,
    StartOptions,
    SystemOptions,
    TechniqueOptions,
    TraceOptions,
    WorkOptions,
)
from tokenmill.cli.plan.plan_predict import CONFIGURATION, given_choice, named_lengths, own_file
from tokenmill.core.config import RouterConfig
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.bench.results.mooncake import TraceRequest
    from tokenmill.core.specs.spec import ModelSpec
    from tokenmill.plan.cluster.cluster import ClusterConfig
    from tokenmill.plan.cluster.faults import FaultEvent
    from tokenmill.plan.cluster.setup import Asked
    from tokenmill.plan.cluster.steady import Demand
    from tokenmill.plan.predict.lengths import Lengths
    from tokenmill.plan.predict.prediction import Question
    from tokenmill.plan.predict.steady_state import Limit

SIMULATE = {
    "Load": (BenchmarkOptions, WorkOptions, DemandOptions, TraceOptions, SimulateOptions),
    "System": (SystemOptions, StartOptions),
    CONFIGURATION: (ConfigurationOptions, SimulatedWorkers),
    "Techniques": TechniqueOptions,
    "Router": ROUTER,
    "Events": FaultOptions,
    "Output": (ComparedRuns, JsonOption),
}
DEFAULTS = {"benchmark": "deepseek-r1", "gpu": "gb300", "gpus": 72}
KEEPS_UP = 0.8  # share of prompts, below which a run is no steady one
Report = dict[str, Any]


def simulate(settings: Settings) -> None:
    """A system of many GPUs in virtual time, over the real schedulers and rules.

    Schedulers, block pools, router, disaggregation rule, balance of ranks,
    placement of experts and migration are those that serve. The time of a
    step is that of `plan predict`, with the ranks as they are. Everything
    printed is a prediction; a published result of the system stands beside it.

    tokenmill plan simulate --gpus 288 --racks 4 --scenario Server

    tokenmill plan simulate --gpus 16 --rate 20 --fail 5:worker-0

    tokenmill plan simulate --config recipes/plan-attention-dp-8xgb200.toml
    """
    from tokenmill.plan.cluster import faults as fault_events
    from tokenmill.plan.cluster import steady
    from tokenmill.plan.cluster.report import PREDICTION, describe_workers
    from tokenmill.plan.cluster.setup import build

    begin = time.process_time()
    asked, demanded, trace = _asked(settings)
    config = build(asked)
    faults = fault_events.read_fault_events(
        settings.get("fail"), settings.get("start"), config.layout
    )
    demanded = _with_rate(settings, config, demanded, bool(trace))
    report: Report = {
        "plan": "simulate",
        "benchmark": settings.get("benchmark") if "model" not in settings else None,
        "model": settings.get("model") if "model" in settings else None,
        "scenario": "trace" if trace else settings.get("scenario"),
        "gpu": asked.gpu.key,
        "gpus": asked.gpus,
        "racks": asked.racks,
        "rate": demanded.rate,
        "configuration": describe_workers(config.layout.workers),
        "what": PREDICTION,
        **_run(config, demanded, trace, settings, faults),
    }
    if demanded.limit is not None and demanded.rate is not None:
        report["limits"] = asdict(demanded.limit)
        report["within_limits"] = steady.holds(report, demanded.limit)
    report["published"] = _published(settings, asked, report)
    if asked.racks > 1 and settings.get("scale-out") and not trace and not faults:
        report["scale_out"] = _scale_out(settings, asked, config, demanded, report)
    if settings.get("ladder") and not trace:
        report["ladder"] = _ladder(config, demanded)
    report["efficiencies"] = {n: round(v, 4) for n, v in asdict(asked.fit.efficiency).items()}
    report["efficiencies_of"], report["fitted_on"] = asked.fit.name, list(asked.fit.fitted_on)
    report["cpu_s"] = round(time.process_time() - begin, 2)
    if not settings.get("json"):
        _print(report)
    console.print_json(report, settings.get("json"))


# What is asked.


def _asked(settings: Settings) -> tuple[Asked, Demand, tuple[TraceRequest, ...]]:
    from tokenmill.plan.cluster.setup import Asked, places_of
    from tokenmill.plan.cluster.steady import Demand
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.predict.efficiencies import find_fit
    from tokenmill.plan.predict.search import SearchSpace

    gpu = find_gpu(settings.get("gpu"), own_file(settings, "hardware"))
    fit = find_fit(settings.get("round"), own_file(settings, "efficiencies"))
    question = _question(settings)
    trace = _trace(settings)
    spec, lengths, limit = _load(settings, question, trace)
    choice = question.choice() if question else SearchSpace(disaggregates=settings.get("gpus") > 8)
    choice = given_choice(settings, choice)
    choice = replace(choice, max_sequences=places_of(settings.get("max-num-seqs")))
    asked = Asked(
        spec,
        lengths,
        gpu,
        settings.get("gpus"),
        settings.get("racks"),
        fit,
        limit,
        choice,
        longest=_longest(lengths, trace),
        prefill=settings.get("prefill"),
        decode=settings.get("decode"),
        prefill_ep=settings.get("prefill-ep"),
        max_num_batched_tokens=settings.get("max-num-batched-tokens"),
        block_size=settings.get("block-size"),
        prefix_cache=bool(trace),
        timeout_iters=settings.get("timeout-iters"),
        batching_wait_iters=settings.get("batching-wait-iters"),
        balance=settings.get("balance"),
        num_redundant=settings.get("redundant-experts"),
        router=settings.build(RouterConfig),
        start_s=settings.get("start-s"),
        seed=settings.get("seed"),
    )
    rate = settings.get("rate") if "rate" in settings else None
    demanded = Demand(lengths, settings.get("num-requests"), rate, limit, settings.get("seed"))
    return asked, demanded, trace


def _question(settings: Settings) -> Question | None:
    from tokenmill.plan.hardware import find_gpu
    from tokenmill.plan.predict.benchmarks import ROUNDS, find_benchmark
    from tokenmill.plan.predict.prediction import Question

    if "model" in settings:
        return None
    round = settings.get("round")
    benchmark = find_benchmark(settings.get("benchmark"), round)
    gpu = find_gpu(settings.get("gpu"), own_file(settings, "hardware"))
    rules = round if round in ROUNDS else "v6.0"
    return Question(benchmark, settings.get("scenario"), gpu, settings.get("gpus"), rules)


def _trace(settings: Settings) -> tuple[TraceRequest, ...]:
    from tokenmill.bench.results.mooncake import read_trace

    if not settings.get("trace"):
        return ()
    if "rate" in settings:
        raise SettingsError("--rate: leave it out, a trace has times; use --trace-speed")
    block_tokens, speed = settings.get("trace-block-tokens"), settings.get("trace-speed")
    return tuple(read_trace(settings.get("trace"), block_tokens, speed, ordered=True))


def _load(
    settings: Settings, question: Question | None, trace: tuple[TraceRequest, ...]
) -> tuple[ModelSpec, Lengths, Limit | None]:
    from tokenmill.plan.predict.benchmarks import benchmark_lengths
    from tokenmill.plan.predict.catalog import find_model
    from tokenmill.plan.predict.lengths import from_trace

    spec = find_model(question.benchmark.model if question else settings.get("model"))
    limit = question.limit if question else _own_limit(settings)
    if trace:
        block_tokens = settings.get("trace-block-tokens")
        return spec, from_trace(settings.get("trace"), trace, block_tokens)[0], None
    if settings.get("lengths") or question is None:
        return spec, named_lengths(settings), limit
    return spec, benchmark_lengths(question.benchmark.name), limit


def _own_limit(settings: Settings) -> Limit | None:
    from tokenmill.plan.predict.steady_state import Limit

    if settings.get("scenario") == "Offline":
        return None
    return Limit(settings.get("ttft") / 1e3, settings.get("tpot") / 1e3)


def _longest(lengths: Lengths, trace: tuple[TraceRequest, ...]) -> int:
    if trace:
        return max(one.num_prompt_tokens + one.num_output_tokens for one in trace)
    return max(i + o for i, o in lengths.pairs)


def _with_rate(
    settings: Settings, config: ClusterConfig, demanded: Demand, is_trace: bool
) -> Demand:
    """The rate that is given, or the highest within the limits, times what runs reached of it."""
    from tokenmill.plan.cluster.steady import highest_rate

    if is_trace or demanded.rate is not None:
        return demanded
    if demanded.limit is None:
        return demanded
    rate = highest_rate(config, demanded, console.note)
    if not rate:
        raise SettingsError(
            f"--scenario {settings.get('scenario')}: this system does not hold the limits at any "
            "rate; give more GPUs, another configuration, or --rate"
        )
    return replace(demanded, rate=rate * config.efficiency.load)


# Runs.


def _run(
    config: ClusterConfig,
    demanded: Demand,
    trace: tuple[TraceRequest, ...],
    settings: Settings,
    faults: tuple[FaultEvent, ...],
) -> Report:
    from tokenmill.plan.cluster import steady
    from tokenmill.plan.cluster.load import SimulatedLoad

    if trace:
        tokens = settings.get("trace-block-tokens")
        load = SimulatedLoad((), len(trace), trace=trace, trace_block_tokens=tokens)
    elif demanded.rate is None:
        load = steady.closed_load(config, demanded)
    else:
        load = steady.open_load(config, demanded, demanded.rate)
    console.note(
        f"{load.num_requests:,} requests over {len(config.layout.workers)} workers, "
        f"{load.num_running:,} under way at the begin"
    )
    return steady.simulate(config, load, faults)


def _published(settings: Settings, asked: Asked, report: Report) -> list[Report]:
    """The closed results of this very system, and how far the prediction is from each."""
    from tokenmill.plan.fit.published import covered_rows

    if "model" in settings or settings.get("lengths") or report["scenario"] == "trace":
        return []
    question = _question(settings)
    assert question is not None
    wanted = (settings.get("round"), question.benchmark.name, asked.gpu.key)
    return [
        {
            "submitter": row.entry.submitter,
            "gpus": asked.gpus,
            "output_tok_s": row.entry.result,
            "error": round(report["output_tok_s"] / row.entry.result - 1, 4),
        }
        for row in covered_rows()
        if row.key == (*wanted, settings.get("scenario")) and row.question.gpus == asked.gpus
    ]


def _scale_out(
    settings: Settings, asked: Asked, config: ClusterConfig, demanded: Demand, report: Report
) -> Report:
    """One rack alone under its share of the load."""
    from tokenmill.plan.cluster import steady

    part, share = steady.one_rack(config)
    if part is config:
        return {"one_rack": None, "why": "its workers lie over several racks"}
    few = replace(
        demanded,
        num_requests=max(1, round(demanded.num_requests * share)),
        rate=demanded.rate * share if demanded.rate else None,
    )
    alone = _run(part, few, (), settings, ())
    alone["scenario"] = report["scenario"]
    each = alone["tok_s_per_gpu"]
    own = replace(asked, gpus=part.layout.gpus, racks=1)
    rows = _published(settings, own, alone)
    keys = ("output_tok_s", "tok_s_per_gpu", "ttft_ms", "tpot_ms")
    found: Report = {
        "one_rack": {key: alone[key] for key in keys} | {"gpus": own.gpus, "published": rows},
        "cost": round(1 - report["tok_s_per_gpu"] / each, 4),
    }
    pairs = {row["submitter"]: row["output_tok_s"] / row["gpus"] for row in rows}
    found["published_cost"] = {
        row["submitter"]: round(1 - row["output_tok_s"] / row["gpus"] / pairs[row["submitter"]], 4)
        for row in report["published"]
        if row["submitter"] in pairs
    }
    return found


def _ladder(config: ClusterConfig, demanded: Demand) -> Report:
    from tokenmill.plan.cluster.ladder import measure_ladder

    return measure_ladder(config, demanded, console.note)


# What is printed.


def _print(report: Report) -> None:
    out = console.out.print
    out(
        f"predicted: {report['output_tok_s']:,.0f} tokens/s, {report['tok_s_per_gpu']:,.0f} per "
        f"GPU, {report['samples_s']:,.1f} requests/s ended in {report['duration_s']:,.1f} s"
    )
    for row in report["published"]:
        out(
            f"published: {row['output_tok_s']:,.0f} tokens/s ({row['submitter']}); "
            f"the prediction is {row['error']:+.1%} off"
        )
    out("; ".join(_kind(one) for one in report["configuration"]))
    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [["simulated", *columns]]
    for key, name in (("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"), ("itl_ms", "ITL ms")):
        if report[key]:
            rows.append([name, *(f"{report[key][column]:,.1f}" for column in columns)])
    console.print_table(rows)
    _print_inside(report)
    if "within_limits" in report:
        limit, kept = report["limits"], report["within_limits"]
        out(
            f"limits of {limit['ttft_s'] * 1e3:,.0f} ms to the first token and "
            f"{limit['tpot_s'] * 1e3:,.0f} ms per token at p99: {'kept' if kept else 'broken'}"
        )
    for event in report["events"]:
        moved = event.get("migrated", event.get("held"))
        what = "died; requests that moved" if event["event"] == "failed" else "is ready; held"
        out(f"after {event['after_s']:,.1f} s {event['worker']} {what}: {moved:,}")
    if "scale_out" in report:
        _print_scale_out(report)
    if "ladder" in report:
        _print_ladder(report["ladder"])


def _kind(one: Report) -> str:
    shape = f"attention-dp {one['attention_dp']}" if one["attention_dp"] > 1 else f"tp {one['tp']}"
    drafts = f", {one['mtp']} drafts" if one["mtp"] else ""
    role = "" if one["role"] == "both" else f"{one['role']} "
    return f"{one['workers']} {role}x {shape} ({one['precision']}, KV {one['kv']}{drafts})"


def _print_inside(report: Report) -> None:
    out, balance, queues = console.out.print, report["balance"], report["queues"]
    out(
        f"queues: {queues['running_per_worker']:,.0f} run and {queues['waiting_per_worker']:,.1f} "
        f"wait at a worker, {queues['most_waiting_at_a_worker']:,} at most; "
        f"{report['num_preemptions']:,} preemptions; "
        f"{report['prefix_reuse']:.1%} of prompt tokens from cache"
    )
    if report["prompts_computed"] < KEEPS_UP and not report["events"]:
        out(
            f"warning: only {report['prompts_computed']:.0%} of the prompts that came were "
            "computed, so this is not a rate that lasts; raise --max-num-batched-tokens, lower "
            "--rate, or measure more requests"
        )
    share = balance["rank_share"]
    out(
        f"ranks: {balance['time']:.1%} of a step's time if they were even, tokens "
        f"{balance['tokens']:.1%}; a rank's share {share['min']:.2f} to {share['max']:.2f} of the "
        f"mean; prompts held in {balance['held_steps']:.0%} of steps"
    )
    for key, name in (("inside_racks", "inside a rack"), ("between_racks", "between racks")):
        one = report["network"][key]
        kv = one["kv"]
        moved = f"{kv['transfers']:,} KV transfers, {kv['gigabytes']:,.1f} GB"
        if kv["transfers"]:
            moved += f", p50 {kv['ms']['p50']:,.2f} ms, p99 {kv['ms']['p99']:,.2f} ms"
        out(
            f"network {name}: {one['exchange_ms_per_step']:,.1f} ms of a step "
            f"({one['share_of_steps']:.1%}); {moved}"
        )


def _print_scale_out(report: Report) -> None:
    found, out = report["scale_out"], console.out.print
    if found["one_rack"] is None:
        out(f"scale-out: not compared with one rack, {found['why']}")
        return
    published = ", ".join(f"{cost:.1%} ({name})" for name, cost in found["published_cost"].items())
    out(
        f"scale-out: {found['one_rack']['tok_s_per_gpu']:,.0f} tokens/s per GPU on one rack; "
        f"{report['racks']} racks cost {found['cost']:.1%}"
        + (f", published {published}" if published else "")
    )


def _print_ladder(ladder: Report) -> None:
    load = "all requests there" if ladder["rate"] is None else f"{ladder['rate']:,.1f} requests/s"
    console.out.print(f"predicted with and without each technique, {ladder['gpus']} GPUs, {load}:")
    rows = [["technique", "used", "tok/s with", "without", "TPOT p99", "without", "gain"]]
    for rung in ladder["rungs"]:
        figures = [rung["with"], rung["without"]]
        tokens = [f"{one['output_tok_s']:,.0f}" for one in figures]
        tpot = [f"{one['tpot_ms']['p99'] or 0:,.1f}" for one in figures]
        used = "yes" if rung["used"] else "no"
        rows.append([rung["technique"], used, *tokens, *tpot, f"{rung['gain']:.3f}"])
    console.print_table(rows)
