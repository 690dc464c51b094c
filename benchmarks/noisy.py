"""How long a key's calls take while another key sends calls of each nasty kind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event

from benchmarks.harness import ROOT, Benchmark, Report
from benchmarks.servers import HOST, Server, keyed
from tokenmill import console
from tokenmill.core.flags import number, setting
from tokenmill.core.metrics import summarize
from tokenmill.core.types import TokenmillError

sys.path.append(str(ROOT / "tests"))  # each kind was a fault once, and has a test

from noisy_calls import CHAT, Crowd, noises

MEGABYTES = 15
WAIT_S = 3.0  # until the calls before are over


@dataclass(frozen=True)
class Options:
    model: str = setting("smollm2", "Model that is served.")
    seconds: float = setting(8.0, "Time of the calls beside each kind.", number(0.1, 3600))
    only: str = setting("", "Part of the name of a kind of calls.")
    rest: tuple[str, ...] = ()


def run(options: Options) -> Report:
    """Calls of four tokens, beside nasty calls and beside ordinary ones of as many tokens.

    Both come from as many clients of another key. The bar is twice the p99 beside ordinary calls,
    and no call of a second more than the longest of them.

    python -m benchmarks.noisy --model smollm2 --seconds 8
    """
    rows: list[Report] = []
    with keyed(options.model, ("victim", "noisy"), *options.rest) as server:
        quiet = victim(server, options.seconds)
        for noise in noises(MEGABYTES):
            if options.only not in noise.name:
                continue
            ordinary = json.dumps(noise.ordinary).encode()
            with beside(server, CHAT, ordinary, noise.clients, False):
                plain = victim(server, options.seconds)
            with beside(server, noise.path, noise.body, noise.clients, noise.stalls):
                nasty = victim(server, options.seconds)
            ratio, longer_s = nasty["p99"] / plain["p99"], (nasty["max"] - plain["max"]) / 1e3
            rows.append(
                {
                    "kind": noise.name,
                    "ordinary_ms": plain,
                    "nasty_ms": nasty,
                    "p99_ratio": round(ratio, 2),
                    "kept": ratio <= 2 and longer_s < 1,
                }
            )
            console.note(f"{noise.name}: p99 {ratio:.2f}x")
    return {"quiet_ms": quiet, "rows": rows}


def show(report: Report) -> None:
    rows = [["kind", "p99 ms", "beside ordinary calls", "ratio", "longest ms", "kept"]]
    for row in report["rows"]:
        nasty, plain = row["nasty_ms"], row["ordinary_ms"]
        figures = [f"{value:.0f}" for value in (nasty["p99"], plain["p99"])]
        longest = f"{nasty['max']:.0f}", "yes" if row["kept"] else "NO"
        rows.append([row["kind"], *figures, f"{row['p99_ratio']:.2f}", *longest])
    console.print_table(rows)
    console.out.print(f"with nothing beside: p99 {report['quiet_ms']['p99']:.0f} ms")


@contextlib.contextmanager
def beside(server: Server, path: str, body: bytes, clients: int, stalls: bool) -> Iterator[None]:
    """Clients in a process of their own, while the block runs."""
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    arguments = ((HOST, server.port), path, body, clients, stalls, over)
    process = context.Process(target=crowd, args=arguments)
    process.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        over.set()
        process.join()
        time.sleep(WAIT_S)


def crowd(
    address: tuple[str, int], path: str, body: bytes, clients: int, stalls: bool, over: Event
) -> None:
    with Crowd(address, "noisy", path, body).calling(clients, stalls):
        over.wait()


def victim(server: Server, seconds: float) -> dict[str, float]:
    """Milliseconds of calls one after another; all must have the same answer."""
    message = {"role": "user", "content": "Count: one, two,"}
    body = {"messages": [message], "max_tokens": 4, "temperature": 0}
    took_ms: list[float] = []
    texts, until_s = set(), time.monotonic() + seconds
    while time.monotonic() < until_s or len(took_ms) < 2:
        began_s = time.perf_counter()
        answer = json.load(server.call(CHAT, body, "victim"))
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        texts.add(answer["choices"][0]["message"]["content"])
    if len(texts) != 1:
        raise TokenmillError(f"the victim's answers differ: {texts}")
    return summarize(took_ms, 1)


BENCHMARK = Benchmark("noisy", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
