"""vLLM's names of settings, on the command line and in Python; the docs list them all."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import typer

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.__main__ import run
from tokenmill.cli.app import app
from tokenmill.core.config import CacheConfig, ExecutionConfig, ParallelConfig
from tokenmill.core.types import InvalidRequestError, TokenmillError
from tokenmill.settings import SettingsError
from tokenmill.settings.options import all_settings
from tokenmill.settings.vllm_names import ROWS, VllmName, as_fields, as_flags

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"


@pytest.mark.parametrize(
    ("given", "here"),
    [
        (["m", "--tensor-parallel-size", "4"], ["m", "--tp=4"]),
        (["--tensor_parallel_size=4", "-tp", "2"], ["--tp=4", "--tp=2"]),
        (["--dtype", "bfloat16", "--dtype=int8"], ["--dtype=bf16", "--dtype=int8"]),
        (["--served-model-name", "x", "--api-key", "k"], ["--served-model-name=x", "--api-key=k"]),
        (["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization=0.9"]),
        (["--enforce-eager", "--port", "1"], ["--no-cuda-graphs", "--port=1"]),
        (["--no-enforce-eager"], ["--cuda-graphs"]),
        (["--enable-prefix-caching"], ["--prefix-cache"]),
        (["--no-enable-prefix-caching"], ["--no-prefix-cache"]),
        (["--seed", "0", "--no-trust-remote-code", "--enable-auto-tool-choice"], []),
        (["--pipeline-parallel-size", "1", "--workers", "2"], ["--workers", "2"]),
        (["--tp", "2", "--no-prefix-cache", "--", "--seed"], None),
        (["--block-size"], ["--block-size"]),
    ],
)
def test_flags_become_ours(given: list[str], here: list[str] | None) -> None:
    assert as_flags(given) == (given if here is None else here)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size .* --tp N or --ep N"),
        (["--trust-remote-code"], "trust_remote_code .* built in"),
        (["--speculative-config", "{}"], "--mtp N"),
        (["--seed", "3"], "send seed in each call"),
    ],
)
def test_others_say_what_to_use_instead(
    given: list[str], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match=instead):
        as_flags(given)
    assert run(["serve", *given]) == 2
    assert given[0].strip("-").replace("-", "_") in capsys.readouterr().err


def test_every_row_leads_somewhere() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    known = {s.key: s for s in all_settings(typer.main.get_command(app))}
    for row in ROWS:
        assert bool(row.here) != bool(row.instead), row
        assert not row.here or known[row.here].is_switch == row.switch, row


def shown(row: VllmName) -> str:
    """A row of the table in the docs."""
    here = f"`--{row.here}`" if row.here else row.instead
    if row.here and row.negated:
        here = f"`--no-{row.here}`"
    if row.values:
        here += "; " + ", ".join(f"`{a}` is `{b}`" for a, b in row.values.items())
    if row.harmless:
        here += f"; {', '.join(f'`{v}`' for v in row.harmless)} is taken"
    return f"| `{row.name}` | {here} |"


def test_the_docs_list_them() -> None:
    page = PAGE.read_text()
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    wanted = [shown(row) for row in ROWS]
    assert [line for line in lines if line in wanted] == wanted, "\n".join(wanted)


def test_keyword_arguments_become_fields() -> None:
    given: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.9,
        "enforce_eager": True,
        "trust_remote_code": False,
        "swap_space": 0,
        "block_size": None,
        "kv_cache_dtype": "bfloat16",
    }
    assert as_fields(given) == {
        ParallelConfig: {"tp": 2},
        CacheConfig: {"gpu_share": 0.9, "dtype": "bf16"},
        ExecutionConfig: {"cuda_graphs": False},
    }
    with pytest.raises(SettingsError, match="api_key is a setting of servers"):
        as_fields({"api_key": "x"})
    with pytest.raises(SettingsError, match="use --ep N"):
        as_fields({"enable_expert_parallel": True})
    with pytest.raises(SettingsError, match="gpu_memory_utilization"):
        as_fields({"gpu_memory_utilization": 7})
    with pytest.raises(TypeError, match="no argument 'tensor_paralel_size'"):
        LLM(tensor_paralel_size=2)


TINY: dict[str, Any] = {
    "random_weights": True,
    "max_model_len": 128,
    "dtype": "float32",
    "enforce_eager": True,
    "cache": CacheConfig(num_blocks=32),
}
DRAWN = SamplingParams(temperature=1.0, max_tokens=8)


def test_a_seed_for_all_and_the_end_of_a_block(smollm2_path: Path) -> None:
    texts = []
    for seed in (3, 3, 4):
        with LLM(str(smollm2_path), seed=seed, **TINY) as llm:
            first, second = llm.generate(["x", "x"], DRAWN)
        texts.append((first.outputs[0].token_ids, second.outputs[0].token_ids))
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1], "each prompt draws anew"


def test_many_tasks_share_an_engine(smollm2_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)

    async def all_of(llm: AsyncLLM, prompt: str) -> list[Any]:
        return [output async for output in llm.generate(prompt, greedy)]

    async def main() -> None:
        async with AsyncLLM(str(smollm2_path), **TINY) as llm:
            runs = await asyncio.gather(*(all_of(llm, text) for text in ("a", "b", "a")))
            for run_of in runs:
                sizes = [len(output.outputs[0].token_ids) for output in run_of]
                assert sizes == sorted(sizes) and sizes[-1] == 8
                assert [output.finished for output in run_of].index(True) == len(run_of) - 1
                for before, after in itertools.pairwise(run_of):
                    whole = after.outputs[0].token_ids
                    assert whole[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
            assert runs[0][-1].outputs[0].token_ids == runs[2][-1].outputs[0].token_ids
            with pytest.raises(InvalidRequestError, match="too long"):
                await all_of(llm, "word " * 500)
            abandoned = llm.generate("c", SamplingParams(max_tokens=100, ignore_eos=True))
            async for _ in abandoned:
                break
            await abandoned.aclose()  # type: ignore[attr-defined]
            assert len((await all_of(llm, "b"))[-1].outputs[0].token_ids) == 8
            left = asyncio.ensure_future(all_of(llm, "d"))
            await asyncio.sleep(0)
        with pytest.raises(TokenmillError, match="was closed"):
            await asyncio.wait_for(left, 60)

    asyncio.run(main())
