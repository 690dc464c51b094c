"""The benchmarks and rounds of MLPerf Inference, whose values are in presets.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

TaskName = Literal["language", "images", "ranking", "video"]
TOKENS_SHARE = 0.1  # by which the number of tokens may differ from the reference's
COMPLIANCE_TESTS = ("TEST04", "TEST06", "TEST07", "TEST09")
INEXACT_VIDEOS = ("step-cache", "vae-tiles")  # settings that the closed division does not allow


class RoundRules(NamedTuple):
    """What differs between two rounds beside the benchmarks that they have."""

    seeds: Mapping[str, int]
    # (benchmark, scenario) in which speculative decoding may be submitted.
    speculative: frozenset[tuple[str, str]]


class TokenLimits(NamedTuple):
    """Milliseconds that the percentile of a latency-bound run may not exceed."""

    ttft_ms: int
    tpot_ms: int


@dataclass(frozen=True, slots=True)
class Preset:
    name: str
    key: str  # in mlperf.conf; "-interactive" is added for that scenario
    model: str  # the only one that a closed submission may run
    num_samples: int
    max_output: int = 0
    task: TaskName = "language"
    limits: Mapping[str, TokenLimits] = field(default_factory=dict)  # by scenario
    latency_ms: int | None = None  # of a whole query of Server, where answers are not tokens
    target_qps: float | None = None  # where the flag's default would ask for far too many samples
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    output_len: int | None = None  # of synthetic samples; None: the column of the lengths
    output_scale: float = 1.0  # of that column
    # The reference's figures, and the share of each that must be reached.
    accuracy: Mapping[str, float] = field(default_factory=dict)
    accuracy_share: float = 0.99
    harmony: bool = False  # answers have channels; the final one is scored
    # How often the accuracy set repeats the questions of a dataset: a repeat counts that much less.
    repeats: Mapping[str, int] = field(default_factory=dict)
    tokens_per_sample: float | None = None  # the reference's
    gen_len: int | None = None  # characters of all its answers
    folder: str = ""  # of results, where it is not the name
    # Where accuracy runs have a set and a cap of their own.
    accuracy_samples: int | None = None
    accuracy_output: int | None = None
    # The compliance tests of the round, and what TEST07 (own dataset) and TEST09 ask for.
    compliance: tuple[str, ...] = ("TEST06",)
    compliance_samples: int | None = None
    compliance_score: float = 0.0
    compliance_tokens: float = 0.0
    # The rounds that have the benchmark, and what a later round changed of it.
    rounds: tuple[str, ...] = ("v6.0", "v6.1")
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of_round(self, name: str) -> Preset:
        """The benchmark by the rules of that round; ValueError where the round dropped it."""
        if name not in self.rounds:
            has = ", ".join(self.rounds)
            raise ValueError(f"{self.name} is not a benchmark of {name}; it was in {has}")
        return replace(self, **self.changed.get(name, {}))

    def limits_ms(self, scenario: str) -> dict[str, int] | None:
        """By "ttft" and "tpot", or by "latency" of whole queries; None where nothing is limited."""
        if tokens := self.limits.get(scenario):
            return {"ttft": tokens.ttft_ms, "tpot": tokens.tpot_ms}
        is_limited = scenario == "Server" and self.latency_ms is not None
        return {"latency": self.latency_ms or 0} if is_limited else None

    def key_of(self, scenario: str) -> str:
        return self.key + "-interactive" * (scenario == "Interactive")


def _preset(name: str, values: dict[str, Any]) -> Preset:
    given = {s: values.pop(s.lower(), None) for s in ("Server", "Interactive")}
    limits = {scenario: TokenLimits(*pair) for scenario, pair in given.items() if pair}
    for key in {"compliance", "rounds"} & values.keys():
        values[key] = tuple(values[key])
    return Preset(name, limits=limits, **values)


_FOUND = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ROUNDS = {
    name: RoundRules(rules["seeds"], frozenset(rules["speculative"].items()))
    for name, rules in _FOUND["rounds"].items()
}
BENCHMARKS = {name: _preset(name, values) for name, values in _FOUND["benchmarks"].items()}
PRESETS = {name: preset for name, preset in BENCHMARKS.items() if preset.task == "language"}
QWEN3_VL, DLRM_V3, WAN = (p for p in BENCHMARKS.values() if p.task != "language")
# Samples whose videos the checker wants in the folder of an accuracy run.
REQUIRED_VIDEOS: dict[str, list[int]] = _FOUND["required_videos"]
