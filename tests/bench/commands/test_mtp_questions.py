"""What scripts/train_mtp.py asks, and which models it takes."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from tiny_configs import SIZES
from tokenmill.bench.commands.mtp import read_prompts
from tokenmill.models import spec_of

SCRIPTS = Path(__file__).parents[3] / "scripts"
QUESTIONS = SCRIPTS / "mtp_questions.toml"


def test_no_prompt_of_the_benchmark_has_their_form() -> None:
    """The module is not measured with questions that it was trained with."""
    words = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
    gaps = {gap for form in words["forms"] for gap in re.findall(r"\{(\w+)\}", form)}
    assert gaps == words.keys() - {"forms"}
    patterns = [
        re.compile(".+".join(map(re.escape, re.split(r"\{\w+\}", form)))) for form in words["forms"]
    ]
    assert any(pattern.fullmatch("Tell me about Norway.") for pattern in patterns)
    for prompt in read_prompts():
        assert not any(pattern.fullmatch(prompt.text) for pattern in patterns), prompt.text


def test_layers_that_it_does_not_compute_are_refused() -> None:
    pytest.importorskip("triton")
    check = runpy.run_path(str(SCRIPTS / "train_mtp.py"))["check_layers"]
    check(spec_of(SIZES | {"model_type": "llama"}))
    with pytest.raises(SystemExit, match="layers with qk_norm are not trained here"):
        check(spec_of(SIZES | {"model_type": "qwen3"}))
