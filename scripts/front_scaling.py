"""How far fronts scale on this machine: one front's own limit, then more fronts at that load each.

    python scripts/front_scaling.py --model FOLDER

Every stream gets a token in each step of the simulated engines, so that the load is set by the
number of streams. One front gets more and more of them until it no longer passes on each token by
itself and in time. Then 2, 4 and 8 fronts get as many streams each. Clients, engines and fronts
share the machine: where they take nearly all of its CPUs, the machine is what limits them, and the
line says so. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

KEEPS_UP = 0.9  # of the tokens offered; the streams' beginning is part of the time
ALONE = 1.1  # tokens in an event, up to which each counts as passed on by itself
FULL = 0.9  # of the CPUs


def measure(fronts: int, streams: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """`bench frontend` with so many fronts and streams, one point for each number of streams."""
    num_tokens = round(1e3 * args.seconds / args.step_ms)
    command = [sys.executable, "-m", "tokenmill", "bench", "frontend", "--json-only"]
    command += ["--fronts", str(fronts), "--workers", str(max(1, fronts // 2))]
    command += ["--client-processes", str(max(1, fronts * 3 // 4)), "--model", args.model]
    command += ["--step-ms", str(args.step_ms), "--stream-tokens", str(num_tokens)]
    command += ["--num-streams", ",".join(map(str, streams))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    points: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["points"]
    return [_row(fronts, point) for point in points]


def _row(fronts: int, point: dict[str, Any]) -> dict[str, Any]:
    used = {name: point[f"{name}_cpu"] or 0.0 for name in ("server", "worker", "client")}
    return {
        "fronts": fronts,
        "streams": point["num_streams"],
        "offered_tok_s": point["offered_tok_s"],
        "tok_s": point["tok_s"],
        "events_s_front": point["chunks_s"] / fronts,
        "tokens_per_event": point["tokens_per_chunk"],
        "us_per_token": point["us_per_token"],
        "us_per_request": point["us_per_request"],
        "p99_ms": point["steady_delay_ms"].get("p99"),
        "p99_ms_from_start": point["delay_ms"].get("p99"),
        "cpus_fronts": used["server"],
        "cpus_workers": used["worker"],
        "cpus_client": used["client"],
        "is_full": sum(used.values()) > FULL * (os.cpu_count() or 1),
    }


def keeps_up(row: dict[str, Any]) -> bool:
    """Whether each token is passed on by itself, and in time."""
    in_time = row["tok_s"] >= KEEPS_UP * row["offered_tok_s"]
    return bool(in_time and row["tokens_per_event"] <= ALONE)


def show(row: dict[str, Any], one: dict[str, Any] | None) -> None:
    """Print a point, beside one front at the same load."""
    ratio = "" if one is None else f", {row['events_s_front'] / one['events_s_front']:.2f} of one's"
    print(
        f"{row['fronts']} front(s), {row['streams']} streams: {row['tok_s']:,.0f} of "
        f"{row['offered_tok_s']:,.0f} tok/s, {row['tokens_per_event']:.2f} tokens an event, "
        f"{row['events_s_front']:,.0f} events/s a front{ratio}; p99 {row['p99_ms']:.2f} ms, "
        f"{row['p99_ms_from_start']:.2f} with the start; {row['us_per_token']:.1f} us a token, "
        f"{row['us_per_request']:.0f} a request; CPUs: fronts {row['cpus_fronts']:.1f}, engines "
        f"{row['cpus_workers']:.1f}, client {row['cpus_client']:.1f} of {os.cpu_count()}"
        + (" (full)" if row["is_full"] else ""),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", default="128,192,256,320", help="of each front")
    parser.add_argument("--fronts", default="2,4,8", help="beside one")
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each point")
    args = parser.parse_args()
    loads = [int(each) for each in args.streams.split(",")]
    alone = dict(zip(loads, measure(1, loads, args), strict=True))
    for row in alone.values():
        show(row, None)
    fit = [load for load, row in alone.items() if keeps_up(row)] or loads[:1]
    print(f"one front keeps up with {fit[-1]} streams", flush=True)
    rows = list(alone.values())
    for fronts in map(int, args.fronts.split(",")):
        shares = [*dict.fromkeys([fit[0], fit[-1]])]
        found = measure(fronts, [share * fronts for share in shares], args)
        for share, row in zip(shares, found, strict=True):
            row["of_one_front"] = row["events_s_front"] / alone[share]["events_s_front"]
            show(row, alone[share])
        rows += found
    print(json.dumps({"num_cpus": os.cpu_count(), "one_front_streams": fit[-1], "rows": rows}))


if __name__ == "__main__":
    main()
