"""tokenmill bench mtp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill import console
from tokenmill.bench import acceptance as bench
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import (
    BenchConfig,
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
)
from tokenmill.settings import CACHE, EXECUTION, MODEL, MTP, SETTINGS, Settings

DEPTHS = (1, 2, 3)
DEFAULT_TOKENS = 128
OURS = ("mtp", "mtp-adaptive", "prefix-cache")  # what the benchmark itself decides
PANELS = {
    "Benchmark": (
        *MTP,
        *(SETTINGS[key] for key in ("num-prompts", "output-len", "rounds", "json-only")),
    ),
    "Model": MODEL,
    "KV cache": tuple(s for s in CACHE if s.key not in OURS),
    "Execution": tuple(s for s in EXECUTION if s.key not in OURS),
}


def mtp(settings: Settings) -> None:
    """How many drafts of the MTP module are right, and the speed-up over no drafts.

    Chat prompts of this package, greedy answers of at most 128 tokens, without drafts and
    with 1, 2 and 3 of them, turn by turn. The ceiling is the speed-up if every
    draft were right, at the measured cost of a step.

    tokenmill bench mtp
    tokenmill bench mtp --depths 2 --batch 8 --rounds 5
    tokenmill bench mtp --draft head.safetensors --num-prompts 8
    """
    from tokenmill.engine.drafting import FixedDrafting

    config = settings.build(BenchConfig)
    depths, batch = sorted(set(settings.get("depths") or DEPTHS)), settings.get("batch")
    max_tokens = config.output_len or DEFAULT_TOKENS
    model = settings.build(ModelConfig)
    path = model_path(model)
    prompts = _prompts(path, config.num_prompts)
    model = replace(model, model=str(path))
    built = _build(settings, model, depths[-1], batch)
    longest = max(map(len, prompts)) + max_tokens
    if longest > built.max_model_len:
        raise BenchError(
            f"--output-len {max_tokens} needs {longest} tokens, "
            f"but the model's context is {built.max_model_len}"
        )

    def set_depth(depth: int) -> None:
        built.engine.drafting = FixedDrafting(depth)

    with console.progress("Benchmark runs") as update:
        runs = bench.measure(
            built.engine, set_depth, prompts, depths, config.num_rounds, batch, max_tokens, update
        )
    by_depth = bench.depth_report(runs)
    drafting = {depth: by_depth[depth] for depth in map(str, depths)}
    best = max(drafting, key=lambda depth: drafting[depth]["speedup"])
    if not settings.get("json-only"):
        _print(by_depth, batch, built.device)
    console.print_json(
        {
            "benchmark": "mtp",
            "model": model.model if settings.get("model") is None else settings.get("model"),
            "device": built.device,
            "dtype": built.dtype,
            "batch": batch,
            "num_prompts": len(prompts),
            "max_tokens": max_tokens,
            "rounds": config.num_rounds,
            "depths": by_depth,
            "best_depth": int(best),
            "acceptance": drafting[best]["acceptance"],
            "speedup": drafting[best]["speedup"],
            "identical": all(not figures["num_different"] for figures in drafting.values()),
        }
    )


def _prompts(path: Path, count: int | None) -> list[list[int]]:
    """Token ids of the first prompts; those of the default model need no tokenizer."""
    from tokenmill.models.store import CATALOG

    known = bench.chat_prompts()
    if count is not None and count > len(known):
        raise BenchError(f"--num-prompts {count}: there are {len(known)} prompts")
    known = known[:count]
    if path.name == CATALOG["smollm2"].file_name:
        return [prompt.token_ids for prompt in known]
    from tokenmill.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    return [tokenizer.encode_chat([{"role": "user", "content": p.text}]) for p in known]


def _build(settings: Settings, model: ModelConfig, depth: int, batch: int) -> Any:
    """An engine that can draft, with room for the batch."""
    with (
        console.progress("Loading weights", size_in_bytes=True) as loaded,
        console.progress("Capturing CUDA graphs") as captured,
    ):
        from tokenmill.engine.build import build_engine

        return build_engine(
            model,
            settings.build(CacheConfig, prefix_cache=False),
            SchedulerConfig(max_num_seqs=batch),
            settings.build(ExecutionConfig, mtp=depth, mtp_adaptive=False),
            progress=loaded,
            capture_progress=captured,
        )


def _print(by_depth: dict[str, Any], batch: int, device: str) -> None:
    console.out.print(f"[bold]Multi-token prediction on {device}, batch {batch}[/bold]")
    head = ["drafts", "tok/s", "speed-up", "ceiling", "step ms", "first right", "tokens/step"]
    rows = [head]
    for depth, figures in by_depth.items():
        share = figures.get("acceptance", {})
        cells = [
            _shown(figures.get("speedup"), "{:.2f}x"),
            _shown(figures.get("ceiling_speedup"), "{:.2f}x"),
            _shown(figures["step_ms"], "{:.2f}"),
            _shown(share.get("first"), "{:.1%}"),
            _shown(share.get("length"), "{:.2f}"),
        ]
        rows.append([depth, _shown(figures["tok_s"], "{:,.1f}"), *cells])
    console.print_table(rows)
    for depth, figures in by_depth.items():
        if figures.get("num_different"):
            console.out.print(
                f"{figures['num_different']} answers with {depth} drafts differ from those without"
            )


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


COMMANDS = (BenchCommand("mtp", mtp, PANELS),)
