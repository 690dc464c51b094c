"""Requests/s of DLRMv3 on a CPU beside those of MLPerf's own model, in one run.

    python scripts/hstu_reference.py --length-scale 0.25

Both have the benchmark's dense part in fp32, the same random tensors and requests of the
benchmark's lengths times the scale, as one batch. They take turns, and the fastest round of each
counts; the scores are compared first. tests/reference_ranking.py says how MLPerf's model is
installed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from reference_ranking import reference_model, reference_scores
from tiny_ranking import tiny_model
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.ranking.synthetic import benchmark_requests

TABLES = {"num_items": 10_000, "num_users": 1_000}  # their size is no matter on a CPU
LIMIT = 1e-5  # between the scores


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length-scale", type=float, default=0.25, help="Of the lengths.")
    parser.add_argument("--requests", type=int, default=2, help="Requests of the batch.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    spec = HstuSpec(**TABLES)
    model = tiny_model(spec)
    requests = benchmark_requests(spec, args.requests, args.length_scale)
    reference = reference_model(spec, model)
    runs: dict[str, Callable[[], np.ndarray]] = {
        "ours": lambda: np.concatenate(model.score(requests))[:, 0],
        "reference": lambda: reference_scores(reference, requests),
    }
    ours, theirs = (run() for run in runs.values())
    apart = float(np.abs(ours - theirs).max())
    assert apart < LIMIT, f"scores are {apart} apart"
    rates = rounds(runs, args.rounds, len(requests))
    lengths = [request.num_history for request in requests]
    print(
        f"{len(requests)} requests of {lengths} items and {requests[0].num_candidates} candidates, "
        f"fp32, {args.threads} threads: ours {rates['ours']:.3f} requests/s, MLPerf's reference "
        f"{rates['reference']:.3f}; scores are {apart:.1e} apart at most"
    )
    found = {f"{name}_requests_per_s": round(rate, 4) for name, rate in rates.items()}
    ratio = round(rates["ours"] / rates["reference"], 2)
    print(json.dumps(found | {"ratio": ratio, "max_difference": apart, "threads": args.threads}))


def rounds(
    runs: dict[str, Callable[[], np.ndarray]], count: int, num_requests: int
) -> dict[str, float]:
    """Requests/s of each, by its fastest round; they take turns."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(count):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: num_requests / seconds for name, seconds in best.items()}


if __name__ == "__main__":
    main()
