"""What `plan size` leaves behind: settings for `serve`, and the benchmark that tests the plan."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.settings import Settings, SettingsError

if TYPE_CHECKING:
    from tokenmill.core.specs.spec import ModelSpec
    from tokenmill.plan.predict.search import System
    from tokenmill.plan.predict.sizing import Size, Traffic

MARK = "# Written by tokenmill plan size."
SERVED = ("fp8", "int8")  # types that `serve` rounds weights to; others are the checkpoint's


def bench_command(settings: Settings, system: System, traffic: Traffic) -> str:
    """The benchmark that tests the plan, with the lengths that it was made for."""
    limit = traffic.limit
    return " ".join(
        (
            "tokenmill bench endpoint --url http://127.0.0.1:8000/v1",
            *_load_words(settings, system, traffic),
            f"--goodput ttft:{limit.ttft_s * 1e3:g},tpot:{limit.tpot_s * 1e3:g}",
            f"--slo-percentile {limit.percentile:g}",
        )
    )


def _load_words(settings: Settings, system: System, traffic: Traffic) -> list[str]:
    """A trace brings its own times; lengths come with the answers that the plan assumes."""
    from tokenmill.bench.mlperf.presets import PRESETS
    from tokenmill.plan.predict.benchmarks import GPT_OSS_OUTPUT

    if settings.get("trace"):
        return [
            f"--trace {settings.get('trace')}",
            f"--trace-block-tokens {settings.get('trace-block-tokens')}",
        ]
    words = [f"--rate {traffic.rate:g} --duration 600"]
    if system.cached:  # a shared prefix comes before prompts of their own
        shared = round(system.cached * system.lengths.mean_input)
        own = max(1, round(system.lengths.mean_input) - shared)
        answer = round(system.lengths.mean_output)
        return [*words, f"--shared-prefix {shared} --input-len {own} --output-len {answer}"]
    words.append(f"--lengths {settings.get('lengths')}")
    preset = PRESETS.get(settings.get("lengths"))
    output = settings.get("output-len") or (preset.output_len if preset else None)
    if preset and preset.name == "gpt-oss-120b" and not settings.get("output-len"):
        output = GPT_OSS_OUTPUT
    if output:
        words.append(f"--output-len {output}")
    return words


def write_settings(settings: Settings, spec: ModelSpec, best: Size) -> str:
    """A TOML file for `serve --config`; a file of the user's is not written over."""
    path = Path(settings.get("write")).expanduser()
    if path.exists() and not path.read_text(encoding="utf-8").startswith(MARK):
        raise SettingsError(f"--write {path}: is there and was not written by plan size")
    lines = serve_lines(settings.get("model"), spec, best)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def serve_lines(model: str, spec: ModelSpec, best: Size) -> list[str]:
    """Settings of `serve` in TOML."""
    plan, replica = best.plan, best.plan.replica
    lines = [MARK, *_model_lines(model), *_type_lines(spec, best)]
    if replica.attention_dp > 1:
        lines += [f"ep = {replica.attention_dp}", "attention-dp = true"]
    elif replica.tensor_parallel > 1:
        lines.append(f"tp = {replica.tensor_parallel}")
    if replica.mtp_depth:
        lines.append(f"mtp = {replica.mtp_depth}")
    if plan.prefill is not None:
        lines += [f"prefill = {plan.prefill_replicas}", f"decode = {plan.replicas}"]
    else:
        lines.append(f"workers = {plan.replicas}")
    # Running requests fluctuate by the root of their number: four times that is seldom exceeded.
    running = plan.operation.sequences / replica.attention_dp
    lines.append(f"max-num-seqs = {math.ceil(1.25 * running + 4 * math.sqrt(running))}")
    return lines


def _model_lines(model: str) -> list[str]:
    """The checkpoint of a shape where it is known; a shape alone has no weights."""
    from tokenmill.bench.mlperf.presets import PRESETS
    from tokenmill.plan.predict.catalog import known_models

    if model in PRESETS:
        return [f'model = "{PRESETS[model].model}"']
    if model in known_models() and model != "smollm2":
        return [
            "# This is the name of a shape: put the folder or hub name of its checkpoint here.",
            f'model = "{model}"',
        ]
    return [f'model = "{model}"']


def _type_lines(spec: ModelSpec, best: Size) -> list[str]:
    """Weights in bf16, and MXFP4 as published, are what `serve` takes without being told."""
    kv, lines = best.plan.replica.precision.kv, []
    if best.precision in SERVED:
        lines.append(f'dtype = "{best.precision}"')
    elif best.precision == "fp4":
        lines.append("# The plan is for fp4 weights: give a checkpoint in it.")
    if kv == "fp8" and spec.mla:
        lines.append("# The plan has KV in fp8, which serve lacks for latent attention.")
    elif kv == "fp8":
        lines.append('kv-cache-dtype = "fp8"')
    return lines
