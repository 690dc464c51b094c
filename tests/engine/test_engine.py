"""The step loop over the real scheduler: every request ends once, whatever goes wrong."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from fake_runner import EOS as FAKE_EOS
from fake_runner import VOCAB, FakeRunner, expected
from random_model import EOS, PAD_TO, PIECES, RandomRunner, text_of, vocab
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams, StepResult, StructuredOutput
from tokenmill.engine.engine import LanguageEngine, Runner
from tokenmill.engine.sampling.grammar import GrammarCompiler
from tokenmill.engine.sampling.grammar_pool import GrammarPool, GrammarRow
from tokenmill.engine.sampling.grammar_process import GrammarLimits, next_masks
from tokenmill.engine.sampling.structured import COMPILE_TIMEOUT_NS
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler

BLOCK = 4
JSON = StructuredOutput("json_object")
DIGITS = StructuredOutput("regex", "[0-9]{30,40}")


def scheduler(
    num_blocks: int = 64, eos: frozenset[int] = frozenset({EOS}), **config: Any
) -> Scheduler:
    config = {"max_model_len": 256, "max_num_batched_tokens": 16} | config
    return Scheduler(SchedulerConfig(**config), BlockPool(num_blocks, BLOCK), eos)


def request(name: str, prompt: list[int] | None = None, **options: Any) -> Request:
    own = {key: options.pop(key) for key in ("deadline_ns", "priority") if key in options}
    return Request(name, Generate(prompt or [3, 4, 5], SamplingParams(**options)), **own)


def run(engine: LanguageEngine, max_steps: int = 5000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is left; outputs by request, each with exactly one terminal one."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_work() and engine.step() == []
    for parts in outputs.values():
        assert [part.finish_reason is not None for part in parts] == [False] * (len(parts) - 1) + [
            True
        ]
    return outputs


def tokens(parts: list[RequestOutput]) -> list[int]:
    return [token for part in parts for token in part.token_ids]


def finish(parts: list[RequestOutput]) -> tuple[FinishReason | None, object]:
    return parts[-1].finish_reason, parts[-1].stop_reason


class FailingRunner:
    """Fails in the given steps and otherwise passes on."""

    def __init__(self, runner: Runner, failures: dict[int, BaseException]) -> None:
        self.runner, self.failures, self.step = runner, failures, -1

    def run(self, batch: Batch) -> StepResult:
        self.step += 1
        if self.step in self.failures:
            raise self.failures[self.step]
        return self.runner.run(batch)


class HeldPool:
    """Grammars of which nothing is heard until the test says so."""

    def __init__(self, pool: GrammarPool) -> None:
        self._pool, self.is_held = pool, True

    def open(self, structured: StructuredOutput, account: str) -> GrammarRow:
        return self._pool.open(structured, f"{id(self)}, who has nothing compiled yet")

    def poll(self, timeout_s: float = 0.0) -> None:
        if not self.is_held:
            self._pool.poll(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture(scope="module")
def grammar() -> GrammarPool:
    return GrammarPool(vocab(), PAD_TO)


def engine_of(
    grammar: object = None,
    runner: Runner | None = None,
    clock: Callable[[], int] | None = None,
    **config: Any,
) -> LanguageEngine:
    return LanguageEngine(
        scheduler(**config),
        runner or RandomRunner(),
        grammar=cast("GrammarPool | None", grammar),
        vocab_size=PAD_TO,
        clock=clock or Clock(),
    )


def test_the_module_imports_without_torch() -> None:
    code = "import sys, tokenmill.engine.engine; print({'torch', 'xgrammar'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_requests_get_the_answers_of_the_model() -> None:
    engine = LanguageEngine(scheduler(48, FAKE_EOS), FakeRunner(48, BLOCK), vocab_size=VOCAB)
    requests = [
        request(f"r{i}", [i % VOCAB] * (i + 1), max_tokens=1 + 3 * i, ignore_eos=i % 2 == 0)
        for i in range(20)
    ]
    for item in requests:
        engine.submit(item)
    found = run(engine)
    for item in requests:
        token_ids, reason = expected(item, 256, 48 * BLOCK)
        assert (tokens(found[item.request_id]), finish(found[item.request_id])) == (
            token_ids,
            reason,
        )
    stats = engine.stats()
    assert sum(stats.num_finished.values()) == 20 and stats.num_kv_blocks_used == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [1, PAD_TO]}, f"prompt_token_ids .* got {PAD_TO}"),
        ({"prompt": [-1, 2]}, "prompt_token_ids .* got -1"),
        ({"logit_bias": {1: 1.0, 9999: 1.0}}, "logit_bias .* got 9999"),
        ({"stop_token_ids": [5, 400]}, "stop_token_ids .* got 400"),
        ({"stop_token_ids": [-2]}, "stop_token_ids .* got -2"),
        ({"structured": JSON, "ignore_eos": True}, "ignore_eos does not go with structured"),
        ({"structured": JSON, "min_tokens": 2}, "min_tokens does not go with structured"),
    ],
)
def test_what_the_engine_cannot_do_is_rejected(
    grammar: GrammarPool, options: dict[str, Any], message: str
) -> None:
    engine = engine_of(grammar)
    engine.submit(request("bad", **options))
    assert engine.has_work()
    (output,) = run(engine)["bad"]
    assert finish([output]) == (FinishReason.REJECT, "invalid_request")
    assert re.search(message, output.error or "")
    assert engine.stats().num_finished == {"reject": 1}


def test_structured_output_needs_a_grammar_backend() -> None:
    engine = engine_of(grammar=None)
    engine.submit(request("r", structured=JSON))
    (output,) = run(engine)["r"]
    assert finish([output]) == (FinishReason.REJECT, "invalid_request")


@pytest.mark.parametrize(
    ("structured", "reason"),
    [
        (StructuredOutput("regex", "("), "parenthesis"),
        (StructuredOutput("json_schema", "{"), "not valid JSON"),
        (StructuredOutput("json_schema", '{"not": {}}'), "'not' is not supported"),
    ],
)
def test_a_bad_grammar_is_rejected_with_the_reason(
    grammar: GrammarPool, structured: StructuredOutput, reason: str
) -> None:
    engine = engine_of(grammar)
    engine.submit(request("bad", structured=structured))
    engine.submit(request("good", max_tokens=3, ignore_eos=True))
    found = run(engine)
    assert finish(found["bad"]) == (FinishReason.REJECT, "invalid_grammar")
    assert reason in (found["bad"][0].error or "")
    assert finish(found["good"]) == (FinishReason.LENGTH, None)


# A failing step.


class Poisoned(RandomRunner):
    """Fails whenever one of the named requests is in the batch."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.num_runs = names, 0

    def run(self, batch: Batch) -> StepResult:
        self.num_runs += 1
        singles = [num_new == 1 for _, num_new in batch.items]
        assert singles == sorted(singles, reverse=True)
        for seq, _ in batch.items:
            if seq.request_id in self.names and seq.num_output_tokens == 2:
                raise RuntimeError(f"{seq.request_id} is odd")
        return super().run(batch)


