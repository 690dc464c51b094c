"""The video model's kernels at full size: TFLOP/s, GB/s, and a step and a decode from their parts.

    python scripts/wan_kernels.py            one GPU, about two minutes
    python scripts/wan_kernels.py --tiny     no GPU: torch's operations at a tiny size

Every attention kernel is first compared with torch's at a small size with ragged ends, then timed
on the tokens of a video of 1280x720 and 81 frames. A part that fails is named, and the others go
on. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenmill.core.specs.wan import A14B, TINY, VaeSpec
from tokenmill.kernels import bidirectional, modulation
from tokenmill.kernels.rows import FP8
from tokenmill.layers.linear import ComputeType, Linear
from tokenmill.models.wan.wan_transformer import WanTransformer, rotation_of, transformer_tensors
from tokenmill.models.wan.wan_vae import VideoDecoder, decoder_tensors

CEILING_TFLOPS = 790.0  # bf16 products of an H200, measured
STEPS, BRANCHES = 20, 2
Attention = bidirectional.AttentionType


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="A tiny size on CPU.")
    parser.add_argument("--parts", default="attention,linears,rows,step,decode")
    parser.add_argument("--layers", type=int, default=2, help="Layers of the step that is timed.")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if not args.tiny and not torch.cuda.is_available():
        sys.exit("There is no GPU here: --tiny runs torch's operations at a tiny size on CPU.")
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    bench = Bench(args.tiny, args.layers)
    for part in args.parts.split(","):
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                found[part] = getattr(bench, part)()
        except Exception as fault:  # one part that fails must not hide the others
            found[part] = f"{type(fault).__name__}: {str(fault)[:200]}"
            print(f"{part}: {found[part]}")
        if not args.tiny:
            torch.cuda.empty_cache()
        print(f"[{part}: {time.perf_counter() - start:.1f} s]", flush=True)
    print(json.dumps(found))


class Bench:
    """The sizes, and a clock."""

    def __init__(self, tiny: bool, layers: int) -> None:
        self.tiny, self.layers = tiny, layers
        self.device, self.dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
        self.spec = TINY if tiny else A14B
        self.grid = self.spec.grid(5, 16, 16) if tiny else self.spec.grid(81, 720, 1280)
        self.tokens = self.spec.transformer.num_tokens(self.grid)

    def some(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def sync(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 3, warm: bool = True) -> float:
        """The least of several runs, after one that compiles and warms up."""
        times = []
        for number in range(repeats + warm):
            self.sync()
            start = time.perf_counter()
            work()
            self.sync()
            if number >= warm:
                times.append(time.perf_counter() - start)
        return min(times)

    def attention(self) -> dict[str, float]:
        """TFLOP/s of one branch's self-attention by each kernel that is right."""
        heads, dim = self.spec.transformer.num_heads, self.spec.transformer.head_dim
        own = [self.some(1, self.tokens, heads, dim) for _ in range(2)]
        wide = self.some(1, self.tokens, 3 * heads * dim)
        v = wide.chunk(3, dim=-1)[2].unflatten(-1, (heads, dim))
        flops = 4.0 * self.tokens * self.tokens * heads * dim
        rates: dict[str, float] = {}
        for name, work in self.candidates().items():
            try:
                error = self.attention_error(work)
                seconds = self.seconds(lambda work=work: work(*own, v), repeats=2)
            except Exception as fault:  # a kernel that does not run must not hide the others
                print(f"attention {name}: {type(fault).__name__}: {str(fault)[:160]}")
                continue
            rate = flops / seconds / 1e12
            rates[name] = round(rate, 1) if error < 0.1 else 0.0
            share = "" if self.tiny else f", {rate / CEILING_TFLOPS:.0%} of {CEILING_TFLOPS:.0f}"
            print(
                f"attention {name:22s} {seconds * 1e3:8.2f} ms {rate:8.1f} TFLOP/s{share}, "
                f"relative error {error:.2e}{'' if error < 0.1 else ' WRONG'}",
                flush=True,
            )
        return rates

    def candidates(self) -> dict[str, Callable[..., torch.Tensor]]:
        """By name; all but torch's need a GPU."""
        found: dict[str, Callable[..., torch.Tensor]] = {}
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        for name, backend in backends.items():
            found[f"torch {name}"] = self.by_torch(backend)
        if self.tiny:
            for kind, rounding in bidirectional.ROUNDINGS.items():
                if rounding:
                    found[f"reference {kind}"] = lambda q, k, v, own=rounding: (
                        bidirectional.attend_rounded.reference(q, k, v, own)
                    )
            return found
        for kind, rounding in bidirectional.ROUNDINGS.items():
            for stages, turns in ((2, True), (2, False), (3, True), (3, False)):
                name = f"hopper {kind} {stages} {'turns' if turns else 'free'}"
                found[name] = self.by_kernel(rounding, stages, turns)
        return found

    def by_torch(self, backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with nullcontext() if self.tiny else sdpa_kernel(backend):
                return bidirectional.attend.reference(q, k, v)

        return work

    def by_kernel(
        self, rounding: bidirectional.AttentionRounding | None, stages: int, turns: bool
    ) -> Callable[..., torch.Tensor]:
        """The Hopper kernel in a shape; rounding its inputs counts."""
        from tokenmill.kernels.gpu import bidirectional as gpu
        from tokenmill.kernels.gpu.hopper import bidirectional as hopper
        from tokenmill.kernels.gpu.hopper.two_groups import Shape

        def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            packed = gpu.pack(q, k, v, rounding) if rounding else gpu.plain(q, k, v)
            out = torch.empty_like(q)
            hopper.launch(packed, out, k.shape[1], Shape(stages, turns))
            return out

        return work

    def attention_error(self, work: Callable[..., torch.Tensor]) -> float:
        """Against fp32, at ragged sizes, with keys that share a large part."""
        dim = self.spec.transformer.head_dim
        q, k = self.some(2, 300, 2, dim), self.some(2, 1000, 2, dim) + self.some(dim)
        v = self.some(2, 1000, 2, dim)
        expected = bidirectional.attend.reference(q.float(), k.float(), v.float())
        return float((work(q, k, v).float() - expected).norm() / expected.norm())

    def linears(self) -> dict[str, float]:
        """TFLOP/s of the products of a block, one branch; rounding to fp8 is counted."""
        hidden, inner = self.spec.transformer.hidden_size, self.spec.transformer.ffn_dim
        shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden)}
        shapes |= {"up": (inner, hidden), "down": (hidden, inner)}
        rates = {}
        kinds: tuple[ComputeType, ...] = ("fp32",) if self.tiny else ("bf16", "fp8")
        for name, (n, k) in shapes.items():
            x, weight, bias = self.some(self.tokens, k), self.some(n, k) / k**0.5, self.some(n)
            for kind in kinds:
                linear = Linear([weight], [bias], kind, self.device)
                seconds = self.seconds(lambda linear=linear, x=x: linear(x))
                rates[f"{name} {kind}"] = round(2.0 * self.tokens * n * k / seconds / 1e12, 1)
                print(f"linear {name:5s} {kind:5s} {rates[f'{name} {kind}']:8.1f} TFLOP/s")
        return rates

    def rows(self) -> dict[str, float]:
        """GB/s of the row kernels and of a copy; a row is read and written once."""
        spec = self.spec.transformer
        x, delta = (
            self.some(self.tokens, spec.hidden_size),
            self.some(self.tokens, spec.hidden_size),
        )
        wide = self.some(self.tokens, spec.ffn_dim)
        gain = torch.randn(spec.hidden_size, device=self.device)
        rotation = rotation_of(spec, self.grid_of_patches(), self.device)
        target, nbytes = torch.empty_like(x), x.nbytes
        added = modulation.Added(delta, gain)
        cases: dict[str, tuple[Callable[[], object], float]] = {
            "copy": (lambda: target.copy_(x), 2 * nbytes),
            "modulate": (lambda: modulation.norm_modulate(x, gain, gain, 1e-6), 2 * nbytes),
            "modulate fp8": (
                lambda: modulation.norm_modulate(x, gain, gain, 1e-6, FP8), 1.5 * nbytes,
            ),
            "add modulate fp8": (
                lambda: modulation.norm_modulate(x, gain, gain, 1e-6, FP8, added), 3.5 * nbytes,
            ),
            "rotate": (
                lambda: bidirectional.norm_rotate(x[None], gain, 1e-6, spec.num_heads, rotation),
                2 * nbytes,
            ),
            "fp8": (lambda: modulation.round_rows(x, FP8), 1.5 * nbytes),
            "gelu fp8": (lambda: modulation.gelu_rows(wide, FP8), 1.5 * wide.nbytes),
        }  # fmt: skip
        rates = {}
        for name, (work, moved) in cases.items():
            rates[name] = round(moved / self.seconds(work) / 1e9, 1)
            print(f"rows {name:16s} {rates[name]:9.1f} GB/s, {rates[name] / rates['copy']:.0%}")
        return rates

    def grid_of_patches(self) -> tuple[int, int, int]:
        t, h, w = self.spec.transformer.patch_size
        return self.grid[0] // t, self.grid[1] // h, self.grid[2] // w

    def step(self) -> dict[str, float]:
        """Seconds of a step and of a video's steps, from a model of few layers, one branch."""
        found = {}
        kinds: list[tuple[ComputeType, Attention]] = [("fp32", "auto")]
        if not self.tiny:
            kinds = [("bf16", "auto"), ("fp8", "auto"), ("fp8", "int8-fp8"), ("fp8", "fp8")]
        for dtype, rounding in kinds:
            name = f"{dtype}, attention {rounding}"
            found[name] = round(self.step_seconds(dtype, rounding), 3)
            whole = STEPS * found[name]
            print(f"step {name:24s} {found[name]:8.3f} s, {STEPS} steps {whole:8.1f} s", flush=True)
            if not self.tiny:
                torch.cuda.empty_cache()
        return found

    def step_seconds(self, dtype: ComputeType, rounding: Attention) -> float:
        """Both branches through all layers: the layers that are there count for the others."""
        spec = replace(self.spec.transformer, num_layers=self.layers)
        weights = {
            name: torch.randn(shape, device=self.device) * (0.02 if len(shape) > 1 else 1.0)
            for name, shape in transformer_tensors(spec).items()
        }
        model = WanTransformer(spec, weights, dtype, self.device)
        del weights
        model.round_attention(bidirectional.ROUNDINGS[rounding])
        latents = torch.randn(16, *self.grid, device=self.device)
        text = model.text_kv(self.some(1, 512, spec.text_dim))
        whole = self.seconds(lambda: model(latents, 899, text), repeats=1)
        _, embedded = model.embed_time(899)
        x = model.embed_patches(latents, 1)
        layers = self.seconds(
            lambda: model.run_blocks(x, embedded, model.grid(latents), text), repeats=1
        )
        per_layer = layers / self.layers
        start = time.perf_counter()
        model.run_blocks(x, embedded, model.grid(latents), text)
        launched = (time.perf_counter() - start) / self.layers
        self.sync()
        if not self.tiny:
            print(f"  launching a layer takes {launched * 1e3:.2f} ms of {per_layer * 1e3:.1f} ms")
        return BRANCHES * (whole - layers + per_layer * self.spec.transformer.num_layers)

    def decode(self) -> dict[str, Any]:
        """Seconds of a whole decode by type and layout, and of its parts for one latent frame."""
        spec = self.spec.vae
        weights = {
            name: torch.randn(shape, device=self.device) * 0.05
            for name, shape in decoder_tensors(spec).items()
        }
        latents = torch.randn(spec.z_dim, *self.grid, device=self.device)
        cases = [("fp32", torch.float32, False), ("bf16", torch.bfloat16, False)]
        cases += [] if self.tiny else [("bf16 search", torch.bfloat16, True)]
        found: dict[str, Any] = {"pflop": round(spec.decode_flops(self.grid) / 1e15, 3)}
        for name, dtype, search in cases:
            decoder = VideoDecoder(spec, weights, self.device, dtype)
            torch.backends.cudnn.benchmark = search  # not the engine's: bits may change by run
            found[name] = round(self.decode_seconds(decoder, latents), 3)
            torch.backends.cudnn.benchmark = False
            print(f"decode {name:12s} {found[name]:8.3f} s", flush=True)
            if not self.tiny:
                found[f"{name} peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.empty_cache()
        parts = decode_parts(self, decoder, spec, latents)
        print("decode by part, s: " + ", ".join(f"{name} {s:.3f}" for name, s in parts.items()))
        return found | {"parts": {name: round(s, 4) for name, s in parts.items()}}

    def decode_seconds(self, decoder: VideoDecoder, latents: torch.Tensor) -> float:
        """Of all frames: the first three latent frames are run before the clock starts."""
        for _ in decoder.frames(latents[:, :3]):
            pass

        def work() -> None:
            for piece in decoder.frames(latents):
                del piece

        return self.seconds(work, repeats=1, warm=False)


def decode_parts(
    bench: Bench, decoder: VideoDecoder, spec: VaeSpec, latents: torch.Tensor
) -> dict[str, float]:
    """Seconds by kind of operation over a whole decode; waiting for each makes them slower."""
    spent = dict.fromkeys(
        ("_convolve", "_norm_conv3d", "_conv3d", "_conv2d", "_attend", "other"), 0.0
    )
    depth = [0.0]

    def timed(name: str) -> Callable[..., Any]:
        inner = getattr(decoder, name)

        def call(*args: Any) -> Any:
            bench.sync()
            start, outer = time.perf_counter(), depth[0]
            depth[0] = 0.0
            found = inner(*args)
            bench.sync()
            seconds = time.perf_counter() - start
            spent[name] += seconds - depth[0]
            depth[0] = outer + seconds
            return found

        return call

    for name in list(spent)[:-1]:
        setattr(decoder, name, timed(name))
    start = time.perf_counter()
    for piece in decoder.frames(latents):
        del piece
    bench.sync()
    spent["other"] = time.perf_counter() - start - sum(spent.values())
    return spent


if __name__ == "__main__":
    main()
