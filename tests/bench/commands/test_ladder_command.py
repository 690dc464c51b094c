"""The ladder: which rungs run with which settings, the figures of a row, and the plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.sample_runs import page_data
from tokenmill.bench.commands import ladder as cli
from tokenmill.bench.commands.ladder import (
    CHANGED,
    NEEDS,
    RUNGS,
    LadderRung,
    RungAttempt,
    choose,
    ladder_rows,
    missing,
    run_rung,
    settings_of,
)
from tokenmill.bench.report.page import render
from tokenmill.bench.report.table_pages import check_page, ladder_page
from tokenmill.bench.results.reports import CellReport, as_json
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import usd_per_million_tokens
from tokenmill.settings import CACHE, EXECUTION, MODEL, by_key, read_value

GPU, CPU = {"cuda", "compiled", "fp8"}, {"cpu", "compiled"}
BY_KEY = {rung.key: rung for rung in RUNGS}


def names(features: set[str]) -> list[str]:
    return [rung.name for rung in RUNGS if not missing(rung, features)]


def figures(tok_s: float) -> CellReport:
    return CellReport(
        tok_s=tok_s,
        tok_s_runs=[tok_s],
        output_tok_s=tok_s,
        total_tok_s=tok_s,
        seconds=1.0,
        num_prompts=1,
        num_input_tokens=1,
        num_output_tokens=1,
        ceiling_tok_s=400.0,
        share_of_ceiling=tok_s / 400,
        mfu=0.5,
        mbu=0.25,
    )


def test_rungs_of_each_device() -> None:
    on_gpu = ["eager torch", "fused kernels", "CUDA graphs", "overlap", "fp8", "fp8 KV"]
    assert names(GPU) == on_gpu
    assert names(CPU) == ["eager torch", "fused kernels", "overlap", "int8"]
    assert missing(BY_KEY["fp8"], {"cuda"}) == NEEDS["fp8"]


def test_a_draft_is_given_to_the_rung_that_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    def noted(rung: LadderRung, line: list[str]) -> RungAttempt:
        lines.append(line)
        return RungAttempt(rung)

    monkeypatch.setattr(cli, "run_rung", noted)
    values = {"draft": "head.safetensors"}
    for key in ("overlap", "mtp"):
        cli._attempt(BY_KEY[key], values, "cpu", frozenset(CPU | {"mtp"}))
    flags = {"--draft=head.safetensors"}
    assert [flags & set(line) for line in lines] == [set(), flags]


def test_every_rung_sets_settings_that_exist() -> None:
    known = by_key(MODEL, CACHE, EXECUTION)
    for rung in RUNGS:
        assert not rung.needs or rung.needs in NEEDS
        for key, value in rung.settings.items():
            assert read_value(known[key], value, key) == value
            assert key in CHANGED


def test_a_rung_keeps_what_the_ones_before_it_changed() -> None:
    eager = settings_of(BY_KEY["eager"], "cuda", GPU)
    assert eager == {
        "dtype": "bf16",
        "fused-kernels": False,
        "cuda-graphs": False,
        "overlap": False,
        "kv-cache-dtype": "auto",
    }
    last = settings_of(BY_KEY["fp8-kv"], "cuda", GPU)
    assert last == {
        "dtype": "fp8",
        "kv-cache-dtype": "fp8",
        "fused-kernels": True,
        "cuda-graphs": True,
        "overlap": True,
    }
    on_cpu = settings_of(BY_KEY["int8"], "cpu", CPU)
    assert on_cpu["dtype"] == "int8" and not on_cpu["cuda-graphs"]
    assert settings_of(BY_KEY["overlap"], "cpu", CPU)["dtype"] == "fp32"


def test_chosen_rungs_come_in_order() -> None:
    assert choose([]) == list(RUNGS)
    assert [rung.key for rung in choose(["fp8", "eager torch"])] == ["eager", "fp8"]
    with pytest.raises(BenchError, match="--rungs fp4: no such rung; there are eager, fused"):
        choose(["fp8", "fp4"])


def test_price_of_a_million_tokens_by_hand() -> None:
    # 1,000 tokens a second are 3.6 million an hour.
    assert usd_per_million_tokens(3.6, 1000) == pytest.approx(1.0)
    assert usd_per_million_tokens(1.8, 2000) == pytest.approx(0.25)


def test_rows_compare_with_the_last_and_the_first_that_ran() -> None:
    attempts = [
        RungAttempt(BY_KEY["eager"], figures(100)),
        RungAttempt(BY_KEY["fused"], error="boom"),
        RungAttempt(BY_KEY["graphs"], skipped="needs a GPU"),
        RungAttempt(BY_KEY["overlap"], figures(150)),
        RungAttempt(BY_KEY["fp8"], figures(300)),
    ]
    rows = ladder_rows(attempts, usd_per_hour=3.6)
    assert [row.speedup or None for row in rows] == [1.0, None, None, 1.5, 2.0]
    assert [row.cumulative or None for row in rows] == [1.0, None, None, 1.5, 3.0]
    assert rows[0].usd_per_million == 10.0 and rows[4].share_of_ceiling == 0.75
    assert rows[1].error == "boom" and rows[2].skipped == "needs a GPU"


def script(folder: Path, code: str) -> list[str]:
    path = folder / "child.py"
    path.write_text(code)
    return [sys.executable, str(path)]


def test_a_rung_is_a_process_with_one_json_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"cells": {"batch": {"tokenmill": as_json(figures(7))}}}
    code = f"import sys; print('half', file=sys.stderr); print({json.dumps(json.dumps(report))})"
    attempt = run_rung(RUNGS[0], script(tmp_path, code))
    assert attempt == RungAttempt(RUNGS[0], figures(7))
    assert capsys.readouterr().err == "half\n"


def test_a_rung_that_fails_keeps_its_error_line(tmp_path: Path) -> None:
    failing = script(tmp_path, "import sys; sys.exit('error: no memory left\\n')")
    assert run_rung(RUNGS[0], failing) == RungAttempt(RUNGS[0], error="no memory left")
    silent = script(tmp_path, "import sys; sys.exit(3)")
    assert run_rung(RUNGS[0], silent).error == "exit status 3"


def test_plot_has_a_bar_for_each_rung_that_ran(tmp_path: Path) -> None:
    odd = LadderRung("odd", "a < b", {})
    attempts = [RungAttempt(BY_KEY["eager"], figures(100)), RungAttempt(odd, figures(400))]
    rows = ladder_rows([*attempts, RungAttempt(BY_KEY["fp8"], skipped="needs a GPU")], 3.0)
    page = page_data(render(ladder_page("x & y", rows)))
    _, eager, second, fp8 = page["sections"][0]["blocks"][0]["rows"]
    assert page["title"] == "x & y" and (eager[0], second[0]) == ("eager torch", "a < b")
    assert [(row[1]["kind"], row[1]["share"]) for row in (eager, second)] == [
        ("bar", 0.25),
        ("bar", 1.0),
    ]
    assert eager[1]["text"] == "100" and second[2:] == ["4.00x", "2.083", "100%"]
    assert fp8[:2] == ["fp8", "skipped: needs a GPU"]
    check_page("plot", tmp_path / "ladder.html")
    with pytest.raises(BenchError, match=r"--plot .* expected a file that ends in \.html"):
        check_page("plot", tmp_path / "ladder.png")
    with pytest.raises(BenchError, match="there is no folder"):
        check_page("plot", tmp_path / "gone/ladder.html")
