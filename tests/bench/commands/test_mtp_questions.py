"""What scripts/train_mtp.py asks and computes, and which models it takes."""

from __future__ import annotations

import random
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tiny_configs import SIZES
from tokenmill.bench.commands.mtp import read_prompts
from tokenmill.models import spec_of

SCRIPTS = Path(__file__).parents[3] / "scripts"
WORDS: dict[str, list[str]] = tomllib.loads(
    (SCRIPTS / "mtp_questions.toml").read_text(encoding="utf-8")
)
OUTER = ("forms", "openings", "followups", "greetings", "endings", "systems")
# Kinds that say what a question is about; numbers, styles and the like do not.
TOPICS = (
    "thing", "food", "animal", "idea", "subject", "deed", "person", "place", "event", "problem",
    "language", "tongue", "feeling", "sentence",
)  # fmt: skip
COMMON = """
about add after again ago all also always and another any anyone are ask away back because been
before being best better between big both bring but called came can certain come could day did
does doing done down due during each early either else end even evening ever every everyone
extra far few find first five for four free from fun get give goes going good got had half has
have help her here high him his home hour how idea into its just keep kind know last late less
let like long look lot low made main make many may mean means minute month more morning most
move much name need never new next night nine nobody not nothing now number often okay old once
one only open other our out over own pair part people per pick place play please point put real
really right said same say see set she short should show side since single six small some
someone something sound sounds start still stop such take talk tell ten than thank thanks that
the their them then there these they thing things this those three time today tomorrow too top
try turn two until use used using very want was way week weird well were what when where which
while who why will with without word work working would wrong year yes yesterday yet you your
"""


def patterns(kind: str) -> list[re.Pattern[str]]:
    return [
        re.compile(".+".join(map(re.escape, re.split(r"\{\w+\}", text))), re.DOTALL)
        for text in WORDS[kind]
    ]


def topic_words(text: str) -> set[str]:
    """What it is about: its words without the common ones, in the singular."""
    common = set(COMMON.split())
    words = set(re.findall(r"[a-z]{3,}", text.lower())) - common
    return {word[:-1] if word.endswith("s") and len(word) > 3 else word for word in words} - common


def conversations(monkeypatch: pytest.MonkeyPatch, name: str = "mtp_conversations") -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def test_every_gap_has_fillers_and_all_are_used() -> None:
    gaps = {gap for texts in WORDS.values() for t in texts for gap in re.findall(r"\{(\w+)\}", t)}
    assert gaps == WORDS.keys() - set(OUTER)
    assert all(len(texts) == len(set(texts)) for texts in WORDS.values())


@pytest.mark.parametrize("kind", ["chat", "everyday"])
def test_no_prompt_of_the_benchmark_has_their_form(kind: str) -> None:
    """The module is not measured with questions that it was trained with."""
    known = patterns("forms") + patterns("followups")
    assert any(pattern.fullmatch("Tell me about Norway.") for pattern in known)
    starts = tuple(text.lower() for text in WORDS["openings"] if len(text.split()) >= 3)
    for prompt in read_prompts(kind):
        for text in (*prompt.earlier, prompt.text):
            assert not any(pattern.fullmatch(text) for pattern in known), text
            assert not text.lower().startswith(starts), text


def test_no_everyday_prompt_has_their_topics_or_is_one_of_the_chat_prompts() -> None:
    trained = {word for kind in TOPICS for text in WORDS[kind] for word in topic_words(text)}
    assert {"volcanoe", "norway", "pancake"} <= trained
    chat = {prompt.text for prompt in read_prompts("chat")}
    for prompt in read_prompts("everyday"):
        for text in (*prompt.earlier, prompt.text):
            assert not topic_words(text) & trained, text
            assert text not in chat


def test_questions_are_of_many_kinds_and_never_those_of_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = conversations(monkeypatch)["Questions"](random.Random(3))
    asked = [questions.whole() for _ in range(400)]
    assert len(set(asked)) > 390 and not any(re.search(r"\{\w+\}", text) for text in asked)
    assert any(text == text.lower() for text in asked)
    assert not any(questions.is_measured(text) for text in asked)
    for kind in ("chat", "everyday", "documents"):
        assert all(questions.is_measured(prompt.text) for prompt in read_prompts(kind))
    assert questions.is_measured("Was Napoleon really short?")
    assert {questions.system() for _ in range(50)} > {None}


def test_what_is_learnt_is_the_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    script = conversations(monkeypatch, "train_mtp")
    talk = script["Conversation"](list(range(20)), [(4, 10), (14, 20)])
    inside = script["answered"]([talk], count=17, depth=2)
    # A place's two drafts are the tokens two and three after it; both are of the answer.
    assert inside[0].nonzero().flatten().tolist() == [3, 4, 5, 6, 13, 14, 15, 16]


def test_the_gradient_is_that_of_the_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    script = conversations(monkeypatch, "train_mtp")
    torch.manual_seed(5)
    states, head = torch.randn(3, 8, requires_grad=True), torch.randn(30, 8)
    teacher, rows = torch.randn(4, 30), torch.tensor([2, 0, 3])
    loss, hits = script["Distillation"].apply(states, head, teacher, rows)
    expected = F.cross_entropy(F.linear(states, head), teacher[rows].softmax(-1))
    assert torch.allclose(loss, expected, atol=1e-5)
    assert hits.tolist() == (F.linear(states, head).argmax(-1) == teacher[rows].argmax(-1)).tolist()
    own, other = (torch.autograd.grad(x, states)[0] for x in (loss, expected))
    assert torch.allclose(own, other, atol=1e-5)


def test_a_wider_mlp_begins_with_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    widen = conversations(monkeypatch, "train_mtp")["widen"]
    shapes = {"mlp.gate_proj": (6, 4), "mlp.up_proj": (6, 4), "mlp.down_proj": (4, 6)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    x = torch.randn(5, 4)

    def mlp() -> torch.Tensor:
        gate, up, down = (weights[name] for name in shapes)
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    before = mlp()
    widen(weights, 10)
    assert weights["mlp.down_proj"].shape == (4, 10) and torch.allclose(mlp(), before, atol=1e-5)
    with pytest.raises(SystemExit, match="--inner 8: the MLP to start with is 10 wide"):
        widen(weights, 8)


def test_layers_that_it_does_not_compute_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    check = conversations(monkeypatch, "train_mtp")["check_layers"]
    check(spec_of(SIZES | {"model_type": "llama"}))
    with pytest.raises(SystemExit, match="layers with qk_norm are not trained here"):
        check(spec_of(SIZES | {"model_type": "qwen3"}))
