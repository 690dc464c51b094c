"""A family is one module and its lines in the table: nothing else may be forgotten."""

import ast
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from harness import assert_same_logits
from tiny_models import SMALL, VARIANTS, make_model, save, stored_tensors, tame
from tokenmill import models
from tokenmill.models import FAMILIES, load_family
from tokenmill.models.checkpoints.weights import open_checkpoint

FOLDER = Path(models.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def _declares(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return any(isinstance(target, ast.Name) and target.id == "FAMILY" for target in targets)


def _variant(architecture: str) -> str:
    """The first tiny model of an architecture."""
    for name, (config_class, _) in VARIANTS.items():
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
            model_class = auto._model_mapping.get(config_class, None)
            if model_class is not None and model_class.__name__ == architecture:
                return name
    raise AssertionError(f"tests/tiny_models.py has no variant of {architecture}")


def test_every_family_is_in_the_table() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py") if _declares(path)}
    declared = {name: m for m in modules for name in load_family(m).architectures}
    assert declared == FAMILIES
    kinds = [a.model_type for m in modules for a in load_family(m).architectures.values()]
    assert len(set(kinds)) == len(FAMILIES)


def test_the_page_lists_every_family() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert not [module for module in FAMILIES.values() if f"`models/{module}.py`" not in page]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_gives_the_logits_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    reference = tame(make_model(_variant(architecture)))
    assert_same_logits(reference, save(reference, tmp_path))
    spec = open_checkpoint(tmp_path).spec
    assert (spec.architecture, spec.family) == (architecture, FAMILIES[architecture])
    assert spec.vocab_size == SMALL["vocab_size"]
    assert spec.num_params() == sum(t.numel() for t in stored_tensors(reference).values())
