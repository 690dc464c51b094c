"""What scripts/train_mtp.py asks and computes, and which models it takes."""

from __future__ import annotations

import random
import re
import runpy
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tiny_configs import SIZES
from tokenmill.bench.commands.mtp import read_prompts
from tokenmill.models import spec_of
from tokenmill.models.names import layer_tensors

SCRIPTS = Path(__file__).parents[3] / "scripts"
WORDS: dict[str, list[str]] = tomllib.loads(
    (SCRIPTS / "mtp_questions.toml").read_text(encoding="utf-8")
)
OUTER = ("forms", "openings", "word_openings", "followups", "greetings", "endings", "systems")
GIVEN = {"word", "pasted"}  # of the vocabulary, and earlier answers
# Kinds that say what a question is about; numbers, styles and the like do not.
TOPICS = (
    "thing", "food", "animal", "idea", "subject", "deed", "person", "place", "event", "problem",
    "language", "tongue", "feeling", "sentence",
)  # fmt: skip
# What stands in questions about anything, and the languages that they are to be answered in.
ANYWHERE = """
built buy change children common convert file fix function hot language learn note safe save story
string study system world write python spanish polish
"""


def patterns(kind: str) -> list[re.Pattern[str]]:
    return [re.compile(pattern(text), re.DOTALL) for text in WORDS[kind]]


def pattern(form: str) -> str:
    """A {word} is one word, any other gap anything."""
    parts = re.split(r"(\{\w+\})", form)
    gaps = {"{word}": r"\w+"}
    return "".join(gaps.get(p, ".+") if p[:1] == "{" else re.escape(p) for p in parts)


def conversations(monkeypatch: pytest.MonkeyPatch, name: str = "mtp_conversations") -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))


def test_every_gap_has_fillers_and_all_are_used() -> None:
    gaps = {gap for texts in WORDS.values() for t in texts for gap in re.findall(r"\{(\w+)\}", t)}
    assert gaps - GIVEN == WORDS.keys() - set(OUTER) and gaps >= GIVEN
    assert all(len(texts) == len(set(texts)) for texts in WORDS.values())


@pytest.mark.parametrize("kind", ["chat", "everyday", "unseen"])
def test_no_prompt_of_the_benchmark_has_their_form(kind: str) -> None:
    """The module is not measured with questions that it was trained with."""
    known = patterns("forms") + patterns("followups")
    assert any(pattern.fullmatch("Tell me about Norway.") for pattern in known)
    starts = tuple(text.lower() for text in WORDS["openings"] if len(text.split()) >= 3)
    for prompt in read_prompts(kind):
        for text in (*prompt.earlier, prompt.text):
            assert not any(pattern.fullmatch(text) for pattern in known), text
            assert not text.lower().startswith(starts), text


@pytest.mark.parametrize("kind", ["everyday", "unseen"])
def test_no_prompt_has_their_topics_or_is_one_of_the_chat_prompts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic_words = conversations(monkeypatch)["topic_words"]
    trained = {word for kind in TOPICS for text in WORDS[kind] for word in topic_words(text)}
    anywhere = set(ANYWHERE.split())
    assert {"glacier", "norway", "pancake"} <= trained
    chat = {prompt.text for prompt in read_prompts("chat")}
    for prompt in read_prompts(kind):
        for text in (*prompt.earlier, prompt.text):
            assert not topic_words(text) & trained - anywhere, text
            assert text not in chat


def test_questions_are_of_many_kinds_and_never_those_of_the_benchmark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = conversations(monkeypatch)
    questions = script["Questions"](random.Random(3), ["umbrella", "harmonica", "accordion"])
    questions.paste("An answer with {gaps}.")
    asked = [questions.whole() for _ in range(400)]
    assert len(set(asked)) > 390 and not any(re.search(r"\{\w+\}", text) for text in asked)
    assert any(text == text.lower() for text in asked)
    assert any("(gaps)" in text for text in asked) and any("harmonica" in t for t in asked)
    assert not any("umbrella" in text for text in asked)  # an unseen prompt is about one
    assert {questions.beginning() for _ in range(50)} > {""}
    assert {questions.system() for _ in range(50)} > {None}


def test_what_is_measured_is_not_asked_nor_what_is_about_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = conversations(monkeypatch)["Measured"]()
    for kind in ("chat", "everyday", "unseen", "documents"):
        assert all(measured.has(prompt.text) for prompt in read_prompts(kind))
    assert measured.has("Was Napoleon really short?")
    assert measured.has("I spilled candle wax on my rug, can you help me?")
    assert measured.has("What is schadenfreude, and do animals know it?")
    assert not measured.has("Which instrument should I learn, the harmonica or the accordion?")


