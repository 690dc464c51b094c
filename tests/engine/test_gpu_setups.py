"""What tests/gpu needs to run, tried without a GPU: its engines, its imports, its fixtures."""

import ast
from pathlib import Path

import pytest
import torch

from driver import assert_same, complete
from gpu import ipc_checks
from gpu.setups import QWEN3_VL_SETUPS, SETUPS, Checkpoints, image_prompts
from kv.at_once import without_threads
from kv.conversations import grow, hits
from tokenmill.core.config import GIB, NGRAM, ExecutionConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.choices import resolve_setup, set_mode
from tokenmill.engine.engine import LanguageEngine

GPU_TESTS = Path(__file__).parents[1] / "gpu"
DOWNLOADED = "smollm2"  # by tests that need the real weights


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(autouse=True)
def default_mode() -> object:
    yield
    set_mode(ExecutionConfig())


@pytest.mark.parametrize("name", SETUPS)
def test_a_gpu_would_take_it(
    name: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (138 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = SETUPS[name].configs(checkpoints, "cuda")
    chosen = resolve_setup(asked)
    assert chosen.model.device == "cuda" and chosen.model.dtype == SETUPS[name].dtype
    assert chosen.execution == asked.execution


@pytest.mark.parametrize("name", [n for n in SETUPS if not n.startswith(DOWNLOADED)])
def test_it_runs_on_cpu(name: str, checkpoints: Checkpoints) -> None:
    setup = SETUPS[name]
    built = setup.build(checkpoints, "cpu")
    engine = built.engine
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answers = complete(engine, [[3] * 5, [7] * 20], greedy)
    assert [len(answer.token_ids) for answer in answers] == [6, 6]
    drafts = sum(engine.stats().num_drafted) > 0
    assert drafts == (setup.execution.mtp > 0) or setup.draft == NGRAM  # so little repeats itself
    built.close()


@pytest.mark.parametrize("name", QWEN3_VL_SETUPS)
def test_images_run_on_cpu(name: str, checkpoints: Checkpoints) -> None:
    engine, asked = SETUPS[name].build(checkpoints, "cpu").engine, image_prompts()
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    images = [each.images for each in asked]
    answers = complete(engine, [each.token_ids for each in asked], greedy, images=images)
    assert [len(answer.token_ids) for answer in answers] == [6] * 4


@pytest.mark.parametrize("name", ["host", "disk"])
def test_tiers_have_hits_on_cpu(name: str, checkpoints: Checkpoints) -> None:
    """What tests/gpu asks evicts blocks, and finds them where it looks for them."""
    built = SETUPS[f"tiers-{name}"].build(checkpoints, "cpu")
    assert isinstance(built.engine, LanguageEngine) and built.engine.tiers is not None
    without_threads(built.engine.tiers)
    assert_same(grow(built), grow(SETUPS["tiers-off"].build(checkpoints, "cpu")))
    assert hits(built, name) > 0


def test_two_processes_on_cpu(checkpoints: Checkpoints) -> None:
    """The checks of two processes on one GPU, with host memory in the place of the GPU's."""
    ipc_checks.check_bits("moves", checkpoints, "cpu")
    ipc_checks.check_killed_peer(checkpoints, "cpu")


def test_no_gpu_test_builds_an_engine_that_is_not_listed() -> None:
    for file in GPU_TESTS.glob("test_*.py"):
        names = {
            node.id for node in ast.walk(ast.parse(file.read_text())) if type(node) is ast.Name
        }
        assert "build_engine" not in names, f"{file.name}: add its set-up to setups.py"
