"""A prefill and a decode worker on one GPU beside one worker that does both.

    python scripts/disaggregated_gpu.py
    python scripts/disaggregated_gpu.py --device cpu --tiny --long-tokens 600 --phase-s 3

Two servers of one random model run one after the other: `--prefill 1 --decode 1`, then
`--workers 1`. On each some prompts are answered alone, short and long: the tokens of both servers
must be the same, which is why they compute batch-invariantly unless `--any-batch` is given. Then
`--streams` short requests run all the time, and again while long prompts arrive at a rate that
keeps one worker busy for `--utilisation` of the time. Figures: the time between two events of a
stream (ITL), TTFT of the long prompts, and the GB/s of KV by the decode worker's own account,
beside a plain copy on the device. The last line is one JSON object. It needs what a server needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_faults import CONFIG, Server, post, served, workers, write_model

SHAPES = Path(__file__).parent.parent / "src" / "tokenmill" / "bench" / "shapes"
POOLS = {"disaggregated": ("--prefill", "1", "--decode", "1"), "one_worker": ("--workers", "1")}
SHORT_IN, SHORT_OUT, LONG_OUT = 256, 256, 16
NUM_COMPARED = 8  # short prompts, and two long ones
COPIED_BYTES, COPIES = 2**30, 10


def main() -> None:
    args = _arguments()
    began_s, results, answers, rate = time.monotonic(), {}, [], args.long_per_s
    shape = CONFIG if args.tiny else json.loads((SHAPES / f"{args.shape}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), {**shape, "max_position_embeddings": 16384})
        for name, flags in POOLS.items():
            common = ["--device", args.device, "--max-model-len", "16384"]
            common += [] if args.any_batch else ["--batch-invariant"]
            with served(model, (*flags, *common, *args.flags)) as server:
                load = Load(server, args, shape["vocab_size"])
                result, rate = asyncio.run(load.run(rate))
            answers.append(result.pop("answers"))
            results[name] = {"start_s": round(server.start_s, 1)} | result
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    same = sum(a == b for a, b in zip(*answers, strict=True))
    report = {
        "benchmark": "disaggregated-gpu",
        "device": args.device,
        "shape": "tiny" if args.tiny else args.shape,
        "batch_invariant": not args.any_batch,
        "streams": args.streams,
        "long_tokens": args.long_tokens,
        "long_per_s": round(rate, 3),
        "same_answers": same,
        "answers": len(answers[0]),
        **results,
        "copy_gb_s": _copy_gb_s() if args.device == "cuda" else None,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(report))
    if same < len(answers[0]) and not args.any_batch:
        sys.exit("the tokens of two workers differ from those of one")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama3.1-8b", help="of bench/shapes")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU instead")
    parser.add_argument("--streams", type=int, default=16, help="short ones, all the time")
    parser.add_argument("--long-tokens", type=int, default=8192, help="of each long prompt")
    parser.add_argument("--utilisation", type=float, default=0.5, help="of a worker by these")
    parser.add_argument("--long-per-s", type=float, help="long prompts, instead of that")
    parser.add_argument("--phase-s", type=float, default=10.0, help="with and without these")
    parser.add_argument("--any-batch", action="store_true", help="the quickest kernels")
    parser.add_argument("flags", nargs="*", help="of both servers, after --")
    return parser.parse_args()


@dataclass
class Stream:
    """Words of an answer, and when they came."""

    words: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def ttft_ms(self) -> float:
        return 1e3 * (self.times_s[1] - self.times_s[0])

    def gaps_ms(self) -> list[float]:
        """Between two events, after the first one."""
        return [1e3 * (b - a) for a, b in pairwise(self.times_s[1:])]


class Load:
    """What one server is asked."""

    def __init__(self, server: Server, args: argparse.Namespace, vocab_size: int) -> None:
        self._server, self._args = server, args
        self._vocab_size, self._source = vocab_size, random.Random(11)

    async def run(self, rate: float | None) -> tuple[dict[str, Any], float]:
        """All figures, and the long prompts a second that were asked for."""
        args = self._args
        answers, alone_ms = await self._compare()
        rate = rate or args.utilisation * 1e3 / alone_ms
        calm = await self._phase(0.0)
        print(f"without long prompts: {json.dumps(calm)}", flush=True)
        before = await self._moved()
        disturbed = await self._phase(rate)
        after = await self._moved()
        print(f"with long prompts: {json.dumps(disturbed)}", flush=True)
        moved = {key: after[key] - before[key] for key in after}
        if moved["seconds"]:
            moved["gb_s"] = moved["bytes"] / moved["seconds"] / 1e9
        kv = {key: round(value, 3) for key, value in moved.items()}
        figures = {"calm": calm, "disturbed": disturbed, "kv": kv, "answers": answers}
        return {"long_alone_ms": round(alone_ms, 1)} | figures, rate

    async def _compare(self) -> tuple[list[list[str]], float]:
        """Answers to be the same everywhere, and the TTFT of a long prompt alone."""
        short = [self._prompt(SHORT_IN) for _ in range(NUM_COMPARED)]
        long = [self._prompt(self._args.long_tokens) for _ in range(2)]
        streams = await asyncio.gather(*(self._ask(prompt, 64) for prompt in short))
        streams += [await self._ask(prompt, LONG_OUT) for prompt in long]
        return [stream.words for stream in streams], streams[-1].ttft_ms()

    async def _phase(self, rate: float) -> dict[str, Any]:
        """Streams for some seconds, while so many long prompts arrive a second."""
        end_s = time.monotonic() + self._args.phase_s
        shorts = [asyncio.create_task(self._again(end_s)) for _ in range(self._args.streams)]
        longs = []
        while rate and time.monotonic() + 1 / rate < end_s:
            prompt = self._prompt(self._args.long_tokens)
            longs.append(asyncio.create_task(self._ask(prompt, LONG_OUT)))
            await asyncio.sleep(1 / rate)
        streams = [stream for found in await asyncio.gather(*shorts) for stream in found]
        gaps = sorted(gap for stream in streams for gap in stream.gaps_ms())
        ttft = sorted(stream.ttft_ms() for stream in await asyncio.gather(*longs))
        figures: dict[str, Any] = {"streams": len(streams), "tokens": len(gaps)}
        figures |= {f"itl_ms_p{p}": _percentile(gaps, p) for p in (50, 99)}
        figures |= {"itl_ms_max": round(gaps[-1], 2), "long_prompts": len(ttft)}
        return figures | {f"long_ttft_ms_p{p}": _percentile(ttft, p) for p in (50, 99) if ttft}

    async def _again(self, end_s: float) -> list[Stream]:
        found = []
        while time.monotonic() < end_s:
            found.append(await self._ask(self._prompt(SHORT_IN), SHORT_OUT, end_s))
        return found

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._source.choices(range(1, self._vocab_size), k=num_tokens)

    async def _ask(self, prompt: list[int], num_tokens: int, end_s: float = 0.0) -> Stream:
        """Stream an answer, as far as it has come when the time is over."""
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        stream = Stream(times_s=[time.monotonic()])
        reader, writer = await post(
            self._server, "/v1/completions", body | {"ignore_eos": True, "stream": True}
        )
        try:
            async for line in reader:
                if line.startswith(b"HTTP") and b" 200 " not in line:
                    raise ValueError(line.decode().strip())
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                if words := event["choices"][0]["text"].split():
                    stream.words += words
                    stream.times_s.append(time.monotonic())
                if end_s and time.monotonic() > end_s and len(stream.times_s) > 1:
                    break
        finally:
            writer.close()
        return stream

    async def _moved(self) -> dict[str, float]:
        """KV that has moved so far; workers tell once a second."""
        await asyncio.sleep(1.2)
        view = await workers(self._server)
        reader, writer = await post(self._server, "/metrics", None)
        lines = (await reader.read()).decode().splitlines()
        writer.close()
        name = "tokenmill_kv_read_seconds_total"
        seconds = sum(float(line.split()[-1]) for line in lines if line.startswith(name))
        return {
            "bytes": view["transferred_bytes"],
            "seconds": seconds,
            "transfers": view["transfers"],
            "failed": view["failed_transfers"],
        }


def _percentile(values: list[float], percent: int) -> float:
    return round(values[int(percent / 100 * (len(values) - 1))], 2)


def _copy_gb_s() -> float:
    """A plain copy on the device, on which nothing else runs by now."""
    import torch

    source, target = torch.zeros(2, COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target.copy_(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(COPIES):
        target.copy_(source)
    end.record()
    end.synchronize()
    return round(COPIES * COPIED_BYTES / begin.elapsed_time(end) / 1e6, 1)


if __name__ == "__main__":
    main()
