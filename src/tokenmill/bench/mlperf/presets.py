"""The benchmarks of MLPerf Inference v6.0 and v6.1 as data.

The latency limits are those of LoadGen's mlperf.conf. The other values are those of the submission
checker (tools/submission/submission_checker/constants.py) and of the reference code, both in
mlcommons/inference. Where the written rules differ from these files, the files count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Round:
    """What differs between two rounds beside the benchmarks that they have."""

    seeds: Mapping[str, int]
    # (benchmark, scenario) in which speculative decoding may be submitted.
    speculative: frozenset[tuple[str, str]]


# A LoadGen wheel has the seeds of the round that it was made for, so they are set by every run.
ROUNDS: dict[str, Round] = {
    "v6.0": Round(
        seeds={
            "qsl_rng_seed": 2465351861681999779,
            "sample_index_rng_seed": 14276810075590677512,
            "schedule_rng_seed": 3936089224930324775,
        },
        speculative=frozenset({("deepseek-r1", "Interactive")}),
    ),
    "v6.1": Round(
        seeds={
            "qsl_rng_seed": 2085463073848966840,
            "sample_index_rng_seed": 2747215439041700203,
            "schedule_rng_seed": 16159082839903944936,
        },
        speculative=frozenset({("deepseek-r1", "Interactive"), ("gpt-oss-120b", "Interactive")}),
    ),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the percentile of a latency-bound run may not exceed."""

    ttft_ms: int
    tpot_ms: int


@dataclass(frozen=True, slots=True)
class Preset:
    """One benchmark of the round."""

    name: str
    key: str  # in mlperf.conf; "-interactive" is added for that scenario
    model: str  # the only one that a closed submission may run
    num_samples: int
    max_output: int
    server: Limits
    interactive: Limits
    latency_ms: int | None = None  # of a query, where answers are not tokens
    tokens: bool = True  # answers are tokens; else samples alone are counted
    target_qps: float | None = None  # where the flag's default would ask for far too many samples
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    images: bool = False  # a sample has one
    output_len: int | None = None  # of synthetic samples; None: the column of the lengths
    output_scale: float = 1.0  # of that column
    # The reference's figures, and the share of each that must be reached.
    accuracy: Mapping[str, float] = field(default_factory=dict)
    accuracy_share: float = 0.99
    harmony: bool = False  # answers have channels; the final one is scored
    # How often the accuracy set repeats the questions of a dataset: a repeat counts that much less.
    repeats: Mapping[str, int] = field(default_factory=dict)
    tokens_per_sample: float | None = None  # the reference's; 10 % either way are allowed
    gen_len: int | None = None  # characters of all its answers, likewise
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
    changed: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def of_round(self, name: str) -> Preset:
        """The benchmark by the rules of that round; ValueError where the round dropped it."""
        if name not in self.rounds:
            has = ", ".join(self.rounds)
            raise ValueError(f"{self.name} is not a benchmark of {name}; it was in {has}")
        return replace(self, **self.changed.get(name, {}))  # type: ignore[arg-type]

    def limits(self, scenario: str) -> Limits | None:
        """None where the scenario has no latency limit, or one of whole queries."""
        if self.latency_ms is not None:
            return None
        return {"Server": self.server, "Interactive": self.interactive}.get(scenario)

    def key_of(self, scenario: str) -> str:
        return self.key + "-interactive" * (scenario == "Interactive")


TOKENS_SHARE = 0.1

