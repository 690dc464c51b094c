"""The same greedy answer in every mode: chunked, prefix hit, preempted, overlapped, or not."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from driver import Answer, assert_same, build, complete
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save, tame
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.kernels import cpu_kernels
from tokenmill.kernels.stack import run_stack
from tokenmill.models import llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
WIDE = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tame(make_model("llama", **WIDE), 0.3)
    return save(model, tmp_path_factory.mktemp("tiny"))


def prompts() -> list[list[int]]:
    """Prompts of many lengths, half of them with a shared beginning."""
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(70)]
    own = [[source.randrange(64) for _ in range(n)] for n in (1, 2, 15, 16, 17, 33, 64, 100)]
    return own + [shared + tail for tail in own]


@pytest.mark.skipif(not cpu_kernels(), reason="no compiled kernels here")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3-tied"])
def test_all_layers_in_one_call_give_what_they_give_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tame(make_model(family, **WIDE), 0.3), tmp_path)
    modes: dict[str, Any] = {"chunked": True, "prefix_cache": False, "num_blocks": 400}
    calls = []

    def count(*args: Any) -> bool:
        calls.append(run_stack(*args))
        return calls[-1]

    monkeypatch.setattr(llama, "run_stack", count)
    together = complete(build(tmp_path, "int8", **modes).engine, prompts(), GREEDY)
    assert calls and all(calls)
    monkeypatch.setattr(llama, "run_stack", lambda *args: False)
    apart = complete(build(tmp_path, "int8", **modes).engine, prompts(), GREEDY)
    assert [a.logprobs for a in together] == [a.logprobs for a in apart]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def golden(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[Answer]]:
    """Each prompt alone, whole, with no cache and plenty of room."""
    answers = []
    for prompt in prompts():
        built = build(folder, request.param, chunked=False, prefix_cache=False, num_blocks=64)
        answers += complete(built.engine, [prompt], GREEDY)
    return request.param, answers


@pytest.mark.parametrize(
    ("chunked", "prefix_cache", "num_blocks", "overlap"),
    list(itertools.product([False, True], [False, True], [400, 40], [False, True])),
)
def test_every_mode_gives_the_golden_answer(
    folder: Path,
    golden: tuple[str, list[Answer]],
    chunked: bool,
    prefix_cache: bool,
    num_blocks: int,
    overlap: bool,
) -> None:
    dtype, expected = golden
    built = build(
        folder,
        dtype,
        chunked=chunked,
        prefix_cache=prefix_cache,
        num_blocks=num_blocks,
        overlap=overlap,
    )
    engine = built.engine
    first = complete(engine, prompts(), GREEDY)
    assert_same(first, expected)
    again = complete(engine, prompts(), GREEDY)
    assert_same(again, expected)
    if num_blocks == 40:
        assert engine.stats().num_preemptions > 0
    if prefix_cache and num_blocks == 400:
        for prompt, answer in zip(prompts(), again, strict=True):
            assert answer.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_seeded_sampling_does_not_depend_on_the_batch(folder: Path, overlap: bool) -> None:
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True)
        for i in range(len(prompts()))
    ]
    together = build(
        folder, "int8", chunked=True, prefix_cache=True, num_blocks=40, overlap=overlap
    )
    batched = complete(together.engine, prompts(), params)
    alone = build(folder, "int8", chunked=False, prefix_cache=False, num_blocks=64)
    for prompt, sampling, answer in zip(prompts(), params, batched, strict=True):
        assert complete(alone.engine, [prompt], sampling)[0].token_ids == answer.token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_a_neighbour_with_penalties_changes_nothing(folder: Path, overlap: bool) -> None:
    """Penalties ask for the newest token, which an overlapped step knows last."""
    penalised = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=0.3,
    )  # fmt: skip
    params = [penalised if i % 3 == 0 else GREEDY for i in range(len(prompts()))]
    alone = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64)
    expected = [
        complete(alone.engine, [prompt], sampling)[0]
        for prompt, sampling in zip(prompts(), params, strict=True)
    ]
    together = build(
        folder, "fp32", chunked=True, prefix_cache=True, num_blocks=40, overlap=overlap
    )
    assert_same(complete(together.engine, prompts(), params), expected)


@pytest.mark.parametrize("overlap", [False, True])
def test_abort_at_any_step_leaves_nothing_behind(folder: Path, overlap: bool) -> None:
    built = build(folder, "fp32", chunked=True, prefix_cache=True, num_blocks=40, overlap=overlap)
    engine = built.engine
    source = random.Random(5)

    def abort_some(step: int) -> None:
        engine.abort(str(source.randrange(len(prompts()))))

    answers = complete(engine, prompts(), GREEDY, after_step=abort_some)
    assert {a.terminals[0].finish_reason for a in answers} >= {"abort"}
    assert engine.stats().num_kv_blocks_used == 0
    check_scheduler(engine._scheduler)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_goes_on_where_another_engine_left_it(folder: Path, overlap: bool) -> None:
    """As a pool continues the streams of a worker that died."""
    samplings = [
        GREEDY,
        SamplingParams(
            temperature=1.0,
            top_p=0.95,
            seed=11,
            max_tokens=24,
            min_tokens=8,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logprobs=1,
        ),
    ]
    prompt = prompts()[5]
    for sampling in samplings:
        whole = build(
            folder, "int8", chunked=False, prefix_cache=False, num_blocks=64, overlap=overlap
        )
        (expected,) = complete(whole.engine, [prompt], sampling)
        for cut in (1, 5, len(expected.token_ids) - 1):
            other = build(
                folder, "int8", chunked=True, prefix_cache=True, num_blocks=64, overlap=overlap
            )
            known = expected.token_ids[:cut]
            other.engine.submit(Request("0", Generate(prompt, sampling, output_token_ids=known)))
            rest = Answer()
            while other.engine.has_work():
                for output in other.engine.step():
                    rest.add(output)
            assert rest.num_cached_tokens <= len(prompt)
            rest.token_ids, rest.logprobs = (
                known + rest.token_ids,
                expected.logprobs[:cut] + rest.logprobs,
            )
            assert_same([rest], [expected])
