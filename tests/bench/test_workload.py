"""Cells and workloads: lengths from files and from a seed, and the prompts that go with them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tokenmill.bench.options import BenchConfig
from tokenmill.bench.workload import (
    SHIPPED,
    BenchError,
    Cell,
    make_cells,
    make_prompts,
    read_lengths,
)


def workload(lengths: str | Path, **more: int) -> Cell:
    (cell,) = make_cells(BenchConfig(lengths=str(lengths), **more))
    return cell


def csv_file(folder: Path, text: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(text)
    return path


def test_cells_of_the_config() -> None:
    lengths = [(c.num_prompts, *c.lengths[0]) for c in make_cells(BenchConfig())]
    assert lengths == [(32, 128, 64), (1, 128, 128), (1, 2048, 1)]
    config = BenchConfig(num_prompts=2, input_len=3, output_len=4, cells=("batch",))
    assert make_cells(config) == [Cell("batch", ((3, 4), (3, 4)))]


def test_rounds_depend_on_the_kind_of_workload() -> None:
    assert BenchConfig().num_rounds == 3 and BenchConfig(lengths="x").num_rounds == 1
    assert BenchConfig(lengths="x", rounds=2).num_rounds == BenchConfig(rounds=2).num_rounds == 2


def test_figures_of_a_cell() -> None:
    cell = Cell("mixed", ((10, 3), (4, 20)))
    assert (cell.num_prompts, cell.num_input_tokens, cell.num_output_tokens) == (2, 14, 23)
    assert cell.longest == 24 and cell.num_counted_tokens == 23
    assert cell.shape == "2 requests (14 in, 23 out)"
    assert Cell.equal("x", 2, 10, 3).shape == "2 x (10 in, 3 out)"
    assert Cell("prefill", ((10, 1), (4, 1))).num_counted_tokens == 14
    many = Cell.equal("x", 100, 10, 30).warmup()
    assert many.lengths == ((10, 8),) * 48
    assert Cell.equal("x", 2, 10, 3).warmup().lengths == ((10, 3),) * 2


def test_prompts_are_distinct_and_the_same_for_all() -> None:
    cell = Cell.equal("batch", 8, 16, 4)
    first, again = make_prompts(cell, 0, 1, 49_152), make_prompts(cell, 0, 1, 49_152)
    assert first == again
    others = make_prompts(cell, 1, 1, 49_152) + make_prompts(cell, 0, 2, 49_152)
    assert len({tuple(p) for p in first + others}) == 24
    assert {len(p) for p in first} == {16}
    assert all(1536 <= token < 43_008 for p in first for token in p)


def test_uniform_is_the_public_bench_of_nano_vllm() -> None:
    cell = workload("uniform:100-1024")
    assert (cell.num_prompts, cell.num_input_tokens) == (256, 142_827)
    assert cell.num_output_tokens == 133_966
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    assert make_prompts(cell, 0, 0, 151_936) == prompts
    assert cell.output_lens == [rng.randint(100, 1024) for _ in range(256)]
    assert max(map(max, make_prompts(cell, 0, 0, 100))) == 99


def test_rows_of_a_file_are_drawn_by_seed_seven() -> None:
    cell = workload("llama3.1-8b", num_prompts=50, output_len=128)
    inputs = [i for i, _ in read_lengths(SHIPPED / "llama3.1-8b.csv")]
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 128_000) for _ in range(n)] for n in rng.sample(inputs, 50)]
    assert make_prompts(cell, 0, 0, 128_256) == prompts
    assert make_prompts(cell.warmup(), -1, 0, 128_256) == prompts[:48]
    assert cell.name == "llama3.1-8b" and set(cell.output_lens) == {128}
    assert cell.lengths == tuple((len(prompt), 128) for prompt in prompts)
    assert all(10 <= token < 422 for p in make_prompts(cell, 0, 0, 422) for token in p)


def test_without_a_number_all_rows_run_with_their_own_outputs(tmp_path: Path) -> None:
    path = csv_file(tmp_path, "input_length,output_length\n5,7\n6,8\n9,1\n")
    cell = workload(path)
    assert sorted(cell.lengths) == [(5, 7), (6, 8), (9, 1)]
    assert cell.name == "mine"
    assert set(workload(path, output_len=3).output_lens) == {3}
    with pytest.raises(BenchError, match=r"mine\.csv: has 3 rows, but --num-prompts asks for 4"):
        workload(path, num_prompts=4)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.csv")), ids=lambda path: path.stem)
def test_shipped_lengths_can_be_read(path: Path) -> None:
    assert len(workload(path.stem, output_len=2).lengths) == len(path.read_text().split()) - 1
    assert path.name in (SHIPPED / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"mine\.csv:1: expected the header input_length,output_length, found nothing"),
        ("in,out\n1,2\n", r"mine\.csv:1: expected the header .*, found in,out"),
        ("input_length\n3\n", r"mine\.csv:1: has no output_length column: give --output-len"),
        ("input_length,output_length\n", r"mine\.csv:2: expected a row of lengths"),
        (
            "input_length,output_length\n1,2\n3,x\n",
            r"mine\.csv:3: expected 2 whole numbers of at least 1, found 3,x",
        ),
        ("input_length,output_length\n1,0\n", r"mine\.csv:2: expected 2 whole numbers .* 1,0"),
        ("input_length,output_length\n1\n", r"mine\.csv:2: expected 2 whole numbers"),
        ("input_length,output_length\n1,2\n\n3,4", r"mine\.csv:3: expected .*, found nothing"),
    ],
)
def test_bad_files_name_line_and_expectation(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        workload(csv_file(tmp_path, text))


def test_sources_that_do_not_exist() -> None:
    with pytest.raises(BenchError, match=r"--lengths gone: .* known are .*llama3\.1-8b.* uniform:"):
        workload("gone")
    with pytest.raises(BenchError, match="9 is more than 3"):
        workload("uniform:9-3")
