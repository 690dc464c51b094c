"""bench mtp: the prompts, the runs turn by turn, and the figures made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draft_heads import forgetful, save_head
from tiny_models import make_model, save, tame
from tokenmill.bench.commands import mtp as cli
from tokenmill.bench.commands.mtp import (
    DepthRun,
    depth_report,
    measure,
    read_prompts,
    set_shares,
    together,
)
from tokenmill.core.metrics import acceptance
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import EngineStats, FinishReason
from tokenmill.models.checkpoints.store import cached


class FakeEngine:
    """Two tokens for every request; it drafts as it is told, and is right every other time."""

    def __init__(self) -> None:
        self.depth, self.asked = 0, list[Request]()
        self.counts = EngineStats()
        self.depths: list[int] = []

    def submit(self, request: Request) -> None:
        self.asked.append(request)

    def step(self) -> list[RequestOutput]:
        self.counts.num_steps += 1
        self.depths.append(self.depth)
        self.counts.num_drafted = [n + (p < self.depth) for p, n in enumerate(self._padded(0))]
        odd = self.counts.num_steps % 2
        self.counts.num_accepted = [
            n + odd * (p < self.depth) for p, n in enumerate(self._padded(1))
        ]
        asked, self.asked = self.asked, []
        return [
            RequestOutput(r.request_id, [1, 2], finish_reason=FinishReason.LENGTH) for r in asked
        ]

    def _padded(self, which: int) -> list[int]:
        counts = (self.counts.num_drafted, self.counts.num_accepted)[which]
        return counts + [0] * (3 - len(counts))

    def abort(self, request_id: str) -> None:
        raise AssertionError

    def has_work(self) -> bool:
        return bool(self.asked)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_steps=self.counts.num_steps,
            num_drafted=list(self.counts.num_drafted),
            num_accepted=list(self.counts.num_accepted),
        )


def test_acceptance_by_hand() -> None:
    shares = acceptance([10, 8, 4], [6, 2, 1])
    assert shares == {"first": 0.6, "length": 1.9, "positions": [0.6, 0.25, 0.25]}
    assert acceptance([], [])["length"] is None


def test_depths_take_turns_and_have_counts_of_their_own() -> None:
    engine = FakeEngine()

    def set_depth(depth: int) -> None:
        engine.depth = depth

    prompts = [[1]] * 4
    runs = measure(engine, set_depth, prompts, [1, 3], rounds=2, batch=2, max_tokens=8)
    assert engine.depths == [0, 1, 3] + 2 * [0, 0, 1, 1, 3, 3]  # a warm-up, then whole rounds
    assert [len(own) for own in runs.values()] == [2, 2, 2]
    assert runs[0][0].drafted == [] and runs[1][0].drafted == [2]
    assert runs[3][0].drafted == [2, 2, 2] and runs[3][0].accepted == [1, 1, 1]
    assert runs[3][0].answers == [[1, 2]] * 4 and runs[3][0].num_tokens == 8


def test_figures_by_hand() -> None:
    answers = [[1, 2, 3, 4], [5, 6, 7, 8]]
    plain = [DepthRun(2.0, 8, answers), DepthRun(4.0, 8, answers)]
    other = [[1, 2, 3, 4], [5, 6, 7, 9]]
    drafted = [DepthRun(1.0, 4, other, [4], [2]), DepthRun(2.0, 4, answers, [4], [3])]
    report = depth_report({0: plain, 1: drafted})
    figures = report["1"]
    assert report["0"]["tok_s"] == round(8 / 3, 2)
    assert figures["speedup"] == 2.0 and figures["acceptance"]["first"] == 0.625
    assert figures["step_cost"] == 1.0 and figures["ceiling_speedup"] == 2.0
    assert figures["num_different"] == 1


def test_rounds_that_differ_count_each_for_itself() -> None:
    """As on a GPU, where two rounds may round differently: other tokens, positions and lengths."""
    plain = [DepthRun(2.0, 8, [[1, 2, 3, 4]]), DepthRun(2.0, 8, [[1, 2, 3, 4]])]
    short = DepthRun(1.0, 4, [[1, 2]], [4], [3])
    drafted = [DepthRun(1.0, 4, [[1, 2, 3, 4]], [4, 4], [3, 1]), short]
    figures = depth_report({0: plain, 2: drafted})["2"]
    assert figures["acceptance"] == acceptance([8, 4], [6, 1])
    assert figures["speedup_runs"] == [2.0, 1.0]  # half the answer in half the time gains nothing
    assert figures["num_different"] == 1


def test_sets_of_prompts_have_shares_of_their_own_and_together() -> None:
    chat = {0: [DepthRun(2.0, 8, [[1, 2]])], 2: [DepthRun(1.0, 4, [[1, 2]], [8, 4], [4, 1])]}
    everyday = {0: [DepthRun(3.0, 6, [[3]])], 2: [DepthRun(2.0, 5, [[3]], [2], [2])]}
    assert set_shares(chat) == {"2": acceptance([8, 4], [4, 1])}
    assert set_shares(everyday)["2"]["first"] == 1.0
    both = together([chat, everyday])
    assert both[0] == [DepthRun(5.0, 14, [[1, 2], [3]])]
    assert both[2] == [DepthRun(3.0, 9, [[1, 2], [3]], [10, 4], [6, 1])]
    assert depth_report(both)["2"]["acceptance"]["first"] == 0.6


def test_a_second_question_comes_after_the_first_and_its_answer() -> None:
    prompt = next(prompt for prompt in read_prompts("everyday") if prompt.earlier)
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("kind", "count"), [("chat", 24), ("everyday", 88), ("documents", 8)])
def test_prompts_are_those_of_the_tokenizer(kind: str, count: int) -> None:
    prompts = read_prompts(kind)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == count
    path = cached("smollm2")
    if path is None:
        pytest.skip("the default model is not here")
    from tokenmill.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    for prompt in prompts:
        assert prompt.messages[-1] == {"role": "user", "content": prompt.text}
        assert tokenizer.encode_chat(prompt.messages) == prompt.token_ids


@pytest.mark.parametrize("draft", ["module", "ngram"])
def test_the_command_ends_with_its_figures(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.cli.app import app

    model = forgetful(tame(make_model("llama", head_dim=16, hidden_size=64), 0.3))
    folder, head = save(model, tmp_path / "model"), save_head(model, tmp_path / "h.safetensors")
    monkeypatch.setattr(cli, "_prompts", lambda path, kind, count: [[5, 6, 7], [8, 9]][:count])
    drafter = str(head) if draft == "module" else draft
    arguments = ["--model", str(folder), "--draft", drafter, "--dtype", "fp32"]
    arguments += ["--rounds", "1", "--output-len", "40", "--depths", "1,3"]
    arguments += ["--prompt-kind", "chat,everyday"]
    done = CliRunner().invoke(app, ["bench", "mtp", *arguments])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["identical"] and set(report["depths"]) == {"0", "1", "3"}
    best = report["depths"][str(report["best_depth"])]
    assert (
        report["speedup"]
        == best["speedup"]
        == max(report["depths"][depth]["speedup"] for depth in ("1", "3"))
    )
    assert report["acceptance"] == best["acceptance"]
    assert set(best["acceptance"]) == {"first", "length", "positions"}
    assert len(report["depths"]["3"]["acceptance"]["positions"]) == 3
    assert "drafts" in done.stdout and "ceiling" in done.stdout
    assert set(report["sets"]) == {"chat", "everyday"} and report["num_prompts"] == 4
    assert report["sets"]["chat"]["3"]["positions"]
