"""The MLPerf benchmarks as a plan sees them: model, lengths, limits, and what a round allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenmill.bench.mlperf.presets import PRESETS, TokenLimits
from tokenmill.bench.mlperf.presets import ROUNDS as RULES
from tokenmill.bench.workload import SHIPPED, read_lengths
from tokenmill.plan.hardware import PlanError
from tokenmill.plan.predict.lengths import Lengths, exponential_outputs, represent

SCENARIOS = ("Offline", "Server", "Interactive")
GPT_OSS_OUTPUT = 1309  # what the runs of v6.0 emit at the mean; its distribution is not published


@dataclass(frozen=True, slots=True)
class Benchmark:
    name: str
    model: str
    limits: dict[str, TokenLimits]
    dropped: str = ""  # the round from which on it is no benchmark any more
    own_lengths: Lengths | None = None  # of a model that is no benchmark

    @property
    def lengths(self) -> Lengths:
        return self.own_lengths or benchmark_lengths(self.name)

    def limit(self, scenario: str) -> TokenLimits | None:
        """None for Offline."""
        if scenario != "Offline" and scenario not in self.limits:
            raise PlanError(
                f"--scenario {scenario}: {self.name} has {', '.join(('Offline', *self.limits))}"
            )
        return self.limits.get(scenario)


@dataclass(frozen=True, slots=True)
class SubmissionRound:
    """What the software of a round did, as its submissions show."""

    name: str
    disaggregates: bool  # prefill and decode apart, on systems of more than one node
    drafts: frozenset[tuple[str, str]] = frozenset()  # benchmark and scenario, by the rules


ROUNDS = {
    "v5.1": SubmissionRound("v5.1", disaggregates=False),
    "v6.0": SubmissionRound("v6.0", disaggregates=True, drafts=RULES["v6.0"].speculative),
    "v6.1": SubmissionRound("v6.1", disaggregates=True, drafts=RULES["v6.1"].speculative),
}
LATEST = "v6.1"
DRAFTS = 3  # of a step, in all submissions that draft: DeepSeek-R1's own, gpt-oss's EAGLE-3
BENCHMARKS = {
    name: Benchmark(
        name,
        name,
        dict(preset.limits),
        dropped="" if LATEST in preset.rounds else LATEST,
    )
    for name, preset in PRESETS.items()
} | {
    "mixtral-8x7b": Benchmark(
        "mixtral-8x7b", "mixtral-8x7b", {"Server": TokenLimits(2000, 200)}, dropped="v6.1"
    )
}


def find_benchmark(name: str, round: str = "v6.0") -> Benchmark:
    """A benchmark of a round by name; llama2-70b-99 and -99.9 differ in accuracy alone."""
    plain = name.lower().removesuffix("-99.9").removesuffix("-99")
    left = [one.name for one in BENCHMARKS.values() if one.dropped != round]
    if plain in BENCHMARKS and plain not in left:
        raise PlanError(
            f"--benchmark {name}: {round} has no longer this benchmark, which --round v6.0 has; "
            f"it has {', '.join(left)}"
        )
    if plain not in BENCHMARKS:
        raise PlanError(f"--benchmark {name}: expected one of {', '.join(left)}")
    return BENCHMARKS[plain]


@cache
def benchmark_lengths(name: str) -> Lengths:
    """The dataset's lengths with the outputs that runs emit."""
    path, preset = SHIPPED / f"{name}.csv", PRESETS.get(name)
    if name == "gpt-oss-120b":
        inputs = sorted(i for i, _ in read_lengths(path, 1))
        return represent(name, exponential_outputs(inputs, GPT_OSS_OUTPUT, 10_240))
    if preset is None:
        return represent(name, read_lengths(path))
    rows = read_lengths(path, preset.output_len)
    scale, cap = preset.output_scale, preset.max_output
    return represent(name, [(i, min(cap, max(1, round(o * scale)))) for i, o in rows])