def answers_of(runner: RandomRunner, prompts: dict[str, list[int]]) -> dict[str, Any]:
    engine = engine_of(runner=runner, max_num_batched_tokens=512, num_blocks=512)
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=5, ignore_eos=True, seed=1))
    found = run(engine)
    assert engine.stats().num_kv_blocks_used == 0
    return found


def test_of_a_failed_step_those_at_fault_end_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = {f"r{i}": [3 + i] * (1 + i % 9) for i in range(64)}
    whole, one, two = RandomRunner(), Poisoned("r37"), Poisoned("r5", "r60")
    expected = {name: tokens(parts) for name, parts in answers_of(whole, prompts).items()}
    for runner in (one, two):
        found = answers_of(runner, prompts)
        for name, parts in found.items():
            if name in runner.names:
                assert finish(parts)[0] is FinishReason.ERROR
                assert parts[-1].error == f"the step failed: RuntimeError: {name} is odd"
            else:
                assert tokens(parts) == expected[name]
    assert one.num_runs <= 5 + 2 * 6 and two.num_runs <= 5 + 4 * 6
    assert "a step over 64 requests failed" in caplog.text and "r37 is odd" in caplog.text


def test_who_reads_what_a_failed_request_writes_fails_with_it() -> None:
    """A step writes a prompt's blocks, and shares them with those who came with it."""

    class OddPrompt(RandomRunner):
        def run(self, batch: Batch) -> StepResult:
            if any(seq.request_id == "writer" for seq, _ in batch.items):
                raise RuntimeError("odd")
            return super().run(batch)

    shared = [7] * (3 * BLOCK)
    prompts = {"before": [9] * 20, "writer": [*shared, 1], "reader": [*shared, 2], "after": [8]}
    found = answers_of(OddPrompt(), prompts)
    failed = {name for name, parts in found.items() if finish(parts)[0] is FinishReason.ERROR}
    assert failed == {"writer", "reader"}


