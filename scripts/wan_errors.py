"""What rounding costs a video: errors of fp8 linears and of rounded attention against plain ones.

    python scripts/wan_errors.py             one GPU, about a minute
    python scripts/wan_errors.py --tiny      no GPU: the torch references at a tiny size

First attention alone, on inputs of several kinds; then whole videos of random weights, same seed:
relative L2 of the final latents, also relative to how far the steps moved them, and PSNR of the
frames. Weights are drawn so that every layer matters. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace

import torch

from tokenmill.core.specs.wan import A14B, TINY, WanSpec
from tokenmill.core.types import Request
from tokenmill.core.video import VideoParams
from tokenmill.kernels import bidirectional
from tokenmill.layers.linear import ComputeType
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.models.checkpoints.weights import RandomTensor
from tokenmill.video.pipeline import Pipeline, build_pipeline
from tokenmill.video.video_job import VideoJob

TOKENS, DIM = 2048, 128
Attention = bidirectional.AttentionType


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="A tiny size on CPU.")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--size", default="480x272")
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = "cpu" if args.tiny else "cuda"
    with torch.inference_mode():
        found = {"attention": attention_errors(device), "videos": video_errors(args, device)}
    print(json.dumps(found))


def inputs(device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Queries, keys and values [1, TOKENS, 2, DIM] of several kinds."""
    draw = torch.Generator(device).manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    shape = 1, TOKENS, 2, DIM
    outliers = torch.ones(DIM, device=device)
    outliers[:: DIM // 4] = 10.0
    time = torch.linspace(0, 40, TOKENS, device=device)[None, :, None, None]
    smooth = [torch.sin(time * (1 + some(1, 1, 2, DIM)) + some(1, 1, 2, DIM)) for _ in range(3)]
    return {
        "normal": (some(*shape), some(*shape), some(*shape)),
        "sharp": (3 * some(*shape), 3 * some(*shape), some(*shape)),
        "keys with a mean": (some(*shape), some(*shape) + 4 * some(1, 1, 2, DIM), some(*shape)),
        "large channels": (some(*shape), some(*shape) * outliers, some(*shape) * outliers),
        "smooth in time": (smooth[0], smooth[1], smooth[2]),
    }


def attention_errors(device: str) -> dict[str, dict[str, float]]:
    """Relative L2 by kind of input and of rounding."""
    found: dict[str, dict[str, float]] = {}
    for name, parts in inputs(device).items():
        q, k, v = (part.bfloat16() for part in parts)
        exact = bidirectional.attend.reference(q.double(), k.double(), v.double())

        def error(own: torch.Tensor, exact: torch.Tensor = exact) -> float:
            return float((own.double() - exact).norm() / exact.norm())

        plain = bidirectional.attend(q, k, v)
        found[name] = {"bf16": error(plain)}
        for kind, rounding in bidirectional.ROUNDINGS.items():
            if rounding:
                found[name][kind] = error(bidirectional.attend_rounded(q, k, v, rounding))
        figures = ", ".join(f"{kind} {value:.2e}" for kind, value in found[name].items())
        print(f"attention, {name:17s}: {figures}")
    return found


@dataclass(frozen=True)
class Drawn:
    """A tensor by name and shape: products keep the size of rows, so that every layer matters."""

    tensor: RandomTensor
    name: str

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes

    def read(self) -> torch.Tensor:
        drawn = self.tensor.read().float()
        if drawn.dim() < 2 or drawn.min() == 1.0:
            return drawn
        if "scale_shift_table" in self.name:
            return 10 * drawn
        return drawn * (50.0 / math.sqrt(drawn[0].numel()))  # drawn with 0.02


def spec_of(args: argparse.Namespace) -> WanSpec:
    if args.tiny:
        return TINY
    transformer = replace(A14B.transformer, num_layers=args.layers, text_dim=TINY.text.hidden_size)
    return replace(A14B, transformer=transformer, text=TINY.text)


def pipeline_of(spec: WanSpec, dtype: ComputeType, device: str) -> Pipeline:
    from tokenmill.models.checkpoints import diffusers_folder

    diffusers_folder.SHAPES["errors"] = spec
    checkpoint = random_wan("errors")
    parts = {
        part: {
            name: Drawn(replace(tensor, device=device), name) for name, tensor in tensors.items()
        }
        for part, tensors in checkpoint.parts.items()
    }
    return build_pipeline(replace(checkpoint, parts=parts), torch.device(device), dtype)


def make(
    pipeline: Pipeline, params: VideoParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noise, final latents and frames in [0, 255]."""
    job = VideoJob(Request("a", [5, 6, 7], video=params), pipeline)
    for _ in range(params.num_steps):
        next(job.steps)
    assert job.latents is not None
    latents = job.latents.float()
    generator = torch.Generator().manual_seed(params.seed)
    noise = torch.randn(latents.shape, generator=generator).to(latents.device)
    pixels = [
        torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in job.decode(latents)
    ]
    return noise, latents, torch.cat(pixels).float()


def compared(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    noise, latents, frames = expected
    apart = (found[1] - latents).norm()
    mean_square = float((found[2] - frames).pow(2).mean())
    psnr = 10 * math.log10(255**2 / mean_square) if mean_square else math.inf
    return {
        "latents": float(apart / latents.norm()),
        "of_the_way": float(apart / (latents - noise).norm()),
        "psnr_db": min(psnr, 99.0),
    }


def report(name: str, errors: dict[str, float]) -> None:
    figures = ", ".join(f"{key} {value:.4g}" for key, value in errors.items())
    print(f"video, {name:28s}: {figures}", flush=True)


def video_errors(args: argparse.Namespace, device: str) -> dict[str, dict[str, float]]:
    """By what is rounded, against the plain type; on CPU that is fp32."""
    width, height = (int(side) for side in args.size.split("x"))
    params = VideoParams(
        (width, height), args.frames, num_steps=args.steps, negative_token_ids=(9,)
    )
    if args.tiny:
        params = replace(params, size=(32, 32), num_frames=5, num_steps=4)
    spec = spec_of(args)
    kinds: tuple[Attention, ...] = ("int8", "int8-fp8", "fp8")
    found: dict[str, dict[str, float]] = {}
    plain = pipeline_of(spec, "fp32" if args.tiny else "bf16", device)
    expected = make(plain, params)
    for kind in kinds:
        name = f"{plain.dtype}, attention {kind}"
        found[name] = compared(make(plain, replace(params, attention_dtype=kind)), expected)
        report(name, found[name])
    other_seed = make(plain, replace(params, seed=params.seed + 1))
    found["another seed"] = compared(other_seed, expected)
    report("another seed", found["another seed"])
    del plain
    rounded = pipeline_of(spec, "fp8", device)
    for own in ("auto", *kinds):
        name = f"fp8, attention {own}"
        found[name] = compared(
            make(rounded, replace(params, attention_dtype=own)),  # type: ignore[arg-type]
            expected,
        )
        report(name, found[name])
    return found


if __name__ == "__main__":
    main()
