"""What a decode step of two ranks that share one GPU costs beside one rank, and their answers.

    python scripts/ranks_gpu.py
    python scripts/ranks_gpu.py --device cpu --tiny --layers 2 --batch 4 --outputs 12

NCCL takes one rank for each GPU, so two ranks on one exchange by gloo through host memory. A dense
model with `--tp 2`, and one of experts with `--ep 2` and with `--attention-dp`, all of random
weights and cut to `--layers`, answer the same prompts as one rank does: by CUDA graphs, which of
several ranks end where these meet, and operation by operation ("eager"). Steps count once every
request is decoding. On a GPU all compute batch-invariantly, so that answers of two ranks must be
those of one. With `--any-batch`, and on a CPU, how many tokens are the same, from the first on, is
told. What does not begin within `--seconds` is left out. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.types import Engine, Request, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup

SHAPES = Path(__file__).parent.parent / "src" / "tokenmill" / "bench" / "shapes"
PROMPT_TOKENS = 64
MOE_SIZES = {"num_experts": 32}  # of 128: a start has to be short
TINY = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128}
TINY |= {"vocab_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
# By name: the model, whether by graphs, and how it is divided. The first of a model is what others
# are compared with.
CELLS = {
    "dense": ("dense", True, ParallelConfig()),
    "dense tp 2": ("dense", True, ParallelConfig(tp=2)),
    "experts": ("experts", True, ParallelConfig()),
    "experts ep 2": ("experts", True, ParallelConfig(ep=2)),
    "experts ep 2, attention dp": ("experts", True, ParallelConfig(ep=2, attention_dp=True)),
    "dense tp 2, eager": ("dense", False, ParallelConfig(tp=2)),
    "experts ep 2, eager": ("experts", False, ParallelConfig(ep=2)),
    "dense, eager": ("dense", False, ParallelConfig()),
    "experts, eager": ("experts", False, ParallelConfig()),
}
Answers = list[list[int]]


def main() -> None:
    args = _arguments()
    began_s, cells, first = time.monotonic(), {}, {}
    with tempfile.TemporaryDirectory() as name:
        models = _write_models(Path(name), args)
        for cell, (model, graphs, parallel) in CELLS.items():
            if args.device == "cpu" and not graphs:  # there are none
                continue
            if time.monotonic() - began_s > args.seconds:
                cells[cell] = {"left_out": f"{args.seconds:g} s were over"}
                continue
            execution = ExecutionConfig(cuda_graphs=graphs, batch_invariant=not args.any_batch)
            setup = _setup(models[model], execution, parallel, args)
            figures, answers = _measure(setup, args)
            cells[cell] = figures | _compared(answers, first.setdefault(model, answers))
            print(f"{cell}: {json.dumps(cells[cell])}", flush=True)
    seconds = round(time.monotonic() - began_s, 1)
    keys = ("device", "dense", "experts", "tiny", "layers", "batch", "any_batch")
    report = {"benchmark": "ranks-gpu"} | {key: getattr(args, key) for key in keys}
    print(json.dumps(report | {"cells": cells, "seconds": seconds}))
    other = [
        name for name, cell in cells.items() if cell.get("same_answers", args.batch) < args.batch
    ]
    if other and args.device == "cuda" and not args.any_batch:
        sys.exit(f"answers differ from those of one rank: {', '.join(other)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dense", default="qwen3-0.6b", help="shape of bench/shapes")
    parser.add_argument("--experts", default="qwen3-30b-a3b", help="shape of bench/shapes")
    parser.add_argument("--tiny", action="store_true", help="narrow ones, for a CPU")
    parser.add_argument("--layers", type=int, default=8, help="of each model")
    parser.add_argument("--batch", type=int, default=16, help="requests at once")
    parser.add_argument("--outputs", type=int, default=64, help="tokens of each")
    parser.add_argument("--any-batch", action="store_true", help="the quickest kernels")
    parser.add_argument("--seconds", type=float, default=100.0, help="in which cells may begin")
    return parser.parse_args()


def _write_models(folder: Path, args: argparse.Namespace) -> dict[str, Path]:
    paths = {}
    for name, shape in (("dense", args.dense), ("experts", args.experts)):
        config = json.loads((SHAPES / f"{shape}.json").read_text())
        config |= {"num_hidden_layers": args.layers} | (MOE_SIZES if name == "experts" else {})
        config |= TINY if args.tiny else {}
        paths[name] = folder / name
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(json.dumps(config))
    return paths


def _setup(
    path: Path, execution: ExecutionConfig, parallel: ParallelConfig, args: argparse.Namespace
) -> Setup:
    num_tokens = PROMPT_TOKENS + args.outputs
    model = ModelConfig(
        str(path), device=args.device, share_gpus=True, random_weights=True, max_model_len=1024
    )
    cache = CacheConfig(num_blocks=8 + args.batch * (num_tokens // 16 + 2))
    limits = SchedulerConfig(max_num_seqs=args.batch, max_num_batched_tokens=2048)
    return resolve_setup(Setup(model, cache, limits, execution, parallel))


def _measure(setup: Setup, args: argparse.Namespace) -> tuple[dict[str, Any], Answers]:
    begin_s = time.monotonic()
    built = build_engine(setup)
    start_s = time.monotonic() - begin_s
    try:
        _ask(built.engine, "warm", args, seed=1)
        answers, steps_ms = _ask(built.engine, "timed", args, seed=2)
    finally:
        built.close()
    return {
        "start_s": round(start_s, 1),
        "step_ms": round(statistics.median(steps_ms), 3),
        "step_ms_max": round(max(steps_ms), 3),
        "steps": len(steps_ms),
    }, answers


def _ask(
    engine: Engine, name: str, args: argparse.Namespace, seed: int
) -> tuple[Answers, list[float]]:
    """The answers, and the milliseconds of the steps in which every request was decoding."""
    source = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=args.outputs, ignore_eos=True)
    answers: dict[str, list[int]] = {f"{name}-{i}": [] for i in range(args.batch)}
    for key in answers:
        prompt = [source.randrange(10, 1000) for _ in range(PROMPT_TOKENS)]
        engine.submit(Request(key, prompt, sampling, arrival_ns=time.monotonic_ns()))
    steps_ms, num_open = [], args.batch
    while num_open:
        all_decode = all(answers.values()) and num_open == args.batch
        begin_s = time.perf_counter()
        outputs = engine.step()
        if all_decode:
            steps_ms.append(1e3 * (time.perf_counter() - begin_s))
        for output in outputs:
            if output.error:
                raise SystemExit(f"{output.request_id}: {output.error}")
            answers[output.request_id] += output.token_ids
            num_open -= output.finish_reason is not None
    return list(answers.values()), steps_ms


def _compared(answers: Answers, expected: Answers) -> dict[str, Any]:
    pairs = [list(zip(*pair, strict=True)) for pair in zip(answers, expected, strict=True)]
    same = [sum(1 for _ in takewhile(_equal, pair)) for pair in pairs]
    return {
        "same_answers": sum(n == len(pair) for n, pair in zip(same, pairs, strict=True)),
        "same_tokens_mean": round(statistics.mean(same), 1),
    }


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


if __name__ == "__main__":
    main()
