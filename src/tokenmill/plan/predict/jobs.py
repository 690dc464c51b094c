"""Models whose samples are one job each: video, recommender and image captions.

A job is products with weights, attention, and bytes that move between them, all at the efficiencies
of the language models; captions are a language model's prompts and answers beside an image's tower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.catalog import find_model
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.lengths import Lengths
from tokenmill.plan.predict.prediction import interval
from tokenmill.plan.predict.search import SearchSpace, System, best_precision, search
from tokenmill.plan.predict.step_cost import Efficiency


@dataclass(frozen=True, slots=True)
class JobCost:
    linear_flops: float
    attention_flops: float
    moved_bytes: float  # activations, and weights or embeddings that are read
    dtype: str  # of the linear layers on GPUs that have it
    scenarios: tuple[str, ...]
    model: str = ""  # the language model that a sample also asks, with prompts of such lengths
    lengths: Lengths | None = None

    def seconds(self, gpu: Accelerator, efficiency: Efficiency) -> dict[str, float]:
        share = efficiency.fp4_products if self.dtype == "fp4" else efficiency.products
        linear = min(gpu.peak(self.dtype), 2 * gpu.peak("fp8")) * share
        attention = gpu.peak("bf16") * efficiency.attention
        return {
            "linear layers": self.linear_flops / linear,
            "attention": self.attention_flops / attention,
            "activations": self.moved_bytes / (gpu.memory_bytes_per_s * efficiency.memory),
        }


def wan_job(gpu: Accelerator) -> JobCost:
    """Wan 2.2 T2V A14B at 720 x 1280, 81 frames: 20 steps, each with and without the prompt.

    S tokens of D channels and F inner ones in L layers, and 512 tokens of text.
    """
    tokens, width, inner, layers, text = 75_600, 5120, 13_824, 40, 512
    linear = 2 * tokens * layers * (6 * width**2 + 2 * width * inner)
    linear += 4 * text * width**2 * layers
    attention = 4 * tokens**2 * width * layers + 4 * tokens * text * width * layers
    passes = 2 * 20
    dtype = "fp8" if "fp4" in gpu.flops else "bf16"  # submissions: fp8 on Blackwell, bf16 before
    weights = 2 * layers * (6 * width**2 + 2 * width * inner)
    streams = 16 * tokens * width * layers  # norms, gates and rotations: 2 bytes, eight times
    moved = passes * (weights + streams)
    return JobCost(passes * linear, passes * attention, moved, dtype, ("Offline", "SingleStream"))


def dlrm_job(gpu: Accelerator) -> JobCost:
    """DLRMv3: five HSTU layers over a history of 6,714 items and 2,048 candidates."""
    history, candidates, layers, width = 6_715, 2_048, 5, 512
    tokens = history + candidates
    linear = layers * 2 * tokens * width * (4 * width + 3 * width) + 1.33e6 * tokens + 5.4e9
    attention = layers * (2 * width * history**2 + 4 * width * candidates * (history + 1))
    # A layer moves the stream, its four projections and their product, and the gated output.
    moved = 2 * layers * tokens * width * (2 + 2 * 4 + 3) + tokens * 2 * width
    return JobCost(linear, attention, moved, "bf16", ("Offline", "Server"))


def caption_job(gpu: Accelerator) -> JobCost:
    """Qwen3-VL-235B-A22B: 2,240 prompt tokens, 1,410 of them of an image, and 43 of an answer.

    The means are read off a plot of the dataset, so this is known to a fifth at best.
    """
    prompt, image, answer = 2_240, 1_410, 43
    patches = 4 * image
    linear = 2 * patches * 412.8e6 + 2 * image * 160e6
    attention = 1.24e5 * patches**2
    name = "qwen3-235b-a22b"
    dtype = best_precision(find_model(name), gpu)
    lengths = Lengths("captions", ((prompt, answer),))
    return JobCost(linear, attention, 0.0, dtype, ("Offline", "Server"), name, lengths)


JOBS: dict[str, Callable[[Accelerator], JobCost]] = {
    "wan-2.2-t2v-a14b": wan_job,
    "dlrm-v3": dlrm_job,
    "qwen3-vl-235b-a22b": caption_job,
}


def job_seconds(
    job: JobCost, gpu: Accelerator, gpus: int, efficiency: Efficiency
) -> dict[str, float]:
    parts = job.seconds(gpu, efficiency)
    if job.lengths is not None:
        system = System(find_model(job.model), gpu, gpus, job.lengths, efficiency)
        plan = search(system, SearchSpace(), None)
        assert plan is not None, "without limits there is always one"
        parts["language model"] = gpus / plan.requests_per_s
    return parts


def job_rate(
    name: str, scenario: str, gpu: Accelerator, gpus: int, efficiency: Efficiency
) -> float:
    """Samples per second; SingleStream divides each sample among all GPUs."""
    parts = job_seconds(JOBS[name](gpu), gpu, gpus, efficiency)
    return gpus / sum(parts.values()) * (efficiency.load if scenario == "Server" else 1.0)


def predict_job(
    name: str, scenario: str, gpu: Accelerator, gpus: int, software: str, fit: Fit
) -> dict[str, Any]:
    """The prediction as `plan predict` prints it; `fit.error` is that of this benchmark's rows."""
    job = JOBS[name](gpu)
    if scenario not in job.scenarios:
        raise PlanError(f"--scenario {scenario}: {name} has {', '.join(job.scenarios)}")
    parts = job_seconds(job, gpu, gpus, fit.efficiency)
    rate = job_rate(name, scenario, gpu, gpus, fit.efficiency)
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