def test_an_error_of_one_row_ends_it_alone() -> None:
    class OneError(RandomRunner):
        def run(self, batch: Batch) -> StepResult:
            result = super().run(batch)
            for index, (seq, _) in enumerate(batch.items):
                if seq.request_id == "b" and seq.num_output_tokens == 2:
                    result.token_ids[index], result.errors[index] = [], "not finite"
            return result

    found = answers_of(OneError(), {name: [5] * 9 for name in "abc"})
    assert [len(tokens(found[name])) for name in "abc"] == [5, 2, 5]
    assert found["b"][-1].error == "not finite"


def test_a_fault_of_the_device_is_not_looked_for_in_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead = RuntimeError("CUDA error: an illegal memory access was encountered")
    runner = FailingRunner(RandomRunner(), {2: dead})
    engine = engine_of(runner=runner, max_num_seqs=2)
    for name in "abcd":
        engine.submit(request(name, max_tokens=5, ignore_eos=True))
    found = run(engine)
    assert [finish(found[name])[0] for name in "abcd"] == [
        *[FinishReason.ERROR] * 2,
        *[FinishReason.LENGTH] * 2,
    ]
    assert found["a"][-1].error == f"the step failed: RuntimeError: {dead}"
    assert len(tokens(found["c"])) == 5
    assert "a step over 2 requests failed" in caplog.text
    assert engine.stats().num_kv_blocks_used == 0


@pytest.mark.parametrize(
    "result", [StepResult([]), StepResult([[1]] * 3), StepResult([[1], [2]], logprobs=[None])]
)
def test_a_malformed_result_is_a_failed_step(result: StepResult) -> None:
    class Malformed:
        def run(self, batch: Batch) -> StepResult:
            return result

    engine = engine_of(runner=Malformed())
    engine.submit(request("a"))
    engine.submit(request("b"))
    assert {name: finish(parts)[0] for name, parts in run(engine).items()} == {
        "a": FinishReason.ERROR,
        "b": FinishReason.ERROR,
    }


def test_an_interrupted_step_ends_its_requests_with_the_next_one() -> None:
    engine = engine_of(runner=FailingRunner(RandomRunner(), {1: KeyboardInterrupt()}))
    engine.submit(request("a", max_tokens=5, ignore_eos=True))
    first = engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.submit(request("b", max_tokens=2, ignore_eos=True))
    found = run(engine)
    assert len(first) == 1 and finish(found["a"])[0] is FinishReason.ERROR
    assert finish(found["b"])[0] is FinishReason.LENGTH


# Grammars on their way.


def test_a_request_waits_for_its_grammar_while_others_run(grammar: GrammarPool) -> None:
    held = HeldPool(grammar)
    engine = engine_of(held)
    engine.submit(request("late", structured=DIGITS, max_tokens=200))
    engine.submit(request("now", max_tokens=3, ignore_eos=True))
    early = [output for _ in range(5) for output in engine.step()]
    assert {output.request_id for output in early} == {"now"}
    assert early[-1].finish_reason is FinishReason.LENGTH
    assert engine.has_work() and engine.stats().num_waiting == 1
    assert engine.step() == []
    held.is_held = False
    found = run(engine)
    assert finish(found["late"]) == (FinishReason.STOP, None)
    assert text_of(tokens(found["late"])).isdigit()


def test_abort_deadline_and_timeout_reach_a_request_without_grammar(grammar: GrammarPool) -> None:
    clock = Clock()
    engine = engine_of(HeldPool(grammar), clock=clock)
    engine.submit(request("aborted", structured=JSON))
    engine.submit(request("expired", structured=JSON, deadline_ns=1000))
    engine.submit(request("given up", structured=JSON))
    engine.abort("aborted")
    engine.abort("aborted")
    engine.abort("unknown")
    assert [finish([o]) for o in engine.step()] == [(FinishReason.ABORT, None)]
    clock.now_ns = 1000
    assert [finish([o]) for o in engine.step()] == [(FinishReason.ABORT, "deadline")]
    assert engine.step() == []
    clock.now_ns = COMPILE_TIMEOUT_NS
    (output,) = engine.step()
    assert output.request_id == "given up" and "not compiled within 60 s" in (output.error or "")
    assert finish([output]) == (FinishReason.REJECT, "grammar_busy")
    assert not engine.has_work()
    assert engine.stats().num_finished == {"abort": 2, "reject": 1}


