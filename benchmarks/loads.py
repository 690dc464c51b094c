"""Router policies side by side over kinds of load, on the step times of three machines.

Everything is simulated in virtual time and drawn from seeds: the figures are the same everywhere.
A load's rate is a share of what the workers could do if each prefix were computed once, so that a
load is as hard on the costs of a GPU as on those of a CPU. The requests of all seeds are pooled for
each policy: a p99 over the few hundred requests of one seed is the luck of three of them. All
policies get the same loads, so that seeds drawn again and again tell how far a ratio is luck.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.bench.results.mooncake import TraceRequest
from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.core.flags import DURATION_MS, count, setting
from tokenmill.core.metrics import percentile
from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
FIGURES = {"ttft_ms": "TTFT ms", "ttft_p99_ms": "p99", "tpot_ms": "TPOT ms", "duration_s": "s"}
NUM_DRAWS = 100  # of seeds, for the interval of a ratio
LOW, HIGH = 0.3, 0.7  # share of the workers' time
BLOCK_TOKENS = 16
BURST = 24  # requests that come at once
_BLOCKS = ReplayConfig(block_size=BLOCK_TOKENS, trace_block_tokens=BLOCK_TOKENS)
MACHINES = {
    "gpu": replace(
        _BLOCKS,
        num_blocks=32768,
        timing=StepTiming(prefill=(0.0, 0.03, 2.0), decode=(0.0, 40.0, 8.0), sequence=0.03),
    ),
    "cpu": replace(
        _BLOCKS,
        num_blocks=4096,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        timing=StepTiming(prefill=(0.0, 1.0, 3.0), decode=(0.0, 50.0, 10.0), sequence=2.0),
    ),
    "dynamo": replace(_BLOCKS, num_blocks=65536),
}


@dataclass(frozen=True)
class Options:
    workers: int = setting(8, "Workers behind the router.", count(1))
    requests: int = setting(256, "Requests of a load.", count(24))
    seeds: int = setting(3, "Draws of each load, whose requests are pooled.", count(1))
    fronts: int = setting(1, "API processes with a router each, compared with one.", count(1))
    report_delay_ms: float = setting(
        0.0, "How late workers' reports reach the fronts.", DURATION_MS, flag="report-delay"
    )


def run(options: Options) -> Report:
    """Every policy over nine kinds of load, at a low and at a high rate; with --fronts, kv alone.

    python -m benchmarks.loads --workers 2
    python -m benchmarks.loads --fronts 8 --report-delay 100ms
    """
    cells = [
        Cell(machine, kind, options.workers, utilization)
        for machine in MACHINES
        for kind in KINDS
        for utilization in (LOW, HIGH)
    ]
    rows = []
    for row in compare(cells, options):
        rows.append(row)
        console.note(f"{row.cell}: {row.worst:.2f}")
    worst = max(rows, key=lambda row: row.worst)
    return {
        "workers": options.workers,
        "worst_ratio": round(worst.worst, 3),
        "worst": str(worst.cell),
        "loads": [row.as_json() for row in rows],
    }


def show(report: Report) -> None:
    names = list(report["loads"][0]["figures"])
    head = ["load", "figure", *names, f"{names[0]} / best other", "90 % interval"]
    table = [head]
    for row in report["loads"]:
        for figure, name in FIGURES.items():
            values = [f"{row['figures'][each][figure]:.1f}" for each in names]
            interval = "{:.2f} to {:.2f}".format(*row["interval_90"][figure])
            table.append([row["load"], name, *values, f"{row['ratios'][figure]:.2f}", interval])
    console.print_table(table)
    console.out.print(
        f"worst: {names[0]} is {report['worst_ratio']:.2f} times the best other, on "
        f"{report['worst']}"
    )


# Loads: what prompts share, how long they are, how they arrive.


@dataclass(frozen=True, slots=True)
class Draft:
    """A request without a time: blocks that others may have too, and blocks of its own."""

    shared: tuple[int, ...]
    num_own_blocks: int
    num_output_tokens: int

    def request(self, number: int, arrival_ms: float) -> TraceRequest:
        own = range(number << 20, (number << 20) + self.num_own_blocks)
        ids = [*self.shared, *own]
        return TraceRequest(arrival_ms, BLOCK_TOKENS * len(ids), self.num_output_tokens, ids)


def _length(rng: random.Random, mean: float, spread: float = 0.5) -> int:
    """A length about a mean, at least 1, by a log-normal distribution."""
    return max(1, round(mean * rng.lognormvariate(-spread * spread / 2, spread)))


def _prefix(number: int, num_tokens: int) -> tuple[int, ...]:
    first = (1 << 50) + (number << 20)
    return tuple(range(first, first + num_tokens // BLOCK_TOKENS))


def _draft(rng: random.Random, shared: tuple[int, ...], own: int, output: int) -> Draft:
    return Draft(shared, _length(rng, own / BLOCK_TOKENS), _length(rng, output))


Drafts = Callable[[random.Random, int], list[Draft]]


def system_prompt(num_tokens: int, own: int) -> Drafts:
    """One system prompt, then some tokens of one's own."""

    def drafts(rng: random.Random, num: int) -> list[Draft]:
        return [_draft(rng, _prefix(0, num_tokens), own, 64) for _ in range(num)]

    return drafts


