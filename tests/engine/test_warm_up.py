"""After the start no request waits for a compiler."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tokenmill.engine.warm_up import FEW, Step, warm_up_batch, warm_up_steps
from tokenmill.kernels.attention import GPU_TILE_ROWS, SHORT, QueryTiles, heads_of, plan_tiles
from tokenmill.kernels.gpu.attention import HOPPER_ITEMS, _attention_kernel
from tokenmill.kernels.gpu.expert_tiles import tile_rows

TESTS = Path(__file__).parents[1]


def kernels(step: Step, group: int, kv_heads: int) -> set[tuple[int, int, int, bool]]:
    """What Triton builds attention for: rows and heads of a tile, programs that share its keys.

    And whether the kernel of Hopper takes it.
    """
    plans = plan_tiles(np.array(step, np.int64), group, kv_heads, True, full_tiles=True)
    return {_kernel(QueryTiles.of(plan), group, kv_heads) for plan in plans}


def _kernel(tiles: QueryTiles, group: int, kv_heads: int) -> tuple[int, int, int, bool]:
    heads = heads_of(tiles, group)
    rows, programs = tiles.tokens * heads, len(tiles.seqs) * group * kv_heads // heads
    by_hopper = not tiles.rows and rows == GPU_TILE_ROWS and programs >= HOPPER_ITEMS
    return max(16, 1 << (rows - 1).bit_length()), heads, tiles.splits, by_hopper


def test_no_number_that_varies_decides_what_attention_is_built_for() -> None:
    """So that kernels() is all: a tile of one query is not built apart from one of two."""
    free = {param.name for param in _attention_kernel.params if param.do_not_specialize}
    assert free >= {"num_tokens", "table_stride", "tile_tokens"}


def random_step(source: random.Random, budget: int, num_seqs: int) -> Step:
    """Decoding sequences, then a prompt or more, or prompts alone; or a short one, or padding."""
    if source.random() < 0.4:
        beside = source.choice((0, source.randrange(min(num_seqs, budget - SHORT))))
        return [1] * beside + [source.randrange(1, SHORT + 1)]
    most = source.choice((2, min(num_seqs, budget // 20)))
    longest = budget // max(4, most)
    prompts = [source.randrange(SHORT + 1, longest) for _ in range(source.randrange(1, most + 1))]
    return [1] * source.randrange(min(num_seqs, budget - sum(prompts)) + 1) + prompts


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 8), (3, 3), (4, 8), (5, 8), (7, 4), (8, 4)])
@pytest.mark.parametrize(("budget", "num_seqs"), [(256, 16), (2048, 64), (8192, 1024)])
def test_random_steps_meet_kernels_that_are_there(
    group: int, kv_heads: int, budget: int, num_seqs: int
) -> None:
    warm = {k for s in warm_up_steps(budget, num_seqs, 40_960) for k in kernels(s, group, kv_heads)}
    source = random.Random(0)
    for _ in range(300):
        step = random_step(source, budget, num_seqs)
        assert kernels(step, group, kv_heads) <= warm, step


@pytest.mark.parametrize("budget", [256, 2048, 8192])
def test_every_tile_of_experts_is_there(budget: int) -> None:
    steps = warm_up_steps(budget, 64, 40_960)
    warm = {tile_rows(8 * sum(step), 128) for step in steps}
    assert {tile_rows(8 * count, 128) for count in range(1, budget + 1)} == warm


@pytest.mark.parametrize(
    ("budget", "num_seqs", "num_tokens"),
    [(8192, 1024, 40_960), (8192, 1024, 64), (2, 256, 500), (1, 1, 1), (256, 16, 512), (64, 64, 7)],
)
def test_the_steps_stay_within_the_limits(budget: int, num_seqs: int, num_tokens: int) -> None:
    steps = warm_up_steps(budget, num_seqs, num_tokens)
    for step in steps:
        assert sum(step) <= budget and max(step) <= num_tokens
        assert len(step) <= 2 * num_seqs  # rows of the block tables
        batch = warm_up_batch(step, 16)
        assert batch.num_tokens == sum(step)
        assert all(len(seq.block_ids) * 16 >= count for seq, count in batch.items)
    assert [min(budget, num_tokens)] in steps and [1] in steps


FIRST_REQUESTS = """
import sys, tempfile
from pathlib import Path
from numba.core import event
from driver import complete
from gpu.setups import LIMITS, Checkpoints
from tokenmill.core.config import CacheConfig, ModelConfig, Setup
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup

greedy = SamplingParams(temperature=0.0, max_tokens=3)
drawn = SamplingParams(seed=1, top_p=0.9, logprobs=2, prompt_logprobs=1, frequency_penalty=0.1)
with tempfile.TemporaryDirectory() as folder:
    path = Checkpoints(Path(folder))["qwen3"]
    for dtype in ("fp32", "int8"):
        model = ModelConfig(str(path), dtype, "cpu")
        built = build_engine(resolve_setup(Setup(model, CacheConfig(num_blocks=64), LIMITS)))
        with event.install_recorder("numba:compile") as compiled:
            for count in (1, 5, 100, 300):
                complete(built.engine, [[3] * count, [4] * count], [greedy, drawn])
        assert not compiled.buffer, (dtype, compiled.buffer)
"""


def test_the_first_requests_on_cpu_compile_nothing() -> None:
    pytest.importorskip("numba")
    assert FEW
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REQUESTS], cwd=TESTS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