def test_requests_without_grammar_count_for_the_queue_limit(grammar: GrammarPool) -> None:
    engine = engine_of(HeldPool(grammar), max_waiting=2)
    for name in "abc":
        engine.submit(request(name, structured=JSON))
    assert [(o.request_id, o.stop_reason) for o in engine.step()] == [("c", "queue_full")]


def test_an_id_in_use_is_rejected(grammar: GrammarPool) -> None:
    held = HeldPool(grammar)
    engine = engine_of(held)
    engine.submit(request("same", structured=DIGITS, max_tokens=100))
    engine.submit(request("same", max_tokens=2))
    assert [o.stop_reason for o in engine.step()] == ["duplicate_id"]
    held.is_held = False
    while engine.stats().num_running == 0:
        engine.step()
    engine.submit(request("same", structured=DIGITS))
    parts = [o for o in engine.step() if o.finish_reason is FinishReason.REJECT]
    assert [o.stop_reason for o in parts] == ["duplicate_id"]
    assert finish(run(engine)["same"])[0] is FinishReason.STOP


def test_draining_finishes_what_is_here_and_refuses_the_rest(grammar: GrammarPool) -> None:
    held = HeldPool(grammar)
    engine = engine_of(held)
    engine.submit(request("structured", structured=DIGITS, max_tokens=100))
    engine.submit(request("plain", max_tokens=2, ignore_eos=True))
    engine.drain()
    engine.submit(request("new"))
    held.is_held = False
    found = run(engine)
    assert finish(found["new"]) == (FinishReason.REJECT, "draining")
    assert finish(found["structured"])[0] is FinishReason.STOP
    assert finish(found["plain"])[0] is FinishReason.LENGTH