def skewed(rng: random.Random, num: int) -> list[Draft]:
    """16 prefixes of 2,048 tokens, one of which has half of the requests."""
    numbers = [0 if rng.random() < 0.5 else rng.randrange(1, 16) for _ in range(num)]
    return [_draft(rng, _prefix(number, 2048), 96, 48) for number in numbers]


def documents(rng: random.Random, num: int) -> list[Draft]:
    """Four questions about each document of 4,096 tokens, of all documents in one order."""
    drafts = [_draft(rng, _prefix(number // 4, 4096), 96, 48) for number in range(num)]
    rng.shuffle(drafts)
    return drafts


def mixed(rng: random.Random, num: int) -> list[Draft]:
    """Prompts of 32 to 2,048 tokens, half of them after a system prompt; answers of 8 to 128."""
    drafts = []
    for _ in range(num):
        which = rng.randrange(6)
        shared = _prefix(which, 64 << which) if rng.random() < 0.5 else ()
        drafts.append(_draft(rng, shared, rng.choice((32, 256, 2048)), rng.choice((8, 32, 128))))
    return drafts


def chats(rng: random.Random, num: int) -> list[Draft]:
    """Chats of up to 8 turns; each asks with all that was said before, some while later."""
    drafts: list[Draft] = []
    waiting: list[tuple[int, int, int]] = []  # (chat, turn, blocks said so far)
    for number in range(num):
        if len(waiting) < 24:
            chat, turn, said = number, 0, 0
        else:
            chat, turn, said = waiting.pop(rng.randrange(12))
        draft = _draft(rng, _prefix(chat, BLOCK_TOKENS * said), 128, 64)
        drafts.append(draft)
        if turn < 7:
            said += draft.num_own_blocks + -(-draft.num_output_tokens // BLOCK_TOKENS)
            waiting.append((chat, turn + 1, said))
    return drafts


KINDS: dict[str, Drafts] = {
    "system-short": system_prompt(96, 32),
    "system-long": system_prompt(768, 64),
    "system-huge": system_prompt(4096, 128),
    "unique": lambda rng, num: [_draft(rng, (), 512, 64) for _ in range(num)],
    "chats": chats,
    "documents": documents,
    "skewed": skewed,
    "mixed": mixed,
    "bursts": system_prompt(768, 64),  # many come at once
}


def work_ms(drafts: Sequence[Draft], config: ReplayConfig) -> float:
    """What a request takes from a worker, in the mean, if no prefix is computed twice."""
    timing, num_kv_tokens = config.timing, config.num_blocks * config.block_size
    known: set[int] = set()
    total_ms = 0.0
    for draft in drafts:
        new = [block for block in draft.shared if block not in known]
        known.update(new)
        num_prefill = BLOCK_TOKENS * (len(new) + draft.num_own_blocks)
        context = BLOCK_TOKENS * (len(draft.shared) + draft.num_own_blocks)
        kv_ms = timing.decode[1] * context / num_kv_tokens
        total_ms += timing.step_ms(num_prefill, 0, 0.0)
        total_ms += draft.num_output_tokens * (timing.sequence + kv_ms)
    return total_ms / len(drafts)


def make_load(
    kind: str, seed: int, num_requests: int, utilization: float, config: ReplayConfig
) -> list[TraceRequest]:
    """Requests that take this share of the workers' time; bursts come as many at once."""
    rng = random.Random(f"{kind}:{seed}")
    drafts = KINDS[kind](rng, num_requests)
    gap_ms = work_ms(drafts, config) / utilization / config.num_workers
    at_once = BURST if kind == "bursts" else 1
    requests, now_ms = [], 0.0
    for number, draft in enumerate(drafts):
        if number % at_once == 0 and number:
            now_ms += rng.expovariate(1.0) * gap_ms * at_once
        requests.append(draft.request(number, now_ms))
    return requests


# Policies over a load.


@dataclass(frozen=True, slots=True)
class Cell:
    machine: str
    kind: str
    num_workers: int
    utilization: float

    def __str__(self) -> str:
        return f"{self.machine} {self.kind} at {self.utilization:.0%}"


@dataclass(frozen=True, slots=True)
class Run:
    ttft_ms: list[float]
    tpot_ms: list[float]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A cell's figures by policy, and the first one's over the best of the others'."""

    cell: Cell
    runs: dict[str, list[Run]]  # by policy, one for each seed

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        return {policy: _figures(runs) for policy, runs in self.runs.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """1.05: kv is 5 % worse than the best other policy in that figure."""
        figures = self.figures
        ours = figures.pop(next(iter(figures)))
        return {name: ours[name] / min(f[name] for f in figures.values()) for name in FIGURES}

    @property
    def worst(self) -> float:
        return max(self.ratios.values())

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Where 90 % of the ratios to the best other lie if as many seeds are drawn from these."""
        rng, (ours, *others) = random.Random(0), self.runs
        figures = self.figures
        best = {name: min((figures[other][name], other) for other in others)[1] for name in FIGURES}
        drawn: dict[str, list[float]] = {name: [] for name in FIGURES}
        num_seeds = len(self.runs[ours])
        for _ in range(NUM_DRAWS):
            seeds = rng.choices(range(num_seeds), k=num_seeds)
            found = {
                policy: _figures([self.runs[policy][seed] for seed in seeds])
                for policy in {ours, *best.values()}
            }
            for name in FIGURES:
                drawn[name].append(found[ours][name] / found[best[name]][name])
        return {name: (percentile(r, 5), percentile(r, 95)) for name, r in drawn.items()}

    def as_json(self) -> dict[str, Any]:
        return {
            "load": str(self.cell),
            "workers": self.cell.num_workers,
            "figures": {
                policy: {name: round(value, 3) for name, value in figures.items()}
                for policy, figures in self.figures.items()
            },
            "ratios": {name: round(ratio, 3) for name, ratio in self.ratios.items()},
            "interval_90": {n: [round(x, 3) for x in i] for n, i in self.intervals().items()},
        }


def compare(cells: Sequence[Cell], options: Options) -> Iterator[Row]:
    """A row for each cell, as they are done: all policies, or kv with several fronts and one."""
    ways: dict[str, tuple[RouterPolicy, int, float]]
    if options.fronts > 1:
        several = f"{options.fronts} fronts"
        ways = {several: ("kv", options.fronts, options.report_delay_ms), "1 front": ("kv", 1, 0.0)}
    else:
        ways = {policy: (policy, 1, options.report_delay_ms) for policy in POLICIES}
    for cell in cells:
        yield Row(
            cell,
            {
                name: [_run(cell, way, options.requests, seed) for seed in range(options.seeds)]
                for name, way in ways.items()
            },
        )


def _run(cell: Cell, way: tuple[RouterPolicy, int, float], num_requests: int, seed: int) -> Run:
    policy, num_fronts, report_delay_ms = way
    config = replace(
        MACHINES[cell.machine],
        num_workers=cell.num_workers,
        num_fronts=num_fronts,
        report_delay_ms=report_delay_ms,
    )
    load = make_load(cell.kind, seed, num_requests, cell.utilization, config)
    router = RouterConfig(policy=policy, block_size=config.block_size, seed=seed)
    replay = Replay(load, config, router)
    duration_s = replay.run()["duration_s"]
    ttft_ms = [t.ttft_ms for t in replay.times if t.ttft_ms is not None]
    tpot_ms = [t.tpot_ms for t in replay.times if t.tpot_ms is not None]
    return Run(ttft_ms, tpot_ms, duration_s)


def _figures(runs: Sequence[Run]) -> dict[str, float]:
    ttft = [value for run in runs for value in run.ttft_ms]
    tpot = [value for run in runs for value in run.tpot_ms]
    return {
        "ttft_ms": sum(ttft) / len(ttft),
        "ttft_p99_ms": percentile(ttft, 99),
        "tpot_ms": sum(tpot) / len(tpot),
        "duration_s": sum(run.duration_s for run in runs) / len(runs),
    }


BENCHMARK = Benchmark("loads", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
