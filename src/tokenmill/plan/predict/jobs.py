"""Models whose samples are one job each: video, recommender and image captions, by their FLOPs.

A job is products with weights and attention; both run at the efficiencies of the language models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.catalog import find_model
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.prediction import interval
from tokenmill.plan.predict.search import best_precision
from tokenmill.plan.predict.step_cost import Efficiency


@dataclass(frozen=True, slots=True)
class Job:
    """Arithmetic of one sample."""

    linear_flops: float
    attention_flops: float
    dtype: str  # of the linear layers on GPUs that have it
    scenarios: tuple[str, ...]

    def seconds(self, gpu: Accelerator, efficiency: Efficiency) -> dict[str, float]:
        """Of one GPU, by part."""
        share = efficiency.fp4_products if self.dtype == "fp4" else efficiency.products
        linear = min(gpu.peak(self.dtype), 2 * gpu.peak("fp8")) * share
        attention = gpu.peak("bf16") * efficiency.attention
        return {
            "linear layers": self.linear_flops / linear,
            "attention": self.attention_flops / attention,
        }


def wan_job(gpu: Accelerator) -> Job:
    """Wan 2.2 T2V A14B at 720 x 1280, 81 frames: 20 steps, each with and without the prompt.

    S tokens of D channels and F inner ones in L layers, and 512 tokens of text.
    """
    tokens, width, inner, layers, text = 75_600, 5120, 13_824, 40, 512
    linear = 2 * tokens * layers * (6 * width**2 + 2 * width * inner)
    linear += 4 * text * width**2 * layers
    attention = 4 * tokens**2 * width * layers + 4 * tokens * text * width * layers
    passes = 2 * 20
    dtype = "fp8" if "fp4" in gpu.flops else "bf16"  # submissions: fp8 on Blackwell, bf16 before
    return Job(passes * linear, passes * attention, dtype, ("Offline", "SingleStream"))


def dlrm_job(gpu: Accelerator) -> Job:
    """DLRMv3: five HSTU layers over a history of 6,714 items and 2,048 candidates."""
    history, candidates, layers, width = 6_715, 2_048, 5, 512
    tokens = history + candidates
    linear = layers * 2 * tokens * width * (4 * width + 3 * width) + 1.33e6 * tokens + 5.4e9
    attention = layers * (2 * width * history**2 + 4 * width * candidates * (history + 1))
    return Job(linear, attention, "bf16", ("Offline", "Server"))


def caption_job(gpu: Accelerator) -> Job:
    """Qwen3-VL-235B-A22B: 2,240 prompt tokens, 1,410 of them of an image, and 43 of an answer.

    The means are read off a plot of the dataset, so this is known to a fifth at best.
    """
    prompt, image, answer = 2_240, 1_410, 43
    patches = 4 * image
    linear = 2 * 20.95e9 * (prompt + answer) + 2 * patches * 412.8e6 + 2 * image * 160e6
    attention = 1.54e6 * prompt**2 + 1.24e5 * patches**2 + answer * 3.1e6 * prompt
    spec = find_model("qwen3-235b-a22b")
    return Job(linear, attention, best_precision(spec, gpu), ("Offline", "Server"))


JOBS: dict[str, Callable[[Accelerator], Job]] = {
    "wan-2.2-t2v-a14b": wan_job,
    "dlrm-v3": dlrm_job,
    "qwen3-vl-235b-a22b": caption_job,
}


def predict_job(
    name: str, scenario: str, gpu: Accelerator, gpus: int, software: str, fit: Fit
) -> dict[str, Any]:
    """Samples per second of GPUs that each take their own; SingleStream divides one among all."""
    job = JOBS[name](gpu)
    if scenario not in job.scenarios:
        raise PlanError(f"--scenario {scenario}: {name} has {', '.join(job.scenarios)}")
    parts = job.seconds(gpu, fit.efficiency)
    rate = gpus / sum(parts.values())
    if scenario == "Server":
        rate *= fit.efficiency.load
    low, high = interval(rate * 1e6, fit)
    return {
        "plan": "predict",
        "benchmark": name,
        "scenario": scenario,
        "round": software,
        "efficiencies_of": fit.name,
        "gpu": gpu.key,
        "gpus": gpus,
        "output_tok_s": None,
        "samples_s": rate,
        "latency_s": sum(parts.values()) / (gpus if scenario == "SingleStream" else 1),
        "tok_s_per_gpu": None,
        "ttft_ms": None,
        "tpot_ms": None,
        "interval": [low / 1e6, high / 1e6],
        "configuration": None,
        "bottleneck": max(parts, key=parts.__getitem__),
        "step_ms": {part: round(s * 1e3, 3) for part, s in parts.items()},
        "fitted_on": list(fit.fitted_on),
        "efficiencies": {key: round(value, 4) for key, value in asdict(fit.efficiency).items()},
    }
