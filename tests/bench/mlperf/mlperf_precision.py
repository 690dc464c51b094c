"""How exact `bench mlperf` is on an engine of known latencies; run it on a quiet machine.

`python tests/bench/mlperf_precision.py`; the last line is JSON. `engine_late_ms` says how late the
engine itself was: on a busy machine it does not keep to its latencies either.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("mlperf_driver.py")
TTFT_S, TPOT_S, NUM_TOKENS = 0.2, 0.02, 32
KNOWN = {"ttft_s": TTFT_S, "tpot_s": TPOT_S, "num_tokens": NUM_TOKENS, "end": "length"}
NAP_S = 2e-4  # a query waits for the end of a nap of the engine
QPS, NUM_QUERIES = 40, 600


def report_of(scenario: str, **options: Any) -> dict[str, Any]:
    text = json.dumps({"scenario": scenario} | KNOWN | {"nap_s": NAP_S} | options)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(DRIVER), folder, text]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def compared(found: float, true: float) -> dict[str, float]:
    return {"true": true, "found": found, "percent": round(100 * (found / true - 1), 3)}


def main() -> None:
    server = report_of("Server", qps=QPS, num_samples=NUM_QUERIES, duration_ms=10_000)
    offline = report_of("Offline", qps=40, num_samples=200)
    seconds = TTFT_S + (NUM_TOKENS - 1) * TPOT_S
    # LoadGen counts until the query that it scheduled last is answered; the first one comes about
    # 1 / QPS after the start.
    true_s = 1 / QPS + server["span_s"] + seconds
    rows = {
        f"server {name} {which}": compared(server[f"{name}_ms"][which], 1e3 * known_s)
        for name, known_s in (("ttft", TTFT_S), ("tpot", TPOT_S))
        for which in ("mean", "p50", "p90", "p99")
    }
    rows["server tokens/s"] = compared(server["metric"]["value"], NUM_QUERIES * NUM_TOKENS / true_s)
    rows["offline ttft p99"] = compared(offline["ttft_ms"]["p99"], 1e3 * TTFT_S)
    rows["offline tpot p99"] = compared(offline["tpot_ms"]["p99"], 1e3 * TPOT_S)
    rows["offline tokens/s"] = compared(offline["metric"]["value"], 200 * NUM_TOKENS / seconds)
    for name, row in rows.items():
        values = f"true {row['true']:10.3f}  found {row['found']:10.3f}"
        print(f"{name:18} {values}  {row['percent']:+.3f} %")
    late = server["engine_late_ms"]
    print(f"engine late by p50 {late['p50']:.3f} ms, p99 {late['p99']:.3f} ms")
    print(json.dumps({"engine_late_ms": late, "figures": rows}))


if __name__ == "__main__":
    main()
