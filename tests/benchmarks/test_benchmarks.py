"""Each benchmark runs at a small size, and its last line is one whole JSON object."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from benchmarks.__main__ import names
from benchmarks.embeddings import most_keys_s
from benchmarks.harness import ROOT, Benchmark, Report
from benchmarks.router import Options as RouterOptions
from benchmarks.router import OwnRouter, PlainRouter, measure_decisions, measure_index
from tiny_configs import write_config
from tiny_tokenizers import byte_level, save_folder
from tokenmill.models.checkpoints.random_folder import write_random_folder

SERVED = "--random-weights --dtype fp32 --device cpu --num-threads 1 --kv-cache-memory 4MiB"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
MODEL = "--model MODEL --random-weights --dtype fp32 --num-threads 1"
SMALL = {  # the flags of a short run, and what its report has
    "decode": (f"{MODEL} --batch 1,4 --context 40", "steps machine"),
    "embeddings": (
        "--device cpu --rows 512 --columns 8 --keys 300 --seconds 0.01",
        "tiers copy_gb_s of_copy memory_bytes cache_and_host_ceiling_keys_s",
    ),
    "eplb": ("--ranks 8", "rows"),
    "frontend": ("--num-streams 4 --stream-tokens 20 --fronts 1,2", "points num_cpus"),
    "router": (
        "--num-workers 4 --num-blocks 400 --query-blocks 20 --num-decisions 50",
        "decision_us bytes_per_block events_per_s plain_dict limits",
    ),
    "scheduler": ("--num-running 8 --num-steps 5", "total_us limit_us share_of_limit"),
    "start": (f"{MODEL} --starts 1", "first_token_s weights_gb_s starts read_gb_s"),
    "windows": ("", "sessions branches least_hit_share least_found_share"),
    "noisy": (f"--model MODEL --only stops --seconds 0.2 -- {SERVED}", "quiet_ms rows"),
    "tenants": (f"--model MODEL --keys 2 --tokens 48 --rounds 2 -- {SERVED}", "apart shared"),
}

ELSEWHERE = {  # tests of those that run there, or need what is not installed here
    "front_peers": "benchmarks/test_frontend.py",
    "itl_ratio": "benchmarks/test_online.py",
    "kv_tiers": "benchmarks/test_kv.py",
    "kv_transfer": "benchmarks/test_kv.py",
    "loads": "plan/test_loads.py",
    "online": "benchmarks/test_online.py",
    "peers": "benchmarks/test_peers.py",
}


def benchmark(name: str) -> Benchmark:
    found = import_module(f"benchmarks.{name}").BENCHMARK
    assert isinstance(found, Benchmark) and found.name == name
    return found


def test_all_are_listed_and_have_a_run_here() -> None:
    assert names().keys() == SMALL.keys() | ELSEWHERE.keys()
    assert all((ROOT / "tests" / place).is_file() for place in ELSEWHERE.values())
    assert all(names().values()) and all(benchmark(name).run.__doc__ for name in SMALL)


REPORTS: dict[str, Report] = {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of random weights that chats."""
    folder = write_config(tmp_path_factory.mktemp("model"), vocab_size=422)
    save_folder(byte_level(), folder, eos_token="<|im_end|>", chat_template=TEMPLATE)
    write_random_folder(folder / "config.json", folder)
    return str(folder)


def report_of(name: str, model: str = "") -> Report:
    """Of the small run, made once."""
    if name not in REPORTS:
        flags = SMALL[name][0].replace("MODEL", model).split()
        REPORTS[name] = benchmark(name).call(flags)
    return REPORTS[name]


@pytest.mark.parametrize("name", SMALL)
def test_the_last_line_is_the_report(
    name: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    REPORTS.pop(name, None)
    report = report_of(name, model)
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == json.loads(json.dumps(report)) and len(lines) > 1
    assert report["benchmark"] == name and report.keys() >= set(SMALL[name][1].split())


def test_a_process_lists_them_and_names_wrong_flags() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    shown = run("benchmarks").stdout
    assert all(f"python -m benchmarks.{name} " in shown for name in SMALL)
    done = run("benchmarks.scheduler", "--num-running", "0")
    assert done.returncode == 2 and "--num-running must be a whole number of at" in done.stderr
    done = run("benchmarks.scheduler", "--num-running", "4", "--num-steps", "2", "--json")
    assert json.loads(done.stdout)["num_running"] == 4, "nothing beside the report"


# What a report says of a benchmark's subject.


def test_queries_leave_what_is_cached_and_both_routers_find_it() -> None:
    options = RouterOptions(4, 200, 20, 4, 30)
    cached, query = (options.hashes(t) for t in (options.prompt(3), options.query(3, 41)))
    assert [a == b for a, b in zip(cached, query, strict=True)] == [True] * 10 + [False] * 10
    for make in (OwnRouter, PlainRouter):
        router, index = measure_index(lambda make=make: make(options), options)
        times = measure_decisions(router, options)
        assert index["events_per_s"] > 0 and 0 < times["p50"] <= times["p99"]


def test_tokens_of_the_frontend_have_prices() -> None:
    points = report_of("frontend")["points"]
    assert [(point["fronts"], point["num_tokens"]) for point in points] == [(1, 80), (2, 160)]
    for point in points:
        assert point["offered_tok_s"] == 80_000 and point["of_first"] > 0
        assert min(point[f"us_per_{what}"] for what in ("token", "request", "send")) > 0


def test_steps_and_starts_add_up(model: str) -> None:
    for row in report_of("decode", model)["steps"]:
        assert 0 < row["share_of_ceiling"] < 1 and row["parts_ms"] == {}
        assert row["tok_s"] == pytest.approx(row["batch"] / row["ms"] * 1e3, rel=0.01)
    report = report_of("start", model)
    (one,) = report["starts"]
    expected = ["process and imports", "device", "tokenizer", "weights", "KV cache", "warm-up"]
    assert list(one["phases"]) == [*expected, "ready", "first token"]
    assert one["seconds"] == report["first_token_s"] == pytest.approx(sum(one["phases"].values()))


def test_every_tier_of_embeddings_is_right() -> None:
    report = report_of("embeddings")
    assert all(tier["keys_s"] > 0 for tier in report["tiers"].values())
    memory = report["memory_bytes"]
    assert memory["cache"] == memory["cache_taken"] and memory["table"] == 512 * 8 * 2
    assert 0.8 < report["hit_rate"] <= 1 and report["cache_and_host_ceiling_keys_s"] is None
    share = report["tiers"]["cache_and_host"]["host_rows_share"]
    assert 0 < share < 0.2  # of new keys, of which some have their row read with others
    # A tenth of the keys bring rows of 1 KiB over 51.2 GB/s: 102.4 bytes a key.
    assert most_keys_s(1024, 0.1, 51.2) == pytest.approx(5e8)
    assert most_keys_s(1024, 0.0, 51.2) is None


def test_eplb_balances_what_is_uneven() -> None:
    assert all(1 < row["balanced"] < row["before"] for row in report_of("eplb")["rows"])
