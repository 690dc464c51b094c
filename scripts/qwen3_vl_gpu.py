"""Qwen3-VL with random weights on one GPU: encoder, throughput, a part of 235B, and streams beside.

    python scripts/qwen3_vl_gpu.py

throughput: the 30B-A3B shape in bf16, requests of about 800 tokens of text and 1,400 of an image,
43 tokens out (qwen3_vl_peer.py has the same for vLLM), then streams: the time between tokens of
requests without images, alone, while the others arrive, and alone again. layers: the 235B shape in
fp8, with --layers of its 94 layers, and what follows for a sample on all of them, without the
communication of several GPUs. streams (not by default): the 30B-A3B shape's streams alone, which
throughput has, too: of each kind of step the host's time to launch it, the device's and the
engine's, and what happened in slow ones (kernels compiled, garbage collected, memory asked for).
encoder (not by default): the vision encoder alone on images of 1,024
x 1,024: each kind of kernel against the least time that its FLOPs or bytes take, its attention by
shapes of tiles and by torch's own, and small images by CUDA graphs and without.

Every figure is printed as soon as it is known, and a part's last line is one JSON object with all
of its figures. One part runs in this process, several each in its own, each of which leaves the
later ones their time. What does not fit into --seconds any more is left out and named; a part that
hangs ends with the stacks of its threads.

`python scripts/qwen3_vl_gpu.py --tiny` runs all of it on a CPU with a tiny model.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from qwen3_vl_requests import OUT, SAMPLES, WARM_UP, Work
from qwen3_vl_streams import Load, StepWatch, compare
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))

import tokenmill.bench
from benchmarks.decode import DecodeProbe, least_seconds
from tokenmill.bench.ceiling import measure_machine
from tokenmill.bench.roofline import Machine
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import Request
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.graphs.capture import CaptureLimits, capture_all
from tokenmill.engine.graphs.encoder_graphs import SIZES as SIZES_OF_GRAPHS
from tokenmill.engine.graphs.encoder_graphs import EncoderGraphs
from tokenmill.engine.images import normalised
from tokenmill.kernels import MODE, segments
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu import segments as gpu_segments
from tokenmill.kernels.gpu.hopper import segments as segments_hopper
from tokenmill.kernels.gpu.hopper.two_groups import Shape
from tokenmill.models import spec_of
from tokenmill.models.qwen3_vl_vision import VisionEncoder, vision_tensors

PARTS = {"throughput": 150.0, "layers": 85.0, "encoder": 45.0, "streams": 90.0}  # seconds of each
BY_DEFAULT = "throughput,layers"
SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
TILES = ((64, 4, 3), (128, 8, 2), (64, 8, 3), (128, 8, 3), (64, 4, 2))  # keys, warps, stages
ALL_LAYERS, RED_HAT = 94, 2.277  # samples/s per H200 of 8, MLPerf Inference v6.0, Offline
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


class Report:
    """A part's figures: each is printed as soon as it is known."""

    def __init__(self, part: str, seconds: float) -> None:
        self.part, self.found = part, {"part": part}
        self._begin, self._end = BEGIN, BEGIN + seconds

    def add(self, **figures: Any) -> None:
        """Print figures, and keep them for the last line."""
        self.found |= figures
        now_s = round(time.monotonic() - self._begin, 1)
        print(json.dumps({"part": self.part, "at_s": now_s, **figures}), flush=True)

    def has(self, seconds: float, what: str) -> bool:
        """Whether there is time for what takes so long; else say that it is left out."""
        enough = time.monotonic() + seconds < self._end
        if not enough:
            self.found.setdefault("left_out", []).append(what)
            print(f"{self.part}: no time for {what}", flush=True)
        return enough


BEGIN = time.monotonic()


