"""Published MLPerf rows of language models as questions, and which of them are fitted on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.bench.results.published_results import TOKENS, read_table
from tokenmill.bench.results.reports import PublishedEntry
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.benchmarks import BENCHMARKS, ROUNDS, find_benchmark
from tokenmill.plan.predict.prediction import Question

# The GPUs whose rows efficiencies are fitted on, and others that a prediction can be compared with.
FITTED = {
    "NVIDIA B200-SXM-180GB": "b200",
    "NVIDIA B300-SXM-270GB": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
    "NVIDIA H200-SXM-141GB": "h200",
}
ACCELERATORS = FITTED | {
    "NVIDIA H100-SXM-80GB": "h100",
    "AMD Instinct MI300X 192GB HBM3": "mi300x",
    "AMD Instinct MI325X 256GB HBM3e": "mi325x",
    "AMD Instinct MI355X 288GB HBM3e": "mi355x",
}
RULE = (
    "the best row per GPU of each round, benchmark, GPU and scenario, in alphabetical order: every "
    "fourth of a round is fitted on"
)
EVERY = 4


@dataclass(frozen=True, slots=True)
class Published:
    entry: PublishedEntry
    question: Question
    fitted: bool = False

    @property
    def key(self) -> tuple[str, str, str, str]:
        question = self.question
        return question.round, question.benchmark.name, question.gpu.key, question.scenario

    @property
    def name(self) -> str:
        return f"{' '.join(self.key)} x{self.question.gpus}, {self.entry.submitter}"


def covered_rows() -> list[Published]:
    rows = []
    for entry in read_table():
        plain = entry.benchmark.removesuffix("-99.9").removesuffix("-99")
        covered = (
            entry.division == "closed"
            and entry.unit == TOKENS
            and entry.accelerator in ACCELERATORS
            and entry.accelerators > 0
            and plain in BENCHMARKS
            and entry.round in ROUNDS
        )
        if covered:
            gpu = find_gpu(ACCELERATORS[entry.accelerator])
            benchmark = find_benchmark(plain)
            question = Question(benchmark, entry.scenario, gpu, entry.accelerators, entry.round)
            rows.append(Published(entry, question))
    return rows


def best_rows(rows: Iterable[Published]) -> list[Published]:
    """The best per GPU of each key among the GPUs that are fitted on; every fourth is marked."""
    best: dict[tuple[str, str, str, str], Published] = {}
    for row in rows:
        if row.question.gpu.key not in FITTED.values():
            continue
        known = best.get(row.key)
        if known is None or _rate(row) > _rate(known):
            best[row.key] = row
    found: list[Published] = []
    for round in ROUNDS:
        own = [best[key] for key in sorted(best) if key[0] == round]
        found += [
            Published(row.entry, row.question, fitted=index % EVERY == EVERY - 1)
            for index, row in enumerate(own)
        ]
    return found


def _rate(row: Published) -> float:
    return row.entry.result / row.entry.accelerators
