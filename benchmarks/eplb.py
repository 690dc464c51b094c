"""Balance of the experts' load over ranks, before and after experts are copied and moved."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.core.flags import numbers, read_int, setting
from tokenmill.routing.eplb_study import SKEWS, ExpertShape, study

COLUMNS = ("load", "ranks", "slots", "before", "placed", "balanced", "by_node", "place_ms")


@dataclass(frozen=True)
class Options:
    ranks: tuple[int, ...] = setting(
        (8, 32, 72), "Ranks that share the experts.", numbers(read_int, 1, "N,N")
    )


def run(options: Options) -> Report:
    """Synthetic loads of DeepSeek-R1's shape (58 layers, 256 experts, 32 redundant ones).

    Experts are placed by one window of counted tokens; what is reported is the busiest rank over
    the mean in the next window.

    python -m benchmarks.eplb --ranks 8,16
    """
    return {"rows": [study(skew, ExpertShape(ranks)) for skew in SKEWS for ranks in options.ranks]}


def show(report: Report) -> None:
    cells = [[str(row.get(column, "")) for column in COLUMNS] for row in report["rows"]]
    console.print_table([list(COLUMNS), *cells])
    console.out.print(
        "synthetic loads; busiest rank / mean: before, experts in order; placed by load; "
        "balanced, busy ones copied, too; by_node, groups of experts each on one machine"
    )


BENCHMARK = Benchmark("eplb", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