def main() -> None:
    args = _arguments()
    parts = args.parts.split(",")
    if len(parts) == 1:
        faulthandler.dump_traceback_later(args.seconds + 5, exit=True)
        report = Report(parts[0], args.seconds)
        RUNS[parts[0]](args, report)
        print(json.dumps({"benchmark": "qwen3-vl", "weights": "random", **report.found}))
        return
    for index, part in enumerate(parts):  # what one takes of the GPU is gone after it
        later = sum(PARTS[name] for name in parts[index + 1 :])
        left = max(1.0, args.seconds - (time.monotonic() - BEGIN) - later)
        command = [sys.executable, __file__, *sys.argv[1:], "--parts", part]
        try:
            subprocess.run([*command, "--seconds", str(left)], timeout=left + 10)
        except subprocess.TimeoutExpired:
            print(f"{part}: cut off after {left + 10:.0f} s", flush=True)


def _config(name: str, args: argparse.Namespace, **text: int) -> Path:
    """The shape's config.json in a folder of its own, or a tiny one of the same family."""
    config = json.loads((SHAPES / f"{name}.json").read_text())
    if args.tiny:
        config["text_config"] |= TINY_TEXT
        config["vision_config"] |= TINY_VISION
        tokens = {"image_token_id": 509, "vision_start_token_id": 510, "vision_end_token_id": 511}
        config |= tokens
    config["text_config"] |= text
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def _vision(name: str, args: argparse.Namespace) -> VisionSpec:
    vision = spec_of(json.loads(_config(name, args).read_text())).vision
    assert vision is not None
    return vision


def _seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Of a run, the mean of several that are launched one after the other."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    run()
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - begin) / repeats


@torch.inference_mode()
def encoder(args: argparse.Namespace, report: Report) -> None:
    """The encoder alone, one image at a time and several."""
    device, repeats = args.device, 1 if args.tiny else 10
    spec, side = _vision("qwen3-vl-30b-a3b", args), 8 if args.tiny else 64
    weights = {
        name: torch.randn(shape, device=device) * 0.02
        for name, shape in vision_tensors(spec).items()
    }
    built = VisionEncoder(spec, weights, "bf16" if device == "cuda" else "fp32", device)
    text = spec_of(json.loads(_config("qwen3-vl-30b-a3b", args).read_text()))
    machine = measure_machine(text, os.cpu_count() or 1, device)
    ceiling = machine.flops_per_s("bf16" if device == "cuda" else "fp32")
    report.add(patches=side**2, ceiling_tflops=round(ceiling / 1e12, 2))

    def timed(count: int) -> dict[str, float]:
        pixels = torch.rand(count * side**2, spec.patch_dim, device=device)
        grids = [(1, side, side)] * count
        seconds = _seconds(lambda: built(pixels, grids), device, repeats)
        rate = count * spec.encode_flops(side**2) / seconds
        found = {"ms": 1e3 * seconds / count, "tflops": rate / 1e12, "share": rate / ceiling}
        return {name: round(value, 4) for name, value in found.items()}

    for count in (1, 4, 2):
        report.add(**{f"images_{count}": timed(count)})
    if device == "cuda":
        report.add(**_kernels(built, spec, side, machine))
        _other_attention(spec, side, report, timed)
    if report.has(8, "small images"):
        report.add(small=_small(built, spec, device, repeats))


def _other_attention(
    spec: VisionSpec, side: int, report: Report, timed: Callable[[int], dict[str, float]]
) -> None:
    """One layer's attention by other kernels and tiles, and the encoder with them."""
    if hopper.is_here():
        report.add(hopper_difference=_hopper_difference(spec))
    hopper.ALLOWED = False
    report.add(without_hopper_attention=timed(4))
    MODE.without = frozenset({"segment_attention"})
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        report.add(with_cudnn_attention=timed(4))
    MODE.without = frozenset()
    found = _attention(spec, side, report)
    tiles = [name for name in found if name.startswith("tile")]
    if tiles:
        best = max(tiles, key=lambda name: found[name])
        gpu_segments.TILE = gpu_segments.Tile(*map(int, best.split()[1].split("/")))
        report.add(with_best_tile={"tile": best, **timed(4)})