def test_what_is_learnt_is_the_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    script = conversations(monkeypatch, "train_mtp")
    talk = script["Conversation"](list(range(20)), [(4, 10), (14, 20)])
    inside = script["answered"]([talk], count=17, depth=2)
    # A place's two drafts are the tokens two and three after it; both are of the answer.
    assert inside[0].nonzero().flatten().tolist() == [3, 4, 5, 6, 13, 14, 15, 16]


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_the_gradient_is_that_of_the_cross_entropy(
    sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    script = conversations(monkeypatch, "train_mtp")
    torch.manual_seed(5)
    states, head = torch.randn(3, 8, requires_grad=True), torch.randn(30, 8)
    teacher, rows = torch.randn(4, 30), torch.tensor([2, 0, 3])
    loss, hits = script["Distillation"].apply(states, head, teacher, rows, sharpness)
    expected = F.cross_entropy(F.linear(states, head), (sharpness * teacher[rows]).softmax(-1))
    assert torch.allclose(loss, expected, atol=1e-5)
    assert hits.tolist() == (F.linear(states, head).argmax(-1) == teacher[rows].argmax(-1)).tolist()
    own, other = (torch.autograd.grad(x, states)[0] for x in (loss, expected))
    assert torch.allclose(own, other, atol=1e-5)


def test_each_draft_learns_the_distribution_of_its_own_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Draft k of place i stands against the model's logits of place i + k + 1."""
    pytest.importorskip("triton")
    script, depth = conversations(monkeypatch, "train_mtp"), 2
    torch.manual_seed(3)
    talks = [
        script["Conversation"](list(range(12)), [(3, 8)], torch.randn(12, 4)),
        script["Conversation"](list(range(9)), [(2, 5), (6, 9)], torch.randn(9, 4)),
    ]
    head, states = torch.randn(20, 4), torch.randn(depth, 2, 12 - 1 - depth, 4)
    states[0, 0, :6] = talks[0].hidden[1:7]  # these are right

    class Module:
        target = (SimpleNamespace(device="cpu", head=head),)

        def __call__(self, *_: object) -> list[torch.Tensor]:
            return list(states)

    found, hits = script["losses"](Module(), talks, depth)
    expected, inside = 0.0, script["answered"](talks, 9, depth)
    for k in range(depth):
        own = torch.stack([states[k, j, i] for j, i in inside.nonzero().tolist()]) @ head.T
        later = [talks[j].hidden[i + k + 1] for j, i in inside.nonzero().tolist()]
        goal = torch.stack(later) @ head.T
        expected += 0.7**k * F.cross_entropy(own, goal.softmax(-1))
        assert hits[k].tolist() == (own.argmax(-1) == goal.argmax(-1)).tolist()
    assert hits[0].tolist() == [True, True, True, False, False]
    assert torch.allclose(found, torch.as_tensor(expected), atol=1e-5)


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


def test_a_module_is_trained_saved_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    script, spec = conversations(monkeypatch, "train_mtp"), spec_of(SIZES | {"model_type": "llama"})
    torch.manual_seed(2)
    shapes = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    shapes |= {"model.norm.weight": (spec.hidden_size,)}
    for index in range(spec.num_layers):
        layer = layer_tensors(spec, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    target = script["Target"](spec, tensors, "cpu")
    dice = random.Random(1)
    talks = [
        script["Conversation"]([dice.randrange(spec.vocab_size) for _ in range(20)], [(4, 20)])
        for _ in range(12)
    ]
    args = SimpleNamespace(
        depth=2, tokens=80, rate=1e-3, seed=1, sharpness=2.0, later_share=0.5, train_s=0.5,
        limit_s=900.0, save_s=0.0, begin=time.monotonic(), out=tmp_path,
    )  # fmt: skip
    script["note_hidden"](target, talks, args.tokens)
    module = script["Module"](target, spec.intermediate_size + 16)
    assert script["train"](module, talks[4:], talks[:4], args) > 0
    file = script["save_module"](module, tmp_path)
    again = script["Module"].of(file, target)
    assert again.weights["mlp.up_proj"].shape[0] == spec.intermediate_size + 16
    sets = {"held_out": talks[:4]}
    found = script["measure_all"](again, sets, args)
    assert found["held_out"]["count"] == 4 and len(found["held_out"]["acceptance"]) == 2


def test_layers_that_it_does_not_compute_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    check = conversations(monkeypatch, "train_mtp")["check_layers"]
    check(spec_of(SIZES | {"model_type": "llama"}))
    with pytest.raises(SystemExit, match="layers with qk_norm are not trained here"):
        check(spec_of(SIZES | {"model_type": "qwen3"}))
