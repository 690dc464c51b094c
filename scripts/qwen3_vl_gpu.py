"""Samples/s of Qwen3-VL-30B-A3B with random weights on one GPU, each with an image.

    python scripts/qwen3_vl_gpu.py
    python scripts/qwen3_vl_gpu.py --tiny      a tiny model on a CPU

Requests of about 800 tokens of text and 1,400 of an image, 43 tokens out; qwen3_vl_peer.py has the
same for vLLM. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from qwen3_vl_requests import SAMPLES, WARM_UP, Work

import tokenmill.bench
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.requests import Request
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup

SHAPE = Path(tokenmill.bench.__path__[0]) / "shapes" / "qwen3-vl-30b-a3b.json"
TINY_TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2]},
}  # fmt: skip
TINY_VISION = {
    "depth": 2, "hidden_size": 144, "intermediate_size": 96, "num_heads": 2,
    "deepstack_visual_indexes": [0], "out_hidden_size": 64,
}  # fmt: skip
TINY_IDS = {"image_token_id": 509, "vision_start_token_id": 510, "vision_end_token_id": 511}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    begin = time.monotonic()
    built = build(args.tiny)
    build_s = time.monotonic() - begin
    assert built.spec.vision is not None
    work = Work(built.spec.vision, built.spec.vocab_size, args.tiny)
    seconds_of(built, [work.sample(8) for _ in range(2 if args.tiny else WARM_UP)])
    requests = [work.sample() for _ in range(args.samples)]
    as_text = [work.sample(as_text=True) for _ in range(max(1, args.samples // 4))]
    seconds = seconds_of(built, requests)
    tokens = sum(len(request.task.prompt_token_ids) for request in requests)
    images = sum(request.task.images[0].num_tokens for request in requests)
    report = {
        "benchmark": "qwen3-vl",
        "weights": "random",
        "build_s": round(build_s, 1),
        "samples": args.samples,
        "text_tokens": tokens - images,
        "image_tokens": images,
        "seconds": round(seconds, 3),
        "samples_s": round(args.samples / seconds, 3),
        "as_text_samples_s": round(len(as_text) / seconds_of(built, as_text), 3),
    }
    print(json.dumps(report))


def build(tiny: bool) -> BuiltEngine:
    config = json.loads(SHAPE.read_text())
    if tiny:
        config |= TINY_IDS
        config["text_config"] |= TINY_TEXT
        config["vision_config"] |= TINY_VISION
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(config))
    device, dtype = ("cpu", "fp32") if tiny else ("cuda", "bf16")
    cache = CacheConfig(prefix_cache=False)
    if tiny:
        cache = replace(cache, num_blocks=2000)
    model = ModelConfig(str(path), dtype, device, random_weights=True)
    return build_engine(resolve_setup(Setup(model, cache, SchedulerConfig(max_waiting=8192))))


def seconds_of(built: BuiltEngine, requests: list[Request]) -> float:
    """Seconds until all are done that are submitted at once."""
    begin, done = time.perf_counter(), 0
    for request in requests:
        built.engine.submit(request)
    while built.engine.has_work():
        for output in built.engine.step():
            assert output.error is None, output.error
            done += output.finish_reason is not None
    assert done == len(requests), f"{done} of {len(requests)} ended"
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
