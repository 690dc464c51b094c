"""What it costs that keys share no cached prefixes: several keys with one system prompt."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Benchmark, Report
from benchmarks.servers import Server, keyed
from tokenmill import console
from tokenmill.core.flags import count, setting

SENTENCE = "You answer in one word, and never mention number {} or what stands beside it. "


@dataclass(frozen=True)
class Options:
    model: str = setting("smollm2", "Model that is served.")
    keys: int = setting(10, "API keys, each an account of its own.", count(2))
    tokens: int = setting(2000, "Tokens of the system prompt.", count(16))
    rounds: int = setting(3, "Questions of each key, one after another.", count(2))
    rest: tuple[str, ...] = ()


def run(options: Options) -> Report:
    """The same calls to a server at its defaults and to one with --share-prefix-cache.

    In each round every key asks a question of its own, one after another. Figures are the share of
    the prompts' tokens that was cached, and the median TTFT, of the first round and of later ones.

    python -m benchmarks.tenants --keys 10 --tokens 2000
    """
    apart = measure(options)
    shared = measure(options, "--share-prefix-cache")
    times = {which: (apart[which]["ttft_ms"], shared[which]["ttft_ms"]) for which in apart}
    ratios = {which: round(own / other, 2) for which, (own, other) in times.items()}
    return {"apart": apart, "shared": shared, "ttft_apart_to_shared": ratios}


def show(report: Report) -> None:
    rows = [["calls", "cached, apart", "cached, shared", "TTFT apart / shared"]]
    for which, ratio in report["ttft_apart_to_shared"].items():
        shares = [f"{report[name][which]['hit_share']:.1%}" for name in ("apart", "shared")]
        rows.append([which, *shares, f"{ratio:.2f}"])
    console.print_table(rows)


def measure(options: Options, *flags: str) -> Report:
    names = [f"key-{number}" for number in range(options.keys)]
    with keyed(options.model, names, *options.rest, *flags) as server:
        system = system_prompt(server, names[0], options.tokens)
        ask(server, names[0], "Warm up.", "Now.")
        rounds = [
            [ask(server, name, system, f"Question {number} of {name}?") for name in names]
            for number in range(options.rounds)
        ]
    later = [call for calls in rounds[1:] for call in calls]
    return {"first": _figures(rounds[0]), "later": _figures(later)}


def _figures(calls: list[tuple[float, int, int]]) -> dict[str, float]:
    share = sum(cached for _, _, cached in calls) / sum(total for _, total, _ in calls)
    ttft_ms = 1e3 * median(ttft_s for ttft_s, _, _ in calls)
    return {"hit_share": round(share, 3), "ttft_ms": round(ttft_ms, 1)}


def system_prompt(server: Server, key: str, num_tokens: int) -> str:
    """Sentences of about so many tokens."""
    text = "".join(SENTENCE.format(number) for number in range(num_tokens // 8))
    tokens = json.load(server.call("/tokenize", {"prompt": text}, key))["tokens"]
    cut = server.call("/detokenize", {"tokens": tokens[:num_tokens]}, key)
    return str(json.load(cut)["prompt"])


def ask(server: Server, key: str, system: str, question: str) -> tuple[float, int, int]:
    """TTFT in seconds, tokens of the prompt, and those of them that were cached."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2}
    began_s = time.perf_counter()
    answer = server.call("/v1/chat/completions", {"messages": messages} | options, key)
    ttft_s = 0.0
    usage: Report = {}
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if not ttft_s and any(c["delta"].get("content") for c in event["choices"]):
                ttft_s = time.perf_counter() - began_s
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return ttft_s or time.perf_counter() - began_s, usage["prompt_tokens"], cached


BENCHMARK = Benchmark("tenants", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