def size_job(
    name: str, gpu: Accelerator, rate: float, price: float, most: int, fit: Fit
) -> dict[str, Any]:
    """The fewest GPUs that take so many samples per second, in units that hold the model."""
    unit = _least_gpus(name, gpu, fit)
    scenario = "Server" if "Server" in JOBS[name](gpu).scenarios else "Offline"
    each = job_rate(name, scenario, gpu, unit, fit.efficiency)
    units = math.ceil(rate / each)
    gpus = units * unit
    lost = min(gpus, max(unit, gpu.node_gpus))  # with one node
    low, high = (math.exp(sign * fit.error) * rate / each for sign in (-1, 1))
    parts = job_seconds(JOBS[name](gpu), gpu, unit, fit.efficiency)
    left = (gpus - lost) // unit
    return {
        "plan": "size",
        "model": name,
        "gpu": gpu.key,
        "rate": rate,
        "price_per_gpu_hour": price,
        "gpus": gpus,
        "workers": units,
        "max_rate": round(units * each, 6),
        "headroom": round(units * each / rate - 1, 4),
        "latency_s": sum(parts.values()) / unit,
        "bottleneck": max(parts, key=parts.__getitem__),
        "within_gpus": gpus <= most,
        "usd_per_hour": round(gpus * price, 2),
        "usd_per_sample": gpus * price / 3600 / rate,
        "interval_gpus": [max(1, math.floor(low)) * unit, math.ceil(high) * unit],
        "what_if": {
            "one node lost": {
                "gpus": left * unit,
                "max_rate": round(left * each, 6),
                "holds": left * each >= rate,
                "needs_gpus": gpus + lost,
            }
        },
        "efficiencies_of": fit.name,
        "fitted_on": list(fit.fitted_on),
    }


def _least_gpus(name: str, gpu: Accelerator, fit: Fit) -> int:
    """The least power of two of GPUs that hold the language model of a job; others fit on one."""
    size = 1
    while JOBS[name](gpu).lengths is not None:
        try:
            job_rate(name, "Offline", gpu, size, fit.efficiency)
        except PlanError:
            if size >= gpu.domain_gpus:
                raise
            size *= 2
        else:
            break
    return size