def test_masks_end_at_a_draft_that_may_not_come(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without a word on stderr, special tokens and such beyond the vocabulary among them."""
    matcher = GrammarCompiler(vocab(), PAD_TO).compile(DIGITS).matcher()
    digit = PIECES.index(b"7")
    for drafts, count in (([digit, digit], 3), ([digit, 1], 2), ([PAD_TO * 2], 1), ([1], 1)):
        assert len(next_masks(matcher, drafts)) == count
    assert capfd.readouterr().err == ""


def test_a_grammar_is_forgotten_with_its_request(grammar: GrammarPool) -> None:
    failing = FailingRunner(RandomRunner(), {0: RuntimeError("boom")})
    engine = engine_of(grammar, runner=failing, max_num_seqs=1, max_num_batched_tokens=2)
    for name in ("fails in its prompt", "is aborted in the queue"):
        engine.submit(request(name, [3] * 9, structured=DIGITS))
    while not engine.stats().num_running:
        engine.step()
    engine.abort("is aborted in the queue")
    found = run(engine)
    assert finish(found["is aborted in the queue"]) == (FinishReason.ABORT, None)
    assert engine._structured._rows == {}


# Structured output through the whole engine.


def texts(engine: LanguageEngine, grammar: GrammarPool) -> dict[str, str]:
    for index in range(6):
        structured = (JSON, DIGITS)[index % 2]
        options: dict[str, Any] = {"temperature": 0} if index < 2 else {"seed": index}
        prompt = [5 + index, *range(10, 20)]
        engine.submit(
            request(f"r{index}", prompt, structured=structured, max_tokens=None, **options)
        )
    found = run(engine)
    assert {finish(parts) for parts in found.values()} == {(FinishReason.STOP, None)}
    return {name: text_of(tokens(parts)) for name, parts in found.items()}


def test_structured_texts_are_the_same_preempted_chunked_or_not(grammar: GrammarPool) -> None:
    plain = texts(engine_of(grammar, num_blocks=256, max_num_batched_tokens=512), grammar)
    for name, text in plain.items():
        if int(name[1:]) % 2:
            assert text.isdigit() and len(text) <= 40
        else:
            assert isinstance(json.loads(text), dict)
    longest = max(len(text.encode()) for text in plain.values())
    num_blocks = -(-(longest + 12) // BLOCK)  # a prompt of 11 tokens, the text and its end
    squeezed = engine_of(grammar, num_blocks=num_blocks, max_num_batched_tokens=5)
    assert texts(squeezed, grammar) == plain
    assert squeezed.stats().num_preemptions > 0


def test_structured_output_goes_on_where_another_engine_left_it(grammar: GrammarPool) -> None:
    whole = request("r", structured=DIGITS, max_tokens=None, seed=7)
    engine = engine_of(grammar)
    engine.submit(whole)
    expected = tokens(run(engine)["r"])
    for cut in (1, 17, len(expected) - 1):
        engine = engine_of(grammar)
        engine.submit(whole.with_task(output_token_ids=expected[:cut]))
        assert tokens(run(engine)["r"]) == expected[cut:]


def test_eos_in_the_stop_ids_of_the_request_still_ends_it(grammar: GrammarPool) -> None:
    engine = engine_of(grammar)
    engine.submit(request("r", structured=DIGITS, stop_token_ids=[EOS], max_tokens=100))
    found = run(engine)["r"]
    assert finish(found) == (FinishReason.STOP, None) and text_of(tokens(found)).isdigit()


def test_a_grammar_that_takes_too_long_ends_its_requests_alone() -> None:
    engine = engine_of(GrammarPool(vocab(), PAD_TO, GrammarLimits(burst_s=0.0, mask_s=0.0)))
    engine.submit(request("slow", structured=JSON))
    engine.submit(request("alive", max_tokens=4, ignore_eos=True))
    found = run(engine)
    assert finish(found["slow"]) == (FinishReason.ERROR, "grammar")
    assert "the json_object is too ambiguous" in (found["slow"][0].error or "")
    assert finish(found["alive"])[0] is FinishReason.LENGTH and len(tokens(found["alive"])) == 4


class LateAnswers(HeldPool):
    """Masks that are never there in the step that asks for them."""

    def wait(self, rows: list[GrammarRow], runs: object = None) -> None:
        """Nobody has patience."""


def test_who_has_no_mask_sits_out_the_step_and_nobody_waits(grammar: GrammarPool) -> None:
    late = LateAnswers(grammar)
    late.is_held = False
    requests = [
        request("bound", [3] * 9, structured=DIGITS, seed=1, max_tokens=None),
        request("free", [4] * 9, seed=2, max_tokens=30, ignore_eos=True),
    ]
    found = []
    for pool in (grammar, late):
        engine = engine_of(pool, max_num_batched_tokens=5)
        for item in requests:
            engine.submit(item)
        found.append({name: tokens(parts) for name, parts in run(engine).items()})
        assert engine.stats().num_kv_blocks_used == 0
    assert found[0] == found[1]


def test_a_token_outside_the_grammar_ends_its_request_alone(grammar: GrammarPool) -> None:
    class Unmasked(RandomRunner):
        def run(self, batch: Batch) -> StepResult:
            return StepResult([[PIECES.index(b"a")] for _ in batch.items])

    engine = engine_of(grammar, runner=Unmasked())
    engine.submit(request("odd", structured=DIGITS))
    engine.submit(request("fine", max_tokens=2))
    found = run(engine)
    assert (
        finish(found["odd"]) == (FinishReason.ERROR, "grammar") and len(tokens(found["odd"])) == 1
    )
    assert finish(found["fine"])[0] is FinishReason.LENGTH


def test_every_request_ends_once_under_random_trouble(grammar: GrammarPool) -> None:
    chance, clock = random.Random(1), Clock()
    failures: dict[int, BaseException] = {
        step: RuntimeError("boom") for step in chance.sample(range(400), 12)
    }
    runner = FailingRunner(RandomRunner(), failures)
    engine = engine_of(
        grammar, runner, clock, num_blocks=40, max_num_seqs=6, max_waiting=8, max_model_len=100
    )
    kinds: list[dict[str, Any]] = [
        {},
        {"structured": JSON},
        {"structured": DIGITS, "temperature": 0},
        {"structured": StructuredOutput("regex", "(")},
        {"logit_bias": {PAD_TO: 1.0}},
        {"prompt": [7] * 150},
    ]
    submitted, ended = [], []
    for step in range(400):
        clock.now_ns += 1
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            name = f"r{len(submitted)}"
            deadline = clock.now_ns + 30 if chance.random() < 0.1 else None
            options = chance.choice(kinds) | {"max_tokens": chance.randint(1, 40)}
            engine.submit(request(name, deadline_ns=deadline, seed=step, **options))
            submitted.append(name)
        if submitted and chance.random() < 0.05:
            engine.abort(chance.choice(submitted))
        ended += [o.request_id for o in engine.step() if o.finish_reason is not None]
    ended += run(engine)
    assert sorted(ended) == sorted(submitted)
    assert sum(engine.stats().num_finished.values()) == len(submitted)
    assert set(engine.stats().num_finished) == {r.value for r in FinishReason}
    assert engine.stats().num_kv_blocks_used == 0 and engine._structured._rows == {}
