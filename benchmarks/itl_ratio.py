"""What long prompts cost the streams beside them: prefill and decode workers against plain ones."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Benchmark, Report, medians
from benchmarks.servers import EndpointLoad, serve
from tokenmill import console
from tokenmill.core.flags import count, number, setting

POOLS = {
    "disaggregated": ("--prefill", "1", "--decode", "1"),
    "one_worker": ("--workers", "1"),
    "two_workers": ("--workers", "2"),
}
COMPARED = ("itl_ms_p50", "itl_ms_p99", "output_tok_s", "long_ttft_ms_p50", "long_ttft_ms_p99")
LONG_OUTPUT = 16


@dataclass(frozen=True)
class Options:
    model: str = setting("smollm2", "Model that is served.")
    streams: int = setting(4, "Short requests that run all the time.", count(1))
    long_tokens: int = setting(256, "Tokens of each long prompt.", count(1))
    utilisation: float = setting(0.5, "Share of a worker's time for these.", number(0.01, 1))
    rate: float | None = setting(None, "Long prompts a second, instead.", number(0.001, 1e6))
    duration: int = setting(60, "Seconds of each measurement.", count(1))
    rounds: int = setting(1, "Rounds; the median counts.", count(1))
    rest: tuple[str, ...] = ()


def run(options: Options) -> Report:
    """ITL of short streams, and TTFT of long prompts that arrive at a fixed rate beside them.

    Three pools with the same cores (or on one GPU) take turns: a prefill and a decode worker, one
    worker that has them all, and two that share them. The rate keeps one worker busy with prompts
    for --utilisation of the time: a long prompt is first timed alone, on the first pool. A ratio is
    the first pool's figure by that of another. Flags after -- go to every server.

    python -m benchmarks.itl_ratio --model smollm2 --duration 60
    python -m benchmarks.itl_ratio --model llama3.1-8b -- --random-weights --device cuda
    """
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in POOLS}
    rate = options.rate
    for seed in range(options.rounds):
        for name, flags in POOLS.items():
            with serve(options.model, "--share-gpus", *flags, *options.rest) as server:
                alone_ms = long_alone_ms(server.url, options.long_tokens, seed)
                rate = rate or options.utilisation * 1000 / alone_ms
                found = measure(server.url, options, rate, seed) | {"long_alone_ms": alone_ms}
            rounds[name].append(found)
            console.note(f"round {seed + 1}, {name}: {found}")
    pools = {name: medians(results) for name, results in rounds.items()}
    ours = pools["disaggregated"]
    ratios = {
        name: {key: round(ours[key] / pool[key], 4) for key in COMPARED}
        for name, pool in pools.items()
        if pool is not ours
    }
    return {"model": options.model, "long_per_s": rate, **pools, "ratios": ratios}


def show(report: Report) -> None:
    rows = [["", *POOLS]]
    rows += [[key, *(f"{report[name][key]:.2f}" for name in POOLS)] for key in COMPARED]
    console.print_table(rows)


def long_alone_ms(url: str, num_tokens: int, seed: int) -> float:
    """TTFT of a long prompt while nothing else runs."""
    shape = ("--input-len", str(num_tokens), "--output-len", "1", "--num-requests", "3")
    load = ("--concurrency", "1", "--warmup-requests", "1", "--seed", str(100 + seed))
    return float(EndpointLoad(url, *shape, *load).point()["ttft_ms"]["p50"])


def measure(url: str, options: Options, rate: float, seed: int) -> dict[str, float]:
    """Streams and long prompts at the same time; figures of both."""
    common = ("--duration", str(options.duration), "--warmup-requests", "0", "--seed")
    streams = EndpointLoad(
        *(url, "--concurrency", str(options.streams), "--input-len", "32", "--output-len", "128"),
        *(*common, str(200 + seed)),
    )
    prompts = EndpointLoad(
        *(url, "--rate", f"{rate:.4f}", "--arrival", "constant"),
        *("--input-len", str(options.long_tokens), "--output-len", str(LONG_OUTPUT)),
        *(*common, str(300 + seed)),
    )
    short, long = streams.point(), prompts.point()
    return {
        **{f"itl_ms_{name}": short["itl_ms"][name] for name in ("p50", "p90", "p99", "max")},
        "output_tok_s": short["output_tok_s"],
        "stream_requests": short["num_completed"],
        **{f"long_ttft_ms_{name}": long["ttft_ms"][name] for name in ("p50", "p99")},
        "long_requests": long["num_completed"],
        "failed": short["num_failed"] + long["num_failed"],
    }


BENCHMARK = Benchmark("itl_ratio", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