# Output lengths: llama3.1-8b's column is the human summary, but runs fill the cap of 128;
# gpt-oss has no column, 1278 is the reference's mean; llama2-70b's column has a mean of 218.9, the
# reference model's answers 294.45; deepseek-r1's is raw and is capped at 20,000.
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="deepseek-r1",
            key="deepseek-r1",
            model="deepseek-ai/DeepSeek-R1",
            num_samples=4388,
            max_output=20_000,
            server=Limits(2000, 80),
            interactive=Limits(1500, 15),
            accuracy={"exact_match": 81.3582},
            tokens_per_sample=3886.2274,
        ),
        Preset(
            name="gpt-oss-120b",
            key="gpt-oss-120b",
            model="openai/gpt-oss-120b",
            num_samples=6396,
            max_output=10_240,
            server=Limits(3000, 80),
            interactive=Limits(2000, 15),
            temperature=1.0,
            output_len=1278,
            accuracy={"exact_match": 83.13},
            harmony=True,
            repeats={"aime": 8, "gpqa": 5, "livecodebench": 3},
            accuracy_samples=4395,
            accuracy_output=32_768,
            compliance=("TEST07", "TEST09"),
            compliance_samples=990,
            compliance_score=60.698,
            compliance_tokens=1278.2,
        ),
        Preset(
            name="llama3.1-8b",
            key="llama3_1-8b",
            model="meta-llama/Llama-3.1-8B-Instruct",
            num_samples=13_368,
            max_output=128,
            server=Limits(2000, 100),
            interactive=Limits(500, 30),
            output_len=128,
            accuracy={
                "rouge1": 38.7792,
                "rouge2": 15.9075,
                "rougeL": 24.4957,
                "rougeLsum": 35.793,
            },
            gen_len=8_167_644,
        ),
        Preset(
            name="llama3.1-405b",
            key="llama3_1-405b",
            model="meta-llama/Llama-3.1-405B-Instruct",
            num_samples=8313,
            max_output=2000,
            server=Limits(6000, 175),
            interactive=Limits(4500, 80),
            accuracy={"rougeL": 21.6666, "exact_match": 90.1335},
            tokens_per_sample=684.68,
            rounds=("v6.0",),
        ),
        Preset(
            name="llama2-70b",
            key="llama2-70b",
            model="meta-llama/Llama-2-70b-chat-hf",
            num_samples=24_576,
            max_output=1024,
            server=Limits(2000, 200),
            interactive=Limits(450, 40),
            output_scale=294.45 / 218.9,
            accuracy={"rouge1": 44.4312, "rouge2": 22.0352, "rougeL": 28.6162},
            tokens_per_sample=294.45,
            folder="llama2-70b-99",
            changed={"v6.1": {"folder": "llama2-70b-99.9", "accuracy_share": 0.999}},
        ),
    )
}

# Samples have an image, and one limit of whole queries; v6.1 has Interactive, too, with 8,000
# samples of its own.
QWEN3_VL = Preset(
    name="qwen3-vl-235b",
    key="qwen3-vl-235b-a22b",
    model="Qwen/Qwen3-VL-235B-A22B-Instruct",
    num_samples=48_289,
    max_output=150,
    server=Limits(0, 0),
    interactive=Limits(0, 0),
    latency_ms=12_000,
    temperature=0.7,
    top_p=0.8,
    top_k=20,
    images=True,
    accuracy={"category_f1": 79.03},
    folder="qwen3-vl-235b-a22b",
    compliance=(),
)

# Answers are scores: no tokens, no lengths, and one limit of whole queries.
DLRM_V3 = Preset(
    name="dlrm-v3",
    key="dlrm-v3",
    model="the DLRMv3 checkpoint of MLCommons",
    num_samples=34_996,
    max_output=0,
    server=Limits(0, 0),
    interactive=Limits(0, 0),
    latency_ms=80,
    accuracy={"ne": 86.687, "accuracy": 69.651, "gauc": 78.663},
    accuracy_share=0.999,
    compliance=("TEST08",),
)

# Answers are videos: no limit of latency, and SingleStream's figure is in seconds. 20 s a video is
# what the fastest published system takes.
WAN = Preset(
    name="wan-2.2-t2v-a14b",
    key="wan-2.2-t2v-a14b",
    model="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    num_samples=248,
    max_output=0,
    server=Limits(0, 0),
    interactive=Limits(0, 0),
    tokens=False,
    target_qps=0.05,
    accuracy={"vbench_score": 70.48},
    compliance=("TEST04",),
)
# Samples whose videos the checker wants in the folder of an accuracy run.
REQUIRED_VIDEOS = {
    "v6.0": (130, 106, 84, 59, 12, 31, 86, 122, 233, 96),
    "v6.1": (130, 106, 84, 59, 12, 123, 43, 22, 238, 32),
}
