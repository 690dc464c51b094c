"""The Python API on the default model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.core.config import CacheConfig
from tokenmill.core.types import InvalidRequestError, StructuredOutput, TokenmillError
from tokenmill.text.output_style import resolve_style

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    yield LLM(str(smollm2_path), dtype="int8", max_model_len=512, cache=CacheConfig(num_blocks=128))


def text(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return llm.generate(prompt, params)[0].outputs[0].text


def test_generate_keeps_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["The capital of France is", "One, two, three,", "The capital of France is"]
    first, second, third = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in (first, second, third)] == prompts
    assert "Paris" in first.outputs[0].text
    assert first.outputs[0].text == third.outputs[0].text
    assert first.outputs[0].finish_reason == "length" and first.finished
    assert len(second.outputs[0].token_ids) == 12


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The capital of France is")
    by_text = llm.generate("The capital of France is", GREEDY)[0].outputs[0].token_ids
    for prompt in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == by_text


def test_prompts_without_parameters_get_the_defaults_of_the_model(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    monkeypatch.setattr(llm, "_defaults", {"temperature": 0})
    (first,), (again,) = (llm.generate("The capital of France is") for _ in range(2))
    assert first.outputs[0].text == again.outputs[0].text
    assert first.outputs[0].text.startswith(text(llm, "The capital of France is", GREEDY))
    with pytest.raises(InvalidRequestError, match="generation_config must be one of auto, none"):
        LLM("smollm2", generation_config="non")


def test_n_siblings_of_a_seed_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=10)
    (one,), (again,) = (llm.generate("Once upon a time", params) for _ in range(2))
    texts = [completion.text for completion in one.outputs]
    assert len(set(texts)) == 3
    assert [completion.text for completion in again.outputs] == texts


def test_a_budget_of_reasoning(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, params = "<think>\nLet me see,", replace(GREEDY, thinking_token_budget=4)
    free = text(llm, prompt, GREEDY)
    assert text(llm, prompt, params) == text(llm, prompt, params) == free
    assert caplog.text.count("thinking_token_budget has no effect") == 1
    monkeypatch.setattr(llm, "_style", resolve_style(llm.tokenizer, "auto", "think"))
    end = llm.tokenizer.encode("</think>")
    (one,), (two,) = (llm.generate(p, params) for p in (prompt, prompt + " now"))
    for output in (one.outputs[0], two.outputs[0]):
        assert output.token_ids[4 : 4 + len(end)] == end
    assert one.outputs[0].text.partition("</think>")[0] == free[: one.outputs[0].text.index("</")]
    for wrong in (-1, 2.5, True):
        with pytest.raises(InvalidRequestError, match="thinking_token_budget must be"):
            SamplingParams(thinking_token_budget=wrong)  # type: ignore[arg-type]
    loop: Any = {"max_pattern_size": 2, "min_count": 4}
    same = replace(GREEDY, logit_bias={end[0]: 100.0}, repetition_detection=loop)
    (looped,) = llm.generate("x", same)[0].outputs
    assert looped.token_ids == end[:1] * 4 and looped.stop_reason == "repetition_detected"


def test_stop_strings_are_bounded() -> None:
    for stop, what in (("x" * 1025, r"stop\[0\] has 1025"), (["x"] * 65, "65 strings, at most 64")):
        with pytest.raises(InvalidRequestError, match=what):
            SamplingParams(stop=stop)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = text(llm, "The capital of France is", GREEDY)
    stop = whole[4:8]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=stop)
    completion = llm.generate("The capital of France is", params)[0].outputs[0]
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_logprobs_of_output_and_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("The capital of France is", params)
    completion = output.outputs[0]
    assert completion.logprobs is not None and output.prompt_logprobs is not None
    assert [entry.token_ids[0] for entry in completion.logprobs] == completion.token_ids
    assert all(entry.rank == 1 and len(entry.token_ids) == 3 for entry in completion.logprobs)
    assert completion.cumulative_logprob == sum(e.logprobs[0] for e in completion.logprobs)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None


def test_chat_uses_the_template(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=20))
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
    assert len(llm.chat([question, question], GREEDY)) == 2


def test_structured_output(llm: LLM) -> None:
    choice = StructuredOutput("choice", '["cat", "dog"]')
    params = SamplingParams(temperature=0.0, max_tokens=8, structured=choice)
    assert text(llm, "My pet is a", params) in ("cat", "dog")


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The sea is")
    pieces = [piece for piece, _ in llm.stream(ids, GREEDY)]
    assert len(pieces) > 3
    whole = llm.generate([ids], GREEDY)[0].outputs[0]
    assert llm.get_tokenizer().decode(whole.token_ids) == "".join(pieces)


def test_an_abandoned_stream_frees_its_blocks(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("The sea is")
    stream = iter(llm.stream(ids, SamplingParams(max_tokens=400, ignore_eos=True)))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    while llm.engine.has_work():
        llm.engine.step()
    assert llm.engine.stats().num_kv_blocks_used == 0


def test_errors_name_what_is_wrong(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt is too long: 600 tokens > 512 max"):
        llm.generate([[1] * 600], GREEDY)
    with pytest.raises(InvalidRequestError, match="2 entries for 1 prompts"):
        llm.generate(["x"], [GREEDY, GREEDY])
    with pytest.raises(TokenmillError, match="prompt_token_ids must be token ids"):
        llm.generate([[10**9]], GREEDY)
    with pytest.raises(InvalidRequestError, match="dtype must be"):
        LLM("smollm2", dtype="int3")
    assert text(llm, "The capital of France is", GREEDY)  # and it goes on
