"""What long prompts cost the streams beside them: disaggregated against aggregated workers.

    python scripts/itl_ratio.py --model smollm2 --duration 60
    python scripts/itl_ratio.py --model ./model -- --random-weights --device cuda

Flags after `--` go to every server.
Three pools with the same cores take turns: `serve --prefill 1 --decode 1`, `--workers 1`, which
has them all, and `--workers 2`, which share them. On each, streams of short prompts run all the
time (`bench endpoint --concurrency`) while long prompts arrive at a fixed rate (`bench endpoint
--rate`). The rate keeps one worker busy with prompts for `--utilisation` of the time: a long prompt
is first timed alone, on the first pool. The last line is one JSON object; a ratio is the
disaggregated pool's figure by that of another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "tokenmill")
FLOORS = {
    "disaggregated": ("--prefill", "1", "--decode", "1"),
    "one_worker": ("--workers", "1"),
    "two_workers": ("--workers", "2"),
}
COMPARED = ("itl_ms_p50", "itl_ms_p99", "output_tok_s", "long_ttft_ms_p50", "long_ttft_ms_p99")
LONG_OUTPUT = 16


def main() -> None:
    args = _arguments()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in FLOORS}
    rate = args.rate
    for number in range(args.rounds):
        for name, flags in FLOORS.items():
            with _served(args.model, (*flags, *args.flags)) as url:
                alone_ms = _alone(url, args.long_tokens, number)
                if rate is None:
                    rate = args.utilisation * 1000 / alone_ms
                    print(f"a long prompt alone: {alone_ms:.0f} ms; {rate:.3f} a second arrive")
                result = _measure(url, args, rate, number)
                result["long_alone_ms"] = alone_ms
            rounds[name].append(result)
            print(f"round {number + 1}, {name}: {json.dumps(result)}", flush=True)
    medians = {name: _medians(results) for name, results in rounds.items()}
    ours = medians.pop("disaggregated")
    report = {
        "benchmark": "itl-ratio",
        "model": args.model,
        "streams": args.streams,
        "long_tokens": args.long_tokens,
        "long_per_s": rate,
        "duration_s": args.duration,
        "rounds": args.rounds,
        "disaggregated": ours,
        **medians,
        "ratios": {
            name: {key: round(ours[key] / figures[key], 4) for key in COMPARED}
            for name, figures in medians.items()
        },
    }
    print(json.dumps(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=4, help="short ones that run all the time")
    parser.add_argument("--long-tokens", type=int, default=256, help="of each long prompt")
    parser.add_argument("--utilisation", type=float, default=0.5, help="of one worker by these")
    parser.add_argument("--rate", type=float, help="long prompts a second, instead of that")
    parser.add_argument("--duration", type=int, default=60, help="seconds of each measurement")
    parser.add_argument("--rounds", type=int, default=1, help="the median counts")
    parser.add_argument("flags", nargs="*", help="of the servers, after --")
    return parser.parse_args()


@contextlib.contextmanager
def _served(model: str, flags: tuple[str, ...]) -> Iterator[str]:
    """A server as a process of its own; yields its URL."""
    command = (*COMMAND, "serve", model, "--share-gpus", "--port", "0", *flags)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        log = ""
        for line in process.stderr:
            log += line
            if (found := re.search(r"(http://127\.0\.0\.1:\d+)/v1;", line)) is not None:
                yield f"{found[1]}/v1"
                break
        else:
            sys.exit(f"the server did not start:\n{log}")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def _alone(url: str, num_tokens: int, seed: int) -> float:
    """TTFT of a long prompt while nothing else runs, in ms."""
    shape = ("--input-len", str(num_tokens), "--output-len", "1", "--num-requests", "3")
    load = ("--concurrency", "1", "--warmup-requests", "1", "--seed", str(100 + seed))
    point = _finish(_bench(url, *shape, *load))
    return float(point["ttft_ms"]["p50"])


def _measure(url: str, args: argparse.Namespace, rate: float, seed: int) -> dict[str, Any]:
    """Streams and long prompts at the same time; figures of both."""
    duration = ("--duration", str(args.duration))
    streams = _bench(
        url,
        *("--concurrency", str(args.streams), "--input-len", "32", "--output-len", "128"),
        *("--warmup-requests", "0"),
        *(*duration, "--seed", str(200 + seed)),
    )
    long = _bench(
        url,
        *("--rate", f"{rate:.4f}", "--arrival", "constant", "--warmup-requests", "0"),
        *("--input-len", str(args.long_tokens), "--output-len", str(LONG_OUTPUT)),
        *(*duration, "--seed", str(300 + seed)),
    )
    short, prompts = _finish(streams), _finish(long)
    return {
        "itl_ms_p50": short["itl_ms"]["p50"],
        "itl_ms_p90": short["itl_ms"]["p90"],
        "itl_ms_p99": short["itl_ms"]["p99"],
        "itl_ms_max": short["itl_ms"]["max"],
        "output_tok_s": short["output_tok_s"],
        "stream_requests": short["num_completed"],
        "long_ttft_ms_p50": prompts["ttft_ms"]["p50"],
        "long_ttft_ms_p99": prompts["ttft_ms"]["p99"],
        "long_requests": prompts["num_completed"],
        "failed": short["num_failed"] + prompts["num_failed"],
    }


def _bench(url: str, *flags: str) -> subprocess.Popen[str]:
    command = (*COMMAND, "bench", "endpoint", "--url", url, "--no-audit", "--json", *flags)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The one point of a report."""
    out, _ = process.communicate()
    if process.returncode != 0:
        sys.exit(f"bench endpoint ended with status {process.returncode}")
    (point,) = json.loads(out.splitlines()[-1])["points"]
    return dict(point)


def _medians(results: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(r[key] for r in results) for key in results[0]}


if __name__ == "__main__":
    main()