def _hopper_difference(spec: VisionSpec) -> float:
    """Relative, of the Hopper kernel to torch's attention in fp32, over two odd segments."""
    lens = (1000, 333)
    qkv = torch.randn(sum(lens), 3 * spec.hidden_size, device="cuda", dtype=torch.bfloat16)
    qkv[:, : spec.hidden_size] *= 0.1
    plan = segments.plan_segments(lens, qkv.device)
    found = segments_hopper.attend(qkv, plan, spec.num_heads).float()
    expected = segments.segment_attention.reference(qkv.float(), plan, spec.num_heads)
    return round(float((found - expected).norm() / expected.norm()), 5)


def _small(
    built: VisionEncoder, spec: VisionSpec, device: str, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of one image by its patches: as it is, and in the size of a graph."""
    sides = (4, 6) if device == "cpu" else (16, 24, 32, 48, 64)
    wanted = (
        (128,)
        if device == "cpu"
        else tuple(SIZES_OF_GRAPHS[bisect_left(SIZES_OF_GRAPHS, side**2)] for side in sides)
    )
    graphs = EncoderGraphs(built, spec, wanted)
    found: dict[str, dict[str, float]] = {}
    if device == "cuda":
        begin = time.perf_counter()
        report = capture_all(graphs.jobs(torch.cuda.graph_pool_handle()), CaptureLimits(6, 2**33))
        graphs.start()
        found["capture"] = {"s": time.perf_counter() - begin, "mib": report.memory_bytes / 2**20}
    for side in sides:
        pixels, grids = torch.rand(side**2, spec.patch_dim, device=device), [(1, side, side)]
        plain = _seconds(partial(built, pixels, grids), device, repeats)
        padded = _seconds(partial(graphs, pixels, grids), device, repeats)
        apart = (graphs(pixels, grids)[0] - built(pixels, grids)[0]).norm()
        found[str(side**2)] = {
            "plain_ms": 1e3 * plain,
            "graph_ms": 1e3 * padded,
            "difference": float(apart / built(pixels, grids)[0].norm()),
        }
    return {n: {key: round(value, 4) for key, value in row.items()} for n, row in found.items()}


def _least_ms(spec: VisionSpec, patches: int, machine: Machine) -> dict[str, float]:
    """Of an image, by kind of kernel: products and attention by FLOPs, the rest by bytes."""
    flops, rate, width = machine.flops_per_s("bf16"), machine.read_bytes_per_s, 2 * patches
    attention = spec.depth * 4 * patches**2 * spec.hidden_size
    # Two norms read x and what is added to it and write both sums and norms; q and k turn in place.
    rows = spec.depth * width * spec.hidden_size * (2 * 4 + 2 * 2)
    return {
        "products": 1e3 * (spec.encode_flops(patches) - attention) / flops,
        "attention": 1e3 * attention / flops,
        "rows": 1e3 * rows / rate,
    }


def _kind(kernel: str) -> str:
    if "segment_kernel" in kernel:
        return "attention"
    products = ("gemm", "cutlass", "nvjet", "xmma", "splitK", "cublas")
    return "products" if any(part in kernel for part in products) else "rows"


def _kernels(built: VisionEncoder, spec: VisionSpec, side: int, machine: Machine) -> dict[str, Any]:
    """Milliseconds per image of four in one call: by kind against the least, and by kernel."""
    pixels = torch.rand(4 * side**2, spec.patch_dim, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        built(pixels, [(1, side, side)] * 4)
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    least, spent, count = _least_ms(spec, side**2, machine), Counter[str](), Counter[str]()
    for event in events:
        if event.self_device_time_total:  # the others are calls of the runtime
            spent[_kind(event.key)] += event.self_device_time_total / 4e3
            count[_kind(event.key)] += event.count
    kinds = {
        kind: {
            "ms": round(spent[kind], 3),
            "least_ms": round(least[kind], 3),
            "share": round(least[kind] / spent[kind], 3) if spent[kind] else 0.0,
            "launches": count[kind],
        }
        for kind in least
    }
    longest = {e.key[:70]: round(e.self_device_time_total / 4e3, 3) for e in events[:10]}
    return {"kinds": kinds, "kernels_ms": longest}


def _attention(spec: VisionSpec, side: int, report: Report) -> dict[str, float]:
    """TFLOP/s of one layer's attention over four images: by torch, on Hopper, by tile."""
    heads, lens = spec.num_heads, (side**2,) * 4
    qkv = torch.randn(sum(lens), 3 * spec.hidden_size, device="cuda", dtype=torch.bfloat16)
    plan = segments.plan_segments(lens, qkv.device)
    flops = 4 * spec.hidden_size * sum(n * n for n in lens)
    q, k, v = qkv.unflatten(1, (3, heads, -1)).unflatten(0, (4, -1)).permute(2, 0, 3, 1, 4)
    runs: dict[str, Callable[[], object]] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def run(backend: Any = backend) -> object:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, scale=1.0)

        runs[backend.name] = run
    for stages, turns in ((3, True), (2, True), (3, False)):
        shape = Shape(stages, turns)
        name = f"hopper {stages}{' in turns' if turns else ''}"
        runs[name] = partial(segments_hopper.attend, qkv, plan, heads, shape)
    for tile in TILES:
        name = f"tile {'/'.join(map(str, tile))}"
        runs[name] = partial(gpu_segments.attend, qkv, plan, heads, gpu_segments.Tile(*tile), True)
    found: dict[str, float] = {}
    for name, each in runs.items():
        if not report.has(14, name):
            continue
        try:
            found[name] = round(flops / _seconds(each, "cuda", 10) / 1e12, 1)
            report.add(attention_tflops={name: found[name]})
        except Exception as error:
            print(f"{name}: {error}"[:300], flush=True)
    report.found["attention_tflops"] = found
    return found


def _build(
    path: Path, args: argparse.Namespace, dtype: str, graphs: bool = True, **changes: Any
) -> BuiltEngine:
    model = ModelConfig(
        str(path), dtype if args.device == "cuda" else "fp32", args.device, random_weights=True
    )
    cache = CacheConfig(prefix_cache=False)
    if args.device == "cpu":
        cache = replace(cache, num_blocks=2000)
    setup = Setup(model, cache, SchedulerConfig(**changes), ExecutionConfig(cuda_graphs=graphs))
    begin = time.perf_counter()
    built = build_engine(resolve_setup(setup))
    print(f"built in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return built


def _run(built: BuiltEngine, requests: list[Request]) -> float:
    """Seconds until all are done that are submitted at once."""
    begin, done = time.perf_counter(), 0
    for request in requests:
        built.engine.submit(request)
    while built.engine.has_work():
        for output in built.engine.step():
            if output.finish_reason is not None:
                assert output.error is None, output.error
                done += 1
    assert done == len(requests)
    return time.perf_counter() - begin


def _build_30b(args: argparse.Namespace, report: Report) -> BuiltEngine:
    begin = time.monotonic()
    built = _build(_config("qwen3-vl-30b-a3b", args), args, "bf16", max_waiting=8192)
    report.add(
        build_s=round(time.monotonic() - begin, 1),
        max_num_seqs=built.max_num_seqs,
        max_num_batched_tokens=built.max_num_batched_tokens,
    )
    if built.runner.decode.graphs is not None:
        report.add(graphs=built.runner.decode.graphs.report.as_json())
    return built


def throughput(args: argparse.Namespace, report: Report) -> None:
    """Samples per second of the 30B-A3B shape, then the streams beside images."""
    built = _build_30b(args, report)
    work = _work(built, args)
    warm_s = _run(built, [work.sample(8) for _ in range(2 if args.tiny else WARM_UP)])
    requests = [work.sample() for _ in range(args.samples)]
    tokens = sum(len(r.prompt_token_ids) for r in requests)
    images = sum(r.images[0].num_tokens for r in requests)
    seconds = _run(built, requests)
    report.add(
        samples=args.samples,
        text_tokens=tokens - images,
        image_tokens=images,
        warm_s=round(warm_s, 3),
        seconds=round(seconds, 3),
        samples_s=round(args.samples / seconds, 3),
    )
    if report.has(3 * args.stream_seconds, "streams"):
        _streams(built, work, args, report)
    if report.has(seconds / 4, "the same lengths as text"):
        fewer = [work.sample(as_text=True) for _ in range(max(1, args.samples // 4))]
        report.add(as_text_samples_s=round(len(fewer) / _run(built, fewer), 3))


def _work(built: BuiltEngine, args: argparse.Namespace) -> Work:
    assert built.spec.vision is not None
    return Work(built.spec.vision, built.spec.vocab_size, args.tiny)


def streams(args: argparse.Namespace, report: Report) -> None:
    """Of the 30B-A3B shape the streams alone, and what steps of each kind take."""
    built = _build_30b(args, report)
    work = _work(built, args)
    _run(built, [work.sample(8) for _ in range(2 if args.tiny else 6)])
    _streams(built, work, args, report)


def _streams(built: BuiltEngine, work: Work, args: argparse.Namespace, report: Report) -> None:
    gc.collect()
    gc.freeze()  # as workers do: the loaded model is not scanned on every collection
    others = tuple(int(each) for each in args.image_parts.split(",") if each)
    load = Load(args.text_rate, args.image_rate, args.stream_seconds, args.tiny, others)
    compare(built, work, load, report.add, StepWatch(built.runner))
    pieces, images = built.runner.plain.graphs, built.runner.images
    graphs = None if images is None or images.encode is None else images.encode.graphs
    if pieces is not None and graphs is not None:
        report.add(
            replayed_steps=pieces.num_replayed,
            replayed_steps_with_images=pieces.num_with_images,
            replayed_encoder_parts=graphs.num_parts_replayed,
            replayed_images=graphs.num_replayed,
        )


def layers(args: argparse.Namespace, report: Report) -> None:
    """Some layers of 235B in fp8 and its whole encoder: a step's parts, and a sample on all."""
    count = 2 if args.tiny else args.layers
    path = _config("qwen3-vl-235b-a22b", args, num_hidden_layers=count)
    size = 4 if args.tiny else args.batch
    built = _build(path, args, "fp8", graphs=False, max_num_seqs=size, max_waiting=8192)
    work, spec = _work(built, args), built.spec
    machine = measure_machine(spec, os.cpu_count() or 1, args.device)
    _run(built, [work.sample(2) for _ in range(2 if args.tiny else 8)])
    samples = 4 if args.tiny else 48
    texts = [work.sample(1, as_text=True) for _ in range(samples)]
    prefill = _run(built, texts) / samples
    lens = [len(request.prompt_token_ids) for request in texts]
    encode = _encode_seconds(built, work, args, machine)
    context = int(np.mean(lens))
    probe = DecodeProbe(built.runner, size, context)
    if args.device == "cuda":
        probe.capture()
    step = probe.seconds(2 if args.tiny else 20)
    share = count / ALL_LAYERS
    whole = {
        "encode": encode["s"],
        "prefill": prefill / share,
        "decode": (OUT - 1) * step / size / share,
    }
    prefill_least = _prefill_least(built, lens, machine) / samples
    decode_least = _decode_least(built, size, context, machine)
    least = encode["least_s"] + (prefill_least + (OUT - 1) * decode_least / size) / share
    figures = {
        "layers": count,
        "weights_gb": round(built.weight_bytes / 1e9, 1),
        "encode_ms": round(1e3 * encode["s"], 3),
        "encode_tflops": encode["tflops"],
        "prefill_tok_s": round(context / prefill, 1),
        "prefill_roofline_tok_s": round(context / prefill_least, 1),
        "prefill_share": round(prefill_least / prefill, 4),
        "decode_batch": size,
        "decode_context": context,
        "decode_ms": round(1e3 * step, 3),
        "decode_roofline_ms": round(1e3 * decode_least, 3),
        "decode_share": round(decode_least / step, 4),
        "predicted_seconds_per_sample": {name: round(value, 4) for name, value in whole.items()},
        "predicted_samples_s": round(1 / sum(whole.values()), 3),
        "roofline_samples_s": round(1 / least, 3),
        "prediction": f"{ALL_LAYERS} layers for {count}, no time between GPUs; not measured",
        "red_hat_samples_s": RED_HAT,
    }
    report.add(**figures)


def _encode_seconds(
    built: BuiltEngine, work: Work, args: argparse.Namespace, machine: Machine
) -> dict[str, float]:
    """Of an image of the workload, several in one call."""
    found = [span.image for _ in range(4) for span in work.sample().images]
    vision, device = work.vision, torch.device(args.device)
    pixels = torch.cat([normalised(image, vision, device) for image in found])
    grids = [image.grid for image in found]
    with torch.inference_mode():
        encode = built.runner.model.visual
        seconds = _seconds(lambda: encode(pixels, grids), args.device, 1 if args.tiny else 10)
    flops = sum(vision.encode_flops(image.num_patches) for image in found)
    rate = machine.flops_per_s("bf16" if args.device == "cuda" else "fp32")
    return {
        "s": seconds / len(found),
        "least_s": flops / rate / len(found),
        "tflops": round(flops / seconds / 1e12, 2),
    }


def _prefill_least(built: BuiltEngine, lens: list[int], machine: Machine) -> float:
    spec, rate = built.spec, machine.flops_per_s(built.dtype)
    head = 2 * spec.vocab_size * spec.hidden_size
    products = sum(lens) * (spec.flops_per_token(0) - head) / rate
    seen = sum(spec.attended_positions(n) for n in lens) * spec.seen_flops(decode=False)
    return products + seen / machine.flops_per_s("bf16" if built.device == "cuda" else "fp32")


def _decode_least(built: BuiltEngine, size: int, context: int, machine: Machine) -> float:
    least = least_seconds(built.spec, built.dtype, built.kv_dtype, size, context, machine)
    return sum(least.values())


RUNS: dict[str, Callable[[argparse.Namespace, Report], None]] = {
    "encoder": encoder,
    "throughput": throughput,
    "layers": layers,
    "streams": streams,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=BY_DEFAULT, help=f"of {', '.join(PARTS)}, by commas")
    parser.add_argument("--seconds", type=float, help="after which nothing more is begun")
    parser.add_argument("--samples", type=int, default=None, help=f"{SAMPLES}")
    parser.add_argument("--layers", type=int, default=24, help="of 94, in fp8")
    parser.add_argument("--batch", type=int, default=256, help="sequences of the decode step")
    parser.add_argument("--text-rate", type=float, default=8.0, help="streams a second")
    parser.add_argument("--image-rate", type=float, default=2.0, help="images a second")
    parser.add_argument("--stream-seconds", type=float, default=None, help="16, or 10")
    parser.add_argument(
        "--image-parts", default="", help="tokens of an image in a step to try, too, by commas"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    unknown = sorted(set(args.parts.split(",")) - set(PARTS))
    if unknown:
        parser.error(f"--parts {args.parts}: {unknown[0]} is none of {', '.join(PARTS)}")
    args.seconds = args.seconds or sum(PARTS[part] for part in args.parts.split(","))
    args.device = "cpu" if args.tiny else "cuda"
    args.samples = args.samples or (6 if args.tiny else SAMPLES)
    usual = 10.0 if args.parts == "streams" else 16.0
    args.stream_seconds = args.stream_seconds or (1.0 if args.tiny else usual)
    return args


if __name__ == "__main__":
    main()
